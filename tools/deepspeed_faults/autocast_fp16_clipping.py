"""torch_autocast fp16 on ZeRO 1 to 3: gradient clipping acts on the scaled gradient.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_clipping.py

The loss is scaled by a GradScaler (65536 at first), and only GradScaler.step, the last thing of all, unscales. Before
it `unscale_and_clip_grads` compares the scaled norm with the limit, since `loss_scale` is 1 for fp32 parameters
(stage_1_and_2.py, stage3.py): every step is cut to the limit / 65536. `get_global_grad_norm()` is the scaled norm too.
ZeRO 0 calls GradScaler.unscale_ first, and is right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, forget_autocast, tell
from deepspeed.accelerator import get_accelerator


def one_step(stage: int) -> tuple[float, float]:
    """Return the sizes of the update and of the reported norm, for a gradient of norm 2 (64 x 0.25) clipped at 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    forget_autocast()  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ones = torch.ones(1, 64, device=get_accelerator().current_device_name())
    engine.backward(0.25 * engine(ones).float().sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        update = engine.module.weight.norm().item()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    forget_autocast()
    return update, float("nan") if norm is None else float(norm)


def main() -> dict[str, str]:
    """Take one step on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(one_step, stage) for stage in range(4)},
        said=lambda found: (
            f"a gradient of norm 2, clipped at 1, moves by {found[0]:g}, right is 1; norm {found[1]:g}, right is 2"
        ),
        # On ZeRO 0 the norm is lost (clip_norm_lost.py), and the step is right.
        right=lambda found: abs(found[0] - 1) < 1e-3 and not abs(found[1] - 2) >= 1e-3,
        fault=lambda found: found[0] < 0.5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
