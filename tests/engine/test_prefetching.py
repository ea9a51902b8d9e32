"""A stream that is read in a thread: in order, never too far, and nothing is left of it when its reader leaves."""

import threading
import time

import pytest

from ds_parity.engine.passes import PassQueue
from ds_parity.engine.prefetching import Prefetched
from ds_parity.errors import WindowError
from tests.engine.test_passes_arguments import Alone, Batch

pytestmark = pytest.mark.timeout(60)


def threads():
    return [one for one in threading.enumerate() if one.name == "ds_parity prefetch"]


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Source:
    """Numbers; knows how many were made, by whom, and whether it was closed."""

    def __init__(self, count, *, fails_at=None):
        self.made, self.closed, self.makers = 0, False, set()
        self.numbers = self._numbers(count, fails_at)

    def _numbers(self, count, fails_at):
        try:
            for number in range(count):
                if number == fails_at:
                    raise ValueError(f"number {number} can't be made")
                self.made += 1
                self.makers.add(threading.current_thread().name)
                yield number
        finally:
            self.closed = True


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_all_comes_in_order_and_the_thread_ends_with_the_stream(ahead):
    source = Source(20)
    assert list(Prefetched(source.numbers, ahead)) == list(range(20))
    until(lambda: not threads())
    assert source.makers == {"ds_parity prefetch"}


def test_what_waits_is_shown_and_not_taken():
    read = Prefetched(Source(5).numbers, 3)
    assert read.waiting(2) is None  # nobody has taken the first, so that no thread reads
    assert next(read) == 0
    until(lambda: read.waiting(3) == [1, 2, 3])
    assert read.waiting(2) == [1, 2]
    assert read.waiting(4) is None
    assert [next(read), next(read)] == [1, 2]
    until(lambda: read.waiting(3) == [3, 4])
    assert list(read) == [3, 4]


def test_what_waits_in_front_of_an_error_is_not_shown():
    read = Prefetched(Source(5, fails_at=2).numbers, 3)
    next(read)
    until(lambda: not threads())
    assert read.waiting(1) == [1]
    assert read.waiting(2) is None


def test_it_reads_no_further_than_it_was_told():
    source = Source(20)
    read = Prefetched(source.numbers, 2)
    assert source.made == 0
    for taken in range(1, 5):
        next(read)
        until(lambda taken=taken: source.made == taken + 2)
    time.sleep(0.05)
    assert source.made == 6
    read.close()


def test_an_error_is_raised_where_its_number_would_have_come():
    source = Source(20, fails_at=3)
    read = Prefetched(source.numbers, 10)
    assert [next(read) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="number 3 can't be made"):
        next(read)
    with pytest.raises(StopIteration):
        next(read)
    until(lambda: not threads())


def test_a_reader_that_leaves_ends_the_thread_and_another_may_go_on_with_the_stream():
    source = Source(20)
    read = Prefetched(source.numbers, 3)
    next(read)
    read.close()
    assert not source.closed
    assert not threads()
    assert source.made <= 5
    assert next(source.numbers) == source.made - 1
    with pytest.raises(StopIteration):
        next(read)
    read.close()
    unread = Prefetched(Source(3).numbers, 2)
    unread.close()
    assert not threads()


class TestOfPasses:
    def queue(self, stream, **options):
        driver = Alone()
        queue = PassQueue(driver, stream, 0, **options)
        driver.queue = queue.upcoming
        return driver, queue

    def test_the_stream_is_read_ahead_of_the_passes(self):
        made = []

        def stream():
            for number in range(6):
                made.append(number)
                yield Batch(tokens=number + 1)

        _, queue = self.queue(stream(), prefetch=2)
        handed = iter(queue)
        assert next(handed).tokens == 1
        until(lambda: len(made) == 3)
        queue.close()
        assert not threads()

    def test_an_error_of_the_stream_is_told_to_the_other_ranks(self):
        def stream():
            raise ValueError("no rollouts")
            yield

        driver, queue = self.queue(stream(), prefetch=2)
        with pytest.raises(ValueError, match="no rollouts"):
            next(iter(queue))
        assert [str(error) for error in driver.refused] == ["no rollouts"]
        queue.close()
        assert not threads()

    @pytest.mark.parametrize("wrong", [-1, 1.5, True, "2", 4097])
    def test_what_is_no_number_is_refused(self, wrong):
        with pytest.raises(WindowError, match=r"passes\(prefetch=.*whole number from 0 to 4096"):
            self.queue([Batch()], prefetch=wrong)
        assert not threads()

    def test_without_it_there_is_no_thread(self):
        _, queue = self.queue([Batch()])
        next(iter(queue))
        assert not threads()
        queue.close()
