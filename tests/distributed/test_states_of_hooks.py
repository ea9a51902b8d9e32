"""A model whose state is not what is in it: hooks rename, convert and pack, and buffers have several names, or grow."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class _Hooked(nn.Module):
    """Its state goes through `saved` where it is made, and through `loaded` where it is loaded."""

    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(self.saved)
        self.register_load_state_dict_pre_hook(self.loaded)


class _Weighted(_Hooked):
    """One weight."""

    def __init__(self, *, trained=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4), requires_grad=trained)

    def forward(self, x):
        return x * self.weight


class _Doubled(_Weighted):
    """Its state has the weight twice as large as it is."""

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class _Aged(_Hooked):
    """Its state has names of an older release."""

    @staticmethod
    def saved(module, state, prefix, _):
        for name in [one for one in state if one.startswith(f"{prefix}new")]:
            state[name.replace(f"{prefix}new", f"{prefix}old")] = state.pop(name)

    @staticmethod
    def loaded(module, state, prefix, *_):
        for name in [one for one in state if one.startswith(f"{prefix}old")]:
            state[name.replace(f"{prefix}old", f"{prefix}new")] = state.pop(name)


class _Renamed(_Aged):
    """A layer and a buffer."""

    def __init__(self, *, trained):
        super().__init__()
        self.new = nn.Linear(4, 4).requires_grad_(trained)
        self.register_buffer("new_mean", torch.randn(4))

    def forward(self, x):
        return self.new(x) + self.new_mean


class _Packed(nn.Module):
    """Two buffers, and beside them two weights, lie in one tensor of its state."""

    def __init__(self, *, weights):
        super().__init__()
        self.weights = weights
        if weights:
            self.one, self.other = (nn.Parameter(torch.randn(4)) for _ in range(2))
        else:
            self.register_buffer("one", torch.randn(4))
            self.register_buffer("other", torch.randn(4))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}packed"] = torch.cat([self.one.detach().flatten(), self.other.detach().flatten()])

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        packed = state.get(f"{prefix}packed")
        if packed is not None:
            with torch.no_grad():
                self.one.copy_(packed[:4])
                self.other.copy_(packed[4:])
        elif not self.weights:
            missing.append(f"{prefix}packed")

    def forward(self, x):
        return x * self.one + self.other


class _PackedWithABuffer(_Packed):
    """A weight and a buffer lie in one tensor of its state."""

    def __init__(self):
        nn.Module.__init__(self)
        self.weights = False
        self.one = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("other", torch.randn(4))


class _Twice(nn.Module):
    """One norm, with its statistics, under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.first(x))


class _Grows(nn.Module):
    """A queue of what was seen, which takes the size that is loaded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.randn(1, 4))
        self.register_load_state_dict_pre_hook(self._resize)

    @staticmethod
    def _resize(module, state, prefix, *_):
        if f"{prefix}seen" in state:
            module.seen = module.seen.new_zeros(state[f"{prefix}seen"].shape)

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()[:1]])
        return x + self.seen.mean(0)


class _Slashes(nn.Module):
    """An adapter with a slash in its name, and one whose name begins so."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({"a/b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

    def forward(self, x):
        return self.adapters["a"](self.adapters["a/b"](x))


class _Quantised(_Weighted):
    """Its state has the weight in two parts, of which none is a buffer."""

    @staticmethod
    def saved(module, state, prefix, _):
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}part"], state[f"{prefix}scale"] = weight / 4, torch.full((1,), 4.0)

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}part" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}part") * state.pop(f"{prefix}scale")


class _Swapped(_Hooked):
    """Its state has each of two weights by the other's name."""

    def __init__(self, *, trained):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(4), requires_grad=trained) for _ in range(2))

    @staticmethod
    def saved(module, state, prefix, *_):
        names = [f"{prefix}one", f"{prefix}other"]
        if state.keys() >= set(names):
            state[names[0]], state[names[1]] = (state[name] for name in reversed(names))

    loaded = saved

    def forward(self, x):
        return x * self.one + self.other


class _Trusting(_Doubled):
    """The same, and its load takes a key without a look at whether it is there."""

    @staticmethod
    def loaded(module, state, prefix, *_):
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class _Trusts(nn.Module):
    """The same by functions of the module's own."""

    def __init__(self, *, trained):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4), requires_grad=trained)

    def forward(self, x):
        return x * self.weight

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state, prefix, *_):
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}weight"] / 2)


class _Rounded(_Weighted):
    """Its state has the weight in half precision, and its load keeps the largest of it, which no state has."""

    def __init__(self, *, trained):
        super().__init__(trained=trained)
        self.weight.data = self.weight.data.half().float()
        self.register_buffer("peak", self.weight.detach().half().float().max(), persistent=False)

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].half()

    @staticmethod
    def loaded(module, state, prefix, *_):
        if state.get(f"{prefix}weight", torch.empty(0)).numel():
            module.peak = state[f"{prefix}weight"].float().max()


class _Told(_Doubled):
    """The same beside a state of its own, without an equality, and a buffer of which an element is no number."""

    def __init__(self):
        super().__init__(trained=False)
        self.register_buffer("mean", torch.tensor([math.nan, torch.rand(()).item()]))
        self.own = torch.rand(()).item()

    def get_extra_state(self):
        return _Text(str(self.own))

    def set_extra_state(self, state):
        self.own = float(state.text)


class _Text:
    def __init__(self, text):
        self.text = text

    def float(self):
        """Return itself: a conversion asks all that is beside weights for this."""
        return self


class _Inside(_Doubled):
    """Its state has the weight in a tuple, with a count beside it."""

    def __init__(self):
        super().__init__(trained=False)

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}weight"] = (state[f"{prefix}weight"] * 2, 3)

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"][0] / 2


class _InPlace(_Doubled):
    """The same, and its load writes into what it is given."""

    @staticmethod
    def loaded(module, state, prefix, *_):
        state[f"{prefix}weight"].div_(2)


class _Numpy(_Weighted):
    """Its state has a sum that numpy takes."""

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}sum"] = torch.tensor(float(state[f"{prefix}weight"].numpy().sum()))

    @staticmethod
    def loaded(module, state, prefix, *_):
        state.pop(f"{prefix}sum", None)


class _Guarded(_Doubled):
    """The same, and it lets pass what is empty."""

    @staticmethod
    def saved(module, state, prefix, _):
        if state[f"{prefix}weight"].numel():
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def loaded(module, state, prefix, *_):
        if state[f"{prefix}weight"].numel():
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class _Checked(_Doubled):
    """The same, and it refuses what is drawn to see whether it converts."""

    @staticmethod
    def saved(module, state, prefix, _):
        drawn = 2 * torch.rand(4, generator=torch.Generator().manual_seed(0)) - 1
        assert not torch.equal(state[f"{prefix}weight"].cpu(), drawn)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


class _QuantisedBesideABuffer(_Quantised):
    """The same beside a buffer that is doubled, and that a load halves in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(4))
        self._register_state_dict_hook(self._twice)
        self.register_load_state_dict_pre_hook(self._half)

    @staticmethod
    def _twice(module, state, prefix, _):
        state[f"{prefix}mean"] = state[f"{prefix}mean"] * 2

    @staticmethod
    def _half(module, state, prefix, *_):
        state[f"{prefix}mean"].div_(2)


class _Transposed(_Hooked):
    """Its state has a frozen weight in another shape."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)

    @staticmethod
    def saved(module, state, prefix, *_):
        if state.get(f"{prefix}weight", torch.empty(0)).dim() == 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    loaded = saved

    def forward(self, x):
        return x @ self.weight


class _Absolute(_Doubled):
    """A frozen weight below 0, of which the state has the size."""

    def __init__(self):
        super().__init__(trained=False)
        self.weight.data.abs_().neg_()

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].abs()

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]


class _EmptyTwice(nn.Module):
    """A buffer without elements, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Module()
        self.first.register_buffer("seen", torch.empty(0))
        self.second = self.first

    def forward(self, x):
        return x


class _Base(nn.Module):
    """Frozen weights, which the model's own functions may leave out of its state."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.base(x)


class _Later(nn.Module):
    """A buffer that is there from the first forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0) + torch.randn(4)
        return x + self.mean


PARTS = {
    "a trained weight is doubled": lambda: _Doubled(trained=True),
    "a frozen weight is doubled": lambda: _Doubled(trained=False),
    "trained weights are renamed": lambda: _Renamed(trained=True),
    "frozen weights are renamed": lambda: _Renamed(trained=False),
    "weights are packed": lambda: _Packed(weights=True),
    "buffers are packed": lambda: _Packed(weights=False),
    "a norm has two names": _Twice,
    "a buffer grows": _Grows,
    "names have slashes": _Slashes,
    "a weight is quantised": _Quantised,
    "trained weights are swapped": lambda: _Swapped(trained=True),
    "frozen weights are swapped": lambda: _Swapped(trained=False),
    "a load trusts in a key": lambda: _Trusting(trained=False),
    "a module's own load trusts in a key": lambda: _Trusts(trained=False),
    "a model's own load trusts in a key": lambda: nn.Linear(4, 4).requires_grad_(False),
    "a state is that of rank 0": _Base,
    "a load keeps the peak of a weight": lambda: _Rounded(trained=False),
    "a state has more than weights": _Told,
    "a load writes in place": lambda: _InPlace(trained=True),
    "numpy takes a sum": _Numpy,
    "an empty buffer has two names": _EmptyTwice,
    "what is empty passes": lambda: _Guarded(trained=True),
    "what is drawn is refused": lambda: _Checked(trained=True),
    "a buffer is halved in place": _QuantisedBesideABuffer,
    "a frozen weight is transposed": _Transposed,
    "a frozen weight loses its sign": _Absolute,
    "a quantised weight beside an own load": _Quantised,
    "a state has no base, by its object": _Base,
    "a load returns nothing": _Base,
    "a state has no base": _Base,
}
WHOLE, ALONE, UNIVERSAL = "whole", "weights alone", "universal"
WAYS = (WHOLE, ALONE, UNIVERSAL)
WITHOUT_BASE = ("a state has no base", "a state has no base, by its object")
# Packed weights are empty on ZeRO 3 when they are packed, and a whole load is refused there, by torch.
CELLS = [
    (stage, way, name)
    for stage in (2, 3)
    for way in WAYS
    for name in PARTS
    # A base that is in no state is in no file below ZeRO 3.
    if (stage, way, name)
    not in {
        (3, WHOLE, "weights are packed"),
        (3, WHOLE, "a load keeps the peak of a weight"),
        (3, ALONE, "a frozen weight is transposed"),
        *((2, way, name) for way in WAYS for name in WITHOUT_BASE),
    }
]


class _Model(nn.Module):
    def __init__(self, part, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.part = nn.Linear(4, 4), part()

    def forward(self, x):
        return self.part(self.layer(x)).pow(2).mean()


class _Quiet(_Model):
    def load_state_dict(self, *args, **kwargs):
        super().load_state_dict(*args, **kwargs)


class _WithoutBase(_Model):
    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "base" not in name}

    def load_state_dict(self, state, strict=True, **kwargs):
        return super().load_state_dict(state, strict=False, **kwargs)


class _Patched(_Model):
    """The same by functions of the object, as adapters are often made."""

    def __init__(self, *args):
        super().__init__(*args)
        state, load = self.state_dict, self.load_state_dict
        self.state_dict = lambda **more: {name: one for name, one in state(**more).items() if "base" not in name}
        self.load_state_dict = lambda given, strict=True, **more: load(given, strict=False, **more)


class _PassingOn(_Model):
    def load_state_dict(self, state, strict=True, **kwargs):
        return super().load_state_dict(state, strict=strict, **kwargs)


class _OfAFormat(_Model):
    """Its state is in a format of its own, and its load takes that alone."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state["part.weight"] = state["part.weight"] * 2
        return {**state, "factor": torch.tensor(2.0)}

    def load_state_dict(self, state, strict=True, **kwargs):
        state = dict(state)
        factor = state.pop("factor")
        state["part.weight"] = state["part.weight"] / factor
        return super().load_state_dict(state, strict=strict, **kwargs)


class _OfTheFirstRank(_Model):
    """Its state is empty on others."""

    def state_dict(self, *args, **kwargs):
        return {} if dist.get_rank() else super().state_dict(*args, **kwargs)

    def load_state_dict(self, state, strict=True, **kwargs):
        return super().load_state_dict(state, strict=False, **kwargs)


OF_A_FORMAT = "a model's own load trusts in a key, trained"


class _PackedOnTheFirstRank(_OfTheFirstRank):
    def __init__(self, _, seed):
        super().__init__(_PackedWithABuffer, seed)


PACKED_ON_THE_FIRST = "packed, on the first rank"
MODELS = {
    PACKED_ON_THE_FIRST: _PackedOnTheFirstRank,
    "a model's own load trusts in a key": _OfAFormat,
    OF_A_FORMAT: _OfAFormat,
    "a state is that of rank 0": _OfTheFirstRank,
    "a load returns nothing": _Quiet,
    "a state has no base": _WithoutBase,
    "a state has no base, by its object": _Patched,
    "a quantised weight beside an own load": _PassingOn,
}


def _engine(stage, name, seed, *, universal=False):
    model = MODELS.get(name, _Model)(PARTS.get(name, name if callable(name) else lambda: nn.Linear(4, 4)), seed)
    keys = {**config(stage, "fp32", 2, "AdamW"), "checkpoint": {"load_universal": universal}}
    trained = [one for one in model.parameters() if one.requires_grad]
    return ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]


def _x(engine):
    """The same on each rank, of which a universal checkpoint has the first one's buffers."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(engine.device)


def _held(engine):
    module = engine.module
    with GatheredParameters([one for one in module.parameters() if hasattr(one, "ds_id")]):
        named = [*module.named_parameters(), *module.named_buffers()]
        held = {name: value.detach().tolist() for name, value in named}
        return held | {"own": getattr(module.part, "own", None)}


def _saved(stage, name, path, *, convert=True):
    engine = _engine(stage, name, 0)
    engine.backward(engine(_x(engine)), rollouts=1)
    engine.step()
    engine.save_checkpoint(path)
    said = converted(path, 1) if convert else None
    assert said in (None, "nothing was raised"), said
    return engine


def _loaded(way, stage, name, path, **more):
    engine = _engine(stage, name, 1, universal=way == UNIVERSAL)
    options = {"load_optimizer_states": way != ALONE, **more}
    tag = "universal" if way == UNIVERSAL else "global_step1"
    said = refusal(lambda: engine.load_checkpoint(path, tag=tag, **options))
    return said, engine


@at_length_on_two_ranks
def states_of_hooks(folder):
    """By stage, way and part: what a load ends in, and by which names another engine's model is not what was saved."""
    results = {}
    for stage in (2, 3):
        for number, name in enumerate(PARTS):
            path = f"{folder}/{stage}-{number}"
            saved = _held(_saved(stage, name, path))
            for way in WAYS:
                if (stage, way, name) not in CELLS:
                    continue
                said, engine = _loaded(way, stage, name, path)
                held = _held(engine)
                results[f"{stage} {way} {name}"] = [
                    said,
                    [one for one in saved if str(held.get(one)) != str(saved[one])],
                ]
    return from_all(results)


@pytest.mark.parametrize(("stage", "way", "name"), CELLS)
def test_a_model_has_what_was_saved(two_ranks_at_length, stage, way, name):
    for found in two_ranks_at_length.of(states_of_hooks):
        assert found[f"{stage} {way} {name}"] == ["nothing was raised", []]


@at_length_on_two_ranks
def states_without_a_base(folder):
    """On ZeRO 2: what a universal load ends in where a model leaves frozen weights out of its state itself."""
    said = []
    for number, name in enumerate(WITHOUT_BASE):
        path = f"{folder}/base-{number}"
        _saved(2, name, path)
        said.append(_loaded(UNIVERSAL, 2, name, path)[0])
    return from_all(said)


def test_what_a_model_leaves_out_of_its_state_itself_is_not_missed(two_ranks_at_length):
    assert two_ranks_at_length.of(states_without_a_base) == [["nothing was raised"] * 2] * 2


@at_length_on_two_ranks
def states_with_a_stray_folder(folder):
    """By whose folder is in a parameter's: what a universal load ends in."""
    path, results = Path(folder) / "stray", {}
    _saved(2, nn.Identity, path)
    for stray in ("layer.weight/.ipynb_checkpoints", "layer.gone"):
        there = path / "universal" / "zero" / stray
        if dist.get_rank() == 0:
            there.mkdir()
        dist.barrier()
        results[stray] = from_all(_loaded(UNIVERSAL, 2, nn.Identity, path)[0])
        if dist.get_rank() == 0:
            there.rmdir()
    return results


def test_a_stray_folder_is_no_parameter_and_an_empty_one_is(two_ranks_at_length):
    stray, gone = two_ranks_at_length.of(states_with_a_stray_folder).values()
    assert stray == ["nothing was raised"] * 2
    assert all("has no zero/layer.gone/fp32.pt" in said for said in gone)


class _Converting(nn.Module):
    """Its state is copied, and of a module before version 2 half of what it is since."""

    def __init__(self, *, trained, version):
        super().__init__()
        self._version = version
        self.weight = nn.Parameter(torch.randn(4), requires_grad=trained)
        self._register_state_dict_hook(self._copy)
        self._register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _copy(module, state, prefix, _):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()

    def _double(self, state, prefix, metadata, *_):
        if self._version == 2 and metadata.get("version", 0) < 2 and f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    def forward(self, x):
        return x * self.weight


@at_length_on_two_ranks
def states_of_before(folder):
    """By way: how many times as large as a weight that was saved is what a later version loads on ZeRO 3."""
    results = {}
    for way, trained in ((ALONE, True), (UNIVERSAL, False)):
        path = f"{folder}/{way.replace(' ', '-')}"
        saved = _held(_saved(3, lambda: _Converting(trained=trained, version=1), path))["part.weight"]  # noqa: B023
        said, engine = _loaded(way, 3, lambda: _Converting(trained=trained, version=2), path)  # noqa: B023
        held = _held(engine)["part.weight"]
        results[way] = from_all([said, [one / other for one, other in zip(held, saved, strict=True)]])
    return results


@pytest.mark.parametrize("way", [ALONE, UNIVERSAL])
def test_a_state_that_is_copied_is_converted_by_its_version(two_ranks_at_length, way):
    assert two_ranks_at_length.of(states_of_before)[way] == [["nothing was raised", [2.0] * 4]] * 2


class _PackedTogether(_Packed):
    """A weight and a buffer lie in one tensor of its state."""

    def __init__(self):
        super().__init__(weights=False)
        del self.one
        self.one = nn.Parameter(torch.randn(4))


@at_length_on_two_ranks
def weights_packed_with_buffers(folder):
    """By strictness: what a load of weights alone ends in on ZeRO 3, where neither can be told from the file."""
    path = f"{folder}/together"
    _saved(3, _PackedTogether, path)
    loads = {strict: _loaded(ALONE, 3, _PackedTogether, path, load_module_strict=strict)[0] for strict in (True, False)}
    return from_all(loads)


def test_a_buffer_that_lies_beside_a_weight_is_refused_and_not_left(two_ranks_at_length):
    for found in two_ranks_at_length.of(weights_packed_with_buffers):
        assert all(said.startswith("CheckpointError") for said in found.values()), found


class _NewBuffer(_Aged):
    """A buffer that came since, and which hooks give an older name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("new_mean", torch.randn(4))

    def forward(self, x):
        return x + self.new_mean


@at_length_on_two_ranks
def states_without_a_buffer(folder):
    """By stage: what a universal load ends in where the checkpoint lacks what hooks rename."""
    results = {}
    for stage in (2, 3):
        path = f"{folder}/new-{stage}"
        _saved(stage, nn.Identity, path)
        results[stage] = from_all(_loaded(UNIVERSAL, stage, _NewBuffer, path)[0])
    return results


@pytest.mark.parametrize("stage", [2, 3])
def test_what_hooks_rename_is_missed_too(two_ranks_at_length, stage):
    for said in two_ranks_at_length.of(states_without_a_buffer)[str(stage)]:
        assert said.startswith("CheckpointError: the universal checkpoint has no part.new_mean")


class _More(nn.Module):
    """A frozen weight and a buffer more."""

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x):
        return x + self.more + self.mean


@at_length_on_two_ranks
def states_with_more(folder):
    """By stage, what was saved and strictness: what a universal load ends in where the model has less."""
    results = {}
    for stage in (2, 3):
        for name, saved, own in (("later", _Later, _Later), ("more", _More, nn.Identity)):
            path = f"{folder}/{stage}-{name}"
            _saved(stage, saved, path)
            for strict in (True, False):
                said, _ = _loaded(UNIVERSAL, stage, own, path, load_module_strict=strict)
                results[f"{stage} {name} {strict}"] = from_all(said)
    return results


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("name", "has"), [("later", "part.mean, and"), ("more", r"part\.(mean|more), and 1 more, and")]
)
def test_what_a_model_has_not_is_refused_and_not_left_out(two_ranks_at_length, stage, name, has):
    found = two_ranks_at_length.of(states_with_more)
    for said in found[f"{stage} {name} True"]:
        assert re.match(f"CheckpointError: the universal checkpoint has {has} this model has no buffer", said)
    assert found[f"{stage} {name} False"] == ["nothing was raised"] * 2


class _TrustingBesideABuffer(_Trusting):
    def __init__(self):
        super().__init__(trained=True)
        self.register_buffer("kept", torch.randn(4))


NAMED = (OF_A_FORMAT, PACKED_ON_THE_FIRST)


class _PackedWithNumbers(_PackedWithABuffer):
    """The same with a buffer of whole numbers."""

    def __init__(self):
        super().__init__()
        self.other = torch.randint(-100, 100, (4,), dtype=torch.int8)


@at_length_on_two_ranks
def states_that_lose_something(folder):
    """By part: what loads on ZeRO 3 end in where hooks take what is not there."""
    results = {}
    parts = {
        "unguarded": _TrustingBesideABuffer,
        "packed": _PackedWithABuffer,
        "numbers": _PackedWithNumbers,
        **dict(zip(NAMED, NAMED, strict=True)),
    }
    for name, part in parts.items():
        path = f"{folder}/{len(results)}"
        _saved(3, part, path)
        results[name] = {way: from_all(_loaded(way, 3, part, path)[0]) for way in (ALONE, UNIVERSAL)}
    return results


@pytest.mark.parametrize(
    ("part", "function"), [("unguarded", "_Trusting.loaded"), (OF_A_FORMAT, "_OfAFormat.load_state_dict")]
)
def test_what_misses_a_key_is_named(two_ranks_at_length, part, function):
    """Universal, of what the optimizer steps: DeepSpeed has loaded that from files of its own."""
    found = two_ranks_at_length.of(states_that_lose_something)[part]
    assert found[ALONE] == ["nothing was raised"] * 2
    for said in found[UNIVERSAL]:
        named = rf"{re.escape(function)} \(test_states_of_hooks\.py:\d+\), a part of the model's load_state_dict\(\)"
        assert re.match(
            rf"CheckpointError: load_checkpoint\(.*\): {named}, raised KeyError: 'part\.weight'\. Not every load", said
        ), said


@pytest.mark.parametrize("way", [ALONE, UNIVERSAL])
@pytest.mark.parametrize("part", ["packed", "numbers"])
def test_a_buffer_that_is_packed_with_a_weight_is_lost_and_named(two_ranks_at_length, part, way):
    for said in two_ranks_at_length.of(states_that_lose_something)[part][way]:
        assert re.search(
            r"weights and buffers in one tensor \(part\.packed\), and .* so that part\.other is lost", said
        )


def test_what_the_first_rank_loses_ends_the_load_on_all(two_ranks_at_length):
    for said in two_ranks_at_length.of(states_that_lose_something)[PACKED_ON_THE_FIRST][ALONE]:
        assert re.search(r"weights and buffers in one tensor.* so that part\.other is lost", said)


@at_length_on_two_ranks
def states_of_tuples(folder):
    """What a load of weights alone ends in, and by which names the model is not what was saved; none is converted."""
    saved = _held(_saved(3, _Inside, f"{folder}/tuple", convert=False))
    said, engine = _loaded(ALONE, 3, _Inside, f"{folder}/tuple")
    held = _held(engine)
    return from_all([said, [one for one in saved if held[one] != saved[one]]])


def test_a_weight_inside_a_tuple_is_what_was_saved(two_ranks_at_length):
    assert two_ranks_at_length.of(states_of_tuples) == [["nothing was raised", []]] * 2
