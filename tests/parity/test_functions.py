"""Functions by their names: what can't be found is refused with what is wrong, before ranks are started if possible."""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_parity.config import load_config
from ds_parity.errors import ConfigError
from ds_parity.parity.probe import measure, start
from ds_parity.parity.running.functions import refuse_unknown, resolve, run_loop
from ds_parity.parity.verification import verify

READY = Path(__file__).parents[2] / "ds_configs" / "zero2_bf16.json"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package.module:build", r"'no_such_package\.module:build'.*No module named 'no_such_package'"),
        ("ds_parity.parity.data.model:no_such", r"'ds_parity\.parity\.data\.model:no_such'.*no attribute 'no_such'"),
        ("ds_parity.parity.data.model", r"'ds_parity\.parity\.data\.model'.*write package\.module:function"),
        ("", r"'' does not name a function"),
        (
            "ds_parity.parity.data.model:VOCAB",
            r"'ds_parity\.parity\.data\.model:VOCAB' is a int: it must be a function",
        ),
        (".model:build", r"'\.model:build'.*write package\.module:function"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused_with_what_is_wrong(name, says):
    with pytest.raises(ConfigError, match=says):
        resolve(name)


def a_generator(engine, micro_batches):
    for micro_batch in micro_batches:
        yield engine(micro_batch)


async def a_coroutine(engine, micro_batches):
    engine(micro_batches)


async def an_asynchronous_generator(engine, micro_batches):
    yield engine(micro_batches)


@pytest.mark.parametrize("name", ["a_generator", "a_coroutine", "an_asynchronous_generator"])
@pytest.mark.filterwarnings("ignore:coroutine")  # Python warns of one that never runs, as it should
def test_a_training_function_of_which_nothing_runs_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}' returned a \w+, of which nothing has run: it must train when"):
        run_loop(f"{__name__}:{name}", print, [])


@pytest.mark.parametrize("name", ["os:getcwd", f"{__name__}:three"])
def test_a_training_function_with_other_arguments_is_refused_before_it_is_called(name):
    with pytest.raises(ConfigError, match=rf"train '{name}' takes \(.*\), and is called with an engine and"):
        run_loop(name, print, [])


def with_its_epochs(function):
    @functools.wraps(function)
    def wrapped(engine, micro_batches):
        return function(engine, micro_batches, 3)

    return wrapped


@with_its_epochs
def decorated(engine, micro_batches, epochs):
    assert epochs == 3


def test_the_arguments_are_those_of_a_decorator():
    run_loop(f"{__name__}:decorated", print, [])


def three(engine, micro_batches, epochs):
    raise AssertionError("it was called")


@pytest.mark.parametrize("returned", [iter([1]), map(abs, [1]), [1], None])
def test_what_a_training_function_that_has_trained_returns_is_of_no_account(returned, monkeypatch):
    monkeypatch.setitem(sys.modules, "loops", ModuleType("loops"))
    sys.modules["loops"].train = lambda engine, micro_batches: returned
    run_loop("loops:train", print, [])


def test_what_a_training_function_returns_is_of_no_account_otherwise():
    called = []
    sys.modules["loops"] = ModuleType("loops")
    sys.modules["loops"].train = lambda engine, micro_batches: called.append((engine, micro_batches)) or [1]
    try:
        run_loop("loops:train", "engine", "batches")
    finally:
        del sys.modules["loops"]
    assert called == [("engine", "batches")]


class Engine:
    def destroy(self):
        pass


@pytest.mark.parametrize("returned", [None, 3, (it for it in ()), object()])
def test_a_subject_that_returns_no_engine_is_told_what_it_must_do(monkeypatch, returned):
    monkeypatch.setattr(measure.dist, "get_rank", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"subject 'loop:f' returned .* on rank 1, which is no engine.*return its eng"
    ):
        measure._refuse_unfit("loop:f", returned, True)


def test_a_subject_that_records_no_step_is_told_so(monkeypatch):
    monkeypatch.setattr(measure.dist, "get_rank", lambda: 0)
    with pytest.raises(ConfigError, match=r"subject 'loop:f' never called record on rank 0: it must run the scenario"):
        measure._refuse_unfit("loop:f", Engine(), False)
    measure._refuse_unfit("loop:f", Engine(), True)


def test_a_current_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="the current folder was removed"):
        refuse_unknown("ds_parity.parity.data.model:build_tiny")


def test_a_name_that_leads_to_a_function_gives_the_function():
    assert resolve("json:dumps") is json.dumps


@pytest.mark.parametrize("name", ["nowhere:build", "nowhere.module:build", "json", "", ".model:build", ":build"])
def test_a_package_that_no_rank_will_find_is_refused_in_the_same_words(name):
    with pytest.raises(ConfigError, match=r"does not name a function that can be imported .*package\.module:function"):
        refuse_unknown(name)


def test_a_package_is_found_where_ranks_look_and_is_not_imported(tmp_path, monkeypatch):
    """In the working directory, and in the folders that are given."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"loops_{name}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path / "here")
    before = list(sys.path)
    refuse_unknown("loops_here:train")
    refuse_unknown("loops_there:train", [str(tmp_path / "there")])
    with pytest.raises(ConfigError, match="loops_there"):
        refuse_unknown("loops_there:train")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    refuse_unknown("loops_there:train")
    assert sys.path == before
    assert not {"loops_here", "loops_there"} & sys.modules.keys()


def test_a_module_that_was_written_after_it_was_missed_is_found(tmp_path):
    """In a notebook, whose process lives on."""
    with pytest.raises(ConfigError, match="loops_later"):
        refuse_unknown("loops_later:train", [str(tmp_path / "later")])
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "loops_later.py").touch()
    refuse_unknown("loops_later:train", [str(tmp_path / "later")])


def test_a_module_that_this_process_made_by_hand_is_looked_for_as_ranks_do(tmp_path, monkeypatch):
    by_hand = ModuleType("loops_by_hand")
    monkeypatch.setitem(sys.modules, "loops_by_hand", by_hand)
    with pytest.raises(ConfigError, match="no module named 'loops_by_hand'"):
        refuse_unknown("loops_by_hand:train", [str(tmp_path)])
    (tmp_path / "loops_by_hand.py").touch()
    refuse_unknown("loops_by_hand:train", [str(tmp_path)])


def test_the_main_module_is_refused_because_ranks_have_another():
    with pytest.raises(ConfigError, match=r"the main module of ranks is another one: .* a module of its own"):
        refuse_unknown("__main__:train")


class TestNoRankIsStarted:
    """For a name that leads nowhere; and for one in a folder of the caller's, one is."""

    @pytest.fixture(autouse=True)
    def no_ranks(self, monkeypatch):
        def run_job(job, progress=None):
            raise AssertionError("ranks were started")

        for user in (verify, start):
            monkeypatch.setattr(user, "run_job", run_job)

    @pytest.mark.parametrize("option", ["model", "train"])
    def test_by_verify(self, option, tmp_path):
        with pytest.raises(ConfigError, match="nowhere:build"):
            verify.verify(load_config(READY), tmp_path, **{option: "nowhere:build"})

    @pytest.mark.parametrize("options", [{"subject": "nowhere:build"}, {"model": "nowhere:build"}])
    def test_by_probe(self, options, tmp_path):
        given = {"subject": "ds_parity.parity.subjects.candidate:run", "folder": tmp_path, **options}
        with pytest.raises(ConfigError, match="nowhere:build"):
            start.probe_config(load_config(READY), **given)

    def test_but_where_the_caller_says_to_look(self, tmp_path):
        (tmp_path / "loops_given.py").touch()
        with pytest.raises(AssertionError, match="ranks were started"):
            verify.verify(load_config(READY), tmp_path, import_from=(str(tmp_path),), train="loops_given:train")


def test_what_a_module_prints_as_it_is_imported_is_no_result(tmp_path, monkeypatch, capsys):
    (tmp_path / "speaks_when_imported.py").write_text("print('hello')\ndef build(seed): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    resolve("speaks_when_imported:build")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello\n")
