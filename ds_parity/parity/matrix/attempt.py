"""What ranks do for a cell beside running its engines; an error is an answer, and the next cell runs."""

from __future__ import annotations

from typing import Any

from ds_parity.parity.probe.measure import probe_scenario
from ds_parity.parity.running.half_precision import experiment
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.tasks import attempted, engine_of


def attempt_probe(scenario: dict[str, Any], subject: str) -> dict[str, Any]:
    """Probe a window; `raised` where that failed."""
    return attempted(lambda: probe_scenario(scenario, subject))


def attempt_engine(scenario: dict[str, Any]) -> dict[str, Any]:
    """Build and run the engine under test, and return as `raised` by what words it refuses the configuration."""

    def build() -> dict[str, Any]:
        with experiment():
            engine_of("ds_parity")(Scenario.from_json(scenario), lambda record, module: None)
        return {}

    return attempted(build)
