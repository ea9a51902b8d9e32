"""The thread that goes on with sums: one for all of them, gone with its owner, and never stopped by what is raised."""

import gc
import threading
import weakref

from ds_parity.engine.ranks.helper import Helper


class Given:
    """Work that says in which thread it was done."""

    def __init__(self, raises=None):
        self.done = threading.Event()
        self.thread = None
        self._raises = raises

    def __call__(self):
        self.thread = threading.current_thread()
        self.done.set()
        if self._raises is not None:
            raise self._raises


def done_by(helper, work):
    """The thread that did the work."""
    helper.give(work)
    assert work.done.wait(10)
    return work.thread


def test_all_work_is_done_in_one_thread_that_is_not_the_callers():
    helper = Helper()
    threads = {done_by(helper, Given()) for _ in range(20)}
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_what_is_raised_does_not_end_it():
    helper = Helper()
    first = done_by(helper, Given(SystemExit(1)))
    assert done_by(helper, Given(ValueError("no"))) is first
    assert done_by(helper, Given()) is first


def test_the_thread_ends_with_its_owner():
    helper = Helper()
    thread = done_by(helper, Given())
    del helper
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_what_is_done_is_not_kept_alive_until_there_is_something_else_to_do():
    helper, work = Helper(), Given()
    done_by(helper, work)
    gone = threading.Event()
    weakref.finalize(work, gone.set)
    del work
    assert gone.wait(10)
