"""Faults of what the micro-batches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.running.own_batches import own_batches
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import windows_of
from ds_parity.planning.rollout import MicroBatch, Rollout
from tests.hard.blind_faults.base import Fault, OwnBatches, OwnRollouts, groups_of, remade


class RewardsShuffledInGroup(OwnRollouts):
    name = "rewards-shuffled-in-group"
    truth = "The rewards and advantages of a prompt's rollouts are given to the wrong rollouts of that prompt."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for places in groups_of(rollouts).values():
            for at, source in zip(places, places[1:] + places[:1], strict=True):
                other = rollouts[source]
                changed[at] = replace(rollouts[at], reward=other.reward, advantage=other.advantage)
        return changed


class RewardsOneRolloutLate(OwnRollouts):
    name = "rewards-one-rollout-late"
    truth = "Rewards and rollouts are zipped one off: every rollout has the reward of the one before it in the stream."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        before = [rollouts[0], *rollouts[:-1]]
        return [
            replace(own, reward=other.reward, advantage=other.advantage)
            for own, other in zip(rollouts, before, strict=True)
        ]


class BothRanksReadOneShard(Fault):
    name = "both-ranks-read-one-shard"
    truth = "Every rank reads the data of rank 0, because the sampler was not told its rank."
    kind = "data"
    scenario = "uniform"

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.own = own_batches(wanted, tuple((row[0],) * len(row) for row in self.passes))

    def metrics(self, batches: list[MicroBatch]) -> dict[str, float]:
        return super().metrics(batches[:: self.wanted.ranks])


class SecondWindowAgain(Fault):
    name = "second-window-again"
    truth = "The third step trains on the second step's rollouts once more, and all later data comes a step late."
    kind = "data"
    scenario = "uniform"

    def batches(self) -> Passes:
        passes = super().batches()
        rows = len(passes) // self.wanted.windows
        return passes[: 2 * rows] + passes[rows:-rows]


class DataStartsOver(Fault):
    name = "data-starts-over"
    truth = "The data iterator starts over after two steps, so that the first rollouts are trained on again."
    kind = "data"
    scenario = "uniform"

    def batches(self) -> Passes:
        passes = super().batches()
        rows = len(passes) // self.wanted.windows
        return passes[: 2 * rows] + passes[: len(passes) - 2 * rows]


class RolloutDropped(OwnBatches):
    name = "rollout-dropped-in-every-window"
    truth = "The last rollout of the largest micro-batch of every window is dropped, though it is counted."
    kind = "data"

    def batches(self) -> Passes:
        rows = [list(row) for row in super().batches()]
        for window in windows_of(rows, self.settings, lookahead=True):
            places = [(at, rank) for at in range(window.first, window.last + 1) for rank in range(len(rows[at]))]
            at, rank = max(places, key=lambda place: len(rows[place[0]][place[1]].held))
            batch = rows[at][rank]
            if len(batch.held) > 1:
                rows[at][rank] = remade(batch, batch.held[:-1])
        return tuple(tuple(row) for row in rows)


class RolloutTwice(OwnRollouts):
    name = "rollout-twice-in-every-window"
    truth = "In every window one rollout is trained on twice, in the place of the one that follows it."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for places in windows:
            changed[places[1]] = rollouts[places[0]]
        return changed


class WindowsTradeRollouts(OwnRollouts):
    name = "windows-trade-rollouts"
    truth = "The last rollout of each window arrives late: it is trained on in the next window, in another's place."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for own, following in pairwise(windows):
            last, first = own[-1], following[0]
            changed[last], changed[first] = changed[first], changed[last]
        return changed


class EndsCutOff(OwnBatches):
    name = "ends-cut-off"
    truth = "Rollouts are cut off at 128 tokens, so that the ends of the completions are not trained on."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        return remade(batch, [replace(one, tokens=one.tokens[:128]) for one in batch.held])


class BeginningsCutOff(OwnBatches):
    name = "beginnings-cut-off"
    truth = "Rollouts of more than 144 tokens lose their first ones: the model sees only a part of the prompt."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        return remade(batch, [self._cut(one) for one in batch.held])

    def _cut(self, rollout: Rollout) -> Rollout:
        less = max(0, len(rollout.tokens) - 144)
        return replace(rollout, tokens=rollout.tokens[less:], prompt_length=max(1, rollout.prompt_length - less))


class AnotherTokenizer(OwnBatches):
    name = "another-tokenizer"
    truth = "The tokenizer is of another version: two frequent tokens have each other's ids."
    kind = "data"

    def changed(self, batch: MicroBatch) -> MicroBatch:
        traded = {101: 116, 116: 101}
        held = [replace(one, tokens=tuple(traded.get(token, token) for token in one.tokens)) for one in batch.held]
        return remade(batch, held)


class WrongPrompt(OwnRollouts):
    name = "completion-behind-the-wrong-prompt"
    truth = "The completions of a window's first and last rollout are attached to each other's prompts."
    kind = "data"

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        changed = list(rollouts)
        for places in windows:
            first, last = (rollouts[place] for place in (places[0], places[-1]))
            changed[places[0]] = _behind(first, last)
            changed[places[-1]] = _behind(last, first)
        return changed


def _behind(prompt: Rollout, completion: Rollout) -> Rollout:
    tokens = prompt.tokens[: prompt.prompt_length] + completion.tokens[completion.prompt_length :]
    return replace(completion, tokens=tokens, prompt_length=prompt.prompt_length)
