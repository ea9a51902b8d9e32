"""The one command that would tell more than the record does."""

from __future__ import annotations

from ds_parity.parity.diagnosis.view import View

_PROBE = (
    "`ds-parity probe CONFIG --subject your_module:loop` shows with which coefficient each micro-batch entered a step"
)
_REWRITE = (
    "`ds-parity rewrite CONFIG` shows which optimizer, clipping and scheduler DeepSpeed receives: compare both runs'"
)
_VERIFY = (
    "`ds-parity verify CONFIG --train your_module:train --windows 1` runs your loss on known micro-batches: compare "
    "the loss of one micro-batch, then its inputs"
)
_COUNTS = (
    "record rollouts and tokens in both runs (`--map tokens=...` if they are logged), and run `ds-parity compare` again"
)
_WEIGHTS = (
    "record the weights in both runs (the traces of `ds-parity verify` have them), and run `ds-parity compare` again"
)


def telling(view: View, classes: tuple[str, ...]) -> str:
    """Return the command, by the classes that are left open."""
    if set(classes) & {"data", "loss"} and "gradient" not in classes[:1]:
        known = any(view.recorded(name) for name in ("rollouts", "tokens"))
        return (
            _VERIFY
            if (known and "gradient" not in classes) or (view.agrees("tokens") and "data" in classes)
            else (_COUNTS if not known else _PROBE)
        )
    if "logging" in classes and len(classes) > 1:
        return _WEIGHTS
    if "gradient" in classes:
        return _PROBE
    return _REWRITE
