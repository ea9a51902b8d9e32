"""A planned stream beside the recipe that RL trainers write by hand, on ranks, window by window in turn.

The recipe is that of PipelineRL's fine-tuning loop and preprocessor, in our words (tools/from_pipelinerl/): every rank
has a fixed quota of a window's rollouts; micro-batches are filled in the order of arrival for one rank after the other,
packed until the next rollout would not fit, or padded in a fixed number; a rank that has its quota gets a dummy; the
counts of all ranks are gathered in every pass, one tensor each, and read with `.item()`.
"""

import gc
import time
from itertools import islice

import deepspeed
import torch.distributed as dist
from before import Recipe
from deepspeed.accelerator import get_accelerator
from quotas import deal, packed, padded

import ds_parity
from ds_parity.collation import micro_batches, to_device
from ds_parity.config import rewrite
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import build
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.planning import plan


class ByQuota:
    """The bare engine, driven by quotas, as the tool that shows how to leave them has it."""

    def __init__(self, config, layout, fits):
        target, self.ranks, self.fits = config["gradient_accumulation_passes"], dist.get_world_size(), fits
        module = PolicyGradient(build(0), loss_reduction="sum")
        plain = rewrite(config, self.ranks).config
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=plain)
        self.recipe = Recipe(engine, target, layout=layout)

    def window(self, rollouts):
        """One optimizer step; returns passes and dummies of all ranks."""
        recipe = self.recipe
        passes, sentinels = recipe.passes, recipe.sentinels
        recipe.window(deal(rollouts, self.ranks, self.fits))
        return recipe.passes - passes, recipe.sentinels - sentinels


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


def measure(config, rounds, max_tokens, rows):
    """Seconds of every window, and passes and idle passes of all of them, by rival; one window is to warm up."""
    rivals = {
        "planned": Planned(config, max_tokens),
        "packed quota": ByQuota(config, "packed", packed(max_tokens)),
        "padded quota": ByQuota(config, "padded", padded(rows)),
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
