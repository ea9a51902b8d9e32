"""DeepSpeed's own faults are still there, each shown by its script; ds_parity is right there, or refuses."""

import importlib
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

import ds_parity
from ds_parity.config import rewrite
from ds_parity.errors import ConfigError
from ds_parity.parity.doctor.measured import measured, plain_version
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, one_pass, refusal
from tests.distributed.scaled import OFFLOAD, WINDOWS, scaled_config
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parents[2] / "tools" / "deepspeed_faults"

SCRIPT_NAMES = sorted(path.stem for path in SCRIPTS.glob("[!_]*.py"))


@at_length_on_two_ranks
def deepspeed_faults(folder):
    """Every script of tools/deepspeed_faults/, in turn: what came out of each place."""
    sys.path.insert(0, str(SCRIPTS))
    results = {}
    with fp16_allowed():
        for name in SCRIPT_NAMES:
            results[name] = importlib.import_module(name).main()
            # DeepSpeed takes the grid of a pipeline for every later engine, whose checkpoints ask it for their names.
            groups.mpu = None
    forget_autocast()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_what_a_script_finds_is_what_was_kept_of_this_version(two_ranks_at_length, name):
    """When this fails DeepSpeed has changed: read again what tools/deepspeed_faults/README.md says we do about it."""
    version = plain_version(deepspeed.__version__)
    if name not in measured().get(version, {}):
        pytest.skip(f"{name} was not run with DeepSpeed {version}: python -m tools.fault_table does that")
    found = two_ranks_at_length.of(deepspeed_faults)[name]
    lacking = [outcome for outcome in found.values() if "can't be found here" in outcome]
    if lacking:
        pytest.skip(f"{lacking[0]}: install what the script needs with the system's packages")
    # What it raises has addresses and numbers in it.
    assert {place: word(outcome) for place, outcome in found.items()} == {
        place: word(outcome) for place, outcome in measured()[version][name].items()
    }


def word(outcome):
    return outcome.partition(":")[0]


def test_each_fault_is_in_the_newest_version_or_has_been_mended_on_the_way():
    """Of these every place is right by now, or not there any more; all others have a place with the fault."""
    newest = list(measured().values())[-1]
    assert [name for name in SCRIPT_NAMES if name in newest and "fault" not in newest[name].values()] == [
        "checkpoint_bf16_zero0",
        "client_state_again",  # by a KeyError
        "fetched_by_all_reduce",
        "l2_adam_on_cpu",
        "several_passes",
        "sparse_gradients_zero0",
    ]


def test_every_script_is_in_the_table_of_its_folder():
    table = (SCRIPTS / "README.md").read_text()
    assert SCRIPT_NAMES
    assert [name for name in SCRIPT_NAMES if f"`{name}`" not in table] == []


# Whether the second branch is used, by window and pass: early, late, not at all, throughout, not at all.
USED = ((True, False), (False, True), (False, False), (True, True), (False, False))

BRANCHED = [(stage, offload) for stage in STAGES for offload in (False, True) if stage or not offload]


# The first parameter of a group is the one whose norm others are added to, and whose buffer is copied first.
NAMES = ("always", "sometimes")
ORDERED = [(*cell, names) for cell in BRANCHED for names in (NAMES, NAMES[::-1])]


@on_two_ranks
def left_out(folder):
    """How far a branch that not every pass uses moves in each window, and how far it should."""
    return {f"{stage}-{offload}-{names[0]}": _branch_moves(stage, offload, names) for stage, offload, names in ORDERED}


class _Branches(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(8, 1, bias=False))

    def forward(self, x, both):
        return self.always(x).sum() + (self.sometimes(x).sum() if both else 0.0)


def _branch_moves(stage, offload, names):
    model = _Branches(names)
    torch.nn.init.zeros_(model.sometimes.weight)
    extended = scaled_config(stage, 0.0, 1.0) | {"zero_optimization": {"stage": stage, **(OFFLOAD if offload else {})}}
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)
    rank, at, results = dist.get_rank(), 0.0, []
    ones = torch.ones(1, 8, device=get_accelerator().current_device_name())
    for window, used in zip(WINDOWS, USED, strict=True):
        for tokens, both in zip(window, used, strict=True):
            engine.backward((rank + 1) * engine(ones, both), tokens=tokens[rank])
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            now = engine.module.sometimes.weight[0, [0, -1]].tolist()
        total = sum(tokens for counts in window for tokens in counts)
        right = sum(counts[0] + 2 * counts[1] for counts, both in zip(window, used, strict=True) if both) / total
        results.append([at - now[0], at - now[1], right])
        at = now[0]
    engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "offload", "names"), ORDERED)
def test_a_parameter_is_moved_by_the_passes_that_use_it_and_by_nothing_else(two_ranks, stage, offload, names):
    """In early passes, in late ones, in none, in all, and in none again."""
    for first, last, right in two_ranks.of(left_out)[f"{stage}-{offload}-{names[0]}"]:
        assert (first, last) == pytest.approx((right, right), abs=1e-6)


@on_two_ranks
def refused_instead(folder):
    """What a save inside a window and a new batch size between steps are answered with."""
    engine = build(config(1, passes=8))
    batch = refusal(lambda: engine.set_train_batch_size(4))
    one_pass(engine, 1, rollouts=2)
    return {"batch": batch, "save": refusal(lambda: engine.save_checkpoint(folder))}


def test_what_is_refused_instead(two_ranks):
    """gradient_predivide_factor on ZeRO 3, a save inside a window, a new batch size between steps."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 4, "gradient_predivide_factor": 2.0}
    with pytest.raises(ConfigError, match="too small"):
        rewrite({**config, "zero_optimization": {"stage": 3, "reduce_scatter": False}}, 2)
    result = two_ranks.of(refused_instead)
    assert result["save"].startswith("CheckpointError")
    assert result["batch"].startswith("WindowError")


class Loss(torch.nn.Module):
    """A model that returns its loss, whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, factor):
        return (self.weight * factor).sum()


@on_two_ranks
def losses_that_a_module_returns(folder):
    """Two passes a rank with a gradient of 1 each, of losses that the loop has divided, or that are divided here."""
    moved = {}
    for stage in STAGES:
        for name, section in {"divided": {"loss_weight": "divided", "across_ranks": "mean"}, "weighed": {}}.items():
            extended = config(stage, passes=4, **section)
            extended |= {"gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
            del extended["scheduler"]
            engine, *_ = ds_parity.initialize(model=(model := Loss()), config=extended)
            for _ in range(2):
                engine.backward(engine(torch.ones(1, device=engine.device)))
                engine.step()
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                moved[f"{stage} {name}"] = -float(model.weight)
    return moved


def test_a_loss_that_the_module_has_returned_is_divided_once(two_ranks, stage):
    """divided_twice_zero0: of bare DeepSpeed's on ZeRO 0 half is left."""
    moved = two_ranks.of(losses_that_a_module_returns)
    assert moved[f"{stage} divided"] == pytest.approx(2.0)
    assert moved[f"{stage} weighed"] == pytest.approx(1.0)
