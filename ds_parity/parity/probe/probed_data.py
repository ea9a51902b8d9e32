"""Which data the probe looks at: windows in which every pass and every rank weighs, as far as they exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import coefficients, windows_of

Shares = Sequence[Sequence[Sequence[float]]]
"""shares[pass][rank] are the coefficients with which a micro-batch should enter its step, one for each term."""

# So many draws are tried. Where micro-batches bring their own weights, one in eight weighs 0 (`own_weight`).
_DRAWS = 64

EVERYWHERE = "every rank has data in every pass"
SOMEWHERE = "ranks are idle in some passes"


def probed_data(scenario: Scenario) -> dict[str, Scenario]:
    """Return the scenarios to probe, by what their first window is like.

    What a window of idle passes leaves out of account is seen in a full one, and the other way round.

    Raises:
        ConfigError: the configuration can't be run.
    """
    # Where going beyond the target is an error, windows contain it exactly.
    ragged = "ragged" if scenario.settings.overshoot == "error" else "overshoot"
    return {
        EVERYWHERE: _best(replace(scenario, shape="full"), lambda shares: len(weightless(shares))),
        SOMEWHERE: _best(replace(scenario, shape=ragged), _blind),
    }


def first_window(scenario: Scenario) -> Shares:
    """Return the coefficients that are due in the first window of a scenario."""
    passes = scenario.batches()
    window = windows_of(passes, scenario.settings)[0]
    rows = passes[: window.last + 1]
    return [[coefficients(batch, window, scenario.settings) for batch in row] for row in rows]


def weightless(shares: Shares) -> list[tuple[int, int]]:
    """Return each (pass, rank) from which nothing should enter the step, so that nothing can be missing."""
    return [(index, rank) for index, row in enumerate(shares) for rank, own in enumerate(row) if not any(own)]


def _blind(shares: Shares) -> int:
    """Count the passes and the ranks that weigh nothing at all; a single rank always begins with an idle pass."""
    weigh = [[any(own) for own in row] for row in shares]
    if len(weigh[0]) == 1:
        weigh = weigh[1:]
    return sum(not any(row) for row in weigh) + sum(not any(column) for column in zip(*weigh, strict=True))


def _best(scenario: Scenario, unseen: Callable[[Shares], int]) -> Scenario:
    """Return the scenario with the first draw of its raggedness in which least is unseen."""
    best, least = scenario, None
    for draw in range(_DRAWS):
        drawn = replace(scenario, draw=draw)
        hidden = unseen(first_window(drawn))
        if least is None or hidden < least:
            best, least = drawn, hidden
        if not hidden:
            break
    return best
