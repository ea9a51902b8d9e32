"""A set of ranks runs each registered call once, and says which calls nobody registered."""

import json
from types import SimpleNamespace

import pytest

from ds_parity.config import versions
from ds_parity.config.faults import Fault, refuse
from ds_parity.config.releases import release
from ds_parity.errors import ConfigError, DsParityError, HarnessError, WindowError
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.launch import Call, Job
from ds_parity.parity.running.scenario import Scenario
from tests import rank_sets, starts
from tests.distributed.conftest import pytest_collection_modifyitems
from tests.rank_sets import RankSet

SCENARIO = Scenario("one", {"gradient_accumulation_passes": 4})


def task(folder):
    """A task of this module."""


def another(folder, saved):
    """A task that goes on from what the first one has left."""


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """A function that launches a set without any rank: the result of a call is the call."""
    jobs = []

    def run(job):
        jobs.append(job)
        return list(job.calls)

    monkeypatch.setattr(starts, "run_job", run)
    return lambda rank_set, *earlier: (rank_set.launch(tmp_path, *earlier), jobs[-1])


def test_a_task_is_found_by_itself_and_has_a_folder_of_its_own(launched, tmp_path):
    pair = RankSet(2)
    assert pair(task) is task
    result, job = launched(pair)
    assert result.of(task).function == "tests.test_rank_sets:task"
    assert result.of(task).arguments == {"folder": str(result.folder_of(task))}
    assert result.folder_of(task).parent == tmp_path
    assert (job.ranks, job.import_from) == (2, (rank_sets.ROOT,))


def test_what_several_modules_ask_for_runs_once_in_the_order_of_registration(launched):
    pair = RankSet(2)
    for _ in range(2):
        pair.train(SCENARIO, "torch", "ds_parity")
        pair.probe(SCENARIO)
        pair.call(task, folder="here")
        pair(task)
    _, job = launched(pair)
    assert [one.function.rpartition(":")[2] for one in job.calls] == [
        *["run_scenario"] * 2,
        "probe_scenario",
        "task",
        "task",
    ]


def test_an_errand_is_the_same_job_and_its_results_are_read_the_same_way(launched, tmp_path):
    pair = RankSet(2)
    assert pair.errand(tmp_path) is None
    pair(task)
    _, job = launched(pair)
    errand = pair.errand(tmp_path)
    assert (errand.function, errand.arguments) == ("tests.starts:run_in_parts", (job, starts.MOST_STARTS))
    assert pair.launched(tmp_path, [7]).of(task) == 7


def test_on_an_older_release_ranks_are_started_behind_each_call_that_it_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_sets, "installed", lambda: release("0.18.4"))
    pair = RankSet(2)
    pair(task)
    _, most = pair.errand(tmp_path).arguments
    assert most == rank_sets.STARTS_ON_OLDER > starts.MOST_STARTS


class TestRanksThatEndInACall:
    """The second rank fails in the first and in the third task; the first one has finished the third by then."""

    def test_cost_no_set_that_goes_on_its_other_tasks(self, monkeypatch, tmp_path):
        failed = HarnessError("rank 1 failed")
        monkeypatch.setattr(rank_sets, "run_in_parts", lambda job, most: [failed] * len(job.calls))
        pair, four = RankSet(2), RankSet(4)
        pair(task)
        earlier = pair.launch(tmp_path / "pair")
        four.after(saved=task)(another)
        monkeypatch.setattr(rank_sets, "run_in_parts", lambda job, most: list(job.calls))
        result = four.launch(tmp_path / "four", earlier.folder)
        assert result.of(another).arguments["saved"].startswith(str(tmp_path / "pair"))

    @pytest.fixture
    def run(self, monkeypatch):
        """Runs jobs of numbered calls, and gives the numbers that each start was to run."""
        begun = []

        def run(job):
            numbers = [call.arguments["number"] for call in job.calls]
            begun.append(numbers)
            job.folder.mkdir(parents=True)
            fails = next((at for at, number in enumerate(numbers) if number in (0, 2)), None)
            for rank in range(2):
                done = len(numbers) if fails is None else fails + (rank == 0 and numbers[fails] == 2)
                lines = [{"started": 0}, *({"finished": at, "result": numbers[at]} for at in range(done))]
                (job.folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            if fails is not None:
                raise HarnessError(f"rank 1 failed in {numbers[fails]}")
            return numbers

        monkeypatch.setattr(starts, "run_job", run)
        return begun

    def test_cost_no_other_call_its_answer(self, run, tmp_path):
        calls = tuple(Call(f"call {number}", "x:y", {"number": number}) for number in range(5))
        results = starts.run_all(Job(calls, tmp_path / "ranks", 2))
        assert [str(one) for one in results] == ["rank 1 failed in 0", "1", "rank 1 failed in 2", "3", "4"]
        assert run == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [3, 4]]

    def test_cost_no_other_call_its_answer_where_calls_are_dealt_out(self, run, tmp_path):
        calls = tuple(Call(f"call {number}", "x:y", {"number": number}) for number in range(50))
        results = starts.run_in_parts(Job(calls, tmp_path / "ranks", 2))
        assert [str(one) for one in results] == [
            *["rank 1 failed in 0", "1", "rank 1 failed in 2"],
            *map(str, range(3, 50)),
        ]
        assert sorted(run, key=lambda numbers: numbers[0])[1] == list(range(1, 50, 2))
        assert {folder.name for folder in tmp_path.iterdir()} == {"ranks", "ranks-1", "ranks-2", "ranks-beside-1"}

    @pytest.mark.parametrize(("calls", "ranks"), [(starts.WORTH_PARTS - 1, 2), (50, 4)])
    def test_are_one_set_where_calls_are_few_or_ranks_many(self, run, tmp_path, calls, ranks):
        calls = tuple(Call(f"call {number}", "x:y", {"number": number + 5}) for number in range(calls))
        assert starts.run_in_parts(Job(calls, tmp_path / "ranks", ranks)) == [*range(5, 5 + len(calls))]
        assert len(run) == 1

    def test_are_not_started_for_every_call(self, run, tmp_path):
        calls = tuple(Call(f"call {number}", "x:y", {"number": 0}) for number in range(50))
        results = starts.run_all(Job(calls, tmp_path / "ranks", 2))
        assert [str(one) for one in results] == ["rank 1 failed in 0"] * 50
        assert len(run) == starts.MOST_STARTS

    def test_that_end_badly_behind_the_last_call_say_so(self, monkeypatch, tmp_path):
        def run(job):
            job.folder.mkdir(parents=True)
            for rank in range(2):
                (job.folder / f"rank{rank}.jsonl").write_text('{"started": 0}\n{"finished": 0, "result": 7}\n')
            raise HarnessError("a rank ended with code 1")

        monkeypatch.setattr(starts, "run_job", run)
        with pytest.raises(HarnessError, match="ended with code 1"):
            starts.run_all(Job((Call("a call", "x:y"),), tmp_path / "ranks", 2))

    def test_that_never_began_are_not_started_again(self, monkeypatch, tmp_path):
        begun = []

        def run(job):
            begun.append(job)
            raise HarnessError("there is no launcher")

        monkeypatch.setattr(starts, "run_job", run)
        with pytest.raises(HarnessError, match="there is no launcher"):
            starts.run_all(Job((Call("a call", "x:y"),), tmp_path / "ranks", 2))
        assert len(begun) == 1

    def test_the_test_of_the_call_says_why_and_no_other(self, monkeypatch, tmp_path):
        monkeypatch.setattr(rank_sets, "run_in_parts", lambda job, most: [HarnessError("rank 1 failed in 'task'"), 7])
        pair = RankSet(2)
        pair(task)
        pair.call(another, saved="here")
        result = pair.launch(tmp_path)
        assert result.of(another, saved="here") == 7
        with pytest.raises(HarnessError, match="rank 1 failed in 'task'"):
            result.of(task)


def test_a_task_that_forks_runs_before_the_others(launched):
    pair = RankSet(2)
    pair.train(SCENARIO, "torch")
    pair.first(task)
    assert launched(pair)[1].calls[0].function.endswith(":task")


def test_a_task_goes_on_from_the_folder_of_an_earlier_set(launched):
    pair, four = RankSet(2), RankSet(4)
    pair(task)
    four.after(saved=task)(another)
    earlier, _ = launched(pair)
    result, _ = launched(four, earlier.folder)
    assert (pair.goes_on, four.goes_on) == (False, True)
    assert result.of(another).arguments["saved"] == str(earlier.folder_of(task))


class TestASlowTest:
    """It waits for no set of the others."""

    def test_that_names_one_is_refused(self):
        for fixtures, marks in (["two_ranks"], []), ([], [pytest.mark.waits_for("one_rank").mark]):
            with pytest.raises(pytest.UsageError, match=r"is slow, and waits for .*register its task with a set"):
                pytest_collection_modifyitems([self.item(fixtures, marks, slow=True)])

    def test_with_a_set_at_length_is_taken_and_so_is_one_that_is_not_slow(self):
        pytest_collection_modifyitems([self.item(["two_ranks_at_length"], [], slow=True)])
        pytest_collection_modifyitems([self.item(["two_ranks"], [], slow=False)])

    @staticmethod
    def item(fixtures, marks, *, slow):
        return SimpleNamespace(
            fixturenames=fixtures, iter_markers=lambda name: marks, get_closest_marker=lambda name: slow, nodeid="one"
        )


class TestWhatTheTableOfReleasesRefuses:
    """A call that an older DeepSpeed is refused for: its tests are skipped with the reason, and no rank ends in it."""

    WHY = r"zero_optimization\.contiguous_gradients = false: DeepSpeed 0\.18\.4 is wrong on ZeRO 1 and 2 without"

    @pytest.fixture
    def with_release(self, monkeypatch):
        """A function that has the set believe that another DeepSpeed is installed."""
        return lambda name: monkeypatch.setattr(rank_sets, "installed", lambda: name and release(name))

    @pytest.fixture
    def ran(self, monkeypatch, tmp_path):
        """A function that runs a set's calls in this process; the result of the one task that it registers."""

        def run_in_parts(job, most):
            return [resolve(call.function)(**call.arguments) for call in job.calls]

        monkeypatch.setattr(rank_sets, "run_in_parts", run_in_parts)

        def run(task):
            pair = RankSet(2)
            pair(task)
            return pair.launch(tmp_path).of(task)

        return run

    def test_is_skipped_on_an_older_release(self, with_release, ran):
        with_release("0.18.4")
        with pytest.raises(pytest.skip.Exception, match=self.WHY):
            ran(scattered)
        with pytest.raises(pytest.skip.Exception, match=r"coalesce_grad_reduction\(\): DeepSpeed 0\.18\.4 is wrong on"):
            ran(coalesced)

    @pytest.mark.parametrize("newest", ["0.19.8", "0.20.0", None])
    def test_is_an_error_on_the_newest_one(self, with_release, ran, newest):
        with_release(newest)
        with pytest.raises(ConfigError, match="contiguous_gradients"):
            ran(scattered)

    @pytest.mark.parametrize("task", ["refused_by_another_rule", "refused_by_both", "refused_by_a_window"])
    def test_is_told_from_every_other_refusal(self, with_release, ran, task):
        with_release("0.18.4")
        with pytest.raises(DsParityError, match="another"):
            ran(globals()[task])

    def test_changes_no_result(self, with_release, ran):
        with_release("0.18.4")
        assert ran(answered) == {"seen": [3, 7, 11]}

    def test_leaves_calls_as_they_are_on_the_newest_one(self, with_release, launched):
        pair = RankSet(2)
        pair(task)
        with_release("0.19.8")
        assert launched(pair)[1].calls[0].function == "tests.test_rank_sets:task"


SCATTERED = {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}


def scattered(folder):
    """A task whose engine the table refuses on 0.18.4."""
    refuse(versions.refused(SCATTERED, release("0.18.4")))


def coalesced(folder):
    """A task that calls what the table refuses on 0.18.4."""
    raise ConfigError(
        f"coalesce_grad_reduction(): {versions.refused_by_call('coalesce_grad_reduction()', release('0.18.4'), 'cpu')}"
    )


def refused_by_another_rule(folder):
    """A task that is refused on every release."""
    refuse([Fault("stage", 7, "there is another rule", "choose 3")])


def refused_by_both(folder):
    """A task with two faults, of which one is not of the table."""
    of_table = versions.refused(SCATTERED, release("0.18.4"))
    refuse([Fault("stage", 7, "there is another rule", "choose 3"), *of_table])


def refused_by_a_window(folder):
    """A task that fails with the words of the table in another kind of error."""
    raise WindowError(
        f"another error: {versions.refused_by_call('coalesce_grad_reduction()', release('0.18.4'), 'cpu')}"
    )


def answered(folder):
    """A task with a result."""
    return {"seen": [3, 7, 11]}


def test_two_scenarios_of_one_name_are_refused():
    pair = RankSet(2)
    pair.train(SCENARIO, "torch")
    with pytest.raises(ValueError, match="one: torch is registered already"):
        pair.train(Scenario("one", {"gradient_accumulation_passes": 8}), "torch")


def test_a_scenario_of_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="one takes 2 ranks, not 4"):
        RankSet(4).train(SCENARIO, "torch")


def test_what_nobody_registered_is_named(launched):
    result, _ = launched(RankSet(2))
    with pytest.raises(LookupError, match=r"test_rank_sets\.task was not run: register it"):
        result.of(task)
    with pytest.raises(LookupError, match="one: torch was not run"):
        result.trace(SCENARIO, "torch")
