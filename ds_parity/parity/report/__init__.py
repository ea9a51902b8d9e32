"""The report of comparisons: a page with its pictures, and JUnit XML."""

from ds_parity.parity.report.contents import Compared, Configurations, Contents, Side
from ds_parity.parity.report.files import PAGE, check, write
from ds_parity.parity.report.sources import of_traces, of_verification

__all__ = [
    "PAGE",
    "Compared",
    "Configurations",
    "Contents",
    "Side",
    "check",
    "of_traces",
    "of_verification",
    "write",
]
