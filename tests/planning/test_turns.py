"""Step-wise training: the steps are those of whole trajectories, whatever the turns."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.errors import ConfigError
from ds_parity.parity.data.rollouts import line_turns, load_rollouts
from ds_parity.planning import Rollout, by_turn, plan


def spans(*ends):
    return list(pairwise([3, *ends]))


def trajectory(prompt, length=30, **more):
    return Rollout(prompt, tuple(range(1, length + 1)), prompt_length=3, **more)


def test_a_turn_sees_all_that_came_before_it_and_scores_itself():
    turns = by_turn(Rollout("p", (1, 2, 3, 4, 5, 6), 2, advantage=0.5), [(2, 3), (3, 6)], "p/0")
    assert [(turn.tokens, turn.prompt_length) for turn in turns] == [((1, 2, 3), 2), ((1, 2, 3, 4, 5, 6), 3)]
    assert {(turn.rollout_id, turn.advantage, turn.prompt_id) for turn in turns} == {("p/0", 0.5, "p")}


def test_what_lies_between_turns_is_context_and_carries_no_loss():
    turns = by_turn(Rollout("p", (1, 2, 3, 4, 5, 6, 7), 2), [(2, 3), (5, 6)], "p/0")
    assert [turn.tokens[turn.prompt_length :] for turn in turns] == [(3,), (6,)]
    assert turns[1].tokens == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("turns", [[], [(1, 6)], [(2, 2)], [(2, 4), (3, 6)], [(3, 2)], [(2, 7)]])
def test_turns_that_are_none_are_refused(turns):
    with pytest.raises(ConfigError, match="rollout 'p/0': turns are"):
        by_turn(Rollout("p", (1, 2, 3, 4, 5, 6), 2), turns, "p/0")


def test_a_turn_that_is_there_twice_is_refused_by_name():
    """A second epoch that takes the names of the first would merge two rollouts into one."""
    once = by_turn(trajectory("p"), [(3, 30)], "0")
    with pytest.raises(ConfigError, match="rollout 1 repeats a turn of rollout '0' of prompt 'p'"):
        plan([*once, *once], dp_world_size=1, target=1, max_tokens=64)


@given(st.lists(st.integers(1, 24), min_size=1, max_size=40), st.integers(1, 7), st.integers(1, 6), st.integers(0, 2))
def test_steps_are_prompts_over_prompts_a_step_whatever_the_turns(turns, target, ranks, shift):
    """Each prompt has two trajectories, of 1 to 24 turns."""
    sequences = []
    for number, count in enumerate(turns):
        for which in range(2):
            own = 1 + (count + which * shift - 1) % 24
            ends = spans(*range(4, 3 + own), 30)
            sequences += by_turn(trajectory(f"p{number}"), ends, str(which))
    planned = plan(sequences, dp_world_size=ranks, target=target, max_tokens=64, count="prompt")
    assert len(planned.windows) == len(turns) // target
    for window, counts in zip(planned.windows, planned.counts, strict=True):
        sequences_of_window = [sequences[i] for i in window.rollouts]
        assert counts.sum(axis=(0, 1)).tolist() == [2 * target, target, 27 * 2 * target]
        assert len({sequence.prompt_id for sequence in sequences_of_window}) == target
        assert counts[-1, :, 1].sum() > 0, "the last pass finishes a prompt, so the window closes in it"


@given(st.lists(st.integers(1, 24), min_size=1, max_size=30), st.integers(1, 7), st.integers(1, 6))
def test_a_rollout_counts_once_where_its_last_turn_is_run(turns, target, ranks):
    sequences = [
        t for n, count in enumerate(turns) for t in by_turn(trajectory("p"), spans(*range(4, 3 + count), 30), str(n))
    ]
    planned = plan(sequences, dp_world_size=ranks, target=target, max_tokens=40)
    assert len(planned.windows) == len(turns) // target
    for window, counts in zip(planned.windows, planned.counts, strict=True):
        assert counts[:, :, 0].sum() == target
        assert counts[-1, :, 0].sum() > 0
        last = {sequences[i].rollout_id: at for at, i in enumerate(window.rollouts.tolist())}
        finished = [0] * counts[:, :, 0].size
        for at in last.values():
            finished[int((window.ends.ravel() > at).argmax())] += 1
        assert counts[:, :, 0].ravel().tolist() == finished


def test_the_same_name_in_another_prompt_is_another_rollout():
    sequences = [turn for p in "ab" for turn in by_turn(trajectory(p), spans(10, 30), "0")]
    planned = plan(sequences, dp_world_size=1, target=1, max_tokens=64)
    assert len(planned.windows) == 2


def test_gsm8k_takes_as_many_steps_by_turns_as_by_whole_solutions():
    """1,319 prompts, 16 a step: 82 steps, by 5,276 solutions or by their 23,141 lines."""
    whole = load_rollouts()
    options = {"dp_world_size": 4, "target": 16, "max_tokens": 4096, "count": "prompt"}
    by_line = list(line_turns(whole))
    planned, stepwise = plan(whole, **options), plan(by_line, **options)
    assert len(by_line) == 23_141
    assert len(planned.windows) == len(stepwise.windows) == 1319 // 16
    for one, other in zip(planned.windows, stepwise.windows, strict=True):
        prompts = {whole[i].prompt_id for i in one.rollouts}
        assert prompts == {by_line[i].prompt_id for i in other.rollouts}
    assert [int(c[:, :, 2].sum()) for c in planned.counts] == [int(c[:, :, 2].sum()) for c in stepwise.counts]
