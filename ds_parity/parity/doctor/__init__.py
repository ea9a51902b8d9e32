"""What is wrong here before a step is taken: the installation, the machine, the ranks, DeepSpeed's known faults.

Imports neither torch nor DeepSpeed, which may be what is missing: whatever needs them runs in processes of its own.
"""

from ds_parity.parity.doctor.examination import Examination, examine
from ds_parity.parity.doctor.findings import Finding, State

__all__ = ["Examination", "Finding", "State", "examine"]
