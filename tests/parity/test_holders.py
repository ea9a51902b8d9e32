"""Who has a file open: found by its file and not by its name, whatever ends while it is looked for."""

import os

import pytest

from ds_parity.parity.running import holders as module
from ds_parity.parity.running.holders import holders


@pytest.fixture
def path(tmp_path):
    """A file that this process has open."""
    path = tmp_path / "lock"
    with path.open("w"):
        yield path


def test_a_process_is_found_that_has_the_file_open(path):
    assert os.getpid() in holders(path)


def test_a_file_is_found_behind_a_link(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    assert os.getpid() in holders(link)


def test_a_copy_is_another_file(path, tmp_path):
    other = tmp_path / "other"
    other.write_text("")
    assert not list(holders(other))
    assert not list(holders(tmp_path / "absent"))


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, ProcessLookupError])
def test_a_process_that_ends_while_it_is_looked_at_is_left_out(path, monkeypatch, error):
    scandir, gone = os.scandir, []

    def ending(folder):
        if str(folder).endswith("/fd") and str(os.getpid()) not in str(folder):
            gone.append(folder)
            raise error(f"no such file: {folder}")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", ending)
    assert list(holders(path)) == [os.getpid()]
    assert gone


def test_without_proc_nobody_is_found(path, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_PROCESSES", tmp_path / "absent")
    assert not list(holders(path))
