"""The pure core: what passes contained, when a window closes, where the schedule stands. No torch, no collectives."""

from ds_parity.window.counts import Counts, PassTotals, WindowTotals
from ds_parity.window.progress import Progress
from ds_parity.window.weighting import Weighting
from ds_parity.window.window import Ledger, Rules, Window

__all__ = ["Counts", "Ledger", "PassTotals", "Progress", "Rules", "Weighting", "Window", "WindowTotals"]
