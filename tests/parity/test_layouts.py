"""Layouts lose nothing, double nothing and are really uneven."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_parity.errors import ConfigError
from ds_parity.parity.data.rollouts import BOS, EOS
from ds_parity.parity.running.layouts import collate_layout, finishing, ragged_layout, uniform_layout
from ds_parity.planning.rollout import Rollout


def numbered(count):
    """`count` rollouts that differ, four to a prompt."""
    return [Rollout(f"p{i // 4}", (BOS, i % 256, EOS), prompt_length=1, reward=float(i)) for i in range(count)]


def counts(layout):
    return [[len(held) for held in row] for row in layout]


def flat(layout):
    return [rollout for row in layout for held in row for rollout in held]


def split_windows(layout, target):
    """The windows as the step rule closes them: `>=` a multiple of the target counted from the start."""
    windows, current, held, limit = [], [], 0, target
    for row in layout:
        current.append(row)
        held += sum(len(micro_batch) for micro_batch in row)
        if held >= limit:
            windows.append(current)
            current, limit = [], (held // target + 1) * target
    return windows, current


def test_a_prompt_is_finished_by_its_last_rollout_also_where_prompts_interleave():
    assert finishing("abacbc") == [0, 0, 1, 0, 1, 1]


@given(st.lists(st.sampled_from("abcde"), max_size=30))
def test_as_many_rollouts_finish_as_there_are_prompts(prompts):
    assert sum(finishing(prompts)) == len(set(prompts))


def test_a_collated_layout_counts_each_prompt_once_where_it_ends():
    batches = collate_layout(uniform_layout(2, 4, numbered(8)))
    assert [[batch.prompts for batch in row] for row in batches] == [[0, 0], [0, 1], [0, 0], [0, 1]]
    assert all(batch.rollouts == 1 and batch.tokens == 2 for row in batches for batch in row)


def test_a_uniform_layout_has_one_rollout_on_every_rank_in_every_pass():
    rollouts = numbered(9)
    layout = uniform_layout(2, 4, rollouts)
    assert counts(layout) == [[1, 1]] * 4
    assert flat(layout) == rollouts[:8]


def test_a_layout_refuses_too_few_rollouts_with_the_arithmetic():
    with pytest.raises(ConfigError, match="7 rollouts: 4 passes on 2 ranks need 8"):
        uniform_layout(2, 4, numbered(7))
    with pytest.raises(ConfigError, match="7 rollouts: 2 windows of 4 rollouts need 8"):
        ragged_layout(numbered(7), n_ranks=2, target=4, windows=2, seed=0)


def test_a_layout_refuses_numbers_below_1_by_name():
    with pytest.raises(ConfigError, match="n_ranks = 0"):
        ragged_layout(numbered(7), n_ranks=0, target=4, windows=1, seed=0)


@settings(deadline=None)
@given(
    n_ranks=st.integers(1, 8),
    target=st.integers(1, 40),
    windows=st.integers(1, 6),
    most=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_ragged_windows_hold_exactly_the_target_and_nothing_is_lost_or_doubled(n_ranks, target, windows, most, seed):
    rollouts = numbered(target * windows + 3)
    layout = ragged_layout(rollouts, n_ranks, target, windows, seed, max_rollouts=most)
    assert flat(layout) == rollouts[: target * windows]
    assert {len(row) for row in layout} == {n_ranks}
    assert max(max(row) for row in counts(layout)) <= most
    closed, rest = split_windows(layout, target)
    assert [len(flat(window)) for window in closed] == [target] * windows
    assert rest == []
    if target * 2 <= most * n_ranks:
        assert all(1 <= len(window) <= 9 for window in closed)


@settings(deadline=None)
@given(
    n_ranks=st.integers(1, 8),
    target=st.integers(1, 20),
    windows=st.integers(1, 6),
    available=st.integers(0, 130),
    seed=st.integers(0, 10**6),
)
def test_overshooting_windows_lose_and_double_nothing(n_ranks, target, windows, available, seed):
    """Either the windows asked for are closed, or every rollout is laid out and at most the last window is open."""
    rollouts = numbered(available)
    layout = ragged_layout(rollouts, n_ranks, target, windows, seed, same_windows=False)
    laid = flat(layout)
    assert laid == rollouts[: len(laid)]
    closed, rest = split_windows(layout, target)
    assert len(closed) == windows or len(laid) == available
    assert rest == [] or 0 < len(flat(rest)) < target


def test_1_2_and_4_ranks_see_the_same_windows():
    rollouts = numbered(60)
    for seed in range(20):
        seen = [
            [flat(window) for window in split_windows(ragged_layout(rollouts, n_ranks, 12, 5, seed), 12)[0]]
            for n_ranks in (1, 2, 4)
        ]
        assert seen[0] == seen[1] == seen[2]


def test_a_seed_gives_the_same_layout_and_another_seed_another():
    rollouts = numbered(48)
    layouts = [ragged_layout(rollouts, 2, 12, 4, seed) for seed in (1, 1, 2)]
    assert layouts[0] == layouts[1] != layouts[2]


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_is_idle_at_the_start_and_at_the_end_of_the_first_window(n_ranks, seed):
    closed, _ = split_windows(ragged_layout(numbered(24), n_ranks, 12, 2, seed), 12)
    first = counts(closed[0])
    assert 0 in first[0]
    assert 0 in first[-1]


def test_layouts_are_uneven_over_ranks_and_passes_of_windows():
    layout = ragged_layout(numbered(120), 2, 12, 10, seed=0)
    closed, _ = split_windows(layout, 12)
    assert any(row[0] != row[1] for row in counts(layout))
    assert len({len(window) for window in closed}) > 2
    assert {count for row in counts(layout) for count in row} == {0, 1, 2, 3, 4, 5}


def test_without_same_windows_the_last_pass_goes_beyond_the_target_and_the_last_window_may_be_short():
    layout = ragged_layout(numbered(58), 2, 12, 9, seed=0, same_windows=False)
    closed, rest = split_windows(layout, 12)
    sizes = [len(flat(window)) for window in closed]
    assert any(size > 12 for size in sizes)
    assert sum(sizes) + len(flat(rest)) == 58
    assert 0 < len(flat(rest)) < 12
