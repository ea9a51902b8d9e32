"""Why two runs differ, from their traces alone: causes from which the record follows, or else what is certain."""

from ds_parity.parity.diagnosis.causes import CLASSES, Cause, grouped, kind_of
from ds_parity.parity.diagnosis.diagnose import diagnose
from ds_parity.parity.diagnosis.finding import NOTHING, Diagnosis
from ds_parity.parity.diagnosis.fits import Fit

__all__ = ["CLASSES", "NOTHING", "Cause", "Diagnosis", "Fit", "diagnose", "grouped", "kind_of"]
