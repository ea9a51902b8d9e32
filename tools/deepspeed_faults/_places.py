"""What the scripts of this folder have in common: every place (a ZeRO stage, a precision) is measured apart and told.

An older DeepSpeed may raise in one place and be right in the next, so what one raises does not end the script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FAULT, RIGHT = "fault", "right"
heard: list[Callable[[str, str | None], None]] = []
"""Called with a place and None before it is measured, and with what came out after it."""


class NotThere(Exception):  # noqa: N818  it is no error: an older DeepSpeed lacks what the script is about
    """This DeepSpeed lacks what the script is about."""


def tell(
    measures: Mapping[str, Callable[[], Any]],
    said: Callable[[Any], str],
    right: Callable[[Any], bool],
    fault: Callable[[Any], bool],
) -> dict[str, str]:
    """Measure each place, and print what came out.

    Args:
        measures: by place, such as "ZeRO 1 with CPU offload".
        said: what a value says, and what is right.
        right: whether a value is right.
        fault: whether it shows the fault. What is neither is wrong in another way.

    Returns:
        By place `right`, `fault`, `otherwise: ` and the value, `not there: ` and why, or `error: ` and what was raised.
    """
    found = {}
    for place, measure in measures.items():
        _hear(place, None)
        found[place], line = _outcome(measure, said, right, fault)
        print(f"{place}: {line}")
        _hear(place, found[place])
    print(conclusion(found))
    return found


def _outcome(
    measure: Callable[[], Any], said: Callable[[Any], str], right: Callable[[Any], bool], fault: Callable[[Any], bool]
) -> tuple[str, str]:
    try:
        value = measure()
        outcome = RIGHT if right(value) else FAULT if fault(value) else f"otherwise: {said(value)}"
        return outcome, said(value)
    except NotThere as reason:
        outcome = f"not there: {reason}"
    except Exception as error:  # whatever this DeepSpeed raises
        first = next(iter(str(error).strip().splitlines()), "")
        outcome = f"error: {type(error).__name__}: {first}"
    return outcome, outcome


def _hear(place: str, outcome: str | None) -> None:
    for listener in heard:
        listener(place, outcome)


def conclusion(found: Mapping[str, str]) -> str:
    """Return one word for all places: FAULT where one has it, and `right` where all are."""
    kinds = {outcome.partition(":")[0] for outcome in found.values()}
    if FAULT in kinds:
        return "FAULT"
    return "right in this version" if kinds == {RIGHT} else f"no FAULT, but {' and '.join(sorted(kinds - {RIGHT}))}"


def exit_code(found: Mapping[str, str]) -> int:
    """Return 0 while the fault is there, and 1 where it is not."""
    return int(FAULT not in found.values())


def allow_fp16() -> None:
    """Let DeepSpeed build fp16 engines: its CPU accelerator says no, and torch computes them all the same."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def forget_autocast() -> None:
    """Undo what a torch_autocast engine leaves behind (autocast_outlives_its_engine.py).

    Raises:
        NotThere: this DeepSpeed has no torch_autocast.
    """
    try:
        from deepspeed.runtime import torch_autocast
    except ImportError:
        raise NotThere("DeepSpeed has no torch_autocast yet") from None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


def scaler_of(engine: Any) -> Any:
    """Return the GradScaler of a torch_autocast engine.

    Raises:
        NotThere: this DeepSpeed has none.
    """
    for owner, name in ((engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler")):
        if getattr(owner, name, None) is not None:
            return getattr(owner, name)
    raise NotThere("torch_autocast in fp16 has no GradScaler here")
