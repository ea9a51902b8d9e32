"""The command line inside this process, as a shell would start it.

A process of its own costs half a second, and three where torch is needed. What only a process shows (what is imported,
the streams and the exit code that a shell gets) is for one test of each command, which starts one.
"""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from ds_parity.cli import main

ROOT = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Ran:
    """What a command ended in."""

    returncode: int
    stdout: str
    stderr: str


def started(*arguments, cwd=None, **environment):
    """Start the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ds_parity", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, check=False, stdin=subprocess.DEVNULL,
        cwd=cwd, env={**os.environ, "PYTHONPATH": ROOT, **environment},
    )  # fmt: skip


def ds_parity(*arguments, cwd=".", **environment):
    """Run the command line in a folder, with further variables; nothing comes in from its standard input."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["ds-parity", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        mock.patch.dict(os.environ, environment),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Ran(ended.value.code or 0, out.getvalue(), err.getvalue())
