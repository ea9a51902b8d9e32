"""What an older DeepSpeed is refused for by the table of releases: a test that meets it is skipped with the reason.

So that tests which are run with an older release say what is right there, what is refused and what is wrong. With the
newest release that was measured nothing is ever skipped.
"""

import pytest

from ds_parity.config import versions
from ds_parity.config.features import named
from ds_parity.config.versions import ENTRIES, MEASURED, UNGATHERED, Verdict, rule_and_way_out
from ds_parity.engine.internals.installed import installed
from ds_parity.errors import ConfigError


def is_older(here):
    """Return whether a release (None: one that nobody can name) comes before the newest that was measured."""
    return here is not None and here < MEASURED[-1]


def may_run(config):
    """Return whether the installed release may run a configuration: one of many in a task, whose others are run."""
    here = installed()
    return not is_older(here) or not any(versions.refused(config, here))


def skip_where_bare_is_wrong(config):
    """Skip a test that checks ds_parity against bare DeepSpeed, where the installed release is wrong and is corrected.

    What ds_parity does there is checked against torch and an oracle by other tests, and by the matrix.
    """
    if why := wrong_when_bare(config):
        pytest.skip(why)


def wrong_when_bare(config):
    """Return why bare DeepSpeed is no reference for a configuration on the installed release, "" where it is one."""
    here = installed()
    if not is_older(here):
        return ""
    corrected = [
        f"{feature.name}: {entry.what} ({entry.evidence})"
        for feature, entry in versions.asked_for(config, here, Verdict.CORRECTED)
        # Ranks of an older release wait for weights from their first call on.
        if entry.right_from is not None and entry is not UNGATHERED
    ]
    return f"bare DeepSpeed {here} is wrong on {'; '.join(corrected)}" if corrected else ""


def refusal(error, here):
    """Return the reason where an error is a refusal by the table of releases and nothing else, None otherwise.

    Args:
        error: any exception.
        here: the release that is installed.
    """
    if not is_older(here) or not isinstance(error, ConfigError):
        return None
    rules = [
        rule_and_way_out(named(name), entry, here)[0]
        for entry in ENTRIES
        if entry.verdict is Verdict.REFUSED and entry.on(here)
        for name in entry.features
    ]
    # Faults of a configuration stand one a line, behind a heading.
    first, *others = str(error).split("\n  ")
    faults = others or [first]
    return "; ".join(faults) if all(any(rule in fault for rule in rules) for fault in faults) else None
