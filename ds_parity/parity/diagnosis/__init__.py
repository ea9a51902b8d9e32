"""Why two runs differ: likely causes from their traces alone, each with its numbers and its remedy."""

from ds_parity.parity.diagnosis.causes import Cause, grouped
from ds_parity.parity.diagnosis.diagnose import diagnose

__all__ = ["Cause", "diagnose", "grouped"]
