"""What this package does by itself where an older DeepSpeed has no method for it, beside the newer one's method."""

import deepspeed
import torch
import torch.distributed as dist
from cells import config
from ranked import build, one_pass

from ds_parity.engine import normalize
from ds_parity.parity import weights

TASKS = ["ended_without_a_backward"]


def ended_without_a_backward(folder):
    """A window that is closed by its last backward, by DeepSpeed's own method, and by what older versions get."""
    found = {}
    ways = ["backward", "by hand", *(["method"] if normalize._FINALIZES else [])]
    cells = [(2, False), (3, False), (3, True)]
    if deepspeed.__version_minor__ >= 19:  # refused before
        cells.append((2, True))
    for stage, offload in cells:
        first, *others = reached = [_window(stage, offload, way) for way in ways]
        found[f"{stage} {'offload' if offload else ''}".strip()] = {
            "moved": bool(first[0].abs().max() > 0),
            "difference": max(float((moved - first[0]).abs().max()) for moved, _ in others),
            "norms": [norm for _, norm in reached],
        }
    return found


def _window(stage, offload, way):
    """The step of one window of 3 passes on each of 2 ranks: how far weights moved, and the gradient's norm."""
    extended = config(stage, passes=6 if way == "backward" else 20)
    # torch's own AdamW: DeepSpeed's for the host would be compiled for minutes.
    extended["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    extended.pop("scheduler", None)
    if offload:
        extended["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        extended["zero_force_ds_cpu_optimizer"] = False
    engine = build(extended)
    before = weights.vector(engine.module)
    for seed in range(3):
        one_pass(engine, 10 * dist.get_rank() + seed)
    known = normalize._FINALIZES
    try:
        normalize._FINALIZES = known and way == "method"
        engine.finish()
    finally:
        normalize._FINALIZES = known
    return torch.as_tensor(weights.vector(engine.module) - before), float(engine.get_global_grad_norm())
