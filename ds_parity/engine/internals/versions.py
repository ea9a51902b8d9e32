"""Which DeepSpeed this package is right with: the range of setup.cfg, and why it ends where it ends.

Refused at import of the engine, since what goes wrong outside of it goes wrong in silence.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ds_parity.errors import ConfigError

OLDEST = (0, 19, 8)
"""The oldest version that is supported.

With 0.19.5 this package's own tests fail on fp16 (steps by NaN on ZeRO 3, an autocast loss scale that goes elsewhere)
and in resuming a sequence-parallel run; 0.19.6 and 0.19.7 were not tried. 0.19.4 and older keep no account of the
parameters that a pass has used, so that gradients of those that it left out can't be put right (`zero12.py`,
`zero3.py`). Further back DeepSpeed's own accumulation is wrong: up to 0.18.9 with CPU offload on ZeRO 1 and 2
(DeepSpeed #7967) and in bf16 with fp32 accumulation on ZeRO 1 (#7985), up to 0.18.5 in bf16 on ZeRO 0 (#7839).
"""
BELOW = (0, 20)
"""No release of it has been read."""
_WAY_OUT = "pip install 'deepspeed>=0.19.8,<0.20' (0.19.8 is the one that ds_parity is developed with)"


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
    if not OLDEST <= numbers < BELOW:
        raise ConfigError(
            f"deepspeed {installed} is installed: ds_parity corrects gradients inside DeepSpeed, and supports "
            f"{_dotted(OLDEST)} to below {_dotted(BELOW)}; {_WAY_OUT}"
        )


def _numbers(written: str) -> tuple[int, ...]:
    # A build's own suffix (0.19.8+abc, 0.19.8rc1) counts as the release that it belongs to.
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", written, maxsplit=1)[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
