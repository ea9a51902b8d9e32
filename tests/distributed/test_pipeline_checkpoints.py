"""A pipeline's checkpoint goes to whom it belongs: another optimizer, order or partition of its states is refused."""

import dataclasses
import shutil
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_parity
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_four_ranks, by_length, either, on_four_ranks
from tests.distributed.test_pipelines import alone_in_the_process, config, micro_batches, squares

pytestmark = pytest.mark.ranks
SIZES = [[2, 1], [3]]
HALVES = {"bf16": {"enabled": True}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
IN_TURNS = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}


@dataclasses.dataclass(frozen=True)
class Change:
    """What is other where a checkpoint is loaded, and what the error must say; nothing where it loads."""

    stage: int
    says: str
    changed: dict = dataclasses.field(default_factory=dict)
    saved: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    turned: bool = False
    frozen: int | None = None


NOT_THIS = "the checkpoint's parameter groups are not this engine's: group 0 was "
CHANGES = {
    **{f"the same on ZeRO {stage}": Change(stage, "nothing was raised") for stage in (0, 1)},
    "[a-z] in the tag": Change(1, "nothing was raised"),
    "the same in bf16": Change(0, "nothing was raised", HALVES, HALVES),
    "in turns": Change(1, "saved with zero_optimization.round_robin_gradients = false", IN_TURNS),
    "in turns, weights alone": Change(1, "nothing was raised", IN_TURNS, options={"load_optimizer_states": False}),
    **{f"order on ZeRO {stage}": Change(stage, NOT_THIS, turned=True) for stage in (0, 1)},
    "order in bf16": Change(0, NOT_THIS, HALVES, HALVES, turned=True),
    # In the first stage alone: the other one is told.
    "frozen": Change(0, NOT_THIS, frozen=1),
    **{f"optimizer on ZeRO {stage}": Change(stage, "another optimizer than this engine's", ADAM) for stage in (0, 1)},
    "no schedule": Change(1, "no state of an LR scheduler", saved={"scheduler": {"type": None}}),
    "stage": Change(1, "the checkpoint was saved on stage 0", saved={"zero_optimization": {"stage": 0}}),
}  # fmt: skip


OFTEN = ("the same on ZeRO 1", "the same in bf16", "in turns", "order on ZeRO 1", "frozen", "optimizer on ZeRO 0")
SELDOM = tuple(name for name in CHANGES if name not in OFTEN)


def mean_of_all(outputs, labels):
    return squares(outputs.mean(-1, keepdim=True), labels)


def build(extended, turned=False, frozen=None, stages=2, loss_fn=mean_of_all, initialize=ds_parity.initialize):
    """Build a pipeline whose layers are of one size, so that the states of one fit another."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)]
    layers += [nn.Tanh(), nn.Linear(6, 6, bias=False)]
    if frozen is not None:
        layers[2 * frozen].requires_grad_(False)
    pipeline = deepspeed.PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    trained = [one for one in pipeline.parameters() if one.requires_grad]
    return initialize(model=pipeline, model_parameters=trained[::-1] if turned else trained, config=extended)[0]


def answered(folder, name, change):
    """What a rank is answered where it loads, and how far its weights are then from those that were saved."""
    saving = build(config(change.stage, **change.saved), frozen=0 if change.frozen is not None else None)
    saving.train_window(micro_batches(saving, 0, SIZES))
    saving.save_checkpoint(folder, tag=name)
    loading = build(config(change.stage, **change.changed), change.turned, change.frozen)
    said = refusal(lambda: loading.load_checkpoint(folder, tag=name, **change.options))
    pairs = zip(saving.module.parameters(), loading.module.parameters(), strict=True)
    return [said, max(float((one - other).abs().max()) for one, other in pairs)]


@on_four_ranks
@alone_in_the_process
def changed(folder):
    return {name: from_all(answered(folder, name, CHANGES[name])) for name in OFTEN}


@at_length_on_four_ranks
@alone_in_the_process
def changed_otherwise(folder):
    return {name: from_all(answered(folder, name, CHANGES[name])) for name in SELDOM}


@pytest.mark.parametrize("name", by_length(OFTEN, SELDOM, "four_ranks"))
def test_states_go_to_their_own_parameters_or_are_refused_on_every_rank(request, name):
    found = either(request, changed, changed_otherwise, seldom=name in SELDOM, fixture="four_ranks")
    for said, apart in found[name]:
        assert CHANGES[name].says in said
        assert said.startswith(("CheckpointError", "nothing was raised"))
        assert said.startswith("CheckpointError") or apart == 0.0


@on_four_ranks
@alone_in_the_process
def around(folder):
    """What each rank is answered that saves what can't be, or alone, and what `latest` names."""
    engine, rank = build(config(1)), dist.get_rank()
    engine.train_window(micro_batches(engine, 0, SIZES))
    found = {
        "no mapping": refusal(lambda: engine.save_checkpoint(folder, client_state=3)),
        "on one rank": refusal(lambda: engine.save_checkpoint(folder, client_state=3 if rank == 1 else {})),
        "own value": refusal(lambda: engine.save_checkpoint(folder, client_state={"ds_parity": 1})),
        "alone": refusal(
            lambda: (
                engine.save_checkpoint(folder) if rank == 2 else engine.train_window(micro_batches(engine, 1, SIZES))
            )
        ),
        "other tags": refusal(lambda: engine.save_checkpoint(folder, tag=f"part-{rank % 2}")),
        "missing": refusal(lambda: engine.load_checkpoint(folder, tag="a/c")),
    }
    engine.save_checkpoint(folder, tag="older")
    _, older = engine.load_checkpoint(folder, tag="older")
    for name in ("states", "members", "settings", "schedule"):  # as releases wrote it before checkpoints had them
        older["ds_parity"].pop(name)
    found["older state"] = refusal(lambda: engine.save_checkpoint(folder, tag="older", client_state=older))
    engine.save_checkpoint(folder, tag="broken")
    for host in ("own", "other"):
        engine.save_checkpoint(f"{folder}/{host}", tag="broken")
    own = f"{folder}/{'own' if rank < 2 else 'other'}"
    found["other loads"] = refusal(lambda: engine.load_checkpoint(folder, tag="broken", load_optimizer_states=rank > 0))
    found["other saves"] = refusal(lambda: engine.load_checkpoint(own, tag="broken"))
    dist.barrier()
    if rank == 0:
        for path in Path(folder, "broken").glob("layer_05-*"):
            path.unlink()
    dist.barrier()
    found["lost file"] = refusal(lambda: engine.load_checkpoint(folder, tag="broken"))
    engine.load_checkpoint(f"{folder}/own", tag="broken")  # a load that ended half way is saved by nobody
    engine.save_checkpoint(folder, client_state={"own": 5})
    found["latest"] = Path(folder, "latest").read_text()
    _, state = engine.load_checkpoint(folder)
    found["own"] = state["own"]
    engine.save_checkpoint(folder, tag="again", client_state=state)
    found["then"] = engine.train_window(micro_batches(engine, 1, SIZES)).step
    return from_all(found)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no mapping", ["CheckpointError: save_checkpoint(client_state=3): must be a dict"] * 4),
        ("on one rank", ["RankDesyncError", "CheckpointError", "RankDesyncError", "RankDesyncError"]),
        ("own value", ["CheckpointError: save_checkpoint(): client_state['ds_parity'] is 1"] * 4),
        ("alone", ["RankDesyncError"] * 4),
        ("other tags", ["RankDesyncError: save_checkpoint(): ranks differ in tag (rank 0 has 'part-0'"] * 4),
        ("other loads", ["RankDesyncError: load_checkpoint("] * 4),
        ("other saves", ["RankDesyncError: load_checkpoint("] * 4),
        ("missing", ["CheckpointError: load_checkpoint("] * 4),
        ("older state", ["nothing was raised"] * 4),
        ("lost file", ["CheckpointError: load_checkpoint("] * 4),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank(four_ranks, what, says):
    for said, expected in zip((one[what] for one in four_ranks.of(around)), says, strict=True):
        assert said.startswith(expected), said
        assert said.endswith("Nothing was loaded") or what != "missing"


def test_latest_names_the_checkpoint_and_the_callers_values_are_loaded(four_ranks):
    assert [[one["latest"], one["own"], one["then"]] for one in four_ranks.of(around)] == [["global_step1", 5, 2]] * 4


LAYER, OTHER = "layer_00-model_states.pt", "layer_02-model_states.pt"
# What becomes of a layer's file, and what a load says of it; the first stage alone has the layer.
FOREIGN = {
    "whole": ((), "nothing was raised"),
    "of a later save": ((("late", LAYER, LAYER),), "of 2 saves"),
    "turned": ((("own", LAYER, OTHER), ("own", OTHER, LAYER)), f"was saved as {OTHER}"),
    "missing": ((("own", None, LAYER),), f"no file of a layer: {LAYER}"),
    "empty": ((("own", "", LAYER),), f"is not whole: {LAYER} is empty"),
}


@on_four_ranks
@alone_in_the_process
def foreign_layers(folder):
    return foreign_layers_on(1, folder)


@at_length_on_four_ranks
@alone_in_the_process
def foreign_layers_of_stage_0(folder):
    return foreign_layers_on(0, folder)


def foreign_layers_on(stage, folder):
    """By what became of a layer's file: what each rank is answered, then in training, and behind a whole load."""
    results = {}
    path = Path(folder) / "foreign"
    saving = build(config(stage))
    for tag in ("own", "late"):
        saving.train_window(micro_batches(saving, 0, SIZES))
        saving.save_checkpoint(str(path), tag=tag)
    for name, (files, _) in FOREIGN.items():
        if dist.get_rank() == 0:
            shutil.copytree(path / "own", path / name)
            for tag, there, here in files:
                (path / name / here).unlink()
                if there:
                    shutil.copy(path / tag / there, path / name / here)
                elif there is not None:
                    (path / name / here).touch()
        dist.barrier()
        loading = build(config(stage))
        calls = [
            lambda: loading.load_checkpoint(str(path), tag=name),  # noqa: B023
            lambda: loading.train_window(micro_batches(loading, 0, SIZES)),  # noqa: B023
            lambda: loading.save_checkpoint(str(path), tag=f"{name} behind"),  # noqa: B023
            lambda: loading.load_checkpoint(str(path), tag="own"),  # noqa: B023
            lambda: loading.train_window(micro_batches(loading, 0, SIZES)),  # noqa: B023
        ]
        results[name] = from_all([refusal(call) for call in calls])
    return results


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("stage", by_length((1,), (0,), "four_ranks"))
def test_a_layer_of_another_save_or_place_is_refused_and_not_trained(request, stage, name):
    found = either(request, foreign_layers, foreign_layers_of_stage_0, seldom=stage == 0, fixture="four_ranks")
    says = FOREIGN[name][1]
    for loaded, trained, saved, again, goes_on in found[name]:
        assert says in loaded
        assert loaded.startswith(("CheckpointError", "nothing was raised"))
        halfway = "Nothing was loaded" not in loaded and name != "whole"
        for said in (trained, saved):
            assert ("ended half way" in said) is halfway, said
        assert again == goes_on == "nothing was raised"


def any_answer(call):
    try:
        return refusal(call)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"


@on_four_ranks
@alone_in_the_process
def layer_of_another_kind(folder):
    """What ranks are told where the file of a layer holds no state of one, and what a whole load ends in then."""
    saving = build(config(1))
    for tag in ("own", "odd"):
        saving.save_checkpoint(folder, tag=tag)
    if dist.get_rank() == 0:
        torch.save([1], Path(folder, "odd", LAYER))
    dist.barrier()
    loading = build(config(1))
    return from_all([any_answer(lambda tag=tag: loading.load_checkpoint(folder, tag=tag)) for tag in ("odd", "own")])


def test_whatever_one_stage_raises_the_others_are_told(four_ranks):
    answers = four_ranks.of(layer_of_another_kind)
    raised = [odd for odd, _ in answers if odd.startswith("raw ")]
    assert raised
    for odd, own in answers:
        assert odd in raised or raised[0].removeprefix("raw ").split(":")[0] in odd
        assert own == "nothing was raised"


# By precision and ZeRO stage; from 2 stages of 2 columns to 1 stage of 4.
ONTO_OTHERS = {"bf16 on ZeRO 0": (0, HALVES), "fp32 on ZeRO 0": (0, {}), "fp32 on ZeRO 1": (1, {})}


@on_four_ranks
@alone_in_the_process
def onto_other_stages(folder):
    """What a rank is answered that loads all, and the weights alone; and whether these are those that were saved."""
    results = {}
    for name, (stage, more) in ONTO_OTHERS.items():
        saving = build(config(stage, **more))
        saving.train_window(micro_batches(saving, 0, SIZES))
        saving.save_checkpoint(folder, tag=name)
        saved = {}
        for one in from_all({n: p.tolist() for n, p in saving.module.named_parameters()}):
            saved |= one
        said = refusal(lambda s=stage, m=more, n=name: build(config(s, **m), stages=1).load_checkpoint(folder, tag=n))
        loading = build(config(stage, **more), stages=1)
        loading.load_checkpoint(folder, tag=name, load_optimizer_states=False)
        same = {n: p.tolist() for n, p in loading.module.named_parameters()} == saved
        results[name] = from_all([said, same, refusal(lambda e=loading: trained_on(e))])
    return results


def trained_on(engine):
    engine.train_window(micro_batches(engine, 1, [*SIZES, *SIZES]))


@pytest.mark.parametrize("name", ONTO_OTHERS)
def test_weights_alone_go_to_other_stages_and_columns(four_ranks, name):
    for said, same, trains in four_ranks.of(onto_other_stages)[name]:
        there, here = "2 stages of 2 columns (data-parallel ranks)", "1 stage of 4 columns (data-parallel ranks)"
        assert f"{there} saved the checkpoint, and this pipeline has {here}" in said
        assert "load_optimizer_states=False" in said
        assert same
        assert trains == "nothing was raised"


def _in_halves(outputs, labels):
    return mean_of_all(outputs.float(), labels.float())


@on_four_ranks
@alone_in_the_process
def of_an_fp16_pipeline(folder):
    """The loss scale of a pipeline of bare DeepSpeed in fp16, and behind its load here, at first and behind steps."""
    halves = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
    plain = {key: value for key, value in config(1).items() if key != "ds_parity"}
    with fp16_allowed():
        bare = build(
            {**plain, **halves, "gradient_accumulation_steps": 2}, loss_fn=_in_halves, initialize=deepspeed.initialize
        )
    bare.train_batch(iter([(torch.ones(1, 6).half(), torch.ones(1, 1).half())] * 2))
    bare.save_checkpoint(folder)
    loading = build(config(1))
    said = refusal(lambda: loading.load_checkpoint(folder))
    scales = [bare.optimizer.loss_scale, loading.optimizer.loss_scale]
    for number in range(3):
        loading.train_window(micro_batches(loading, number, SIZES))
    return from_all([said, *scales, loading.optimizer.loss_scale])


def test_a_pipeline_in_fp32_takes_no_loss_scale_of_fp16(four_ranks):
    """It would grow, and each step at which it does would be half as large as it should be."""
    for said, saved, at_first, behind in four_ranks.of(of_an_fp16_pipeline):
        assert said == "nothing was raised"
        assert (saved > 1, at_first, behind) == (True, 1, 1)
