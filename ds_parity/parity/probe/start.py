"""`ds-parity probe`: start ranks, probe one window of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from ds_parity.parity.running.functions import refuse_unknown
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.side_effects import without_outputs


def probe_config(
    config: dict[str, Any],
    subject: str,
    folder: Path,
    *,
    ranks: int = 2,
    timeout: float = 300.0,
    progress: Callable[[int, str], None] = lambda done, title: None,
    **options: Any,
) -> tuple[ProbeResult, float]:
    """Probe a ragged window, and return the result and the tolerance of the configuration's type.

    Args:
        config: extended configuration.
        subject: `package.module:function(scenario, record)` that runs the window; ds_parity's own is
            `ds_parity.parity.subjects.candidate:run`.
        folder: for the ranks' log.
        ranks: processes to start.
        timeout: seconds for all of it.
        progress: called with how many calls are done (0 or 1) and what runs.
        options: of `Scenario` (seed, model, rollouts, max_tokens).

    Raises:
        ConfigError: the configuration can't be run.
        HarnessError: a rank failed, or time ran out.
    """
    scenario = Scenario("probe", without_outputs(config), ranks, shape="overshoot", windows=1, **options)
    scenario.layout()  # for its ConfigError, before any rank is started
    for name in (subject, scenario.model):
        refuse_unknown(name)
    arguments = {"scenario": scenario.to_json(), "subject": subject}
    call = Call(f"probe of {subject}", "ds_parity.parity.probe.measure:probe_scenario", arguments)
    results = run_job(Job((call,), folder.resolve() / "probe", ranks, timeout), progress)
    return ProbeResult(**results[0]), TOLERANCE[scenario.dtype]
