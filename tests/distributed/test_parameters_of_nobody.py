"""Parameters that are not frozen and that no optimizer steps: the norm, and checkpoints, of ZeRO 0 to 3."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import ds_parity
from ds_parity.engine.internals import unstepped
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import STAGES
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SAVED, OWN, LIMIT = 0.7, 0.2, 0.3
DTYPES = ("float32", "bfloat16", "float16")


class _Model(torch.nn.Module):
    """A layer that is trained, and a weight that nobody freezes or steps."""

    def __init__(self, value, shape=(5, 3), frozen=(2,)):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.head = torch.nn.Parameter(torch.full(shape, value))
        self.frozen = torch.nn.Parameter(torch.full(frozen, value), requires_grad=False) if frozen else None

    def forward(self, x):
        return (torch.tanh(self.layer(x)) @ self.head.t()).float().pow(2).mean()


def _engine(stage, value, model=None, step=None, **keys):
    model = _Model(value) if model is None else model
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    optimizer = torch.optim.AdamW(model.layer.parameters() if step is None else step, lr=0.1)
    return ds_parity.initialize(model=model, optimizer=optimizer, config=made)[0]


def _step(engine):
    engine.backward(engine(torch.ones(2, 4, device=engine.device)), rollouts=1)
    engine.step()


def _head(engine):
    with GatheredParameters([engine.module.head] if hasattr(engine.module.head, "ds_id") else []):
        return engine.module.head.detach().flatten().tolist()


def _loaded(stage, path, *, universal, model=None, **options):
    """What a load ends in, and the weight behind it."""
    engine = _engine(stage, OWN, model, checkpoint={"load_universal": universal})
    said = from_all(refusal(lambda: engine.load_checkpoint(path, **options)))
    dist.barrier()
    return said, _head(engine)


@at_length_on_two_ranks
def weights_of_nobody(folder):
    """By stage: what loads of a checkpoint of ds_parity, and of one of bare DeepSpeed, end in."""
    results = {}
    for stage in STAGES:
        path, bare = f"{folder}/{stage}", f"{folder}/bare-{stage}"
        engine = _engine(stage, SAVED)
        _step(engine)
        engine.save_checkpoint(path)
        trains = [one.requires_grad for _, one in sorted(engine.module.named_parameters())]
        engine.__wrapped__.save_checkpoint(bare)
        found = {"as it is": _loaded(stage, path, universal=False), "trains": trains}
        found["weights alone"] = _loaded(stage, path, universal=False, load_optimizer_states=False)
        if stage:
            assert converted(path, 1) in (None, "nothing was raised")
            found["universal"] = _loaded(stage, path, universal=True)
        found["bare"] = _loaded(stage, bare, universal=False)
        found["bare, not strict"] = _loaded(stage, bare, universal=False, load_module_strict=False)
        if stage == 3:
            assert converted(bare, 1) in (None, "nothing was raised")
            found["bare, universal"] = _loaded(stage, bare, universal=True)
        results[stage] = found
    return from_all(results)


def _kept(src, dst):
    """Loads the layer, and leaves the rest as it is."""
    there = {name: value for name, value in src.items() if name.startswith("layer")}
    dst.load_state_dict(there, strict=False)


def _all(src, dst):
    """Loads what there is."""
    dst.load_state_dict(src)


@at_length_on_two_ranks
def loads_beside_nobody(folder):
    """On ZeRO 3: what loads end in that leave such a weight to somebody else, or find another one."""
    engine, found = _engine(3, SAVED), {}
    _step(engine)
    engine.save_checkpoint(folder)
    found["left out"] = from_all(refusal(lambda: engine.save_checkpoint(f"{folder}-b", exclude_frozen_parameters=True)))
    found["custom"] = _loaded(3, folder, universal=False, custom_load_fn=_kept)
    options = {"custom_load_fn": _kept, "load_module_strict": False}
    found["custom, not strict"] = _loaded(3, folder, universal=False, **options)
    for name, function in {"custom, weights alone": _kept, "custom, all of the weights": _all}.items():
        options = {"custom_load_fn": function, "load_optimizer_states": False}
        found[name] = _loaded(3, folder, universal=False, **options)
    for name, shapes in {"head": {"shape": (4, 3)}, "frozen": {"frozen": (3,)}}.items():
        other = _engine(3, OWN, _Model(OWN, **shapes))
        found[name] = [from_all(refusal(lambda: other.load_checkpoint(folder))), _head(other)]  # noqa: B023
    bare = _engine(3, SAVED, _Model(SAVED, frozen=None))
    bare.__wrapped__.save_checkpoint(f"{folder}-none", exclude_frozen_parameters=True)
    found["none of it"] = _loaded(3, f"{folder}-none", universal=False, model=_Model(OWN, frozen=None))
    return from_all(found)


def _filled(model, value):
    with GatheredParameters([model.head], modifier_rank=0):
        model.head.data.fill_(value)


@at_length_on_two_ranks
def two_engines_over_one_model(folder):
    """On ZeRO 3: the weight of a second engine over the model, behind loads of the first one's checkpoint."""
    model = _Model(SAVED)
    first, second = _engine(3, SAVED, model), _engine(3, SAVED, model, step=[model.head])
    _step(first)
    first.save_checkpoint(folder)
    assert converted(folder, 1) in (None, "nothing was raised")
    found = {"alone": _loaded(3, folder, universal=False), "alone, universal": _loaded(3, folder, universal=True)}
    _filled(model, OWN)
    first.load_checkpoint(folder)
    found["theirs"] = _head(second)
    for name, options in {
        "weights alone": {"load_optimizer_states": False},
        "not strict": {"load_module_strict": False},
    }.items():
        first.load_checkpoint(folder, **options)
        found[f"theirs, {name}"] = _head(second)
        _filled(model, OWN)
    model.head.requires_grad_(False)
    first.load_checkpoint(folder)
    found["theirs, frozen just now"] = [*_head(second), float(model.head.requires_grad)]
    for name, universal in {"theirs, built first": False, "theirs, universal": True}.items():
        other = _Model(OWN)
        second = _engine(3, OWN, other, step=[other.head])
        _engine(3, OWN, other, checkpoint={"load_universal": universal}).load_checkpoint(folder)
        found[name] = _head(second)
    return from_all(found)


@at_length_on_two_ranks
def an_engine_whose_place_may_be_taken(folder):
    """On ZeRO 3: what is saved and loaded of a weight that an earlier engine stepped, by what that one did."""
    found = {}
    # Behind one step of the earlier engine, the model's next forward raises inside DeepSpeed.
    for name, steps in {"stepped": 2, "never stepped": 0}.items():
        model = _Model(SAVED)
        earlier = _engine(3, SAVED, model, step=[*model.layer.parameters(), model.head])
        for _ in range(steps):
            _step(earlier)
        later = _engine(3, SAVED, model)
        _step(later)
        saved = _head(later)
        later.save_checkpoint(f"{folder}-{steps}")
        found[name] = [saved, *_loaded(3, f"{folder}-{steps}", universal=False)]
        _filled(model, OWN)
        said = from_all(refusal(lambda: later.load_checkpoint(f"{folder}-{steps}")))  # noqa: B023
        found[f"{name}, here"] = [said, saved, _head(later)]
        if said != ["nothing was raised"] * 2:
            later.load_checkpoint(f"{folder}-{steps}", load_module_strict=False)
            found[f"{name}, not strict"] = _head(later)
            earlier.destroy()
            later.load_checkpoint(f"{folder}-{steps}")
            found[f"{name}, destroyed"] = [saved, _head(later)]
    return from_all(found)


@at_length_on_two_ranks
def norms_beside_nobody(folder):
    """By stage and dtype of autocast: the norm, and how far a step has gone, and both in fp64 without the weight."""
    results = {}
    with fp16_allowed():
        for stage in STAGES:
            for dtype in DTYPES:
                autocast = {} if dtype == "float32" else {"torch_autocast": {"enabled": True, "dtype": dtype}}
                engine = _engine(stage, OWN, gradient_clipping=LIMIT, **autocast)
                _step(engine)
                results[f"{stage} {dtype}"] = float(engine.get_global_grad_norm())
                engine.destroy()
                forget_autocast()
    return from_all(results)


def _norms():
    """The norm of the trained layer's gradient in fp64, and of all."""
    model = _Model(OWN).double()
    model(torch.ones(2, 4, dtype=torch.float64)).backward()
    layer, everything = (list(one.parameters()) for one in (model.layer, model))
    return [float(torch.nn.utils.get_total_norm([p.grad for p in of if p.requires_grad])) for of in (layer, everything)]


@pytest.mark.parametrize("what", ["as it is", "weights alone", "universal"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_nobody_steps_is_loaded(two_ranks_at_length, stage, what):
    for results in two_ranks_at_length.of(weights_of_nobody):
        if not stage and what == "universal":
            continue  # DeepSpeed loads none there
        said, head = results[str(stage)][what]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([SAVED] * 15)


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_leaves_it_as_it_was(two_ranks_at_length, stage):
    for results in two_ranks_at_length.of(weights_of_nobody):
        assert results[str(stage)]["trains"] == [False, True, True, True]


@pytest.mark.parametrize("what", ["bare", "bare, universal"])
def test_where_the_checkpoint_has_nothing_of_it_zero3_says_so(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(weights_of_nobody):
        for said in results["3"][what][0]:
            assert "the checkpoint has no head: ZeRO stage 3 of DeepSpeed saves nothing of a parameter" in said
        said, head = results["3"]["bare, not strict"]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([OWN] * 15)


def test_what_is_left_out_with_the_frozen_ones_is_refused(two_ranks_at_length):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        for said in results["left out"]:
            assert said.startswith(
                "CheckpointError: save_checkpoint(exclude_frozen_parameters=True) on ZeRO stage 3: head"
            )


def test_a_function_of_the_callers_is_told_that_it_is_not_given_it(two_ranks_at_length):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        said, head = results["custom"]
        assert all("a custom_load_fn is not given head, which is not frozen" in one for one in said), said
        assert head == pytest.approx([OWN] * 15)


@pytest.mark.parametrize(
    ("what", "value"),
    [("custom, not strict", OWN), ("custom, weights alone", OWN), ("custom, all of the weights", SAVED)],
)
def test_a_function_of_the_callers_leaves_it_as_it_does(two_ranks_at_length, what, value):
    for said, head in (results[what] for results in two_ranks_at_length.of(loads_beside_nobody)):
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([value] * 15)


def test_a_checkpoint_without_what_is_frozen_lacks_it(two_ranks_at_length):
    for said, head in (results["none of it"] for results in two_ranks_at_length.of(loads_beside_nobody)):
        assert all("the checkpoint has no head: ZeRO stage 3" in one for one in said), said
        assert head == pytest.approx([OWN] * 15)


@pytest.mark.parametrize("what", ["head", "frozen"])
def test_one_of_another_shape_is_refused(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        said, head = results[what]
        assert all(f"the checkpoint's {what} has the shape" in one for one in said), said
        assert head == pytest.approx([OWN] * len(head))


@pytest.mark.parametrize(
    "what", ["", ", built first", ", universal", ", weights alone", ", not strict", ", frozen just now"]
)
def test_what_another_engine_steps_stays_as_that_one_has_it(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(two_engines_over_one_model):
        head = results[f"theirs{what}"]
        assert head[:15] == pytest.approx([OWN] * 15)
        assert head[15:] == ([False] if "frozen" in what else []), "it is left as frozen as it was"


@pytest.mark.parametrize("what", ["alone", "alone, universal"])
def test_what_another_engine_stepped_is_loaded_where_there_is_none(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(two_engines_over_one_model):
        said, head = results[what]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([SAVED] * 15)


@pytest.mark.parametrize("what", ["stepped", "never stepped"])
def test_what_an_earlier_engine_stepped_is_saved(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(an_engine_whose_place_may_be_taken):
        saved, said, head = results[what]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx(saved)


def test_an_engine_that_never_stepped_is_replaced_by_one_that_steps_the_same(two_ranks_at_length):
    for results in two_ranks_at_length.of(an_engine_whose_place_may_be_taken):
        said, saved, head = results["never stepped, here"]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx(saved)


def test_where_its_place_may_be_taken_or_not_the_caller_says_which(two_ranks_at_length):
    for results in two_ranks_at_length.of(an_engine_whose_place_may_be_taken):
        said, _, head = results["stepped, here"]
        assert all("another engine over this model steps head, and was used before" in one for one in said), said
        assert head == results["stepped, not strict"] == pytest.approx([OWN] * 15)
        saved, head = results["stepped, destroyed"]
        assert head == pytest.approx(saved)


def test_many_names_are_counted():
    assert "has no a, b, c, and 2 more: ZeRO" in unstepped.lacks(list("abcde"))
