"""The names of metrics that ranks agree on: those that nobody records any more are forgotten, on all ranks alike."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.record.metrics import Meter

CPU = torch.device("cpu")
RANKS = 2


class Together:
    """Sums and gathers over ranks that are threads here; it notes what each collective of rank 0 carries."""

    def __init__(self):
        self._barrier, self._slots = Barrier(RANKS, timeout=60), [None] * RANKS
        self.sums, self.gathers = [], 0

    def _from_all(self, rank, value):
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def of(self, rank):
        def start(vector):
            if not rank:
                self.sums.append(len(vector))
            values = self._from_all(rank, vector)
            assert len({len(one) for one in values}) == 1, "ranks sum vectors of different lengths"
            return SimpleNamespace(wait=lambda: torch.stack(values).sum(0))

        def gathered(value):
            self.gathers += not rank
            return self._from_all(rank, value)

        return SimpleNamespace(start=start, gathered=gathered, ranks=RANKS)


def run(windows, recorded):
    """Settle windows on two ranks; `recorded(rank, window)` gives what each records there, name to value.

    Returns the means of every window, the numbers of names after each, and what the ranks did together.
    """
    together = Together()

    def rank_of(rank):
        meter, means, kept = Meter(CPU, None, together.of(rank), on_device=False), [], []
        for window in range(windows):
            for name, value in recorded(rank, window).items():
                meter.record(name, value)
            means.append(meter.settle().read()[1])
            kept.append(meter._agreed)
        return means, kept

    with ThreadPoolExecutor(RANKS) as ranks:
        (means, kept), other = ranks.map(rank_of, range(RANKS))
    assert (means, kept) == other, "ranks must agree on every sum, and on the names and their order"
    return means, kept, together


class TestANewNameInEveryWindow:
    @pytest.fixture(scope="class")
    def fresh(self):
        return run(400, lambda rank, window: {f"of {rank}/{window}": 1.0 * window, "known": rank})

    def test_comes_out_in_its_window_alone(self, fresh):
        means, _, _ = fresh
        assert means == [{f"of {rank}/{n}": 1.0 * n for rank in (0, 1)} | {"known": 0.5} for n in range(400)]

    def test_leaves_no_more_names_than_those_of_the_last_128_windows(self, fresh):
        _, kept, together = fresh
        assert max(map(len, kept)) <= 1 + 2 * 128
        assert max(together.sums) <= 2 + 3 * (1 + 2 * 128)

    def test_never_forgets_a_name_that_is_in_use(self, fresh):
        assert all(names[0] == "known" for names in fresh[1])


class TestANameThatIsForgotten:
    def recorded(self, rank, window):
        often = {"often": window}
        return often | ({"b": 10.0, "a": 3.0} if window in (0, 1, 300) and rank else {})

    def test_is_right_when_it_is_used_again(self):
        means, kept, together = run(302, self.recorded)
        for window, found in enumerate(means):
            assert found == {"often": window} | ({"b": 10.0, "a": 3.0} if window in (0, 1, 300) else {})
        assert kept[2] == ("a", "b", "often")
        assert kept[200] == ("often",)
        assert kept[301] == ("often", "a", "b")
        assert together.gathers == 2, "one agreement for the first names, one for the two that come back"

    def test_costs_no_collective_to_forget(self):
        _, kept, together = run(200, self.recorded)
        assert kept[199] == ("often",)
        assert len(together.sums) == 200 + 1, "one sum a window, and one for the names that were new in the first"

    def test_is_not_forgotten_where_one_rank_uses_it_now_and_then(self):
        _, kept, _ = run(400, lambda rank, window: {"rare": 1.0} if rank and window % 60 == 0 else {})
        assert set(kept) == {("rare",)}


class TestManyNames:
    def said(self, caplog, names):
        with caplog.at_level(logging.WARNING, "ds_parity"):
            run(4, lambda rank, window: {f"{window}/{n}": 1.0 for n in range(names)})
        return [record.getMessage() for record in caplog.records if record.name == "ds_parity"]

    def test_are_warned_of_once(self, caplog):
        told = self.said(caplog, 300)
        assert len(told) == RANKS  # a line a rank here, where no process says which of them it is
        assert "engine.record() was given 600 names" in told[0]
        assert "leave what changes" in told[0]

    def test_of_one_run_are_not(self, caplog):
        assert self.said(caplog, 100) == []
