"""Universal checkpoints of pipelines: what stages have under one name, and what no file of a conversion has."""

import shutil
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_parity
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_pipeline_checkpoints import mean_of_all
from tests.distributed.test_pipelines import alone_in_the_process, config, micro_batches

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


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
    return [tied[0], LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Linear, 6, 6), tied[1]]


def by_function():
    """The last layer uses the first one's weight by a function, as a head uses that of an embedding."""
    tied = [TiedLayerSpec("scale", Scale, biased=False, forward_fn=it) for it in (None, lambda m, x: x * m.weight)]
    # The conversion of pipelines with fewer files of layers divides by zero.
    return [tied[0], *(LayerSpec(nn.Linear, 6, 6) for _ in range(4)), tied[1]]


def linear():
    """Trained layers and a frozen one on each stage, and a buffer on the last."""
    return [LayerSpec(nn.Linear, 6, 6) for _ in range(5)] + [LayerSpec(Shifted)]


def pipeline(layers, stages=2, frozen=(), *, bf16=False):
    torch.manual_seed(0)
    model = deepspeed.PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=mean_of_all)
    for name, one in model.named_parameters():
        one.requires_grad_(not name.startswith(frozen))
    keys = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    keys |= {"bf16": {"enabled": True}} if bf16 else {}
    trained = [one for one in model.parameters() if one.requires_grad]
    keys = config(1, **keys, checkpoint={"load_universal": True})
    return ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]


def saved(engine, path):
    """Train a window, save and convert."""
    engine.train_window(micro_batches(engine, 0, [[2, 1]]))
    engine.save_checkpoint(path)
    assert (said := converted(path, 1)) in (None, "nothing was raised"), said


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
        if stages == 2:
            saved(pipeline(scaled(BIASED["both"])), path)
        else:
            saving = pipeline(scaled(BIASED["both"]), stages=1)
            saving.train_window(micro_batches(saving, 0, [[2], [1]]))
            saving.save_checkpoint(path)
            assert converted(path, 1) in (None, "nothing was raised")
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
                if case == "with" and dist.get_rank() == 0:
                    for file in Path(path, "global_step1").glob("layer_*"):
                        shutil.copy(file, Path(path, "universal"))
                dist.barrier()
                loading = pipeline(layers(), frozen=frozen, bf16=bf16)
                strict = case != "not strict"
                said = refusal(lambda: loading.load_checkpoint(path, load_module_strict=strict))  # noqa: B023
                found[case] = from_all([said, apart(saving, loading)])
                dist.barrier()
    return results


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
