"""What a diagnosis comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_parity.parity.diagnosis.causes import Cause


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a difference.

    Attributes:
        causes: those from which the record follows, the likeliest first; none: the cause is unknown. Those with the
            same evidence can't be told apart by the record (`grouped`).
        certain: what the record shows whatever the cause, in sentences.
        classes: of `CLASSES`, those in which the fault can be.
        not_excluded: some known faults that leave such a record, of which it shows nothing, and which it doesn't
            exclude.
        next: the command that would tell, with what to look at; empty where a cause is named.
    """

    causes: tuple[Cause, ...] = ()
    certain: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    not_excluded: tuple[str, ...] = ()
    next: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        causes = [
            {
                "name": it.name,
                "kind": it.kind,
                "fit": it.fit.words,
                "likelihood": round(it.likelihood, 3),
                "evidence": it.evidence,
                "remedy": it.remedy,
            }
            for it in self.causes
        ]
        return {
            "causes": causes,
            "certain": list(self.certain),
            "classes": list(self.classes),
            "not_excluded": list(self.not_excluded),
            "next": self.next,
        }


NOTHING = Diagnosis()
"""Of equal traces."""
