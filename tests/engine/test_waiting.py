"""A script of one's own waits for an operator's lock as `ds-parity` does: it must say so too."""

import ast
import logging
import time
from pathlib import Path

import pytest

from ds_parity.engine.waiting import saying_what_is_waited_for


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    return path


def said(caplog, during=lambda: time.sleep(0.4), patience=0.1):
    with caplog.at_level(logging.WARNING, "ds_parity"), saying_what_is_waited_for(patience):
        during()
    return [record.getMessage() for record in caplog.records]


def test_a_lock_from_before_is_named_once_with_the_way_out(lock, caplog):
    lock.touch()
    (message,) = said(caplog)
    assert f"{lock} has been there since before: if DeepSpeed needs cpu_adam" in message
    assert "if no compiler runs, that process was killed: delete the file" in message


def test_nothing_is_said_where_the_engine_is_built_in_time(lock, caplog):
    lock.touch()
    assert said(caplog, patience=30) == []


def test_nothing_is_said_of_a_lock_that_has_gone_or_is_new(lock, caplog):
    lock.touch()
    assert said(caplog, during=lambda: (lock.unlink(), time.sleep(0.4))) == []
    assert said(caplog, during=lambda: (lock.touch(), time.sleep(0.4))) == []


def test_other_ranks_of_the_host_say_nothing(lock, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    lock.touch()
    assert said(caplog) == []


def test_what_is_raised_inside_comes_out(lock):
    lock.touch()
    with pytest.raises(KeyError), saying_what_is_waited_for(30):
        raise KeyError


def test_initialize_is_inside_of_it_where_deepspeed_loads_operators():
    tree = ast.parse((Path(__file__).parents[2] / "ds_parity" / "engine" / "initialize.py").read_text())
    inside = {
        ast.unparse(call.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and "saying_what_is_waited_for" in ast.unparse(node.items[0])
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    }
    assert {"deepspeed.init_distributed", "bare"} <= inside
