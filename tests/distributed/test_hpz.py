"""hpZ on four ranks, and the whole of what open-instruct trains with by default: runs go on from their checkpoints."""

import pytest

import ds_parity
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.matrix.model_rows import MODEL_SETUPS
from ds_parity.parity.running.half_precision import forget_hpz
from ds_parity.parity.running.own_batches import own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import ulysses
from tests.distributed.cells import config
from tests.distributed.continuing import AFTER, BEFORE, Run, converted, groups_of, stands
from tests.distributed.sequence import remembering, without_mpu
from tests.distributed.sets import at_length_on_four_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
ACCUMULATED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
BORN = {"model": f"{MODEL_SETUPS}:born", "context": f"{MODEL_SETUPS}:zero_init"}
DATA = {"shape": "overshoot", "windows": BEFORE + AFTER, "seed": 3, "max_tokens": 64}


def _scenario(name, ranks, made, **fields):
    extended = {**config(3, optimizer="AdamW", loss_weight="token", lr_progress="rollout"), **HPZ, **made}
    return Scenario(name, extended, ranks, **DATA, **fields)


SCENARIOS = {
    one.name: one
    for one in (
        _scenario("hpz", 4, {}),
        _scenario(
            "hpz-offloaded",
            4,
            {
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {**HPZ["zero_optimization"], "offload_optimizer": {"device": "cpu"}},
            },
        ),
        _scenario("open-instruct", 2, ACCUMULATED, sequence_parallel=2, **BORN),
    )
}


class _Shared(Run):
    """A run of a scenario whose ranks may share micro-batches, and whose model may be born partitioned."""

    def __init__(self, scenario, extended=None):
        self.scenario = scenario
        forget_hpz()
        module, mpu = ulysses.placed(scenario)
        self.engine, *_ = ds_parity.initialize(
            model=module, model_parameters=groups_of(module), mpu=mpu, config=extended or scenario.config
        )
        self.batches, self.idle = own_batches(scenario), stand_in(scenario)

    def save(self, path):
        """Save as open-instruct does (grpo_fast.py): without the mpu, for as long as it takes."""
        with without_mpu(self.engine):
            self.engine.save_checkpoint(path)

    def load(self, path, **options):
        """Load in the same way on releases that look for a file of each rank of the mpu."""
        with without_mpu(self.engine, only=before(release("0.19.8"))):
            self.engine.load_checkpoint(path, **options)


@at_length_on_four_ranks
def saved_and_continued(folder):
    """By scenario: whether a run that goes on from a checkpoint, also from a universal one, is the run itself."""
    results = {}
    for name, scenario in SCENARIOS.items():
        path = f"{folder}/{name}"
        with remembering():
            run = _Shared(scenario)
            run.windows(BEFORE)
            saved = stands(run.engine)
            run.save(path)
            whole = run.windows(AFTER)
            said = converted(path)
            again = _Shared(scenario)
            again.load(path)
            loaded = stands(again.engine)
            universal = _Shared(scenario, {**scenario.config, "checkpoint": {"load_universal": True}})
            universal.load(path, tag="universal")
            results[name] = {
                "loaded": loaded == saved,
                "alike": again.windows(AFTER) == whole,
                "converted": said,
                "universal": [_numbers(universal.windows(AFTER)), _numbers(whole)],
                "idle": sum(step["idle_passes"] for step, *_ in whole),
            }
            for one in (run, again, universal):
                one.engine.destroy()
    return results


def _numbers(steps):
    return [[step["loss"], step["grad_norm"], step["rollouts"], *step["lr"]] for step, *_ in steps]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_goes_on_bit_for_bit(four_ranks_at_length, name):
    found = four_ranks_at_length.of(saved_and_continued)[name]
    assert found["idle"] > 0
    assert (found["loaded"], found["alike"]) == (True, True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_goes_on_from_a_universal_checkpoint(four_ranks_at_length, name):
    found = four_ranks_at_length.of(saved_and_continued)[name]
    assert found["converted"] == "nothing was raised"
    universal, whole = found["universal"]
    assert universal == [pytest.approx(step, rel=1e-6) for step in whole]
