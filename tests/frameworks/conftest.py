"""One launched set of ranks for all frameworks: their imports alone take longer than what they do here."""

from pathlib import Path

import pytest

from ds_parity.parity.running.launch import Job, run_job
from tests.frameworks import runs

ROOT = str(Path(__file__).parents[2])
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """What every call came to, by its title."""
    for package in ("accelerate", "trl"):
        pytest.importorskip(package, reason="takes the extra hf: make test-hf")
    calls, folder = runs.calls(), tmp_path_factory.mktemp("frameworks") / "ranks"
    job = Job(tuple(calls), folder, timeout=900, patience=120, import_from=(ROOT,), environment=OFFLINE)
    return dict(zip([one.title for one in calls], run_job(job), strict=True))
