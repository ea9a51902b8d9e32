"""What one `record()` adds to a metric: the weighted sum of its samples, and their weight."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeAlias

import torch

from ds_parity.errors import WindowError

Number: TypeAlias = "float | torch.Tensor"


def weighed(name: Any, value: Any, weight: Any, device: torch.device, on_device: bool) -> tuple[Number, Number]:
    """Return sum(weight * value) and sum(weight), as numbers where the host holds both, else as tensors on `device`.

    A sample of weight 0 is not there, whatever its value is; any other NaN or inf stays.

    Args:
        name: of the metric: a string that isn't empty.
        value: a number, a real tensor of no dimension, or one number a sample (1-D).
        weight: >= 0 and finite: None for 1 each, a number or tensor of no dimension beside a single value, else 1-D and
            as long as `value`.
        device: where the step is computed.
        on_device: tensors on `device` are not read. A weight there that is negative, inf or NaN makes the metric NaN;
            one on the host is refused.

    Raises:
        WindowError: the name, the value or the weight is none of these.
    """
    if not isinstance(name, str) or not name:
        raise WindowError(
            f"record({name!r}, ...): a metric's name must be a string that isn't empty; pass its name first"
        )
    values = _taken(name, "value", value)
    weights = 1.0 if weight is None and _shape(value) == () else _taken(name, "weight", weight, values)
    if _shape(values) != _shape(weights):
        raise WindowError(
            f"record({name!r}): value has shape {_shape(values)} and weight {_shape(weights)}: they must be alike, a "
            f"weight for every sample; for a mean that stands for n samples pass record({name!r}, mean, n)"
        )
    if isinstance(values, float) and isinstance(weights, float):
        return _of_numbers(name, values, weights)
    tensors = [number for number in (values, weights) if isinstance(number, torch.Tensor)]
    if any(_unread(tensor, device, on_device) for tensor in tensors):
        return _sums(_on(values, device), _on(weights, device))
    host = torch.device("cpu")
    values, weights = _on(values, host), _on(weights, host)
    for wrong in weights[~(weights >= 0) | weights.isinf()].tolist():
        raise _refused(name, wrong)
    summed, units = torch.stack(_sums(values, weights)).tolist()
    return summed, units


def _taken(name: str, what: str, given: Any, samples: Any = None) -> Number:
    if given is None and what == "weight":
        return torch.ones_like(samples, dtype=torch.float64)
    if isinstance(given, Real):
        return _float(given)
    if isinstance(given, torch.Tensor) and given.ndim <= 1 and not given.is_complex():
        return given.detach()
    said = f"a tensor of shape {_shape(given)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
    raise WindowError(
        f"record({name!r}): {what} is {said}: it must be a real number, or a real tensor of no dimension or one (a "
        "number a sample); flatten() what has more, and select the samples that count"
    )


def _float(given: Any) -> float:
    try:
        return float(given)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if given > 0 else -math.inf


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given.shape) if isinstance(given, torch.Tensor) else ()


def _unread(tensor: torch.Tensor, device: torch.device, on_device: bool) -> bool:
    # Memory of the host can be read at any time, the device's only when it has finished.
    return tensor.device.type != "cpu" or (on_device and device.type == "cpu")


def _on(number: Number, device: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float64, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)


def _sums(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    products = torch.where(weights == 0, 0.0, values * weights)
    weights = torch.where((weights >= 0) & ~weights.isinf(), weights, torch.nan)
    return products.sum(), weights.sum()


def _of_numbers(name: str, value: float, weight: float) -> tuple[float, float]:
    if not 0 <= weight < math.inf:
        raise _refused(name, weight)
    return (value * weight if weight else 0.0), weight


def _refused(name: str, weight: float) -> WindowError:
    return WindowError(
        f"record({name!r}): a weight is {weight}: it says for how much a sample counts, and must be >= 0 and finite; "
        "pass 0 for a sample that is to be left out"
    )
