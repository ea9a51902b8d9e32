"""ZeRO 1 to 3: a universal checkpoint of Adam on the CPU is loaded, and torch's Adam raises in its first step.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_off_the_cpu.py

DeepSpeedCPUAdam keeps its `step` as an int (ops/adam/cpu_adam.py), torch's optimizers keep a tensor. The load gives
either what the file has (runtime/zero/stage_1_and_2.py and stage3.py).
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from _universal import converted


def built(stage: int, *, offloaded: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over a layer, with Adam on the CPU or torch's own."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": not offloaded}},
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offloaded else {})},
        "checkpoint": {"load_universal": not offloaded},
    }
    model = torch.nn.Linear(4, 3)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    """Take one step."""
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).pow(2).mean())
    engine.step()


def raised(stage: int) -> str:
    """Return what the first step raises behind a load; an empty text if nothing."""
    saved = built(stage, offloaded=True)
    step(saved)
    with converted(saved) as folder:
        engine = built(stage, offloaded=False)
        engine.load_checkpoint(folder, tag="universal")
    try:
        step(engine)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(raised, stage) for stage in (1, 2, 3)},
        said=lambda error: f"the first step raises {error or 'nothing'}",
        right=lambda error: not error,
        fault=lambda error: "state_steps" in error,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
