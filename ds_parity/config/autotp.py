"""DeepSpeed's AutoTP: ranks that hold parts of one model, and share each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ds_parity.config.faults import Fault, refuse
from ds_parity.values import whole

TENSOR_PARALLEL: Final = "tensor_parallel"
AUTOTP: Final = f"{TENSOR_PARALLEL}.autotp_size"


def autotp_size(config: Mapping[str, Any]) -> int:
    """Return how many ranks share each micro-batch by AutoTP: 1 where it is off, or what stands there is wrong.

    Args:
        config: an extended or a plain DeepSpeed configuration.
    """
    section = config.get(TENSOR_PARALLEL)
    size = whole(section.get("autotp_size")) if isinstance(section, Mapping) else None
    return size if size is not None and size > 1 else 1


def data_parallel_ranks(config: Mapping[str, Any], ranks: int) -> int:
    """Return how many ranks have micro-batches of their own where so many run.

    Args:
        config: an extended or a plain DeepSpeed configuration.
        ranks: all of them (>= 1).

    Raises:
        ConfigError: they can't be divided into groups of `tensor_parallel.autotp_size`.
    """
    size = autotp_size(config)
    if ranks % size:
        rule = f"{ranks} ranks can't be divided into groups of {size}, each of which shares a model"
        refuse([Fault(AUTOTP, size, rule, f"start a multiple of {size} ranks, or write a divisor of {ranks}")])
    return ranks // size
