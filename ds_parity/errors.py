"""The exception tree.

    DsParityError
    ├── ConfigError      (also a ValueError)  a configuration that can't be right
    ├── WindowError      counts, passes and steps used in a way that has no right result
    ├── RankDesyncError  ranks are not in the same pass of the same window
    ├── TraceError       a trace that can't be read or written
    ├── CheckpointError  a checkpoint that can't be saved or resumed from here
    └── HarnessError     a parity run that ended without a verdict

Every message names the thing, its value, the rule and the way out.
"""

from traceback import walk_tb


class DsParityError(Exception):
    """Root of everything that ds_parity raises on purpose."""


class ConfigError(DsParityError, ValueError):
    """A configuration that is misspelt, contradicts itself, or asks for what can't be right."""


class WindowError(DsParityError):
    """Counts, passes and steps used in a way that has no right result."""


class RankDesyncError(DsParityError):
    """Ranks are not in the same pass of the same window, or one of them is gone.

    Attributes:
        parted: False where all ranks have raised it at one place, and may go on from there alike.
    """

    parted = True


class TraceError(DsParityError):
    """A trace that can't be read or written."""


class CheckpointError(DsParityError):
    """A checkpoint that can't be saved or resumed from here."""


class HarnessError(DsParityError):
    """A parity run that ended without a verdict: a rank died, the launcher is missing, time ran out."""


def modules_through(error: BaseException) -> list[str]:
    """Return the names of the modules that an error came through, the one that raised it last; none if nobody has."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
