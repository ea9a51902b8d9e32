"""What is certain of a difference, whatever caused it: what differs first, what follows, and what agrees."""

from __future__ import annotations

from collections.abc import Iterator

from ds_parity.parity.comparison.fields import Comparison, plain
from ds_parity.parity.diagnosis import gradient, updates, windows
from ds_parity.parity.diagnosis.effects import SPLIT
from ds_parity.parity.diagnosis.view import View

_WORDS = {
    "step": "the steps themselves",
    "rollouts": "rollouts",
    "prompts": "prompts",
    "tokens": "tokens",
    "total": "total",
    "lr": "LR",
    "skipped": "skipped steps",
    "metrics": "metrics",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "weights": "weights",
}  # in the order in which a step comes to them

OTHER_SPLIT = "micro-batches of another size make the same step, and so does a log that counts passes otherwise"


def other_split(comparison: Comparison) -> str:
    """Return that windows were split otherwise, in a sentence.

    Args:
        comparison: in which passes differ.
    """
    found = [it for it in comparison.found if plain(it.name) in SPLIT]
    steps, first = max(it.count for it in found), min(it.first.step or 0 for it in found)
    said = f"{steps} windows of the same rollouts have" if steps > 1 else "a window of the same rollouts has"
    return f"{said} another number of passes, from step {first} on: {OTHER_SPLIT}"


def certain(view: View) -> tuple[str, ...]:
    """Return what the record shows, in sentences."""
    return tuple(_sentences(view))


def _sentences(view: View) -> Iterator[str]:
    order = _order(view)
    if order:
        (step, fields), *rest = order
        said = f"first to differ, in step {step}: {_listed(fields)}"
        yield said + "".join(f"; from step {later} on also {_listed(names)}" for later, names in rest)
    if view.fields and view.fields <= SPLIT:
        yield other_split(view.comparison)
    yield from windows.facts(view)
    yield from gradient.facts(view)
    yield from updates.facts(view)
    agree = [name for name in _WORDS if name != "step" and view.agrees(name)]
    if agree:
        yield f"agree in every common step: {_listed(agree)}"
    loose = "weights" not in view.fields and view.recorded("weights") and not view.weights_tell
    if loose:
        yield "the weights lie within their bound, but they are not much nearer than training moves them: no proof"
    unknown = [name for name in ("rollouts", "tokens", "lr", "loss", "grad_norm", "weights") if _unknown(view, name)]
    if unknown:
        yield f"not recorded by both sides in every step, so nothing is known of it: {_listed(unknown)}"


def _unknown(view: View, name: str) -> bool:
    differs = view.weights_differ if name == "weights" else name in view.fields
    return not differs and not view.recorded(name)


def _order(view: View) -> list[tuple[int, list[str]]]:
    """Return the fields that differ, by the first step in which each does."""
    found: dict[str, int] = {}
    for it in view.comparison.found:
        name = plain(it.name)
        if name in _WORDS and it.first.step is not None:
            found[name] = min(found.get(name, it.first.step), it.first.step)
    steps = sorted(set(found.values()))
    return [(step, [name for name in _WORDS if found.get(name) == step]) for step in steps]


def _listed(names: list[str]) -> str:
    return ", ".join(_WORDS[name] for name in names)
