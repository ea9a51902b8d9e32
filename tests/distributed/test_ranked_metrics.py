"""Metrics over ranks and passes, as two ranks sum them."""

import math
from itertools import product
from threading import Thread
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.record import metrics
from tests.distributed.cells import STAGES, config
from tests.distributed.counting import Counting
from tests.distributed.engines import Batch, build, forward, from_all, meter_of, one_pass
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

PATHS = ("host", "device")


@pytest.fixture(params=PATHS)
def path(request):
    """How sums over ranks are taken: on the host, or as an accelerator takes them."""
    return request.param


def over(engine, path):
    """Sum on the host, or as an accelerator does; both run on the same tensors here."""
    meter_of(engine)._on_device = path == "device"
    return engine


def samples(window, index, rank):
    """What a rank records in a pass: name to (values, weights), other numbers of samples everywhere."""
    generator = torch.Generator().manual_seed(100 * window + 10 * index + rank)
    count = (window + 2 * index + 3 * rank) % 5
    values = torch.randn(count, generator=generator)
    results = {}
    if (window, rank) != (2, 1):
        results["reward"] = (values, None)
        results["kl"] = (values * 2, torch.randint(0, 9, (count,), generator=generator))
    if rank == 0:
        results["entropy"] = (float(values.sum()), count)
    if rank == 1 and window >= 2:
        results["a late one"] = (values + 1, None)
    return results


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
    sums = {name: (math.fsum(v * w for v, w in of_name), sum(w for _, w in of_name)) for name, of_name in pairs.items()}
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


@on_two_ranks
def recorded(folder):
    """Five windows of three passes, some of them with uneven rollouts; the third is one in which a rank is silent."""
    rank, results = dist.get_rank(), {}
    for stage in STAGES:
        for path in PATHS:
            engine = over(build(config(stage, passes=3 * dist.get_world_size())), path)
            means = []
            for window in range(5):
                for index in range(3):
                    loss = forward(engine, index)
                    given = samples(window, index, rank)
                    for name, (values, weights) in given.items():
                        engine.record(name, values, weights)
                    engine.backward(loss, rollouts=1)
                    engine.step()
                means.append(engine.last_step.metrics)
            results[f"{stage} {path}"] = from_all(means)
    return results


class TestMetrics:
    def test_are_the_means_of_all_samples_of_all_ranks_and_passes(self, two_ranks, stage, path):
        for result in two_ranks.of(recorded)[f"{stage} {path}"]:
            for window, means in enumerate(result):
                assert means == pytest.approx(direct(window), rel=1e-13)

    def test_are_the_same_on_every_rank_to_the_last_bit(self, two_ranks, stage, path):
        first, second = two_ranks.of(recorded)[f"{stage} {path}"]
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


class _More(Counting):
    COLLECTIVES = (*Counting.COLLECTIVES, "all_gather_object")


@on_two_ranks
def metric_collectives(folder):
    """What a window of 3 passes sends: without metrics, with known ones, with a new one on one rank."""
    results = {}
    for path in PATHS:
        engine = over(build(config(1, passes=6)), path)

        def window(names, engine=engine):
            with _More() as counted:
                for index in range(3):
                    loss = forward(engine, index)
                    for name in names:
                        engine.record(name, loss, 2.0)
                        engine.record(name, torch.ones(4))
                    engine.backward(loss, rollouts=1)
                    engine.step()
            return counted.counts

        known = ["a", "b", "c"]
        window([])
        results[path] = {
            "none": window([]),
            "first": window(known),
            "known": window(known),
            "new": window([*known, "d"] if dist.get_rank() else known),
            "silent": window(known if dist.get_rank() else []),
            "names": sorted(engine.last_step.metrics),
        }
    return results


class TestWhatAMetricCosts:
    def more(self, two_ranks, path, than, kind):
        counts = two_ranks.of(metric_collectives)[path]
        return {name: counts[kind][name] - count for name, count in counts[than].items() if counts[kind][name] != count}

    @pytest.mark.parametrize("kind", ["known", "silent"])
    def test_is_no_collective_and_no_read_once_its_name_is_known(self, two_ranks, path, kind):
        assert self.more(two_ranks, path, "none", kind) == {}

    @pytest.mark.parametrize("kind", ["first", "new"])
    def test_is_one_agreement_for_all_new_names_also_where_one_rank_alone_has_one(self, two_ranks, path, kind):
        more = self.more(two_ranks, path, "known", kind)
        # gathering objects reads their sizes, in the host's memory
        agreed = {"all_gather_object": 1, "item": 1, "__bool__": 1}
        assert more == ({**agreed, "isend": 1, "irecv": 1} if path == "host" else agreed)

    def test_is_one_host_sum_and_one_sum_on_the_device_where_there_is_one(self, two_ranks):
        """Three passes, each with its exchange, and the step's sum; on a device the flag alone goes over the host."""
        host, device = (two_ranks.of(metric_collectives)[path]["known"] for path in PATHS)
        assert host["isend"] == 3 + 1
        assert {name: device[name] - count for name, count in host.items() if device[name] != count} == {
            "all_reduce": 1
        }


@on_two_ranks
def forgotten(folder):
    """Names are looked at in every fourth window; `b` and `a`, of rank 1 alone, are used in the first and the last."""
    results, rank, windows = {}, dist.get_rank(), 14
    with patch.object(metrics, "REVIEWED", 4):
        for path in PATHS:
            engine = over(build(config(1, passes=2)), path)
            found, agreed = [], []
            for window in range(windows):
                engine.record("often", float(window + rank))
                if rank and window in (0, windows - 1):
                    engine.record("b", 10.0)
                    engine.record("a", torch.tensor(float(window)))
                one_pass(engine, window, rollouts=1)
                found.append(engine.last_step.metrics)
                agreed.append(meter_of(engine)._agreed)
            results[path] = {"found": from_all(found), "agreed": from_all(agreed)}
    return results


class TestANameThatNoRankRecordsAnyMore:
    def test_is_forgotten_on_all_ranks_in_one_window_and_has_a_place_again_when_it_comes_back(self, two_ranks, path):
        first, second = two_ranks.of(forgotten)[path]["agreed"]
        assert first == second
        assert [len(names) for names in first] == [3] * 7 + [1] * 6 + [3]
        assert first[-1] == ["often", "a", "b"]

    def test_leaves_all_sums_right(self, two_ranks, path):
        for found in two_ranks.of(forgotten)[path]["found"]:
            for window, means in enumerate(found):
                rare = {"a": float(window), "b": 10.0} if window in (0, 13) else {}
                assert means == {"often": window + 0.5, **rare}


@on_two_ranks
def windows_without_a_step(folder):
    """An empty window and a dropped one hold their metrics, and leave none to the next."""
    results = {}
    for path in PATHS:
        rank = dist.get_rank()
        engine = over(build(config(2, passes=4, loss_weight="token", last_window="drop")), path)
        records = []
        for tokens, passes in ((0, 2), (3, 2), (3, 1)):
            for _ in range(passes):
                engine.record(f"tokens {tokens}", float(rank), 1 + rank)
                one_pass(engine, 1, rollouts=1, tokens=tokens)
            if passes == 1:
                engine.finish()
            records.append(engine.last_step.model_dump())
        for _ in range(2):
            one_pass(engine, 1, rollouts=1, tokens=3)
        records.append(engine.last_step.model_dump())
        results[path] = records
    return results


@on_two_ranks
def thrown_away(folder):
    """Loading discards an open window's metrics, also those from before its first pass; names stay agreed on."""
    results = {}
    for path in PATHS:
        engine = over(build(config(1, passes=4)), path)
        agreed = []
        for _ in range(2):
            engine.record("known", 1.0)
            one_pass(engine, 1, rollouts=1)
        engine.save_checkpoint(f"{folder}/{path}")
        agreed.append(meter_of(engine)._agreed)
        for passes in (1, 0):
            if dist.get_rank():
                engine.record("only here", 5.0)
            engine.record("known", 5.0)
            for _ in range(passes):
                one_pass(engine, 1, rollouts=1)
            engine.load_checkpoint(f"{folder}/{path}")
        agreed.append(meter_of(engine)._agreed)
        for _ in range(2):
            engine.record("known", 2.0)
            one_pass(engine, 1, rollouts=1)
        results[path] = {"agreed": from_all(agreed), "metrics": engine.last_step.metrics}
    return results


class TestWindowsWithoutAStep:
    def test_hold_their_metrics_and_leave_none(self, two_ranks, path):
        empty, whole, dropped, after = two_ranks.of(windows_without_a_step)[path]
        assert [record["skipped"] for record in (empty, whole, dropped, after)] == [True, False, True, False]
        assert empty["metrics"] == {"tokens 0": pytest.approx(2 / 3)}
        assert whole["metrics"] == dropped["metrics"] == {"tokens 3": pytest.approx(2 / 3)}
        assert after["metrics"] == {}

    def test_that_was_thrown_away_by_a_load_leaves_nothing_and_names_stay_agreed(self, two_ranks, path):
        result = two_ranks.of(thrown_away)[path]
        assert result["metrics"] == {"known": 2.0}
        assert result["agreed"] == [[["known"], ["known"]]] * 2


@on_two_ranks
def stand_ins(folder):
    """A stream that ends on rank 1 after one micro-batch; its loop records in every pass."""
    results = {}
    for lookahead in (0, 3):
        engine = build(config(2, passes=12))
        stream = [Batch(2)] * (1 if dist.get_rank() else 3)
        for index, batch in enumerate(engine.passes(stream, lookahead=lookahead)):
            engine.record("before", float(10**index), batch.rollouts)
            engine.backward(forward(engine, 1))
            engine.record("after", torch.full((2,), float(10**index)))
            other = Thread(target=engine.record, args=("of another thread", float(10**index)))
            other.start()
            other.join()
            engine.step()
        results[str(lookahead)] = engine.last_step.model_dump()
    return results


@pytest.mark.parametrize("lookahead", ["0", "3"])
def test_what_a_loop_records_of_a_stand_in_is_left_out(two_ranks, lookahead):
    """Rank 0 has passes of 1, 10 and 100; rank 1 only the first, and re-runs it twice.

    Another thread measures something else, and not the stand-in.
    """
    record = two_ranks.of(stand_ins)[lookahead]
    assert (record["passes"], record["idle_passes"]) == (3, 2)
    mean = (1 + 10 + 100 + 1) / 4
    assert record["metrics"] == {"before": mean, "after": mean, "of another thread": 2 * (1 + 10 + 100) / 6}
