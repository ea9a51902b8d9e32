"""Known bugs are put into the engine, one at a time: the harness catches and names each, and clears the clean ones."""

import re

import pytest

from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.diagnosis import grouped
from ds_parity.parity.subjects.controls.known import known
from ds_parity.parity.verification.control_margins import margins, signal
from ds_parity.parity.verification.control_runs import CLEAN, run_controls
from tests.beside import Errand, begun_with_the_session
from tests.distributed import cells
from tests.older_refusals import skip_where_bare_is_wrong
from tools import update_docs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# All of them on one stage here; `ds-parity controls` runs any configuration.
STAGE = 1
# Controls that are not named here, with the measured reason. There are none in fp32.
NOT_FINITE = ("idle-nan", "zero-denominator")
EXCEPTIONS: dict[str, str] = {}
# As many other names may stand beside the right one at most. Two for three faults, whose records leave them open:
# another target ends windows where sequences that are counted as prompts do (and where a window that was lost in a
# resume ends one short), and another loss with the same gradient is as possible as a mean over ranks.
# Three for one: a line that rises from a rate which DeepSpeed's scheduler has twice is as well that of a longer
# schedule, of a longer warm-up, and of one to another highest rate, to the last digit.
MOST_OTHERS = {"scheduler-budget-in-passes": 3}
FAULTS = [name for name, control in known().items() if STAGE in control.stages]


@begun_with_the_session("findings")
def controls(folder, _):
    """All of them, and the clean engines."""
    name = f"{run_controls.__module__}:{run_controls.__qualname__}"
    return Errand(name, (cells.config(STAGE), folder), {"timeout": 400})


@pytest.fixture(scope="session")
def findings(begun):
    # Each control is a bare engine with a fault.
    skip_where_bare_is_wrong(cells.config(STAGE))
    return {(results.name, results.scenario): results for results in begun.result("findings")}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_and_named(findings, name):
    result = findings[name, known()[name].scenario]
    assert result.raised is None
    assert result.caught
    if name in NOT_FINITE and before(release("0.19.8")):
        pytest.skip("before 0.19.8 bare DeepSpeed takes the step of a NaN, and its causes can't be told apart")
    assert result.named or name in EXCEPTIONS, result.diagnosis


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_named_beside_a_fault_or_left_open_is_little(findings, name):
    """A group of causes that the record can't tell apart, or known faults that it doesn't exclude."""
    diagnosis = findings[name, known()[name].scenario].diagnosis
    together = grouped(diagnosis.causes)[0] if diagnosis.causes else diagnosis.not_excluded
    assert len(together) <= MOST_OTHERS.get(name, 2) + 1, diagnosis


@pytest.mark.parametrize("engine", CLEAN)
def test_no_clean_engine_is_caught(findings, engine):
    clean = [result for result in findings.values() if result.name == engine]
    assert len(clean) == len({control.scenario for name, control in known().items() if name in FAULTS})
    assert all(result.good for result in clean), [result.comparison for result in clean if not result.good]


def test_the_weakest_signal_lies_ten_times_above_the_greatest_noise(findings):
    """In each quantity; what differs bit for bit (LR, rollouts) needs no margin."""
    assert sum(signal(result) is not None for result in findings.values() if not result.clean) > 15
    result = margins(list(findings.values()))
    assert {"loss", "grad_norm", "weights"} <= result.keys()
    assert min(result.values()) > 10, result


def test_the_figures_of_the_pages_are_those_of_these_runs(findings, begun):
    """On another stage, so but for rounding."""
    folder = begun.folder_of("findings")
    words, numbers = (re.compile(pattern) for pattern in (r"[0-9.]+", r"\d+(?:\.\d+)?"))
    for page, measured in update_docs.made_from_runs("figures", folder):
        shown = update_docs.shown(page, "figures")
        assert words.sub("", shown) == words.sub("", measured)
        assert [*map(float, numbers.findall(shown))] == pytest.approx(
            [*map(float, numbers.findall(measured))], rel=0.01
        )
