"""Which DeepSpeed is refused, where, and with what words; and what is said of one that nobody has read."""

import configparser
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config import rewrite
from ds_parity.config.features import Wanted
from ds_parity.config.releases import read
from ds_parity.config.versions import OLDEST
from ds_parity.engine import initialize
from ds_parity.engine.internals import guard_list, guards, installed, unread
from ds_parity.engine.internals.adagrad import own_adagrad
from ds_parity.engine.internals.broadcast import any_shape_is_sent
from ds_parity.engine.internals.guard_list import Changed
from ds_parity.engine.internals.guards import ENGINE, TIMER, ZERO3, ZERO12
from ds_parity.engine.ranks import agreement
from ds_parity.errors import ConfigError, RankDesyncError
from tests.older_refusals import is_older

ROOT = Path(__file__).parents[2]
FAKE = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: {version!r} if name == "deepspeed" else real(name)
import ds_parity
print("light")
try:
    ds_parity.initialize
except ds_parity.ConfigError as error:
    print(error)
else:
    print("taken")
import sys
print("deepspeed" in sys.modules)
"""


def imported_with(version):
    """What a process says that imports ds_parity, then the engine, with this version of DeepSpeed."""
    script = FAKE.format(version=version)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)


def test_an_older_version_is_refused_at_import_of_the_engine_before_deepspeed_is_imported():
    light, refusal, reached = imported_with("0.17.6").stdout.splitlines()
    assert light == "light"
    assert "deepspeed 0.17.6 is installed" in refusal
    assert "supports 0.18.4 and later" in refusal
    assert "pip install" in refusal
    assert reached == "False"


@pytest.mark.skipif(is_older(installed.installed()), reason="guards find an older release changed, whatever its name")
def test_a_version_that_nobody_has_read_is_taken_with_a_warning_after_its_guards_ran():
    said = imported_with("0.21.0")
    assert "taken" in said.stdout.splitlines()  # among what DeepSpeed says of the accelerator
    assert "deepspeed 0.21.0 is installed, which ds_parity was never run with" in said.stderr
    assert "Guards find nothing changed" in said.stderr
    assert "`ds-parity verify`" in said.stderr


@pytest.mark.parametrize(
    "version",
    ["0.18.4", "0.18.7", "0.19.0rc1", "0.19.7", "0.19.8rc1", "0.19.8+abc123", "0.19.8.dev0", "0.20", "1.0", "nightly"],
)
def test_no_version_from_the_oldest_on_is_refused(version):
    installed.check_deepspeed(version)


@pytest.mark.parametrize("version", ["0.9.5", "0.17.6", "0.18.3", "0.18.3.post1", "0.18.4rc1", "0.18.4.dev0"])
def test_what_comes_before_the_oldest_is_refused(version):
    with pytest.raises(ConfigError, match="is installed"):
        installed.check_deepspeed(version)


def test_the_metadata_says_the_same():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    assert f"deepspeed>={OLDEST}" in metadata["options"]["install_requires"].splitlines()


@pytest.fixture
def having(monkeypatch):
    """Make another version the installed one, with what guards find in it."""

    def have(version, *changes):
        for module in (installed, unread, initialize):
            monkeypatch.setattr(module, "installed", lambda: read(version))
        monkeypatch.setattr(unread, "changed", lambda: list(changes))
        unread.found.cache_clear()

    yield have
    unread.found.cache_clear()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19.8", False),
        ("0.18.4", False),
        ("0.19.8rc1", True),
        ("0.19.8.dev0", True),
        ("0.19.7", True),
        ("0.19.8+cu12", True),  # whoever has built it may have changed it
        ("0.19.8.post1", True),
        ("0.19.8-1", True),
        ("0.19.8.post1.dev3", True),
        ("0.20.0", True),
        ("nightly", True),
    ],
)
def test_a_version_is_read_or_unread(version, expected, having):
    having(version)
    assert installed.unread() is expected


IN_ZERO3 = Changed("ZeRO 3 is new.", ZERO3, "internals/zero3.py")
ON_STAGE = {stage: {"zero_optimization": {"stage": stage}} for stage in range(4)}


def test_only_what_a_guard_finds_changed_is_refused(having):
    having("0.21.0", IN_ZERO3)
    assert [list(unread.refused(ON_STAGE[stage])) for stage in (0, 1, 2)] == [[], [], []]
    (fault,) = unread.refused(ON_STAGE[3])
    assert 'deepspeed = "0.21.0"' in str(fault)
    assert "ZeRO 3 is new." in str(fault)
    assert "install deepspeed==0.19.8" in str(fault)
    with pytest.raises(ConfigError, match="ZeRO 3 is new"):
        initialize._refuse_by_release(ON_STAGE[3])
    initialize._refuse_by_release(ON_STAGE[2])


def test_a_version_that_was_read_is_not_guarded_again(having):
    having("0.19.8", IN_ZERO3)
    assert not list(unread.refused(ON_STAGE[3]))


@pytest.mark.parametrize(
    ("owner", "used_in", "config", "expected"),
    [
        (ZERO12, "internals/zero12.py", ON_STAGE[1], True),
        (ZERO12, "internals/base.py", ON_STAGE[3], False),
        (ENGINE, "internals/zero12.py and zero3.py", ON_STAGE[3], True),
        (ENGINE, "internals/zero12.py and zero3.py", ON_STAGE[0], False),
        (ENGINE, "internals/plain.py", ON_STAGE[0], True),
        (ENGINE, "internals/plain.py", {**ON_STAGE[0], "bf16": {"enabled": True}}, False),
        (ENGINE, "driver.py", ON_STAGE[2], True),
        (ENGINE, "callers_driver.py", ON_STAGE[2], False),
        (TIMER, "internals/counters.py", ON_STAGE[2], False),
        (ENGINE, "internals/monitor.py", ON_STAGE[2], False),
        (ZERO3, "internals/zero3.py", {"zero_optimization": {"stage": "auto"}}, True),
        (ENGINE, "internals/broadcast.py", ON_STAGE[2], False),
        (ZERO12, "internals/adagrad.py", ON_STAGE[2], False),
        (ZERO12, "internals/adagrad.py and zero12.py", ON_STAGE[2], True),
    ],
)
def test_a_change_touches_what_relies_on_it(owner, used_in, config, expected):
    assert unread.touches(Changed("", owner, used_in), Wanted(config)) is expected


GIVEN_UP = ((DeepSpeedEngine, "_broadcast_model"), (DeepSpeedZeroOptimizer, "initialize_optimizer_states"))


@pytest.mark.parametrize(("owner", "name"), GIVEN_UP)
def test_a_release_without_a_name_that_few_models_need_is_taken(owner, name, having, monkeypatch):
    having("0.21.0")
    monkeypatch.delattr(owner, name)
    with any_shape_is_sent(), own_adagrad():
        assert not hasattr(owner, name)
    assert not hasattr(owner, name)


def test_a_release_that_sends_weights_in_another_way_is_left_as_it_is(having):
    having("0.21.0")
    sends = DeepSpeedEngine._broadcast_model
    with any_shape_is_sent():
        assert DeepSpeedEngine._broadcast_model is not sends
    having("0.21.0", Changed("", ENGINE, "internals/broadcast.py"))
    with any_shape_is_sent():
        assert DeepSpeedEngine._broadcast_model is sends


def test_so_is_one_that_makes_states_in_another_way(having):
    """What it steps in the place of an Adagrad is seen then, and refused."""
    makes = DeepSpeedZeroOptimizer.initialize_optimizer_states
    having("0.21.0", Changed("", ZERO12, "internals/adagrad.py"))
    with own_adagrad():
        assert DeepSpeedZeroOptimizer.initialize_optimizer_states is makes


def test_the_warning_names_what_is_unverified_and_what_changed(having, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    having("0.21.0", IN_ZERO3)
    with caplog.at_level(logging.WARNING, "ds_parity"):
        unread.say()
    (record,) = caplog.records
    said = record.getMessage()
    assert "deepspeed 0.21.0 is installed" in said
    assert "0.18.4, 0.18.9" in said
    assert "\n  ZeRO 3 is new." in said
    assert "is refused" in said


def test_ranks_with_two_releases_are_told_apart_before_an_engine_is_built(monkeypatch):
    extended = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 8}
    told = []
    for version in ("0.19.3", "0.19.8"):
        monkeypatch.setattr(initialize.deepspeed, "__version__", version)
        told.append(dict(agreement._flat(initialize._alike(rewrite(extended, 2)))))

    def gather(_, value):
        theirs = told[1] if isinstance(value, dict) else (frozenset({0, 1}), b"another digest", 0)
        return {0: told[0] if isinstance(value, dict) else value, 1: theirs}

    monkeypatch.setattr(agreement.Asked, "gather", gather)
    with pytest.raises(RankDesyncError, match=r"the DeepSpeed that is installed \(rank 0 has .0.19.3.; "):
        agreement.agree(agreement.Asked(None, frozenset({0, 1})), initialize._alike(rewrite(extended, 2)))


@pytest.mark.parametrize("error", [OSError("could not get source code"), SyntaxError("invalid syntax")])
def test_a_source_that_cannot_be_read_counts_as_changed(error, monkeypatch):
    """It is told by the first rank alone, which must not end by it while the others go on."""

    def unreadable(*_):
        raise error

    for name in ("_text", "_methods"):
        monkeypatch.setattr(guards, name, unreadable)
    said = guard_list.changed()
    assert len(said) >= len(guard_list.GUARDS) - sum(bool(guard.since) for guard in guard_list.GUARDS)
    assert all("can't be read" in one.says for one in said)


@pytest.mark.parametrize(("version", "rank"), [("0.19.8", "0"), ("0.21.0", "1")])
def test_nothing_is_said_of_a_version_that_was_read_nor_on_another_rank(version, rank, having, caplog, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    having(version)
    with caplog.at_level(logging.WARNING, "ds_parity"):
        unread.say()
    assert not caplog.records
