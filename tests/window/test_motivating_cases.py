"""The failures that RL trainers met on DeepSpeed, and what becomes of them here."""

import pytest

from ds_parity.window import Counts, Ledger, PassTotals, Rules


def run(rules, passes):
    """Feed the ranks' rollouts of each pass; return the 0-based passes that closed a window, and the ledger."""
    ledger, boundaries = Ledger(rules), []
    for number, held in enumerate(passes):
        totals = PassTotals.of([Counts(rollouts) for rollouts in held])
        if ledger.count(totals).closed:
            boundaries.append(number)
            ledger.settle(applied=True)
    return boundaries, ledger


def cut(sequences, size):
    """One rank's passes of `size` sequences; the last takes what is left."""
    return [[min(size, sequences - start)] for start in range(0, sequences, size)]


@pytest.mark.parametrize(("target", "ranks"), [(4, 1), (8, 2), (32, 8)])
def test_windows_of_4_passes_end_at_micro_steps_3_7_11_and_never_at_0(target, ranks):
    """A modulo taken before counting has it at 0, 4, 8: the first step would hold a single micro-batch."""
    boundaries, ledger = run(Rules(target, ranks), [[1] * ranks] * 12)
    assert boundaries == [3, 7, 11]
    assert ledger.window.passes == 0


@pytest.mark.parametrize("size", [1, 8, 64, 640])
def test_3509_sequences_towards_640_give_5_full_windows_and_an_open_one_of_309(size):
    """3,509 is no multiple of 640: nothing asserts that it is, the rest stays in an open window."""
    boundaries, ledger = run(Rules(640, ranks=1), cut(3_509, size))
    assert len(boundaries) == 5
    assert ledger.consumed == 5 * 640
    assert not ledger.window.closed
    assert ledger.units() == 309
    assert ledger.total() == 309.0


@pytest.mark.parametrize("size", [3, 7, 101, 639])
def test_3509_sequences_give_5_windows_too_where_no_pass_ends_on_the_target(size):
    boundaries, ledger = run(Rules(640, ranks=1), cut(3_509, size))
    assert len(boundaries) == 5
    assert ledger.consumed > 5 * 640
    assert ledger.consumed + ledger.units() == 3_509


def test_3509_sequences_over_8_ranks_leave_3_of_them_idle_in_the_last_pass():
    boundaries, ledger = run(Rules(640, ranks=8), [[1] * 8] * 438 + [[1] * 5 + [0] * 3])
    assert boundaries == [79, 159, 239, 319, 399]
    assert (ledger.units(), ledger.window.idle_passes) == (309, 3)


@pytest.mark.parametrize("overshoot", ["carry", "reset"])
def test_passes_of_3_rollouts_jump_over_640_and_close_the_window_all_the_same(overshoot):
    """An equality boundary would wait for ever: no number of such passes holds exactly 640."""
    assert 640 not in range(0, 10**6, 3)
    boundaries, ledger = run(Rules(640, ranks=1, overshoot=overshoot), [[3]] * 214)
    assert boundaries == [213]
    assert ledger.consumed == 642


def test_ranks_that_count_only_their_own_rollouts_disagree_where_the_global_count_does_not():
    """Two ranks, 3 and 1 rollouts a pass: counting alone, each would step where the other is still accumulating."""
    passes = [[3, 1]] * 8
    together, _ = run(Rules(8, ranks=2), passes)
    assert together == [1, 3, 5, 7]
    for target, alone in [(8, ([2, 5, 7], [7])), (4, ([1, 2, 3, 5, 6, 7], [3, 7]))]:
        for rank in (0, 1):
            found, _ = run(Rules(target, ranks=1), [[held[rank]] for held in passes])
            assert found == alone[rank]
            assert found != together
