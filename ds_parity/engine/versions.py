"""Which DeepSpeed this package is right with: the range of setup.cfg, and why it ends where it ends.

Refused at import of the engine, since what goes wrong outside of it goes wrong in silence.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ds_parity.errors import ConfigError

OLDEST = (0, 18, 6)
"""0.18.5 divides gradients of bf16 on ZeRO 0 by a loss scale that it never multiplied by, and never clears them (DeepSpeed
#7839); 0.18.3 divides by gradient_accumulation_steps although `scale_wrt_gas=False` says not to (#7724). 0.18.0 to 0.18.2
have another backward, and were not tried."""
STUCK = ((0, 18, 7), (0, 18, 8), (0, 18, 9))
"""ZeRO 1 and 2 raise in step() where parameters are flattened on the device, as on every CPU (#7948)."""
BELOW = (0, 20)
"""No release of it has been read."""
_REPAIRED = (0, 19, 0)
_WAY_OUT = "pip install 'deepspeed>=0.19,<0.20' (0.19.8 is the one that ds_parity is developed with)"


def check_deepspeed(installed: str | None = None) -> None:
    """Refuse a DeepSpeed that ds_parity doesn't support.

    Args:
        installed: its version; the installed one's where it isn't given.

    Raises:
        ConfigError: DeepSpeed is missing, or its version is outside the range.
    """
    if installed is None:
        try:
            installed = version("deepspeed")
        except PackageNotFoundError:
            raise ConfigError(f"deepspeed is not installed: ds_parity drives it; {_WAY_OUT}") from None
    numbers = _numbers(installed)
    if not OLDEST <= numbers < BELOW or numbers[:3] in STUCK:
        raise ConfigError(
            f"deepspeed {installed} is installed: ds_parity corrects gradients inside DeepSpeed, and supports "
            f"{_dotted(OLDEST)} and 0.19 only; {_WAY_OUT}"
        )


def refuse_broken(optimizer: Any, installed: str | None = None) -> None:
    """Refuse what DeepSpeed itself gets wrong in an older version, with its fixed accumulation included.

    Args:
        optimizer: DeepSpeed's optimizer wrapper.
        installed: DeepSpeed's version; the installed one's where it isn't given.

    Raises:
        ConfigError: this wrapper is wrong in this version.
    """
    installed = version("deepspeed") if installed is None else installed
    if _numbers(installed) >= _REPAIRED:
        return
    name = type(optimizer).__name__
    if name == "BF16_Optimizer":
        raise ConfigError(
            f"bf16 with fp32 accumulation on ZeRO 1 in deepspeed {installed}: it doesn't reduce the boundary's "
            "micro-batch, and ranks part (DeepSpeed #7985); install 0.19.0 or later, or leave "
            "data_types.grad_accum_dtype out"
        )
    if name == "DeepSpeedZeroOptimizer" and optimizer.cpu_offload:
        raise ConfigError(
            f"zero_optimization.offload_optimizer on ZeRO {2 if optimizer.partition_gradients else 1} in deepspeed "
            f"{installed}: it drops the gradients of all but the first and the last pass of a window (DeepSpeed "
            "#7967); install 0.19.0 or later, use ZeRO 3, or leave offload_optimizer out"
        )


def _numbers(written: str) -> tuple[int, ...]:
    # A build's own suffix (0.19.8+abc, 0.19.8rc1) counts as the release that it belongs to.
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", written, maxsplit=1)[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
