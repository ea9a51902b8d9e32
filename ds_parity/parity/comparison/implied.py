"""How like two traces should be, as their headers say: the tier and the type where nobody asked for another."""

from __future__ import annotations

from dataclasses import dataclass

from ds_parity.parity.comparison.bounds import EPS, Tier
from ds_parity.parity.comparison.fields import Comparison
from ds_parity.trace import Header

_SETTINGS = ("ranks", "stage", "dtype", "device", "config_hash")
# The contract between these is bit equality: `verify` compares them in the EXACT tier.
_OF_DEEPSPEED = {"ds_parity", "deepspeed", "deepspeed-loop"}
_KERNELS = ("torch", "deepspeed")
_NAMES = {"config_hash": "the configuration", "stage": "the ZeRO stage", "dtype": "the type", "ranks": "the ranks"}


@dataclass(frozen=True, slots=True)
class Implied:
    """What two headers imply.

    Attributes:
        tier: EXACT where one engine ran one configuration twice, on as many ranks, with the same kernels; elsewhere
            sums may be added up in another order, and nobody promises the same bits.
        dtype: the shorter of both types; fp32 where no header says one.
        because: why this tier, for a sentence.
    """

    tier: Tier
    dtype: str
    because: str


def implied(reference: Header, candidate: Header) -> Implied:
    """Return what two headers imply. A header of an older release says neither type nor stage: no difference."""
    types = [it for it in (reference.dtype, candidate.dtype) if it in EPS]
    dtype = max(types, key=EPS.__getitem__, default="fp32")
    apart = _apart(reference, candidate)
    if apart:
        return Implied(Tier.REASSOCIATED, dtype, f"{apart}, so sums may be added up in another order")
    return Implied(Tier.EXACT, dtype, f"both are {reference.engine}, with the same settings")


def cut_otherwise(given: Implied, found: Comparison) -> Implied:
    """Return what two traces imply whose windows may be cut into other micro-batches: their sums have other parts.

    Args:
        given: what their headers imply.
        found: the comparison in that tier.
    """
    differ = {difference.name for difference in found.found}
    if given.tier is not Tier.EXACT or "passes" not in differ or "rollouts" in differ:
        return given
    because = "windows of as many rollouts have another number of passes, so sums have other parts"
    return Implied(Tier.REASSOCIATED, given.dtype, because)


def _apart(a: Header, b: Header) -> str:
    """Say what is not the same; empty where all is."""
    if a.foreign or b.foreign:
        return "a side is another trainer's"
    if a.engine != b.engine and not ({a.engine, b.engine} <= _OF_DEEPSPEED and a.config_hash == b.config_hash):
        return f"the engines differ ({a.engine}, {b.engine})"
    for name in _SETTINGS:
        x, y = getattr(a, name), getattr(b, name)
        if x != y and None not in (x, y):
            shown = "" if name == "config_hash" else f" ({x}, {y})"
            return f"{_NAMES.get(name, f'the {name}')} {'differ' if name == 'ranks' else 'differs'}{shown}"
    for name in _KERNELS:
        x, y = ((it.versions or {}).get(name) for it in (a, b))
        if x != y:
            return f"the version of {name} differs ({x}, {y})"
    return ""
