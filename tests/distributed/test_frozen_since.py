"""Layers that are frozen, or in no group, in the model that loads, and were trained, or not there, in the one saved."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
LOOSE = {"load_module_strict": False}


class _Model(torch.nn.Module):
    """Layers one behind the other."""

    def __init__(self, names, frozen=(), seed=0, wrapped=()):
        super().__init__()
        torch.manual_seed(seed)
        for name in names:
            layer = torch.nn.Linear(4, 4).requires_grad_(name not in frozen)
            layer.register_buffer("kept", torch.full((2,), float(seed)))
            self.add_module(name, checkpoint_wrapper(layer) if name in wrapped else layer)

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x.float().pow(2).mean()


# By name: the layers of the model that loads, those that are frozen there, those in a group, how, and what ends so.
CASES = {
    "frozen since": ("abc", "b", "ac", ALONE, "loaded"),
    "in no group since": ("abc", "", "ac", ALONE, "loaded"),
    "a new frozen one": ("abnc", "n", "abc", LOOSE, "loaded"),
    "a new frozen one, weights alone": ("abnc", "n", "abc", {**ALONE, **LOOSE}, "loaded"),
    "a new frozen one, strictly": ("abnc", "n", "abc", {}, "another model"),
    "frozen since, with states": ("abc", "b", "ac", {}, "refused"),
    "frozen since, with states, loosely": ("abc", "b", "ac", LOOSE, "refused"),
}


# Layers that torch's checkpoint_wrapper is around, by case.
WRAPPED = {"wrapped since": "b", "a frozen one is wrapped since": "zb"}
CASES |= dict.fromkeys(WRAPPED, ("abc", "", "abc", {}, "loaded"))


def _engine(stage, layers, frozen, trained, seed, wrapped=(), **more):
    model = _Model(layers, frozen, seed, wrapped)
    given = [one for name in trained for one in model.get_submodule(name).parameters()]
    keys = {**config(stage, "fp32", 2, "AdamW"), **more}
    return ds_parity.initialize(model=model, model_parameters=given, config=keys)[0]


def _step(engine):
    engine.backward(engine(torch.ones(2, 4, device=engine.device)), rollouts=1)
    engine.step()


def _plain(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def _weights(engine):
    found = {}
    for name, one in engine.module.named_parameters():
        with GatheredParameters([one] if hasattr(one, "ds_id") else []):
            found[_plain(name)] = one.detach().flatten().tolist()
    found |= {_plain(name): one.tolist() for name, one in engine.module.named_buffers()}
    return found


@at_length_on_two_ranks
def loads_into_frozen(folder):
    """By stage and case: what the load ends in, weights before the save and behind the load, those of the new model."""
    results = {}
    for stage in STAGES:
        path = f"{folder}/{stage}"
        # A layer is frozen at both sides, so that there are copies of frozen weights on ZeRO 2 and 3.
        engine = _engine(stage, "zabc", "z", "abc", 0)
        _step(engine)
        engine.save_checkpoint(path)
        saved = _weights(engine)
        engine.destroy()
        for name, (layers, frozen, trained, how, _) in CASES.items():
            engine = _engine(stage, f"z{layers}", f"z{frozen}", trained, 1, WRAPPED.get(name, ()))
            own = _weights(engine)
            said = from_all(refusal(lambda: engine.load_checkpoint(path, **how)))  # noqa: B023
            behind = _weights(engine)
            if said[0] == "nothing was raised":
                _step(engine)
            trains = {_plain(name) for name, one in engine.module.named_parameters() if one.requires_grad}
            results[f"{stage} {name}"] = [said, saved, own, behind, sorted(trains), engine.window.index]
            engine.destroy()
    return results


@at_length_on_two_ranks
def renamed_by_place(folder):
    """By stage: weights before the save, and behind loose loads into a layer of another name."""
    results = {}
    for stage in STAGES[1:3]:
        path = f"{folder}/{stage}"
        engine = _engine(stage, "abc", "", "abc", 0)
        _step(engine)
        engine.save_checkpoint(path)
        saved, behind = list(_weights(engine).values()), []
        for own in (True, False):
            zero = {"zero_optimization": {"stage": stage, "load_from_fp32_weights": own}}
            engine = _engine(stage, "axc", "", "axc", 1, **zero)
            engine.load_checkpoint(path, load_module_strict=False)
            behind.append(list(_weights(engine).values()))
        engine = _engine(stage, "abc", "", "abc", 1, **zero)
        engine.load_checkpoint(path, load_module_strict=False, custom_load_fn=_fills)
        results[str(stage)] = [saved, behind, _weights(engine)]
    return results


def _fills(src, dst):
    with torch.no_grad():
        for one in dst.parameters():
            one.fill_(0.5)


def _doubles(src, dst):
    dst.load_state_dict({name: 2 * value for name, value in src.items()})


def _rolls(src, dst):
    """Writes past torch's count of writes, and leaves all sums as they were."""
    for name, one in dst.named_parameters():
        one.data.copy_(src[name].roll(1))


def _leaves_what_is_frozen(src, dst):
    own = dict(dst.named_parameters())
    trained = {name: value for name, value in src.items() if name in own and own[name].requires_grad}
    dst.load_state_dict(trained, strict=False)


FUNCTIONS = {"doubles": _doubles, "rolls": _rolls, "leaves what is frozen": _leaves_what_is_frozen}


@at_length_on_two_ranks
def made_by_a_function(folder):
    """By stage and function: weights before the save, and behind a load by it."""
    results = {}
    for stage in STAGES[:3]:
        engine = _engine(stage, "zabc", "z", "abc", 0)
        _step(engine)
        engine.save_checkpoint(f"{folder}/{stage}")
        saved = _weights(engine)
        for name, function in FUNCTIONS.items():
            engine = _engine(stage, "zabc", "z", "abc", 1)
            own = _weights(engine)
            for _ in range(2):  # the second one writes what is there
                engine.load_checkpoint(f"{folder}/{stage}", custom_load_fn=function, load_optimizer_states=False)
            results[f"{stage} {name}"] = [saved, own, _weights(engine)]
    return results


@pytest.mark.parametrize("stage", STAGES[:3])
def test_what_a_function_makes_of_a_frozen_weight_stays(two_ranks_at_length, stage):
    results = two_ranks_at_length.of(made_by_a_function)
    saved, _, loaded = results[f"{stage} doubles"]
    assert loaded == {name: [2 * one for one in value] for name, value in saved.items()}
    saved, own, loaded = results[f"{stage} rolls"]
    rolled = {name: value[-1:] + value[:-1] for name, value in saved.items()}
    assert loaded == {name: (own if name.endswith("kept") else rolled)[name] for name in saved}


@pytest.mark.parametrize("stage", STAGES[:3])
def test_what_it_leaves_is_loaded_from_the_copies_of_zero_2(two_ranks_at_length, stage):
    saved, own, loaded = two_ranks_at_length.of(made_by_a_function)[f"{stage} leaves what is frozen"]
    kept = {name for name in saved if name.endswith("kept") or (name.startswith("z") and stage != 2)}
    assert kept
    assert loaded == {name: (own if name in kept else saved)[name] for name in saved}
    assert all(own[name] != saved[name] for name in saved)


# By what is frozen: layers behind the load, and whether the checkpoint leaves out what was frozen.
ABSENT = {"the same": ("zab", False), "a new one": ("znab", False), "none": ("zab", True)}


@at_length_on_two_ranks
def masters_of_the_weights(folder):
    """By stage and what is frozen: a weight that was edited in the file, of which masters are made."""
    results = {}
    for stage in STAGES[1:3]:
        for case, (layers, leaves_out) in ABSENT.items():
            path = f"{folder}/{stage}-{case}"
            engine = _engine(stage, "zab", "z", "ab", 0)
            _step(engine)
            engine.save_checkpoint(path, tag="one", exclude_frozen_parameters=leaves_out)
            engine.destroy()
            file = f"{path}/one/mp_rank_00_model_states.pt"
            if dist.get_rank() == 0:
                saved = torch.load(file, weights_only=False)
                saved["module"]["a.weight"].fill_(0.25)
                torch.save(saved, file)
            dist.barrier()
            zero = {"zero_optimization": {"stage": stage, "load_from_fp32_weights": False}}
            engine = _engine(stage, layers, "zn", "ab", 1, **zero)
            engine.load_checkpoint(path, load_module_strict=False)
            results[f"{stage} {case}"] = sorted(set(_weights(engine)["a.weight"]))
            engine.destroy()
    return results


class _Around(torch.nn.Module):
    """A model under another name, which keeps what it is given, and a parameter that is called as torch calls that."""

    def __init__(self, inner, number):
        super().__init__()
        self.inner = inner
        self.an_extra_state = torch.nn.Parameter(torch.full((4,), 1.0 + number))
        self.largest = torch.full((20000,), 1.0 + number)

    def get_extra_state(self):
        return self.largest  # a conversion to a universal checkpoint takes tensors alone (DeepSpeed 0.19.8)

    def set_extra_state(self, state):
        self.largest = state

    def forward(self, x):
        return self.inner(x * self.an_extra_state)


def _around(stage, number, **more):
    model = _Around(_Model("ab", "", number), number)
    return ds_parity.initialize(model=model, config={**config(stage, "fp32", 2, "AdamW"), **more})[0]


WAYS_BACK = ("alone", "universal")


def _saved_and_loaded(built, path, stage, way):
    """A new engine that has loaded what one has saved, and written it anew; how the load ended, weights before, behind.

    The files are cut before they are written: what a module has kept may not lie in them.
    """
    engine = built(stage, 0)
    _step(engine)
    engine.save_checkpoint(path)
    saved = _weights(engine)
    engine.destroy()
    if way == "universal":
        ended = converted(path, 1)
        assert ended in (None, "nothing was raised"), ended
    engine = built(stage, 1, checkpoint={"load_universal": way == "universal"})
    how, tag = (ALONE, "global_step1") if way == "alone" else ({}, "universal")
    said = from_all(refusal(lambda: engine.load_checkpoint(path, tag=tag, **how)))
    behind = _weights(engine)
    engine.save_checkpoint(path, tag=tag)
    return engine, said, saved, behind


@at_length_on_two_ranks
def odd_names(folder):
    """By stage and way: how a load ends, weights before the save and behind the load, and what the module has kept."""
    results = {}
    for stage in STAGES:
        for way in WAYS_BACK if stage else ("alone",):
            engine, *found = _saved_and_loaded(_around, f"{folder}/{stage}-{way}", stage, way)
            results[f"{stage} {way}"] = [*found, sorted(set(engine.module.largest.tolist()))]
            engine.destroy()
    return results


@at_length_on_two_ranks
def by_a_function(folder):
    """By stage: how a load of a frozen layer into a wrapper ends, and weights before the save and behind the load."""
    results = {}
    for stage in STAGES:
        engine = _engine(stage, "zab", "z", "ab", 0)
        _step(engine)
        engine.save_checkpoint(f"{folder}/{stage}")
        saved = {f"inner.{name}": value for name, value in _weights(engine).items()}
        engine.destroy()
        wrapper = torch.nn.Module()
        wrapper.inner = _Model("zab", "z", 1)
        given = [one for one in wrapper.parameters() if one.requires_grad]
        keys = config(stage, "fp32", 2, "AdamW")
        engine = ds_parity.initialize(model=wrapper, model_parameters=given, config=keys)[0]
        into = {"custom_load_fn": lambda src, dst: dst.inner.load_state_dict(src)}
        said = from_all(refusal(lambda: engine.load_checkpoint(f"{folder}/{stage}", **into)))  # noqa: B023
        results[str(stage)] = [said, saved, _weights(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize("case", ABSENT)
@pytest.mark.parametrize("stage", STAGES[1:3])
def test_masters_are_made_of_weights_where_a_frozen_layer_is_not_in_the_file(two_ranks_at_length, stage, case):
    assert two_ranks_at_length.of(masters_of_the_weights)[f"{stage} {case}"] == [0.25]


class _Keeping(torch.nn.Module):
    """A layer that keeps what it is given of a state, and doubles a buffer of a state before version 2."""

    _version = 2

    def __init__(self, number):
        super().__init__()
        self.table = torch.nn.Parameter(torch.full((20000,), 1.0 + number), requires_grad=False)
        self.register_buffer("scale", torch.full((2,), 1.0 + number))

    def _load_from_state_dict(self, state, prefix, metadata, *more):
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}scale"] = 2 * state[f"{prefix}scale"]
        given = state.get(f"{prefix}table")
        super()._load_from_state_dict(state, prefix, metadata, *more)
        if given is not None and given.numel() == 20000:
            self.given = given

    def forward(self, x):
        return x * self.scale[0] + self.table[0]


class _Silent(_Keeping):
    """The same, whose own state is None, which a conversion takes on ZeRO 3 alone (DeepSpeed 0.19.8)."""

    told = None

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        self.told = state is None


def _keeping(stage, number, **more):
    model, kind = _Model("ab", "", number), _Silent if stage == 3 else _Keeping
    # Where only one side is wrapped torch finds no version; ds_parity does, where it makes the state.
    model.keeping = checkpoint_wrapper(kind(number)) if number and stage == 3 else kind(number)
    given = [one for one in model.parameters() if one.requires_grad]
    keys = {**config(stage, "fp32", 2, "AdamW"), **more}
    return ds_parity.initialize(model=model, model_parameters=given, config=keys)[0]


@at_length_on_two_ranks
def kept_by_modules(folder):
    """By stage and way: how a load ends, and what a layer has of it once the files are written anew."""
    results = {}
    for stage in STAGES[1:]:
        for way in WAYS_BACK:
            engine, said, *_ = _saved_and_loaded(_keeping, f"{folder}/{stage}-{way}", stage, way)
            layer = getattr(engine.module.keeping, "_checkpoint_wrapped_module", engine.module.keeping)
            kept = sorted(set(layer.given.tolist())) if hasattr(layer, "given") else None
            results[f"{stage} {way}"] = [said, layer.scale.tolist(), getattr(layer, "told", None), kept]
            engine.destroy()
    return results


@pytest.mark.parametrize("way", WAYS_BACK)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_module_is_told_the_version_of_its_state_and_may_keep_it(two_ranks_at_length, stage, way):
    said, scale, told, kept = two_ranks_at_length.of(kept_by_modules)[f"{stage} {way}"]
    assert said == ["nothing was raised"] * 2
    assert scale == [1.0, 1.0]
    assert told is (True if stage == 3 else None)
    assert kept == [1.0]


@pytest.mark.parametrize("way", WAYS_BACK)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_may_be_called_as_extra_state_and_a_module_keep_that(two_ranks_at_length, stage, way):
    if way == "universal" and not stage:
        pytest.skip("ZeRO stage 0 loads no universal checkpoint")
    said, saved, behind, kept = two_ranks_at_length.of(odd_names)[f"{stage} {way}"]
    assert said == ["nothing was raised"] * 2
    assert behind == saved
    assert kept == [1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_may_load_a_frozen_layer_under_another_name(two_ranks_at_length, stage):
    """On ZeRO 3 a function is given the part of it that a rank had: nobody can load that."""
    said, saved, behind = two_ranks_at_length.of(by_a_function)[str(stage)]
    if stage == 3:
        assert all("or had another name" in one for one in said), said
        return
    assert said == ["nothing was raised"] * 2
    assert behind == saved


@pytest.mark.parametrize("stage", STAGES[1:3])
def test_a_renamed_layer_has_what_was_stepped_whatever_masters_are_made_of(two_ranks_at_length, stage):
    saved, behind, filled = two_ranks_at_length.of(renamed_by_place)[str(stage)]
    for found in behind:
        assert found[:6] == saved[:6]
    assert {value for name, values in filled.items() if "kept" not in name for value in values} == {0.5}


SIDES = ("", "saved", "loaded", "saved loaded")
WAYS = {"whole": ({}, "zub"), "alone": (ALONE, "zub"), "universal": ({}, "zu")}


@at_length_on_two_ranks
def wrapped_at_sides(folder):
    """By stage, side and way: what a load ends in, and weights before the save and behind it; `u` is in no group."""
    results = {}
    for stage in STAGES:
        for way, (how, wrapped) in WAYS.items():
            if way == "universal" and not stage:
                continue
            for sides in SIDES:
                path = f"{folder}/{stage}-{way}-{sides}"
                engine = _engine(stage, "zuab", "z", "ab", 0, wrapped if "saved" in sides else "")
                _step(engine)
                engine.save_checkpoint(path)
                saved = _weights(engine)
                if way == "universal":
                    assert converted(path, 1) in (None, "nothing was raised")
                keys = {"checkpoint": {"load_universal": way == "universal"}}
                engine = _engine(stage, "zuab", "z", "ab", 1, wrapped if "loaded" in sides else "", **keys)
                said = from_all(refusal(lambda: engine.load_checkpoint(path, **how)))  # noqa: B023
                results[f"{stage} {way} {sides}"] = [said, saved, _weights(engine)]
    return results


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapper_at_one_side_or_both_changes_nothing(two_ranks_at_length, stage, way, sides):
    if way == "universal" and not stage:
        pytest.skip("ZeRO stage 0 loads no universal checkpoint")
    said, saved, behind = two_ranks_at_length.of(wrapped_at_sides)[f"{stage} {way} {sides}"]
    assert said == ["nothing was raised"] * 2
    assert behind == saved


@at_length_on_two_ranks
def trained_since(folder):
    """By stage: what a universal checkpoint ends in of which a layer was frozen, and is trained now, on each rank."""
    results = {}
    for stage in STAGES[1:]:
        path = f"{folder}/{stage}"
        engine = _engine(stage, "zabc", "z", "abc", 0)
        _step(engine)
        engine.save_checkpoint(path)
        assert converted(path, 1) in (None, "nothing was raised")
        engine = _engine(stage, "zabc", "", "zabc", 1, checkpoint={"load_universal": True})
        results[str(stage)] = from_all(refusal(lambda: engine.load_checkpoint(path)))  # noqa: B023
    return results


@pytest.mark.parametrize(("stage", "file"), [("1", "/exp_avg.pt"), ("2", "/exp_avg.pt"), ("3", "")])
def test_a_layer_that_was_frozen_has_no_moments_in_a_universal_checkpoint(two_ranks_at_length, stage, file):
    for said in two_ranks_at_length.of(trained_since)[stage]:
        assert f"it has no zero/z.weight{file}, as where its conversion broke off" in said, said
        assert "or another set of trained parameters, was saved" in said


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_since_is_loaded_or_refused(two_ranks_at_length, stage, case):
    said, saved, own, behind, trains, windows = two_ranks_at_length.of(loads_into_frozen)[f"{stage} {case}"]
    layers, frozen, _, _, ended = CASES[case]
    assert trains == sorted(f"{name}.{kind}" for name in set(layers) - set(frozen) for kind in ("weight", "bias"))
    if ended == "loaded":
        assert set(said) == {"nothing was raised"}
        assert behind == {**own, **{name: value for name, value in saved.items() if name in own}}
        assert windows == 2
        return
    for one in said:
        assert one.startswith("CheckpointError: "), one
        assert ended == "refused" or "of another model" in one, one
