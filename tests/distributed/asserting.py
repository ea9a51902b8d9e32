"""What several test modules assert of two traces."""

from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import verdict


def assert_equal(launched, scenario, reference, tier):
    """Assert that the candidate's steps are those of a reference, over three windows or more, weights included."""
    traces = [launched.trace(scenario, engine) for engine in (reference, "ds_parity")]
    comparison = compare(*traces, tier, scenario.dtype)
    assert comparison.equal, verdict(comparison)
    assert len(comparison.rows) >= 3, f"{len(comparison.rows)} steps prove little"
    assert all(row.candidate.weights is not None for row in comparison.rows), "a step has no weights"
