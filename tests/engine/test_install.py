"""install(): what stands under the name `deepspeed.initialize`, and when.

What it returns is in distributed/test_installed.py.
"""

import functools
import inspect
import sys
import threading
from types import ModuleType

import deepspeed
import pytest

import ds_parity
from ds_parity.engine.initialize import without_keys
from ds_parity.errors import ConfigError

# Not under a name of this module: install() would find it there.
DEEPSPEEDS = [deepspeed.initialize]
KEYED = {"gradient_accumulation_passes": 4, "ds_parity": {"overshoot": "reset"}, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture(autouse=True)
def _nothing_is_left_installed():
    yield
    assert deepspeed.initialize in DEEPSPEEDS


@pytest.fixture
def importer(monkeypatch):
    """A module that has said `from deepspeed import initialize`."""
    module = ModuleType("importer")
    module.initialize = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "importer", module)
    return module


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach DeepSpeed's own function, which can't be made without ranks."""
    seen = []

    def initialize(args=None, model=None, optimizer=None, config=None, config_params=None):
        seen.append({"args": args, "model": model, "optimizer": optimizer, "config": config, "params": config_params})
        return "engine", None, None, None

    with monkeypatch.context() as patched:
        patched.setattr(deepspeed, "initialize", initialize)
        yield seen


def test_it_holds_for_a_block():
    with ds_parity.install():
        assert deepspeed.initialize not in DEEPSPEEDS
    assert deepspeed.initialize in DEEPSPEEDS


def test_it_holds_at_once_without_a_block():
    installation = ds_parity.install()
    assert deepspeed.initialize not in DEEPSPEEDS
    installation.uninstall()
    assert deepspeed.initialize in DEEPSPEEDS


def test_an_error_in_the_block_ends_it():
    with pytest.raises(ZeroDivisionError), ds_parity.install():
        raise ZeroDivisionError
    assert deepspeed.initialize in DEEPSPEEDS


@pytest.mark.parametrize("first", [0, 1])
def test_of_nested_ones_the_last_to_end_takes_it_back(first):
    both = [ds_parity.install(), ds_parity.install()]
    ours = deepspeed.initialize
    both[first].uninstall()
    both[first].uninstall()
    assert deepspeed.initialize is ours
    both[1 - first].uninstall()
    assert deepspeed.initialize in DEEPSPEEDS


def test_one_that_has_ended_may_begin_again():
    installation = ds_parity.install()
    for _ in range(2):
        installation.uninstall()
        with installation:
            assert deepspeed.initialize not in DEEPSPEEDS
        assert deepspeed.initialize in DEEPSPEEDS


def test_names_that_modules_hold_follow(importer):
    with ds_parity.install():
        assert importer.initialize is deepspeed.initialize
        assert importer.initialize not in DEEPSPEEDS
    assert importer.initialize in DEEPSPEEDS


def test_names_that_modules_took_meanwhile_go_back(importer):
    with ds_parity.install():
        importer.another = deepspeed.initialize
    assert importer.another in DEEPSPEEDS


def test_it_has_the_signature_of_deepspeeds():
    with ds_parity.install():
        assert inspect.signature(deepspeed.initialize) == inspect.signature(DEEPSPEEDS[0])
        assert deepspeed.initialize.__doc__ == DEEPSPEEDS[0].__doc__


def test_a_function_that_was_kept_is_deepspeeds_own_afterwards(calls):
    with ds_parity.install():
        kept = deepspeed.initialize
    assert kept(config=KEYED, optimizer="SGD")[0] == "engine"
    assert calls[0]["config"] is KEYED


def test_somebody_elses_wrapper_stays():
    installation = ds_parity.install()
    theirs = functools.partial(deepspeed.initialize, mpu=None)
    deepspeed.initialize = theirs
    installation.uninstall()
    try:
        assert deepspeed.initialize is theirs
    finally:
        deepspeed.initialize = DEEPSPEEDS[0]


@pytest.mark.parametrize("given", [{}, {"config": {"train_batch_size": 8}}, {"config_params": {"train_batch_size": 8}}])
def test_a_call_without_the_keys_passes_as_it_is(calls, given):
    with ds_parity.install():
        deepspeed.initialize(None, "model", **given)
    for name in ("config", "params"):
        assert calls[0][name] is given.get("config" if name == "config" else "config_params")
    assert calls[0]["model"] == "model"


@pytest.mark.parametrize("name", ["config", "config_params"])
def test_deepspeed_is_given_a_configuration_without_our_keys_by_the_name_that_it_had(name):
    given = dict(KEYED)
    assert without_keys({"model": "reference", name: given}, given) == {name: {"train_micro_batch_size_per_gpu": 1}}
    assert given == KEYED
    assert without_keys({"args": "with a file"}, given) == {}


def test_a_misspelt_key_is_refused():
    with ds_parity.install(), pytest.raises(ConfigError, match='did you mean "gradient_accumulation_passes"'):
        deepspeed.initialize(config={"gradient_accumulation_pases": 4})


def test_threads_that_install_and_uninstall_leave_nothing():
    def work():
        for _ in range(5):
            with ds_parity.install():
                assert deepspeed.initialize not in DEEPSPEEDS

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert deepspeed.initialize in DEEPSPEEDS
