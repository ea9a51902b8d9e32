"""Why ranks ended, read from their log: the reason, and not the launcher's noise."""

import shutil
from collections import namedtuple

import pytest

from ds_parity.parity.running import launch
from ds_parity.parity.running.last_words import last_words

NOISE = (
    "[2026-11-22 17:33:25,829] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 5898\n"
    "[2026-11-22 17:33:25,832] [ERROR] [launch.py:259:sigkill_handler] ['python', '-u'] exits with return code = 1\n"
)


@pytest.fixture
def log(tmp_path):
    def written(text):
        path = tmp_path / "log.txt"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize("line", ["/bin/sh: 1: c++: not found", "sh: g++: command not found", "x-gcc: not found"])
def test_a_machine_without_a_compiler(line, log):
    said = last_words(log(f"RuntimeError: Error building extension 'cpu_adam'\n{line}\nninja: build stopped\n{NOISE}"))
    assert said.startswith("there is no C++ compiler or no ninja")
    assert "install g++" in said


def test_the_last_exception_and_not_the_launchers_lines(log):
    text = (
        f"Traceback (most recent call last):\n  File x\nValueError: first\nOSError: [Errno 28] No space left\n{NOISE}"
    )
    assert last_words(log(text)) == "OSError: [Errno 28] No space left"


def test_a_disk_that_is_full(log, monkeypatch):
    """Then nobody could write down why."""
    usage = namedtuple("usage", "total used free")
    path = log("")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 0))
    assert last_words(
        path
    ) == f"no space is left on the disk of {path.parent}: free some, or choose another folder " + ("with --out")


def test_never_nothing(log):
    assert last_words(log(NOISE)) == "nothing (ds-parity doctor looks at this machine)"
    assert last_words(log(f"a\nb\nc\nd\n{NOISE}")) == "b | c | d"


def test_operators_that_were_built_are_no_reason(log):
    built = "DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\n"
    assert last_words(log(f"it ends here\n{2 * built}{NOISE}")) == "it ends here"


def test_it_is_part_of_the_message(tmp_path, log):
    log(f"/bin/sh: 1: c++: not found\n{NOISE}")
    message = launch._why(launch.Job((), tmp_path, 1), 1)
    assert "there is no C++ compiler" in message
    assert "launch.py" not in message
