"""Two commands of a kind in one folder would read each other's traces: the second is refused."""

import subprocess
import sys

import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity.running.one_at_a_time import alone_in

KEEPS = """
import sys
from pathlib import Path
from ds_parity.parity.running.one_at_a_time import alone_in
with alone_in(Path(sys.argv[1]), "verify"):
    print("there", flush=True)
    sys.stdin.read()
"""


def enter(folder):
    with alone_in(folder, "verify"):
        return True


def test_the_second_of_a_kind_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "new" / "out"
    with alone_in(folder, "verify"):
        with pytest.raises(HarnessError, match=r"out: another process runs `verify` .* choose another folder"):
            enter(folder)
        with alone_in(folder, "probe"):
            assert enter(tmp_path / "other")
    assert enter(folder)


def test_a_process_that_is_killed_leaves_the_folder_to_others(tmp_path):
    command = [sys.executable, "-c", KEEPS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"there\n"
        with pytest.raises(HarnessError, match="another process"):
            enter(tmp_path)
        first.kill()
        first.wait()
    assert enter(tmp_path)
