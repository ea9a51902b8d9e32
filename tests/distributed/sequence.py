"""Sequence-parallel groups of 2 out of 4 ranks: what several test modules build of them."""

from contextlib import contextmanager

from deepspeed.utils import groups

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import ulysses
from tests.distributed.cells import TINY, config

SHARED = {"sequence_parallel": 2, **TINY}

BF16 = {"bf16": {"enabled": True}}

FP32_ACCUMULATION = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def ragged(stage, dtype):
    """Token weights, idle micro-batches, losses divided by an estimate, and a last window that stays open."""
    extended = config(stage, dtype, loss_weight="token")
    return Scenario(f"sequence-{stage}-{dtype}", extended, shape="overshoot", windows=3, short=5, seed=3, **SHARED)


@contextmanager
def remembering():
    """DeepSpeed remembers mpu and mesh of an engine; the next one must not find them."""
    groups.mpu = groups.mesh_device = None
    try:
        yield ulysses._mpu(2)
    finally:
        groups.mpu = groups.mesh_device = None
