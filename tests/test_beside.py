"""What runs beside the tests: errands in their order, what each comes to, and that nothing outlives the tests."""

import time
from types import SimpleNamespace

import psutil
import pytest

from ds_parity.errors import HarnessError
from tests import beside
from tests.beside import Beside, Errand, begun_with_the_session, named_by, wanted


@pytest.fixture
def running(tmp_path):
    """A function that begins errands, given by name, as a context."""

    def begin(needs=(), **errands):
        made = Beside(tmp_path)
        made.errands.update(errands)
        made.needs.update(needs)
        return made

    return begin


def test_what_an_errand_returns_or_raises_is_what_its_name_stands_for(running):
    with running(sum=Errand("operator:add", (1, 2)), failing=Errand("operator:truediv", (1, 0))) as begun:
        assert begun.result("sum") == begun.result("sum") == 3
        with pytest.raises(ZeroDivisionError):
            begun.result("failing")


def test_those_behind_one_that_ends_the_process_are_errors_and_no_wait(running):
    with running(
        {"ends": ["before"], "behind": ["ends"]},
        before=Errand("operator:add", (1, 2)), ends=Errand("os:_exit", (3,)), behind=Errand("os:getpid"),
    ) as begun:  # fmt: skip
        assert begun.result("before") == 3
        for name in ("ends", "behind"):
            with pytest.raises(HarnessError, match=f"has ended before '{name}'"):
                begun.result(name)


def test_two_run_at_a_time_and_one_that_needs_another_behind_it(running, tmp_path):
    """The second place is kept by the one that waits, and the third begins behind it."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    turn = str(folder / "turn")
    waits = ["sh", "-c", f"until test -e {turn}; do sleep 0.02; done"]
    with running(
        {"moves": ["waits"]},
        waits=Errand("subprocess:check_call", (waits,)),
        moves=Errand("os:rename", (turn, turn + "ed")),
        makes=Errand("pathlib:Path.touch", (folder / "last",)),
    ) as begun:
        time.sleep(0.5)
        assert not (folder / "last").exists()
        (folder / "turn").touch()
        assert begun.result("waits") == 0
        assert begun.result("moves") is begun.result("makes") is None
    assert (folder / "turned").exists()


def test_two_run_side_by_side(running, tmp_path):
    left, right = tmp_path / "left", tmp_path / "right"
    meets = "touch {0}; until test -e {1}; do sleep 0.02; done"
    both = [["timeout", "20", "sh", "-c", meets.format(*pair)] for pair in ((left, right), (right, left))]
    with running(first=Errand("subprocess:call", (both[0],)), second=Errand("subprocess:call", (both[1],))) as begun:
        assert begun.result("first") == begun.result("second") == 0


def test_nothing_is_left_where_nobody_waits(running):
    """Neither the process nor what it has started."""
    sleeper = Errand("subprocess:run", (["sleep", "600.25"],))
    with running(pid=Errand("os:getpid"), sleeps=sleeper) as begun:
        child = psutil.Process(begun.result("pid"))
        limit = time.monotonic() + 20
        while not child.children():
            assert time.monotonic() < limit
            time.sleep(0.02)
        started = [child, *child.children()]
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_a_test_waits_for_its_arguments_and_for_what_marks_name():
    marks = {"waits_for": [pytest.mark.waits_for("marked").mark], "slow": []}
    item = SimpleNamespace(fixturenames=["argument"], iter_markers=marks.get)
    assert named_by(item) == ["argument", "marked"]
    assert named_by(SimpleNamespace(iter_markers=lambda name: [])) == []


class TestWhatIsBegun:
    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        monkeypatch.setattr(beside, "BEGUN", {})
        for name in ("first", "second", "third"):
            needs = {"third": ["first"]}.get(name, [])
            begun_with_the_session(name, lambda needs=needs: needs)(
                lambda folder, folder_of: Errand("os:listdir", (str(folder), str(folder_of("first"))))
            )

    def test_is_what_tests_name_and_what_that_needs_in_the_order_of_registration(self):
        assert wanted(["tmp_path", "second"]) == ["second"]
        assert wanted(["third", "tmp_path"]) == ["first", "third"]
        assert wanted(["third", "second"]) == ["first", "second", "third"]
        assert wanted([]) == []

    def test_has_a_folder_of_its_own_and_knows_those_of_others(self, tmp_path):
        made = Beside(tmp_path, ["third"])
        assert list(made.errands) == ["third"]
        assert made.errands["third"].arguments == (str(made.folder_of("third")), str(made.folder_of("first")))
        assert made.folder_of("third").is_dir()
