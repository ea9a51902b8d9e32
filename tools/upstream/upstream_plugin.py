"""A pytest plugin: every outcome is one line of JSON, written at once, so that a crash loses one test only.

pytest -p upstream_plugin        # with DS_PARITY_RESULTS=FILE
"""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

_LIMIT = 4000


def pytest_configure(config: pytest.Config) -> None:
    """Let the fork server of the tests import torch and DeepSpeed once, in place of every rank of every test."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # an accelerator may not be forked
        wrapper = [] if os.environ["DS_PARITY_UPSTREAM"] == "bare" else ["ds_parity.engine.initialize"]
        multiprocessing.set_forkserver_preload(["deepspeed", *wrapper])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down what will run."""
    _write({"collected": [item.nodeid for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down what cannot be imported."""
    if report.failed:
        _write({"test": report.nodeid, "when": "collect", "outcome": "failed", "message": _message(report)})


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down what runs now: the last test that started is the one that crashed."""
    _write({"started": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how it ended; xfail counts as pytest counts it."""
    _write(
        {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "message": "" if report.passed else _message(report),
        }
    )


def _message(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:_LIMIT]
    # A skip is (path, line, reason).
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-_LIMIT:]


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["DS_PARITY_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
