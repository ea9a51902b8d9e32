"""The pure core: what passes contained, when a window closes, where the schedule stands. No torch, no collectives."""

from ds_parity.window.counts import Counts, PassTotals, WindowTotals
from ds_parity.window.ledger import Ledger, Rules
from ds_parity.window.progress import Progress
from ds_parity.window.promise import Promise
from ds_parity.window.standing import Window
from ds_parity.window.terms import Term, Terms
from ds_parity.window.weighting import Weighting

__all__ = [
    "Counts",
    "Ledger",
    "PassTotals",
    "Progress",
    "Promise",
    "Rules",
    "Term",
    "Terms",
    "Weighting",
    "Window",
    "WindowTotals",
]
