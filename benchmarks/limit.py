"""How far a window is from the model's own work, on ranks: the same rollouts by each rival, and without DeepSpeed.

The model's own work is the forward and the backward of the window's rollouts on one rank, packed into full
micro-batches, while other ranks wait: nothing is padded, nobody waits, nothing is reduced, and no step is taken.
"""

import gc
import random
import time

import torch.distributed as dist
from accelerate.utils import DummyOptim
from deepspeed.accelerator import get_accelerator
from quotas import packed, padded

from benchmarks import trained
from benchmarks.accelerated import accelerator_of
from benchmarks.recipe import ByQuota, Planned
from ds_parity.collation import collate, micro_batches, to_device
from ds_parity.config import rewrite
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import build
from ds_parity.parity.data.rollouts import VOCAB, load_rollouts
from ds_parity.planning import Rollout, plan

LONGEST = 1024


class Alone:
    """The model without DeepSpeed, on the first rank alone."""

    def __init__(self, config, max_tokens):
        self.target, self.max_tokens = config["gradient_accumulation_passes"], max_tokens
        self.device = get_accelerator().current_device_name()
        self.module = PolicyGradient(build(0)).to(self.device)

    def window(self, rollouts):
        if dist.get_rank():
            return
        planned = plan(rollouts, dp_world_size=1, target=self.target, max_tokens=self.max_tokens)
        for batch in list(micro_batches(planned, 0)):
            self.module(**to_device(batch, self.device).inputs).backward()


class Accelerate:
    """Accelerate's loop over padded micro-batches of a fixed number of rollouts, as its documentation writes it."""

    def __init__(self, config, rows):
        self.rows, target, ranks = rows, config["gradient_accumulation_passes"], dist.get_world_size()
        sizes = {
            "train_batch_size": target,
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": target // ranks // rows,
        }
        module = PolicyGradient(build(0))
        self.accelerator = accelerator_of({**rewrite(config, ranks).config, **sizes})
        self.net, self.optimizer = self.accelerator.prepare(module, DummyOptim(module.parameters()))
        self.device = get_accelerator().current_device_name()

    def window(self, rollouts):
        own = rollouts[dist.get_rank() :: dist.get_world_size()]
        for at in range(0, len(own), self.rows):
            batch = to_device(collate(own[at : at + self.rows], layout="padded"), self.device)
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(self.net(**batch.inputs))
                self.optimizer.step()
                self.optimizer.zero_grad()


def of_gsm8k():
    """The bundled rollouts in their order, but for the longest."""
    return [rollout for rollout in load_rollouts() if len(rollout.tokens) <= LONGEST]


def of_long_tail():
    """Lengths from a log-normal distribution: a median of 160 tokens, the longest 1,024."""
    rng = random.Random(0)
    lengths = [min(LONGEST, max(16, round(rng.lognormvariate(5.1, 1.0)))) for _ in range(1024)]
    return [
        Rollout(f"p{number}", tuple(rng.randrange(3, VOCAB) for _ in range(length)), prompt_length=8)
        for number, length in enumerate(lengths)
    ]


LENGTHS = {"GSM8K": of_gsm8k, "log-normal": of_long_tail}


def measure(config, rounds, max_tokens, lengths):
    """Seconds of every window by rival; one window is to warm up."""
    source = LENGTHS[lengths]()
    longest = max(len(rollout.tokens) for rollout in source)
    # A power of two divides what a rank has of a window.
    rows = 1 << ((max_tokens // longest).bit_length() - 1)
    rivals = {
        "alone": Alone(config, max_tokens),
        "ds_parity": Planned(config, max_tokens),
        "packed": ByQuota(config, "packed", packed(max_tokens)),
        "padded": ByQuota(config, "padded", padded(rows)),
        "accelerate": Accelerate(config, rows),
    }
    taken = {name: [] for name in rivals}
    target = config["gradient_accumulation_passes"]

    def run_others(number):
        window = tuple(source[number * target : (number + 1) * target])
        for name in list(rivals)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            rivals[name].window(window)
            dist.barrier()
            taken[name].append(time.perf_counter() - begun)

    gc.disable()
    taken["trainer"] = trained.windows(config, rows, source, rounds + 1, dist.get_world_size(), run_others)
    gc.enable()
    return {"seconds": {name: of[1:] for name, of in taken.items()}, "ranks": dist.get_world_size()}
