"""`ds-parity probe`: start ranks, probe one window of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_parity.config.autotp import data_parallel_ranks
from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from ds_parity.parity.probe.probed_data import EVERYWHERE, probed_data
from ds_parity.parity.running.functions import refuse_unknown
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.one_at_a_time import alone_in
from ds_parity.parity.running.policies import refuse_unknown_model
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.side_effects import without_outputs

# Ranks import them by name.
_INSPECT = "ds_parity.parity.running.inspection:inspect_model"
_PROBE = "ds_parity.parity.probe.measure:probe_scenario"
# How many calls the ranks run: one that looks at the model, and one for each window.
PROBE_CALLS = 3


@dataclass(frozen=True)
class Probed:
    """One window that was probed.

    Attributes:
        data: what the window is like.
        result: what it came to.
    """

    data: str
    result: ProbeResult

    @property
    def missed(self) -> list[str]:
        """What could not be tested, though a window of this kind is there to test it."""
        if self.data != EVERYWHERE:
            return []
        return [f"rank {rank} in pass {index}" for index, rank in self.result.untested]


def probe_config(
    config: dict[str, Any],
    subject: str,
    folder: Path,
    *,
    ranks: int = 2,
    timeout: float = 300.0,
    progress: Callable[[int, str], None] = lambda done, title: None,
    **options: Any,
) -> tuple[tuple[Probed, ...], float]:
    """Probe two windows, and return what they came to, and the tolerance of the configuration's type.

    In the first window every rank has data in every pass; in the second, ranks are idle in some.

    Args:
        config: extended configuration.
        subject: `package.module:function(scenario, record)` that runs the window; ds_parity's own is
            `ds_parity.parity.subjects.candidate:run`.
        folder: for the ranks' log.
        ranks: processes to start.
        timeout: seconds for all of it.
        progress: called with how many calls are done and what runs.
        options: of `Scenario` (seed, model, rollouts, tokenizer, max_tokens).

    Raises:
        ConfigError: the configuration can't be run.
        HarnessError: a rank failed, or time ran out, or another process probes in `folder`.
    """
    base = Scenario(
        "probe", without_outputs(config), data_parallel_ranks(config, ranks), shape="overshoot", windows=2, **options
    )
    refuse_unknown(subject)
    refuse_unknown_model(base.model)
    # Its ConfigError comes before any rank is started.
    scenarios = probed_data(base)
    calls = tuple(
        Call(f"probe of {subject}: {data}", _PROBE, {"scenario": scenario.to_json(), "subject": subject})
        for data, scenario in scenarios.items()
    )
    look = Call("a look at the model", _INSPECT, {"scenario": base.to_json()})
    folder = folder.resolve()
    with alone_in(folder, "probe"):
        _, *results = run_job(Job((look, *calls), folder / "probe", ranks, timeout), progress)
    probed = (Probed(data, ProbeResult(**result)) for data, result in zip(scenarios, results, strict=True))
    return tuple(probed), TOLERANCE[base.dtype]
