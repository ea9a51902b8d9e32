"""What DeepSpeed gets wrong by itself, and our steps on the same configurations; asserted in test_faults.py."""

import copy
import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param

import ds_parity
from ds_parity.engine.internals.adapter import choose
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed

SCRIPTS = Path(__file__).parents[2] / "tools" / "deepspeed_faults"
# Loss tokens by window, pass and rank. All but the second need a correction, up and down; at that one the fp16 scale grows.
WINDOWS = (((5, 2), (1, 3)), ((3, 3), (3, 3)), ((2, 6), (1, 4)), ((3, 3), (1, 8)), ((4, 1), (2, 2)))
OVERFLOWING = 2
CLIP = 0.05
STAGES = (0, 1, 2, 3)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
KINDS = {
    "fp32": {},
    "offloaded": {"zero_optimization": OFFLOAD},
    "fp16": {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 1, "hysteresis": 1}
    },
    "fp16-static": {"fp16": {"enabled": True, "loss_scale": 256.0}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}
CELLS = [
    (kind, stage, clip)
    for kind in KINDS
    for stage in STAGES
    for clip in ((0.0, CLIP) if kind in ("fp16", "autocast") else (CLIP,))
    if stage or kind != "offloaded"
]
# Whether the second branch is used, by window and pass: early, late, not at all, throughout, not at all.
USED = ((True, False), (False, True), (False, False), (True, True), (False, False))
BRANCHED = [(stage, offload) for stage in STAGES for offload in (False, True) if stage or not offload]
TASKS = ["deepspeed_faults", "scaled_steps", "fused_wrapper", "left_out"]


def deepspeed_faults(folder):
    """Every script of tools/deepspeed_faults/, in turn: whether its fault is there."""
    sys.path.insert(0, str(SCRIPTS))
    found = {}
    with fp16_allowed():
        for path in sorted(SCRIPTS.glob("*.py")):
            found[path.stem] = importlib.import_module(path.stem).main()
    forget_autocast()
    return found


def scaled_steps(folder):
    """Five windows of each kind, the third of which overflows where losses are scaled, step by step beside plain torch."""
    with fp16_allowed():
        found = {f"{kind}-{stage}-{clip}": _steps(kind, stage, clip) for kind, stage, clip in CELLS}
    forget_autocast()
    return found


def fused_wrapper(folder):
    """FP16_Optimizer around SGD, which DeepSpeed itself puts around its FusedAdam only: five steps on four gradients of 1."""
    weight = torch.zeros(4, dtype=torch.float16, device=get_accelerator().current_device_name()).requires_grad_()
    arguments = {"init_scale": 256.0, "scale_window": 1, "min_scale": 1.0}
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = FP16_Optimizer(sgd, dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False)
    engine = SimpleNamespace(optimizer=optimizer, was_step_applied=lambda: not optimizer.overflow)
    found, at = [], 0.0
    for value in (1.0, 1.0, math.inf, 1.0, 1.0):
        # As a window of total 8 leaves it whose losses were divided by 4.
        weight.grad = torch.full_like(weight, value * 2.0 * optimizer.loss_scale_config.cur_scale)
        with choose(engine).corrected(4.0, 8.0):
            optimizer.step()
        now = float(optimizer.fp32_groups_flat[0][0].detach())
        found.append([at - now, float(optimizer._global_grad_norm), optimizer.loss_scale_config.cur_scale])
        at = now
    return found


def left_out(folder):
    """How far a branch that not every pass uses moves in each window, and how far it should."""
    return {f"{stage}-{offload}": _branch_moves(stage, offload) for stage, offload in BRANCHED}


class _Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (torch.nn.Linear(8, 1, bias=False) for _ in range(2))

    def forward(self, x, both):
        return self.always(x).sum() + (self.sometimes(x).sum() if both else 0.0)


def _branch_moves(stage, offload):
    model = _Branches()
    torch.nn.init.zeros_(model.sometimes.weight)
    config = _config(stage, 0.0, 1.0) | {"zero_optimization": {"stage": stage, **(OFFLOAD if offload else {})}}
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, at, found = dist.get_rank(), 0.0, []
    ones = torch.ones(1, 8, device=get_accelerator().current_device_name())
    for window, used in zip(WINDOWS, USED, strict=True):
        for tokens, both in zip(window, used, strict=True):
            engine.backward((rank + 1) * engine(ones, both), tokens=tokens[rank])
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            now = engine.module.sometimes.weight[0, [0, -1]].tolist()
        total = sum(tokens for held in window for tokens in held)
        right = sum(held[0] + 2 * held[1] for held, both in zip(window, used, strict=True) if both) / total
        found.append([at - now[0], at - now[1], right])
        at = now[0]
    engine.destroy()
    return found


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def _loss(model, window, index, rank, tokens, kind):
    generator = torch.Generator().manual_seed(100 * window + 10 * index + rank)
    parameter = next(model.parameters())
    x = torch.randn(tokens, 6, generator=generator).to(parameter.device)
    y = torch.randn(tokens, 1, generator=generator).to(parameter.device)
    return 0.1 * (model(x.half() if kind.startswith("fp16") else x).float() - y).pow(2).mean()


def _config(stage, clip, lr):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 4,
        "ds_parity": {"loss_weight": "token"},
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _build(kind, stage, clip):
    forget_autocast()
    torch.manual_seed(0)
    model = _Net()
    schedule = {"warmup_num_steps": 1000, "warmup_min_lr": 0.5, "warmup_max_lr": 0.5}
    config = _config(stage, clip, 0.5) | copy.deepcopy(KINDS[kind])
    config["zero_optimization"] = {**config["zero_optimization"], "stage": stage}
    config["scheduler"] = {"type": "WarmupLR", "params": schedule}
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
    engine, *_ = ds_parity.initialize(model=model, model_parameters=groups, config=config)
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0, "growth_interval": 1})
    return engine, scaler


def _steps(kind, stage, clip):
    engine, scaler = _build(kind, stage, clip)
    rank, found = dist.get_rank(), []
    for number, window in enumerate(WINDOWS):
        overflows = number == OVERFLOWING and kind not in ("fp32", "offloaded")
        wanted, norm = _expected(engine, kind, number, window, clip)
        before = _masters(engine)
        for index, tokens in enumerate(window):
            loss = _loss(engine, number, index, rank, tokens[rank], kind)
            engine.backward(loss * 1e8 if overflows and rank == 1 else loss, tokens=tokens[rank])
            engine.step()
        moved, record = before - _masters(engine), engine.last_step
        found.append(
            {
                "off": float((moved - wanted).norm() / wanted.norm()),
                "moved": float(moved.norm()),
                "norm": record.grad_norm and record.grad_norm / norm,
                "clipped": clip > 0 and norm > 1.2 * clip,
                "skipped": record.skipped,
                "scale": record.loss_scale if scaler is None else scaler.get_scale(),
                "clocks": [engine.lr_scheduler.last_batch_iteration, engine.skipped_steps],
            }
        )
    engine.destroy()
    return found


def _expected(engine, kind, number, window, clip):
    """The update and the norm by plain torch, at the weights as they are: each micro-batch apart, weighed by its tokens."""
    model = _Net().to(get_accelerator().current_device_name(), torch.float16 if kind.startswith("fp16") else None)
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for own, theirs in zip(model.parameters(), parameters, strict=True):
            own.data.copy_(theirs.data)
    total = sum(tokens for held in window for tokens in held)
    gradient = torch.zeros(sum(p.numel() for p in model.parameters()))
    scale = 1.0 if kind in ("fp32", "offloaded") else 256.0
    for index, held in enumerate(window):
        for rank, tokens in enumerate(held):
            model.zero_grad()
            with torch.autocast(get_accelerator().device_name(), torch.float16, enabled=kind == "autocast"):
                loss = _loss(model, number, index, rank, tokens, kind)
            (loss * scale).backward()
            own = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])
            gradient += own / scale * tokens / total
    norm = float(gradient.norm())
    return 0.5 * gradient * (min(1.0, clip / norm) if clip else 1.0), norm


def _masters(engine):
    """The fp32 weights that the optimizer steps, in one vector."""
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        held = [p for group in optimizer.fp32_groups for p in group]
    elif engine.zero_optimization():
        held = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    else:
        held = engine.module.parameters()
    return torch.cat([p.detach().flatten().float().cpu() for p in held])
