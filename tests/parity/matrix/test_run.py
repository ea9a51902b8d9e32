"""The ranks of a matrix, where they can't be started; where a cell ends them is tested in tests/distributed."""

import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity.matrix.cell_runs import run_cells
from ds_parity.parity.matrix.cells import cells
from ds_parity.parity.running import launch


def test_ranks_that_cannot_be_started_are_a_harness_error_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda *args, **options: None)
    with pytest.raises(HarnessError, match="could not be started: no `deepspeed` launcher"):
        run_cells(cells(quick=True)[:1], tmp_path)
