"""Universal checkpoints of pipelines: what stages have under one name, and what no file of a conversion has."""

import math
import shutil
from functools import partial
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_parity
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_four_ranks, at_length_on_two_ranks
from tests.distributed.test_pipeline_checkpoints import mean_of_all
from tests.distributed.test_pipelines import alone_in_the_process, config, micro_batches

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


OF_A_STAGE = "tied_modules.scale.bias"


class Scale(nn.Module):
    """Multiplies by a weight, which stages share, and adds a bias, if wanted, of each stage's own."""

    def __init__(self, *, biased):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.bias = nn.Parameter(torch.zeros(6)) if biased else 0.0

    def forward(self, x):
        return x * self.weight + self.bias


class Shifted(nn.Module):
    """Adds a buffer, which no gradient moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.zeros(6))

    def forward(self, x):
        return x + self.by


def scaled(biased):
    """The layers of a pipeline whose first and last ones share a weight, and may each have a bias."""
    tied = [TiedLayerSpec("scale", Scale, biased=it, tied_weight_attr="weight") for it in biased]
    return [tied[0], *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied[1]]


def by_function():
    """The last layer uses the first one's weight by a function, as a head uses that of an embedding."""
    tied = [TiedLayerSpec("scale", Scale, biased=False, forward_fn=it) for it in (None, lambda m, x: x * m.weight)]
    # The conversion of pipelines with fewer files of layers divides by zero.
    return [tied[0], *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied[1]]


def by_functions():
    """Both stages use the weight by a function, so that no file of a layer has it."""
    tied = TiedLayerSpec("scale", Scale, biased=False, forward_fn=lambda m, x: x * m.weight)
    return [tied, *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied]


def linear():
    """Trained layers and a frozen one on each stage, and a buffer on the last."""
    return [LayerSpec(nn.Linear, 6, 6) for _ in range(5)] + [LayerSpec(Shifted)]


class Cut(deepspeed.PipelineModule):
    """Two stages, of which the second begins with a layer of a given number."""

    def __init__(self, layers, second, **options):
        self._second = second
        super().__init__(layers, num_stages=2, **options)

    def _partition_layers(self, method="uniform"):
        self.parts = [0, self._second, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def pipeline(layers, stages=2, frozen=(), *, bf16=False, own=None, universal=True, second=None):
    """A pipeline; `own`: the stages that train the bias of a tied layer, all of them if it is None."""
    torch.manual_seed(0)
    if second is None:
        model = deepspeed.PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=mean_of_all)
    else:
        model = Cut(layers, second, loss_fn=mean_of_all)
    for name, one in model.named_parameters():
        others = own is not None and name == OF_A_STAGE and model.stage_id not in own
        one.requires_grad_(not name.startswith(frozen) and not others)
    keys = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    keys |= {"bf16": {"enabled": True}} if bf16 else {}
    trained = [one for one in model.parameters() if one.requires_grad]
    keys = config(1, **keys, checkpoint={"load_universal": universal})
    return ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]


def saved(engine, path):
    """Train, save and convert."""
    columns = [[2, 1]] if engine.dp_world_size == 1 else [[2]] * (engine.dp_world_size - 1) + [[1]]
    for window in range(3):  # the first rate of the warm-up is 0
        engine.train_window(micro_batches(engine, window, columns))
    engine.save_checkpoint(path)
    assert (said := converted(path, 3)) in (None, "nothing was raised"), said


def copy_layers(path):
    """Copy the files of layers into the folder of the universal checkpoint, as the page says."""
    if dist.get_rank() == 0:
        for file in Path(path, "global_step3").glob("layer_*"):
            shutil.copy(file, Path(path, "universal"))
    dist.barrier()


def forget(path, *names, others=False, tag="universal"):
    """Take out of a checkpoint what releases before have not written; `others`: and a layer of each stage."""
    if dist.get_rank() == 0:
        for file in Path(path, tag).glob("mp_rank_*"):
            state = torch.load(file, weights_only=False)
            for name in names:
                del state["ds_parity"][name]
            if others:
                for shapes in state["param_shapes"]:
                    for name in [name for name in shapes if name.startswith(("1.", "4."))]:
                        del shapes[name]
            torch.save(state, file)
    dist.barrier()


def apart(one, other):
    """By how much two engines of one stage differ at most, in their weights and buffers."""
    states = one.module.state_dict(), other.module.state_dict()
    assert states[0].keys() == states[1].keys()
    return max(float((value - states[1][name]).abs().max()) for name, value in states[0].items())


# Which of the two stages of the tied layer have a bias.
BIASED = {"none": (False, False), "the last": (False, True), "both": (True, True)}


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_stages(folder):
    """By the stages with a bias: what each rank's load ends in, and how far its weights are from those of the save."""
    results = {}
    for name, biased in BIASED.items():
        path = f"{folder}/stages-{name}"
        saving = pipeline(scaled(biased))
        saved(saving, path)
        loading = pipeline(scaled(biased))
        said = refusal(lambda engine=loading, path=path: engine.load_checkpoint(path))
        results[name] = from_all([said, apart(saving, loading)])
        dist.barrier()
    return results


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_a_stage(folder):
    """By who saves: what a load by a pipeline of one stage ends in."""
    results = {}
    for stages in (2, 1):
        path = f"{folder}/{stages}-to-1"
        saved(pipeline(scaled(BIASED["both"]), stages=stages), path)
        deepspeed.utils.groups.mpu = None
        loading = pipeline(scaled(BIASED["both"]), stages=1)
        results[stages] = from_all(refusal(lambda engine=loading, path=path: engine.load_checkpoint(path)))
        deepspeed.utils.groups.mpu = None
        dist.barrier()
    return results


LAYERS = {"frozen layers and a buffer": (linear, ("1", "4")), "a frozen tied layer": (by_function, ("tied",))}


def _moved(engine):
    """Give what no optimizer steps a value of the stage's own layers, alike on all stages that share it."""
    with torch.no_grad():
        for name, one in engine.module.state_dict(keep_vars=True).items():
            if not one.requires_grad:
                one.fill_(0.25 if "tied" in name else 0.125 * (1 + engine.stage_id))


# The stages that train a bias of their own at the save, and at the load.
TRAINING = {"one, then both": ((0,), (0, 1)), "one, then the other": ((0,), (1,)), "one and the same": ((0,), (0,))}


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_parts(folder):
    """By the stages that train a bias of their own: what the load of copied files ends in, and how far it is off."""
    results = {}
    for name, (before, behind) in TRAINING.items():
        path = f"{folder}/parts-{name}"
        engines = []
        for own in (before, behind):
            engines.append(pipeline(scaled(BIASED["both"]), own=own))
            if len(engines) == 1:
                saved(engines[0], path)
                copy_layers(path)
        said = refusal(lambda: engines[1].load_checkpoint(path))  # noqa: B023
        results[name] = from_all([said, apart(*engines)])
        dist.barrier()
    return results


def biases(engine):
    """The biases of tied layers, by their stages."""
    found = engine.module.state_dict().get(OF_A_STAGE)
    return dict(from_all((engine.stage_id, found if found is None else found[0].item())))


def on_other_stages(folder, cases):
    """By case: what loads of copied files end in, and the biases of the save and of the load, by stages.

    Args:
        folder: for the checkpoints.
        cases: by name, of the save and of the load, the number of stages and the stages that train their bias.
    """
    results = {}
    for name, ((before, own), (behind, own_then)) in cases.items():
        path = f"{folder}/{name}"
        engine = pipeline(scaled(BIASED["both"]), before, own=own)
        with torch.no_grad():
            for key, one in engine.module.named_parameters():
                if not one.requires_grad:
                    one.fill_(FROZEN[name] * (1 + engine.stage_id) if name in FROZEN else 0.25)
                assert one.requires_grad or key == OF_A_STAGE
        saved(engine, path)
        copy_layers(path)
        there = biases(engine)
        deepspeed.utils.groups.mpu = None
        if name.startswith("without places"):
            forget(path, "tied", others="other layers" in name)
        loading = pipeline(scaled(BIASED["both"]), behind, own=own_then)
        said = refusal(lambda: loading.load_checkpoint(path))  # noqa: B023
        results[name] = [from_all(said), there, biases(loading)]
        deepspeed.utils.groups.mpu = None
        dist.barrier()
    return results


class Scaled(torch.optim.AdamW):
    """Has a rate of each group multiplied by a number that is not among its settings, as with a decay by layers."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= group["lr_scale"]
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= group["lr_scale"]


class Unnamed(torch.optim.Optimizer):
    """Tells torch no settings, as Muon's reference code: they are in the groups alone."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    names = ("exp_avg", "exp_avg_sq")  # a conversion takes no others
                    mean, squares = (self.state[one].setdefault(name, torch.zeros_like(one)) for name in names)
                    squares.lerp_(one.grad**2, 0.1)
                    one.sub_(group["lr"] * mean.lerp_(one.grad, 0.1) / (squares.sqrt() + 1e-8))


class Policy:
    """Anything that an optimizer may be set by."""


def by_object(groups):
    """An optimizer one of whose settings is an object, which is another one on each rank, and another a function."""
    optimizer = torch.optim.AdamW(groups)
    for name, value in {"policy": Policy(), "rate_of": mean_of_all}.items():
        optimizer.defaults[name] = value
        for group in optimizer.param_groups:
            group[name] = value
    return optimizer


# By what tells the groups of two stages apart: how they are optimized, and what the second stage has in its group.
SETTINGS = {
    "names": (torch.optim.AdamW, {"param_names": ["1"]}),
    "types": (torch.optim.AdamW, {"lr": np.float64(0.01), "weight_decay": 0, "betas": [0.9, 0.99], "amsgrad": 0}),
    "objects": (by_object, {}),
    "rates": (torch.optim.AdamW, {"lr": 0.02}),
    "tensors": (torch.optim.AdamW, {"lr": torch.tensor(0.02)}),
    "scales": (Scaled, {"lr_scale": 0.5}),
    "unnamed": (Unnamed, {"lr": 0.02}),
}
APART = {
    "rates": "parameter group 0 of stage 1 was saved with lr 0.02, that of stage 0 with lr 0.01, and",
    "tensors": "was saved with lr 0.0199",
    "scales": "was saved with lr_scale 0.5, that of stage 0 with lr_scale 1.0, and",
    "unnamed": "was saved with lr 0.02, that of stage 0 with lr 0.01, and",
}


def by_stage(name):
    """A pipeline whose stages have one parameter group each."""
    torch.manual_seed(0)
    model = deepspeed.PipelineModule(linear(), num_stages=2, partition_method="uniform", loss_fn=mean_of_all)
    of_name, of_the_second = SETTINGS[name]
    group = {"params": list(model.parameters()), "lr": 0.01, "weight_decay": -0.0, "betas": (0.9, 0.99), "lr_scale": 1}
    group |= {"param_names": ["0"], "own": [torch.ones(1)], "none": math.nan}
    if name == "tensors":
        group["lr"] = torch.tensor(0.01)
    optimizer = of_name([{**group, **(of_the_second if model.stage_id else {})}])
    keys = config(1, checkpoint={"load_universal": True})
    del keys["optimizer"], keys["scheduler"]
    return ds_parity.initialize(model=model, optimizer=optimizer, config=keys)[0]


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_settings(folder):
    """By what tells groups of stages apart: what a load ends in, and what rates and scales each stage has."""
    results = {}
    for name in SETTINGS:
        path = f"{folder}/{name}"
        saved(by_stage(name), path)
        copy_layers(path)
        loading = by_stage(name)
        said = refusal(lambda: loading.load_checkpoint(path))  # noqa: B023
        (group,) = loading.optimizer.param_groups
        results[name] = from_all([said, [round(float(group[it]), 6) for it in ("lr", "lr_scale")]])
    return results


def by_function_biased():
    """The last layer uses the first one's weight by a function, with a bias of its own."""
    tied = [TiedLayerSpec("scale", Scale, biased=True, forward_fn=it) for it in (None, lambda m, x: m(x))]
    return [tied[0], *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied[1]]


def in_the_middle():
    """As `by_function_biased`, with the function between the other layers."""
    first, *others, last = by_function_biased()
    return [first, *others[:2], last, *others[2:]]


def of_two_keys():
    """Two tied layers, of one of which the last stage has a bias that no forward reads."""
    first, last = (
        TiedLayerSpec("scale", Scale, biased=True, forward_fn=it) for it in (None, lambda m, x: x * m.weight)
    )
    other = TiedLayerSpec("other", Scale, biased=False)
    return [first, LayerSpec(nn.Linear, 6, 6), other, other, LayerSpec(nn.Linear, 6, 6), last]


@at_length_on_two_ranks
@alone_in_the_process
def weights_alone(folder):
    """By case: what the load of weights alone on another number of stages ends in."""
    results = {}
    both, none = partial(scaled, BIASED["both"]), partial(scaled, BIASED["none"])
    cases = {
        "two biases": (both, {"stages": 2}, both, {"stages": 1}),
        "the same": (both, {"stages": 2}, both, {"stages": 2}),
        "one bias": (both, {"stages": 1}, both, {"stages": 2}),
        "none": (none, {"stages": 2}, none, {"stages": 1}),
        "by a function": (by_function_biased, {"stages": 1}, by_function_biased, {"stages": 2}),
        "by a function now": (both, {"stages": 2}, by_function_biased, {"stages": 2}),
        "on another stage": (in_the_middle, {"second": 4}, in_the_middle, {"second": 3}),
        "on another stage, not told": (in_the_middle, {"second": 4}, in_the_middle, {"second": 3}),
        "beside another": (of_two_keys, {"second": 3}, of_two_keys, {"second": 2}),
    }
    for name, (layers, before, layers_behind, behind) in cases.items():
        path = f"{folder}/{name}"
        engine = pipeline(layers(), universal=False, **before)
        columns = [[2], [1]] if engine.dp_world_size == 2 else [[2, 1]]
        for window in range(3):
            engine.train_window(micro_batches(engine, window, columns))
        engine.save_checkpoint(path)
        if "not told" in name:
            forget(path, "tied", tag="global_step3")
        there = biases(engine)
        deepspeed.utils.groups.mpu = None
        loading = pipeline(layers_behind(), universal=False, **behind)
        said = refusal(lambda: loading.load_checkpoint(path, load_optimizer_states=False))  # noqa: B023
        results[name] = [from_all(said), there, biases(loading)]
        deepspeed.utils.groups.mpu = None
        dist.barrier()
    return results


# Frozen biases of the stages that save: alike on all of them where the name is not here.
FROZEN = {"2 to 1, frozen otherwise": 0.25}
OF_TWO = {
    "2 to 1, the first": ((2, [0]), (1, [0])),
    "2 to 1, the last": ((2, [1]), (1, [0])),
    "2 to 1, frozen": ((2, []), (1, [])),
    "2 to 1, frozen otherwise": ((2, []), (1, [])),
    "1 to 2, the first": ((1, [0]), (2, [0])),
    "1 to 2, the last": ((1, [0]), (2, [1])),
    "1 to 2, both": ((1, [0]), (2, [0, 1])),
    "without places, 2 to 2": ((2, [1]), (2, [1])),
    "without places, 2 to 2, other layers": ((2, [1]), (2, [1])),
    "without places, 2 to 2, another": ((2, [1]), (2, [0])),
    "without places, 1 to 2": ((1, [0]), (2, [0])),
}
OF_FOUR = {
    "4 to 2, the same": ((4, [0]), (2, [0])),
    "4 to 2, the last": ((4, [3]), (2, [1])),
    "4 to 2, another": ((4, [0]), (2, [1])),
    "2 to 4, another": ((2, [1]), (4, [0])),
}


@at_length_on_two_ranks
@alone_in_the_process
def universal_on_other_stages(folder):
    return on_other_stages(folder, OF_TWO)


@at_length_on_four_ranks
@alone_in_the_process
def universal_on_four_stages(folder):
    return on_other_stages(folder, OF_FOUR)


class Noted(Scale):
    """Keeps a value of its own in checkpoints, which is another object each time."""

    def get_extra_state(self):
        return torch.full((1,), 0.5)

    def set_extra_state(self, state):
        self.given = float(state)


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_an_extra_state(folder):
    """What a load ends in of a tied layer with extra state, and what each stage is given of it."""
    tied = TiedLayerSpec("scale", Noted, biased=False)
    layers = [tied, *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied]
    saved(pipeline(layers), f"{folder}/extra")
    copy_layers(f"{folder}/extra")
    engine = pipeline(layers)
    said = refusal(lambda: engine.load_checkpoint(f"{folder}/extra"))
    return from_all([said, getattr(engine.module.tied_modules["scale"], "given", None)])


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_more(folder):
    """By strictness: what a load ends in of a layer that was saved with a buffer, and has none."""
    layers = [[LayerSpec(kind), *(LayerSpec(nn.Linear, 6, 6) for _ in range(3))] for kind in (Masked, nn.Identity)]
    saved(pipeline(layers[0]), f"{folder}/more")
    copy_layers(f"{folder}/more")
    said = [
        refusal(lambda: pipeline(layers[1]).load_checkpoint(f"{folder}/more", load_module_strict=strict))  # noqa: B023
        for strict in (True, False)
    ]
    return from_all(said)


class Masked(nn.Module):
    """Has a buffer of what is no number, which it does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([math.nan, -math.inf]))

    def forward(self, x):
        return x


class Wrapped(nn.Module):
    """Its state has other names than its parameters, as activation checkpointing has it."""

    def __init__(self):
        super().__init__()
        self.inner = checkpoint_wrapper(nn.Linear(6, 6))

    def forward(self, x):
        return self.inner(x)


ODD = {"a mask": (Masked, True), "a wrapper": (Wrapped, False)}


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_odd_layers(folder):
    """By layer: what a load ends in, and how far it is off; of trained layers alone, without their files."""
    results = {}
    for name, (layer, copied) in ODD.items():
        layers = [*(LayerSpec(nn.Linear, 6, 6) for _ in range(5)), LayerSpec(layer)]
        engine = pipeline(layers)
        saved(engine, f"{folder}/{name}")
        if copied:
            copy_layers(f"{folder}/{name}")
        other = pipeline(layers)
        said = refusal(lambda: other.load_checkpoint(f"{folder}/{name}"))  # noqa: B023
        pairs = zip(engine.module.parameters(), other.module.parameters(), strict=True)
        results[name] = from_all([said, all(torch.equal(one, its) for one, its in pairs)])
    return results


@at_length_on_two_ranks
@alone_in_the_process
def universal_by_functions(folder):
    """What a load ends in of a frozen tied weight that no file has."""
    engine = pipeline(by_functions(), frozen=("tied",))
    saved(engine, f"{folder}/functions")
    copy_layers(f"{folder}/functions")
    return from_all(refusal(lambda: pipeline(by_functions(), frozen=("tied",)).load_checkpoint(f"{folder}/functions")))


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_layers(folder):
    """By precision and layers: what loads end in, and how far off they are, without files of layers, and with them."""
    results = {}
    for bf16 in (False, True):
        for name, (layers, frozen) in LAYERS.items():
            path = f"{folder}/{bf16}-{name}"
            saving = pipeline(layers(), frozen=frozen, bf16=bf16)
            _moved(saving)
            saved(saving, path)
            results[f"{name} {bf16}"] = found = {}
            for case in ("without", "not strict", "with"):
                if case == "with":
                    copy_layers(path)
                loading = pipeline(layers(), frozen=frozen, bf16=bf16)
                strict = case != "not strict"
                said = refusal(lambda: loading.load_checkpoint(path, load_module_strict=strict))  # noqa: B023
                found[case] = from_all([said, apart(saving, loading)])
                dist.barrier()
    return results


def turned():
    """As many numbers in the second and third layer as in `plain`, in other shapes."""
    return [LayerSpec(nn.Linear, *sizes) for sizes in ((6, 6), (6, 4), (4, 6), (6, 6))]


def plain():
    return [LayerSpec(nn.Linear, *sizes) for sizes in ((6, 6), (6, 6), (6, 6), (6, 6))]


def in_groups(*, exchanged=False):
    """A pipeline whose weights and biases are two parameter groups, in either order."""
    torch.manual_seed(0)
    model = deepspeed.PipelineModule(plain(), num_stages=2, partition_method="uniform", loss_fn=mean_of_all)
    groups = [{"params": [one for one in model.parameters() if one.dim() == 2], "weight_decay": 0.1}]
    groups.append({"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0})
    keys = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    keys = config(1, **keys, checkpoint={"load_universal": True})
    return ds_parity.initialize(model=model, model_parameters=groups[:: -1 if exchanged else 1], config=keys)[0]


OTHERS = {
    "fewer layers": lambda: pipeline(plain()[:3]),
    "more layers": lambda: pipeline([*plain(), *plain()[:2]]),
    "other shapes": lambda: pipeline(turned()),
    "frozen now": lambda: pipeline(plain(), frozen=("1",)),
    "frozen in other shapes": lambda: pipeline(turned(), frozen=("1", "2")),
    "groups": lambda: in_groups(exchanged=True),
}


def of_kind(name):
    """Which of the checkpoints a case loads."""
    return next((kind for kind in ("groups", "frozen in") if kind in name), "one").split()[0]


PARTS = {"load_optimizer_states": False, "load_module_only": True}


@at_length_on_two_ranks
@alone_in_the_process
def universal_of_other_pipelines(folder):
    """What loads into pipelines of other parameters, or of a part, end in, and whether weights stay as they are."""
    results = {}
    kinds = {"one": lambda: pipeline(plain()), "groups": in_groups}
    kinds["frozen"] = lambda: pipeline(plain(), frozen=("1", "2"))
    for kind, made in kinds.items():
        saved(made(), f"{folder}/{kind}")
    copy_layers(f"{folder}/frozen")
    cases = {name: (made, {}) for name, made in OTHERS.items()}
    cases |= {name: (lambda: pipeline(plain()), {name: value}) for name, value in PARTS.items()}
    cases |= {"the same": (lambda: pipeline(plain()), {}), "the same groups": (in_groups, {})}
    for name, (made, options) in cases.items():
        engine, path = made(), f"{folder}/{of_kind(name)}"
        before = [one.detach().clone() for one in engine.module.parameters()]
        said = refusal(lambda: engine.load_checkpoint(path, **options))  # noqa: B023
        pairs = zip(before, engine.module.parameters(), strict=True)
        results[name] = from_all([said, all(torch.equal(one, other) for one, other in pairs)])
        dist.barrier()
    forget(f"{folder}/one", "members")
    for name in ("fewer layers", "more layers"):
        said = refusal(lambda: OTHERS[name]().load_checkpoint(f"{folder}/one"))  # noqa: B023
        results[f"{name}, by names alone"] = from_all([said, True])
    said = refusal(lambda: pipeline(plain()).load_checkpoint(f"{folder}/frozen", tag="global_step3"))
    results["no universal one"] = from_all([said, True])
    return results


@pytest.mark.parametrize("name", [*OTHERS, *PARTS, "fewer layers, by names alone", "more layers, by names alone"])
def test_another_pipeline_or_a_part_is_refused_before_anything_is_loaded(two_ranks_at_length, name):
    for said, as_it_was in two_ranks_at_length.of(universal_of_other_pipelines)[name]:
        assert said.startswith("CheckpointError")
        assert "universal" in said
        assert as_it_was


def test_a_checkpoint_that_was_not_converted_is_said_to_be_none(two_ranks_at_length):
    for said, _ in two_ranks_at_length.of(universal_of_other_pipelines)["no universal one"]:
        assert said.startswith("CheckpointError")
        assert "the tag names no universal checkpoint" in said


def test_a_buffer_that_a_layer_has_not_is_refused_on_every_rank(two_ranks_at_length):
    for strict, lenient in two_ranks_at_length.of(universal_of_more):
        assert strict.startswith("CheckpointError")
        assert "layer_00-model_states.pt has mask, which its layer does not take" in strict
        assert lenient == "nothing was raised"


@pytest.mark.parametrize("name", ["the same", "the same groups"])
def test_the_same_pipeline_is_loaded(two_ranks_at_length, name):
    assert two_ranks_at_length.of(universal_of_other_pipelines)[name] == [["nothing was raised", False]] * 2


@pytest.mark.parametrize("biased", ["none", "the last"])
def test_tied_layers_of_which_no_stage_but_one_has_more_than_is_shared_are_loaded(two_ranks_at_length, biased):
    assert two_ranks_at_length.of(universal_of_stages)[biased] == [["nothing was raised", 0.0]] * 2


def test_what_each_stage_has_of_its_own_is_refused_on_every_rank(two_ranks_at_length):
    for said, _ in two_ranks_at_length.of(universal_of_stages)["both"]:
        assert said.startswith("CheckpointError")
        assert "each of several stages has saved tied_modules.scale.bias of its own" in said
        assert "load the checkpoint that was converted" in said


def test_what_two_stages_had_of_their_own_is_none_of_the_one_that_loads_it(two_ranks_at_length):
    found = two_ranks_at_length.of(universal_of_a_stage)
    assert all("each of several stages has saved tied_modules.scale.bias of its own" in said for said in found["2"])
    assert found["1"] == ["nothing was raised"] * 2


@pytest.mark.parametrize("name", ["one, then both", "one, then the other"])
def test_a_part_of_another_stage_is_refused_in_the_place_of_ones_own(two_ranks_at_length, name):
    for said, _ in two_ranks_at_length.of(universal_of_parts)[name]:
        assert said.startswith("CheckpointError")
        assert "stage 0 of 2 has saved tied_modules.scale.bias of its own, in the layers [0], and stage 1 of 2" in said


def test_a_part_of_one_stage_goes_back_to_it(two_ranks_at_length):
    assert two_ranks_at_length.of(universal_of_parts)["one and the same"] == [["nothing was raised", 0.0]] * 2


def test_a_frozen_weight_that_no_file_has_is_refused(two_ranks_at_length):
    for said in two_ranks_at_length.of(universal_by_functions):
        assert said.startswith("CheckpointError")
        assert "no file of a layer has tied_modules.scale.weight" in said


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_what_no_optimizer_steps_is_refused_without_the_files_of_layers_and_loaded_out_of_them(
    two_ranks_at_length, name, bf16
):
    found = two_ranks_at_length.of(universal_of_layers)[f"{name} {bf16}"]
    for said, off in found["without"]:
        assert "CheckpointError" in said
        assert "a conversion copies no files of a pipeline's layers" in said
        assert off > 0.0
    assert [said for said, _ in found["not strict"]] == ["nothing was raised"] * 2
    assert all(off > 0.0 for _, off in found["not strict"])
    assert found["with"] == [["nothing was raised", 0.0]] * 2


REFUSED = {
    "2 to 1, the first": "stage 0 of 2 has saved tied_modules.scale.bias of its own, in the layers [0]",
    "2 to 1, the last": "stage 1 of 2 has saved tied_modules.scale.bias of its own, in the layers [5]",
    "2 to 1, frozen otherwise": "bias of a tied layer is one in layer_00-model_states.pt and another in layer_05",
    "1 to 2, both": "stages 0 and 1 each train tied_modules.scale.bias of their own, of which it has one",
    "without places, 2 to 2, another": "stage 1 of 2 has saved tied_modules.scale.bias of its own, in layers that it",
    "without places, 2 to 2, other layers": "stage 1 of 2 has saved tied_modules.scale.bias of its own, in layers that",
    "without places, 1 to 2": "stage 0 of 1 has saved tied_modules.scale.bias of its own, in layers that it",
    "4 to 2, another": "stage 0 of 4 has saved tied_modules.scale.bias of its own, in the layers [0], and stage 1 of 2",
    "2 to 4, another": "stage 1 of 2 has saved tied_modules.scale.bias of its own, in the layers [5], and stage 0 of 4",
}


def in_place_or_refused(said, there, here, refused):
    """Assert what a load has ended in."""
    if refused:
        assert all(one.startswith("CheckpointError") and refused in one for one in said)
        assert "load the checkpoint that was converted" in said[0]
        return
    assert set(said) == {"nothing was raised"}
    # The first stage has the first layer, and the last one the last.
    assert here["0"] == there["0"] != 0.0
    assert list(here.values())[-1] == list(there.values())[-1] != 0.0


@pytest.mark.parametrize("name", OF_TWO)
def test_a_part_of_a_tied_layer_stays_in_its_place_or_is_refused(two_ranks_at_length, name):
    in_place_or_refused(*two_ranks_at_length.of(universal_on_other_stages)[name], REFUSED.get(name))


@pytest.mark.parametrize("name", OF_FOUR)
def test_a_part_of_a_tied_layer_stays_in_its_place_on_four_stages_or_two_or_is_refused(four_ranks_at_length, name):
    in_place_or_refused(*four_ranks_at_length.of(universal_on_four_stages)[name], REFUSED.get(name))


def test_a_tied_layer_with_extra_state_is_loaded(two_ranks_at_length):
    assert two_ranks_at_length.of(universal_of_an_extra_state) == [["nothing was raised", 0.5]] * 2


@pytest.mark.parametrize("name", ODD)
def test_layers_with_numbers_that_are_none_and_with_other_names_are_loaded(two_ranks_at_length, name):
    assert two_ranks_at_length.of(universal_of_odd_layers)[name] == [["nothing was raised", True]] * 2


@pytest.mark.parametrize("name", SETTINGS)
def test_stages_with_settings_of_their_own_are_not_given_those_of_the_first(two_ranks_at_length, name):
    found = two_ranks_at_length.of(universal_of_settings)[name]
    for said, _ in found:
        if name in APART:
            assert said.startswith("CheckpointError")
            assert APART[name] in said
        else:
            assert said == "nothing was raised"
    scale = 1 / 2 if name == "scales" else 1
    assert [own for _, own in found] == [[0.01, 1.0], [0.02 if name in APART and scale == 1 else 0.01, scale]]


ALONE = {
    "two biases": "bias of a tied layer is one in layer_00-model_states.pt and another in layer_05",
    "by a function": "no load gives tied_modules.scale.bias back, which this stage trains, and uses by a forward_fn: 1 "
    "stages have saved the checkpoint, and 2 load it",
    "by a function now": "a forward_fn: layer_05-model_states.pt has it, which DeepSpeed reads for a module alone",
    "on another stage": "stage 1 had the tied layer 'scale' as the layers [], and has it as [3]",
    "on another stage, not told": "stage 1 of the checkpoint has trained no tied_modules.scale.bias, or",
}


@pytest.mark.parametrize("name", [*ALONE, "the same", "one bias", "none", "beside another"])
def test_weights_alone_on_other_stages_keep_parts_of_tied_layers_or_are_refused(two_ranks_at_length, name):
    said, there, here = two_ranks_at_length.of(weights_alone)[name]
    if name in ALONE:
        assert any(ALONE[name] in one for one in said)
        assert all(one.startswith("CheckpointError") for one in said)
        return
    assert set(said) == {"nothing was raised"}
    first_and_last = [[list(one.values())[at] for at in (0, -1)] for one in (here, there)]
    assert first_and_last[0] == first_and_last[1]
