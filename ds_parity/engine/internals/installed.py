"""The DeepSpeed that is installed: which release it is, and whether anybody has read it."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import PackageNotFoundError, version

from ds_parity.config import versions
from ds_parity.config.releases import Release, read
from ds_parity.config.versions import MEASURED, OLDEST, measured
from ds_parity.errors import ConfigError

_LOG = logging.getLogger("ds_parity")
_WAY_OUT = f"pip install 'deepspeed>={OLDEST}' ({MEASURED[-1]} is the one that ds_parity is developed with)"


@functools.cache
def installed() -> Release | None:
    """Return the release that is installed; None where its version names none (a name of one's own).

    Raises:
        ConfigError: DeepSpeed is missing.
    """
    try:
        return read(version("deepspeed"))
    except PackageNotFoundError:
        raise ConfigError(f"deepspeed is not installed: ds_parity drives it; {_WAY_OUT}") from None


def before(first: Release) -> bool:
    """Return whether the installed release comes before another; False where nobody can tell."""
    here = installed()
    return here is not None and here < first


def refused_by_call(feature: str) -> str | None:
    """Return why the installed release can't do here what a call or an object asks for, None where it can.

    Args:
        feature: its name.
    """
    # Imported here: this module is asked first whether there is a DeepSpeed at all.
    from deepspeed.accelerator import get_accelerator

    return versions.refused_by_call(feature, installed(), get_accelerator().device_name())


def check_deepspeed(written: str | None = None) -> None:
    """Refuse a DeepSpeed that is older than any that ds_parity was read against.

    Args:
        written: its version; the installed one's where it isn't given.

    Raises:
        ConfigError: DeepSpeed is missing, or older than the oldest that is supported.
    """
    found = installed() if written is None else read(written)
    if found is not None and found < OLDEST:
        raise ConfigError(
            f"deepspeed {found} is installed: ds_parity corrects gradients inside DeepSpeed, and supports {OLDEST} and "
            f"later; {_WAY_OUT}"
        )


def unread() -> bool:
    """Return whether the installed DeepSpeed is one that nobody has measured: also a build or a post release of one."""
    here = installed()
    return here is None or not measured(here)
