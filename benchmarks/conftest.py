"""Each benchmark hands its table to `results`, which prints it and writes it into RESULTS.md."""

import pytest

from benchmarks.results import RESULTS, put


@pytest.fixture
def results(capsys):
    def write(section):
        put(RESULTS, section)
        with capsys.disabled():
            print(f"\n{section.text()}")

    return write
