"""Planned windows of prompts, turns and preference pairs: the bundled losses beside the same written out in fp64."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.nn.functional import logsigmoid

import ds_parity
from ds_parity.losses import DirectPreference, PolicyGradient
from tests.hard.test_unforeseen_streams import Bigrams
from tests.hard.unforeseen.cells import STAGES, Watched
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
WAYS = [f"{layout}-{weight}" for layout in ("packed", "padded") for weight in ("rollout", "token")]
BETA = 0.1


def logps(policy, rollout):
    """The log-probabilities of a rollout's tokens behind its prompt, written out."""
    tokens = torch.tensor(rollout.tokens)
    taken = torch.log_softmax(policy(tokens[:-1]), -1).gather(-1, tokens[1:, None]).squeeze(-1)
    return taken[rollout.prompt_length - 1 :]


def drawn(random, prompt, prompt_length, length):
    """A rollout of random tokens and advantage."""
    tokens = tuple(random.randrange(16) for _ in range(length))
    return ds_parity.Rollout(prompt, tokens, prompt_length, advantage=random.uniform(-1, 1))


def _planned(case, items, target, model, windows, *, count="rollout", reduction="mean"):
    """Train by a plan; `windows` is a list of (rollouts, [(weight, loss of the model)]) a window."""
    layout, weight = case.variant.split("-")
    section = {"loss_weight": weight, "count": count, "loss_reduction": reduction}
    watched = Watched(case.cell, target, model=model, section=section)
    plan = ds_parity.plan(items, dp_world_size=2, target=target, max_tokens=24, count=count, layout=layout)
    for batch in watched.engine.passes(ds_parity.micro_batches(plan, watched.rank), lookahead=case.cell.stage):
        loss = watched.engine(**batch.inputs)
        watched.engine.backward(loss[0] if isinstance(loss, tuple) else loss)
        watched.engine.step()
    for rollouts, losses in windows:
        for units, loss in losses:
            watched.oracle.add(units, loss)
        watched.oracle.end_pass(0, rollouts=rollouts)
        watched.oracle.step()
    return watched.found()


def _mean(rollout):
    return lambda model: -(rollout.advantage * logps(model.policy, rollout)).mean()


@play.right(STAGES, WAYS)
def rollouts_of_prompts_are_mixed(case):
    """24 rollouts of 8 prompts in any order: a window has those of the next two prompts that are complete."""
    random, weight = Random(0), case.variant.split("-")[1]
    rollouts = [
        drawn(random, f"p{n // 3}", length := random.randint(2, 4), length + random.randint(1, 7)) for n in range(24)
    ]
    random.shuffle(rollouts)
    last = {one.prompt_id: place for place, one in enumerate(rollouts)}
    complete = sorted(last, key=last.get)
    windows = []
    for start in range(0, 8, 2):
        own = [one for one in rollouts if one.prompt_id in complete[start : start + 2]]
        windows.append((len(own), [(one.loss_tokens if weight == "token" else 1, _mean(one)) for one in own]))
    return _planned(case, rollouts, 2, PolicyGradient(Bigrams(), loss_weight=weight), windows, count="prompt")


@play.right(STAGES, WAYS)
def rollouts_have_turns(case):
    """Two or three a rollout: weighed by tokens, or each a share of its rollout's mean, under summed losses."""
    random, weight = Random(5), case.variant.split("-")[1]
    every = []
    for number in range(12):
        rollout = drawn(random, f"p{number // 2}", 2, 8 + number % 5)
        spans = [(2, 4), (5, 8)] if number % 3 else [(2, 3), (3, 6), (7, 8)]
        turns = ds_parity.by_turn(rollout, spans, f"r{number}")
        if weight == "rollout":
            total = sum(turn.loss_tokens for turn in turns)
            turns = tuple(replace(turn, advantage=turn.advantage * turn.loss_tokens / total) for turn in turns)
        every.append(turns)
    reduction = "sum" if weight == "rollout" else "mean"
    model = PolicyGradient(Bigrams(), loss_weight=weight, loss_reduction=reduction)
    windows = []
    for start in range(0, 12, 4):
        turns = [turn for own in every[start : start + 4] for turn in own]
        # The shares of a rollout add up to a loss that weighs 1, of which the first turn brings all.
        weighed = [(turn.loss_tokens, _mean(turn)) for turn in turns]
        windows.append((4, weighed if weight == "token" else [(4, _share(turns))]))
    return _planned(case, [turn for own in every for turn in own], 4, model, windows, reduction=reduction)


def _share(turns):
    return lambda model: sum(_mean(turn)(model) for turn in turns) / 4


@play.right(STAGES, WAYS)
def pairs_of_preferences(case):
    """Twelve, four a window."""
    random, weight = Random(5), case.variant.split("-")[1]
    pairs = []
    for number in range(12):
        chosen, rejected = (drawn(random, f"p{number}", 2, 3 + random.randrange(6)) for _ in range(2))
        pairs.append(ds_parity.PreferencePair(chosen, rejected, -3 * random.random(), -3 * random.random()))
    windows = [
        (4, [(pair.loss_tokens if weight == "token" else 1, _preferred(pair)) for pair in pairs[start : start + 4]])
        for start in range(0, 12, 4)
    ]
    return _planned(case, pairs, 4, DirectPreference(Bigrams(), beta=BETA, loss_weight=weight), windows)


def _preferred(pair):
    def loss(model):
        chosen = logps(model.policy, pair.chosen).sum() - pair.chosen_logp
        rejected = logps(model.policy, pair.rejected).sum() - pair.rejected_logp
        return -logsigmoid(BETA * (chosen - rejected))

    return loss


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)
