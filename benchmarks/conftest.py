"""Each benchmark hands its table to `results`, which prints it and writes it into RESULTS.md."""

import os
from pathlib import Path

import pytest

from benchmarks.results import INTO, RESULTS, put


@pytest.fixture
def results(capsys):
    def write(section):
        put(Path(os.environ.get(INTO, RESULTS)), section)
        with capsys.disabled():
            print(f"\n{section.text()}")

    return write
