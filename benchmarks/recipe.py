"""A planned stream beside the recipe that RL trainers write by hand, on ranks, window by window in turn.

The recipe is that of PipelineRL's fine-tuning loop and preprocessor (pipelinerl/finetune_loop.py, preprocess.py; read in
58d3934), in our words: every rank has a fixed quota of a window's rollouts; micro-batches are filled in the order of
arrival for one rank after the other, packed until the next rollout would not fit, or padded in a fixed number; a rank that
has its quota gets a dummy; the counts of all ranks are gathered in every pass, one tensor each, and read with `.item()`.
"""

import gc
import time
from itertools import islice

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.collation import collate, micro_batches, to_device
from ds_parity.config import rewrite
from ds_parity.parity.losses import PolicyGradient
from ds_parity.parity.model import build
from ds_parity.parity.rollouts import load_rollouts
from ds_parity.planning import Rollout, plan


class Recipe:
    """The bare engine, driven by quotas."""

    def __init__(self, config, max_tokens, layout, held):
        self.target = config["gradient_accumulation_passes"]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.max_tokens, self.layout, self.held = max_tokens, layout, held
        module = PolicyGradient(build(0))
        plain = rewrite(config, self.ranks).config
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=plain)
        self.device = get_accelerator().current_device_name()
        self.dummy = Rollout("dummy", (1, 2), 1)

    def window(self, rollouts):
        """One optimizer step; returns passes and dummies of all ranks."""
        engine, total, passes, dummies = self.engine, 0, 0, 0
        local = torch.zeros(1, dtype=torch.int64, device=self.device)
        everyone = [torch.zeros_like(local) for _ in range(self.ranks)]
        for row in self._deal(rollouts):
            held = row[self.rank]
            batch = to_device(collate(held or [self.dummy], layout=self.layout), self.device)
            local += len(held)
            dist.all_gather(everyone, local)
            total = sum(int(tensor.item()) for tensor in everyone)
            engine.set_gradient_accumulation_boundary(total == self.target)
            loss = engine(**batch.inputs) * (len(held) * self.ranks / self.target)
            engine.backward(loss if held else loss * 0.0, scale_wrt_gas=False)
            engine.step()
            passes, dummies = passes + 1, dummies + row.count([])
        assert total == self.target
        return passes, dummies

    def _deal(self, rollouts):
        """Yield what each rank holds, pass by pass."""
        waiting, done, quota = list(rollouts), [0] * self.ranks, self.target // self.ranks
        while waiting:
            row = []
            for rank in range(self.ranks):
                held = self._next(waiting, quota - done[rank])
                done[rank] += len(held)
                row.append(held)
            yield row

    def _next(self, waiting, left):
        count = 0
        if self.layout == "padded":
            count = min(self.held, left, len(waiting))
        else:
            tokens = 0
            while count < min(left, len(waiting)):
                tokens += len(waiting[count].tokens)
                if count and tokens > self.max_tokens:
                    break
                count += 1
        held = waiting[:count]
        del waiting[:count]
        return held


class Planned:
    """The same with a plan and `passes`."""

    def __init__(self, config, max_tokens):
        self.target, self.max_tokens = config["gradient_accumulation_passes"], max_tokens
        module = PolicyGradient(build(0))
        self.engine, *_ = ds_parity.initialize(model=module, model_parameters=module.parameters(), config=config)
        self.device = get_accelerator().current_device_name()

    def window(self, rollouts):
        """One optimizer step, planning and collation included; returns passes and idle passes of all ranks."""
        engine, ranks = self.engine, dist.get_world_size()
        planned = plan(rollouts, dp_world_size=ranks, target=self.target, max_tokens=self.max_tokens)
        stream = (to_device(batch, self.device) for batch in micro_batches(planned, dist.get_rank()))
        for batch in engine.passes(stream, finish=False):
            engine.backward(engine(**batch.inputs))
            engine.step()
        return planned.passes, planned.idle_passes


def measure(config, rounds, max_tokens, held):
    """Seconds of every window, and passes and idle passes of all of them, by rival; one window is to warm up."""
    rivals = {
        "planned": Planned(config, max_tokens),
        "packed quota": Recipe(config, max_tokens, "packed", held),
        "padded quota": Recipe(config, max_tokens, "padded", held),
    }
    source, target = iter(load_rollouts()), config["gradient_accumulation_passes"]
    taken = {name: [] for name in rivals}
    ran = {name: [0, 0] for name in rivals}
    gc.disable()
    for number in range(rounds + 1):
        rollouts = tuple(islice(source, target))
        for name in list(rivals)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            counted = rivals[name].window(rollouts)
            dist.barrier()
            if number:
                taken[name].append(time.perf_counter() - begun)
                ran[name] = [a + b for a, b in zip(ran[name], counted, strict=True)]
    gc.enable()
    return {"seconds": taken, "passes": ran}
