"""Sequence-parallel groups of 2 out of 4 ranks: what several test modules build of them."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
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


def loss_of(engine, seed, share=False):
    """A loss over 6 samples of this data-parallel rank, of which a rank holds 3; gathered, or the own share times 2."""
    generator = torch.Generator().manual_seed(seed + 100 * (dist.get_rank() // 2))
    own = torch.randn(6, 4, generator=generator).chunk(2)[dist.get_rank() % 2]
    mine = engine(own.to(engine.device)).pow(2).sum()
    if share:
        return 2 * mine / 6
    return ulysses.gathered(mine, parallel_state_sp.get_sequence_parallel_group()).sum() / 6


@contextmanager
def without_mpu(engine, only=True):
    """A context in which an engine has no mpu, as open-instruct saves; nothing where it is not `only` this way."""
    mpu = engine.mpu
    if only:
        engine.mpu = None
    try:
        yield
    finally:
        engine.mpu = mpu
