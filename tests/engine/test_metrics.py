"""The step's loss and metrics on one rank: what a weight means, what is refused, what is never read."""

import math
import sys
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

from ds_parity import WindowError
from ds_parity.engine.record.metrics import Meter, Sums

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["host", "device"])
def meter(request):
    """One rank's, told that its tensors lie on the host, or on a device that it must not read."""
    return Meter(CPU, group=None, over_host=None, on_device=request.param)


def means(meter):
    return meter.settle().read()[1]


def total(meter):
    return meter.settle().read()[0]


class TestTheLoss:
    def test_is_the_sum_of_weight_times_loss(self, meter):
        for loss, units in ((0.5, 3), (-2.0, 5), (0.25, 0)):
            meter.add(torch.tensor(loss), units)
        assert total(meter) == 0.5 * 3 - 2.0 * 5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_is_added_in_fp64_where_it_would_vanish_in_its_own_type(self, meter, dtype):
        meter.add(torch.tensor(4096.0, dtype=dtype), 2**20)
        for _ in range(3):
            meter.add(torch.tensor(2.0**-10, dtype=dtype), 1)
        assert total(meter) == 2.0**32 + 3 * 2.0**-10

    def test_of_every_window_starts_at_0_and_a_settled_one_keeps_its_sum(self, meter):
        meter.add(torch.tensor(1.5), 2)
        first = meter.settle()
        meter.add(torch.tensor(1.0), 1)
        assert (first.read()[0], total(meter), total(meter)) == (3.0, 1.0, 0.0)

    def test_and_a_metric_keep_no_graph_alive(self, meter):
        meter.add(torch.ones((), requires_grad=True) * 2, 3)
        meter.record("x", torch.ones(3, requires_grad=True) * 2)
        assert not meter.settle().vector.requires_grad


class TestAMetric:
    def test_is_a_mean_of_samples_and_never_of_means(self, meter):
        meter.record("reward", torch.tensor([1.0, 2.0, 6.0]))
        meter.record("reward", torch.tensor([5.0]))
        assert means(meter) == {"reward": 14 / 4}

    def test_takes_a_mean_with_the_number_that_it_stands_for(self, meter):
        meter.record("reward", 3.0, 3)
        meter.record("reward", torch.tensor(5.0), torch.tensor(1))
        assert means(meter) == {"reward": 14 / 4}

    def test_takes_a_weight_a_sample(self, meter):
        meter.record("kl", torch.tensor([1.0, 4.0]), torch.tensor([3, 1]))
        meter.record("kl", torch.tensor([2.0]), torch.tensor([True]))
        assert means(meter) == {"kl": 9 / 5}

    def test_weighs_1_where_nothing_is_said(self, meter):
        for value in (1, 2.0, True, np.float32(4.0)):
            meter.record("x", value)
        assert means(meter) == {"x": 2.0}

    def test_is_added_in_fp64(self, meter):
        meter.record("x", torch.tensor([4096.0, 2.0**-10], dtype=torch.bfloat16))
        meter.record("x", torch.tensor(2.0**-10, dtype=torch.float16), 1)
        assert means(meter) == {"x": (4096 + 2 * 2.0**-10) / 3}

    def test_stays_nan_or_infinite(self, meter):
        meter.record("nan", torch.tensor([1.0, math.nan]))
        meter.record("inf", math.inf, 2)
        found = means(meter)
        assert math.isnan(found["nan"])
        assert found["inf"] == math.inf

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_leaves_out_what_weighs_0_whatever_it_is(self, meter, value):
        meter.record("x", torch.tensor([1.0, value]), torch.tensor([2.0, 0.0]))
        meter.record("x", value, 0)
        assert means(meter) == {"x": 1.0}

    def test_without_weight_has_no_entry(self, meter):
        meter.record("x", 1.0, 0)
        meter.record("y", torch.tensor([]))
        assert means(meter) == {}

    def test_of_a_window_is_forgotten_with_it_or_by_a_reset(self, meter):
        meter.record("x", 1.0)
        meter.settle()
        assert means(meter) == {}
        meter.record("x", 1.0)
        meter.reset()
        assert means(meter) == {}

    def test_of_an_idle_pass_is_not_there_but_is_looked_at(self, meter):
        meter.record("x", 1.0, idle=True)
        assert means(meter) == {}
        with pytest.raises(WindowError, match="must be a string"):
            meter.record(3, 1.0, idle=True)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_of_an_integer_that_no_float_holds_is_infinite(self, meter, sign):
        meter.record("x", sign * 10**400)
        assert means(meter) == {"x": sign * math.inf}

    def test_comes_in_the_order_of_names(self):
        sums = Sums(("b", "a", "none"), torch.tensor([7.0, 1.0, 2.0, 3.0, 1.0, 0.0, 0.0], dtype=torch.float64))
        assert sums.read() == (7.0, {"a": 3.0, "b": 0.5})
        assert list(sums.read()[1]) == ["a", "b"]


REFUSED = [
    (("", 1.0, 1), "record\\(''.*string that isn't empty"),
    ((3, 1.0, 1), "record\\(3.*must be a string"),
    (("x", "high", 1), "value is a str: it must be a real number"),
    (("x", None, 1), "value is a NoneType"),
    (("x", [1.0, 2.0], None), "value is a list"),
    (("x", torch.ones(2, 2), None), "value is a tensor of shape \\(2, 2\\).*flatten"),
    (("x", torch.tensor(1j), None), "value is a tensor of shape \\(\\)"),
    (("x", 1.0, "1"), "weight is a str"),
    (("x", torch.ones(2), torch.ones(3)), "value has shape \\(2,\\) and weight \\(3,\\): they must be alike"),
    (("x", torch.ones(2), 2), "value has shape \\(2,\\) and weight \\(\\).*record\\('x', mean, n\\)"),
    (("x", 1.0, torch.ones(2)), "value has shape \\(\\) and weight \\(2,\\)"),
    (("x", 1.0, -1), "a weight is -1.0: .*must be >= 0 and finite"),
    (("x", 1.0, math.nan), "a weight is nan"),
    (("x", 1.0, math.inf), "a weight is inf"),
]


@pytest.mark.parametrize(("given", "told"), REFUSED)
def test_what_is_no_metric_is_refused_with_the_rule_and_leaves_nothing(meter, given, told):
    with pytest.raises(WindowError, match=told):
        meter.record(*given)
    assert means(meter) == {}


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
class TestAWrongWeightInATensor:
    def test_is_refused_where_the_host_can_read_it(self, wrong):
        meter = Meter(CPU, group=None, over_host=None)
        with pytest.raises(WindowError, match=f"a weight is {wrong}"):
            meter.record("x", torch.ones(2), torch.tensor([1.0, wrong]))

    def test_makes_the_metric_nan_where_reading_would_wait(self, wrong):
        meter = Meter(CPU, group=None, over_host=None, on_device=True)
        meter.record("x", torch.ones(2), torch.tensor([1.0, wrong]))
        assert math.isnan(means(meter)["x"])


@pytest.fixture
def _threads_take_turns_all_the_time():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_all_the_time")
class TestThreads:
    THREADS, EACH = 4, 4000

    def settled(self, meter, work):
        """The sums of all windows that are settled while threads run `work`, and of the one that is open then."""
        begin = Barrier(self.THREADS + 1)

        def run():
            begin.wait()
            for _ in range(self.EACH):
                work()

        threads = [Thread(target=run) for _ in range(self.THREADS)]
        for thread in threads:
            thread.start()
        begin.wait()
        windows = []
        while any(thread.is_alive() for thread in threads):
            windows.append(meter.settle())
        return [*windows, meter.settle()]

    def test_that_record_while_windows_are_settled_lose_no_number(self, meter):
        windows = self.settled(meter, lambda: meter.record("x", 1.0, 1))
        assert sum(sums.vector.tolist()[2] for sums in windows if sums.names) == self.THREADS * self.EACH

    def test_that_record_tensors_lose_none(self, meter):
        one = torch.ones(1)
        windows = self.settled(meter, lambda: meter.record("x", one))
        assert sum(sums.vector.tolist()[2] for sums in windows if sums.names) == self.THREADS * self.EACH

    def test_that_add_losses_lose_none(self, meter):
        one = torch.ones(())
        assert sum(sums.read()[0] for sums in self.settled(meter, lambda: meter.add(one, 1))) == (
            self.THREADS * self.EACH
        )


def test_a_signal_handler_that_records_while_the_meter_is_busy_does_not_wait_for_itself(meter):
    with meter._lock:
        meter.record("x", 1.0)
    assert means(meter) == {"x": 1.0}


def test_nothing_on_the_device_is_read_before_somebody_asks(monkeypatch):
    meter = Meter(CPU, group=None, over_host=None, on_device=True)

    def read(*args, **kwargs):
        raise AssertionError("the device was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, read)
        meter.record("x", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
        meter.record("x", 2.0, torch.tensor(2))
        meter.record("x", torch.tensor(2.0), 1)
        sums = meter.settle()
    assert sums.read()[1] == {"x": (7 + 4 + 2) / 7}
