"""Metrics over ranks and passes, counters and monitors, as two ranks found them."""

import math
from itertools import pairwise, product

import pytest

from tests.distributed import cells
from tests.distributed.ranked_metrics import PATHS, samples

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[str(stage) for stage in cells.STAGES])
def stage(request):
    return request.param


@pytest.fixture(params=PATHS)
def path(request):
    """How sums over ranks are taken: on the host, or as an accelerator takes them."""
    return request.param


def direct(window):
    """The weighted means of all samples of all ranks and passes of a window, one by one."""
    pairs = {}
    for index, rank in product(range(3), range(2)):
        for name, (values, weights) in samples(window, index, rank).items():
            each = [values] if isinstance(values, float) else values.tolist()
            for_each = (
                [weights] if isinstance(values, float) else [1] * len(each) if weights is None else weights.tolist()
            )
            pairs.setdefault(name, []).extend(zip(each, for_each, strict=True))
    sums = {name: (math.fsum(v * w for v, w in held), sum(w for _, w in held)) for name, held in pairs.items()}
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


class TestMetrics:
    def test_are_the_means_of_all_samples_of_all_ranks_and_passes(self, two_ranks, stage, path):
        for found in two_ranks.results["recorded"][f"{stage} {path}"]:
            for window, metrics in enumerate(found):
                assert metrics == pytest.approx(direct(window), rel=1e-13)

    def test_are_the_same_on_every_rank_to_the_last_bit(self, two_ranks, stage, path):
        first, second = two_ranks.results["recorded"][f"{stage} {path}"]
        assert first == second

    def test_hold_what_they_are_there_for(self):
        """Uneven numbers of samples, a rank that is silent, a name that comes late and from one rank alone."""
        sizes = {
            len(samples(window, index, rank)["kl"][0]) for window, index, rank in product(range(2), range(3), (0, 1))
        }
        assert sizes == {0, 1, 2, 3, 4}
        assert "reward" not in samples(2, 0, 1)
        assert "a late one" not in {**direct(0), **direct(1)}
        assert "a late one" in direct(2)


class TestWhatAMetricCosts:
    def more(self, two_ranks, path, than, kind):
        counts = two_ranks.results["metric_collectives"][path]
        return {name: counts[kind][name] - count for name, count in counts[than].items() if counts[kind][name] != count}

    @pytest.mark.parametrize("kind", ["known", "silent"])
    def test_is_no_collective_and_no_read_once_its_name_is_known(self, two_ranks, path, kind):
        assert self.more(two_ranks, path, "none", kind) == {}

    @pytest.mark.parametrize("kind", ["first", "new"])
    def test_is_one_agreement_for_all_new_names_also_where_one_rank_alone_has_one(self, two_ranks, path, kind):
        more = self.more(two_ranks, path, "known", kind)
        # gathering objects reads their sizes, in the host's memory
        agreed = {"all_gather_object": 1, "item": 1, "__bool__": 1}
        assert more == ({**agreed, "isend": 1, "recv": 1} if path == "host" else agreed)

    def test_is_one_host_sum_and_one_sum_on_the_device_where_there_is_one(self, two_ranks):
        """Three passes, each with its exchange, and the step's sum; on a device the flag alone goes over the host."""
        host, device = (two_ranks.results["metric_collectives"][path]["known"] for path in PATHS)
        assert host["isend"] == 3 + 1
        assert {name: device[name] - count for name, count in host.items() if device[name] != count} == {
            "all_reduce": 1
        }


class TestWindowsWithoutAStep:
    def test_hold_their_metrics_and_leave_none(self, two_ranks, path):
        empty, whole, dropped, after = two_ranks.results["windows_without_a_step"][path]
        assert [record["skipped"] for record in (empty, whole, dropped, after)] == [True, False, True, False]
        assert empty["metrics"] == {"tokens 0": pytest.approx(2 / 3)}
        assert whole["metrics"] == dropped["metrics"] == {"tokens 3": pytest.approx(2 / 3)}
        assert after["metrics"] == {}

    def test_that_was_thrown_away_by_a_load_leaves_nothing_and_names_stay_agreed(self, two_ranks, path):
        found = two_ranks.results["thrown_away"][path]
        assert found["metrics"] == {"known": 2.0}
        assert found["agreed"] == [[["known"], ["known"]]] * 2


@pytest.mark.parametrize("lookahead", ["0", "3"])
def test_what_a_loop_records_of_a_stand_in_is_left_out(two_ranks, lookahead):
    """Rank 0 has passes of 1, 10 and 100; rank 1 only the first, and re-runs it twice."""
    record = two_ranks.results["stand_ins"][lookahead]
    assert (record["passes"], record["idle_passes"]) == (3, 2)
    mean = (1 + 10 + 100 + 1) / 4
    assert record["metrics"] == {"before": mean, "after": mean}


class TestCounters:
    def test_are_the_steps_the_rollouts_and_the_passes(self, two_ranks, stage):
        """A window of one pass, an empty one, one of two passes, one that finish() ends; then a fresh engine goes on."""
        clocks = two_ranks.results["counters"][stage]["clocks"]
        assert [clock[:4] for clock in clocks] == [
            [1, 6, 1, 0],
            [1, 8, 2, 0],
            [2, 12, 4, 0],
            [3, 14, 5, 0],
            [4, 20, 6, 0],
        ]
        assert [clock[6] for clock in clocks] == [1, 2, 3, 4, 5]

    def test_are_the_same_after_a_load(self, two_ranks, stage):
        found = two_ranks.results["counters"][stage]
        assert found["loaded"] == found["clocks"][3][:5]

    def test_lr_is_what_the_next_step_is_taken_with(self, two_ranks, stage):
        clocks = two_ranks.results["counters"][stage]["clocks"]
        for before, after in pairwise(clocks):
            assert before[4] == after[5]
        assert [clock[5] for clock in clocks] == pytest.approx([0.025, 0.025, 0.025, 0.0275, 0.03])

    def test_the_norm_is_the_last_steps(self, two_ranks, stage):
        norm, recorded = two_ranks.results["counters"][stage]["norms"]
        assert norm == recorded
        assert norm > 0

    def test_an_overflow_is_a_step_that_was_skipped_and_its_rollouts_count(self, two_ranks):
        found = two_ranks.results["overflows"]
        assert found["clocks"] == [
            [1, 1, 4, 2],
            [2, 2, 8, 4],
            [3, 3, 12, 6],
            [4, 4, 16, 8],
            [5, 5, 20, 10],
            [6, 5, 24, 12],
        ]
        assert [record["skipped"] for record in found["records"]] == [True] * 5 + [False]


class TestThroughput:
    def test_is_rollouts_over_the_seconds_that_were_measured(self, two_ranks):
        """The timer starts after two steps. An empty window and one that finish() ends are counted with the next step."""
        found = two_ranks.results["throughput"]
        assert found["held"] == [4, 4, 6, 4, 4, 4, 2, 10]
        assert found["rollouts"] == pytest.approx(6 + 4 + 4 + 4 + 2 + 10)
        said = [(6, 6), (4, 10), (4 + 4, 18), (2 + 10, 30)]
        assert found["said"] == [pytest.approx(line, rel=1e-2) for line in said]

    def test_is_unknown_before_it_was_measured_or_where_it_is_off(self, two_ranks):
        found = two_ranks.results["throughput"]
        assert found["early"] == -math.inf
        assert found["off"] == [0, -math.inf]


class TestMonitors:
    """Windows of 6, 4, 4, 4 and 2 rollouts; the third is empty, the last settled by finish()."""

    AT = (6, 10, 14, 18, 20)

    def events(self, records, key):
        return [[x, record[key]] for x, record in zip(self.AT, records, strict=True) if record[key] is not None]

    def test_csv_holds_every_step_once_over_rollouts(self, two_ranks, stage):
        found = two_ranks.results["monitors"][stage]
        files, records = found["csv"], found["records"]
        assert [record["rollouts"] for record in records] == [6, 4, 4, 4, 2]
        assert files["Train_Samples_train_loss"] == [["step", "train_loss"], *self.events(records, "loss")]
        assert len(files["Train_Samples_train_loss"]) == 1 + 4
        assert files["Train_Samples_rollouts"] == [["step", "rollouts"], *self.events(records, "rollouts")]
        assert files["Train_Samples_passes"] == [["step", "passes"], *self.events(records, "passes")]
        assert "Train_Samples_loss_scale" not in files

    def test_csv_holds_the_metrics_from_where_they_appear(self, two_ranks, stage):
        found = two_ranks.results["monitors"][stage]
        for name, head, first in (("reward/mean", "mean", 0), ("late", "late", 3)):
            lines = [[x, r["metrics"][name]] for x, r in zip(self.AT[first:], found["records"][first:], strict=True)]
            assert found["csv"][f"Train_Metrics_{name.replace('/', '_')}"] == [["step", head], *lines]

    def test_lr_is_deepspeeds_own_as_it_stands_once_so_many_rollouts_were_consumed(self, two_ranks, stage):
        found = two_ranks.results["monitors"][stage]
        stepped = [at for at, record in enumerate(found["records"]) if not record["skipped"]]
        lines = [[self.AT[at], found["rates"][at]] for at in stepped]
        assert found["csv"]["Train_Samples_lr"] == [["step", "lr"], *lines]
        for before, after in zip(found["rates"], found["records"][1:], strict=False):
            assert [before] == after["lr"]

    def test_tensorboard_holds_the_same_in_its_fp32(self, two_ranks, stage):
        found = two_ranks.results["monitors"][stage]
        board = found["tensorboard"]
        assert {tag.replace("/", "_") for tag in board} == set(found["csv"])
        for tag, events in board.items():
            lines = found["csv"][tag.replace("/", "_")][1:]
            assert [x for x, _ in events] == [x for x, _ in lines]
            assert [y for _, y in events] == pytest.approx([y for _, y in lines], rel=2**-23)

    def test_of_uniform_windows_hold_every_line_of_the_bare_engines_and_three_files_more(self, two_ranks):
        found = two_ranks.results["monitors_beside_bare"]
        assert {name: found["ours"][name] for name in found["bare"]} == found["bare"]
        more = {f"Train_Samples_{name}" for name in ("train_loss", "rollouts", "passes")}
        assert set(found["ours"]) - set(found["bare"]) == more
        assert [x for x, _ in found["ours"]["Train_Samples_train_loss"][1:]] == [6, 12, 18, 24]

    def test_the_loss_scale_is_the_scalers_own_and_not_the_one_that_corrects(self, two_ranks):
        found = two_ranks.results["overflows"]
        scales = [record["loss_scale"] for record in found["records"]]
        assert scales == [2.0**23, 2.0**22, 2.0**21, 2.0**20, 2.0**19, 2.0**19]
        lines = [[4 * (at + 1), scale] for at, scale in enumerate(scales)]
        assert found["csv"]["Train_Samples_loss_scale"] == [["step", "loss_scale"], *lines]
