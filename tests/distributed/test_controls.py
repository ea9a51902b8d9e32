"""Known bugs are put into the engine, one at a time: the harness must catch and name each, and leave the clean ones alone."""

import cells
import pytest

from ds_parity.parity.controls.known import known
from ds_parity.parity.controls.margins import margins, signal
from ds_parity.parity.controls.run import CLEAN, run_controls

pytestmark = pytest.mark.ranks

# All of them on one stage here; `ds-parity controls` runs any configuration.
STAGE = 1
FAULTS = [name for name, control in known().items() if STAGE in control.stages]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("controls")
    return {(found.name, found.scenario): found for found in run_controls(cells.config(STAGE), folder, timeout=400)}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_and_named(findings, name):
    found = findings[name, known()[name].scenario]
    assert found.raised is None
    assert found.caught
    assert found.named, [(cause.name, cause.likelihood, cause.evidence) for cause in found.causes]


@pytest.mark.parametrize("engine", CLEAN)
def test_no_clean_engine_is_caught(findings, engine):
    clean = [found for found in findings.values() if found.name == engine]
    assert len(clean) == len({control.scenario for name, control in known().items() if name in FAULTS})
    assert all(found.good for found in clean), [found.comparison for found in clean if not found.good]


def test_the_weakest_signal_lies_ten_times_above_the_greatest_noise(findings):
    """In each quantity; what differs bit for bit (LR, rollouts) needs no margin."""
    assert sum(signal(found) is not None for found in findings.values() if not found.clean) > 15
    found = margins(list(findings.values()))
    assert {"loss", "grad_norm", "weights"} <= found.keys()
    assert min(found.values()) > 10, found
