"""What an examination finds: one thing, how it stands, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How something stands.

    Attributes:
        FINE: nothing to do.
        BITES: it is wrong with this configuration, on this machine.
        PERHAPS: it is wrong only with what the finding names: something that a loop does, or a model has.
        UNKNOWN: it could not be found out, so there is no verdict.
    """

    FINE = "fine"
    BITES = "bites"
    PERHAPS = "perhaps"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing; for a fault of DeepSpeed, of its script in tools/deepspeed_faults or of its issue.
        state: how it stands.
        said: what was found, one sentence.
        way_out: what to do; "" where there is nothing to do.
        script: the script that shows it, for a fault of DeepSpeed; "" for anything else.
    """

    name: str
    state: State
    said: str
    way_out: str = ""
    script: str = ""
