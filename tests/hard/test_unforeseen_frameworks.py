"""install(), and loops that drive DeepSpeed as a framework does, by hand: each step is that of one process."""

import contextlib

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Found, config
from tests.hard.unforeseen.language import Policy, Process, by_rollout, clipped, rollout
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
CLIP, RATE, NEAR = 3.0, 0.1, 1e-5  # some steps are clipped, and others are not
DIVIDED = {"loss_weight": "divided", "across_ranks": "mean"}


def descent(model):
    """Plain descent, if no other is asked for."""
    return torch.optim.SGD(model.parameters(), lr=RATE)


def adam(model):
    """With a state."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


class Framework:
    """What accelerate makes of a loop: epochs whose windows have so many passes, and end with the epoch.

    Attributes:
        engine: from deepspeed.initialize().
        right: the process that takes the same steps.
    """

    def __init__(self, cell, *, divides, by_caller, passes=2, by=descent):
        """Build both.

        Args:
            cell: where the state lies.
            divides: whether the loop divides each loss by the passes of a window, as TRL's trainers do.
            by_caller: whether the caller ends windows, or the count of rollouts.
            passes: of a window.
            by: makes the optimizer.
        """
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._divides, self._passes, self._index, self._window = divides, passes, 0, []
        policy = Policy()
        self.right = Process(policy, by, CLIP)
        section = {"boundary": "caller", **(DIVIDED if divides else {})} if by_caller else {}
        extended = config(cell, passes * self.ranks, clip=CLIP, optimizer=False, section=section)
        if by_caller:
            del extended["gradient_accumulation_passes"]
        with ds_parity.install():
            self.engine = deepspeed.initialize(model=policy, optimizer=by(policy), config=extended)[0]

    def loss(self, model, index, rank=None):
        """Of a micro-batch, which has one rollout."""
        rollouts = [rollout(self.rank if rank is None else rank, index, 0)]
        return clipped(by_rollout(model(rollouts), rollouts), rollouts)[0].mean()

    def epoch(self, passes, *, each=False, behind=lambda last: None, within=lambda last: contextlib.nullcontext()):
        """Run an epoch.

        Args:
            passes: of it; what is left is a shorter window.
            each: whether step() follows every backward, and not the last of a window alone.
            behind: is called behind each backward.
            within: gives what a backward runs in.
        """
        for number in range(1, passes + 1):
            last = number % self._passes == 0 or number == passes
            loss = self.loss(self.engine, self._index)
            self.engine.set_gradient_accumulation_boundary(is_boundary=last)
            with within(last):
                self.backward(loss)
            behind(last)
            if each or last:
                self.engine.step()
            self._window.append(self._index)
            self._index += 1
            if last:
                self._right_steps()

    def backward(self, loss, **keywords):
        """Divided before by the loop, or by the engine."""
        if self._divides:
            self.engine.backward(loss / self._passes, scale_wrt_gas=False, **keywords)
        else:
            self.engine.backward(loss, **keywords)

    def _right_steps(self):
        losses = [self.loss(self.right.model, index, rank) for index in self._window for rank in range(self.ranks)]
        # A loop that has divided by the passes of a whole window has a smaller gradient in a short one.
        passes = self._passes if self._divides else len(self._window)
        self.right.step(sum(losses) / (passes * self.ranks))
        self._window = []

    def found(self):
        """Return what was found."""
        self.engine.finish()
        steps, loss = self.engine.global_steps, self.engine.last_step.loss
        return Found(self.right.apart(self.engine), [steps, loss], [len(self.right.losses), self.right.losses[-1]])


WAYS = [f"{loss}-{ends}" for loss in ("whole", "divided") for ends in ("counted", "caller")]


def _driven(case, **keywords):
    loss, ends, *_ = case.variant.split("-")
    return Framework(case.cell, divides=loss == "divided", by_caller=ends == "caller", **keywords)


@play.right(CELLS, [f"{way}-last" for way in WAYS] + [f"{way}-each" for way in WAYS if "counted" in way], bound=NEAR)
def epochs_end_with_a_short_window(case):
    """step() behind each backward, or behind the last of a window."""
    run = _driven(case)
    for passes in (4, 5, 6):
        run.epoch(passes, each=case.variant.endswith("each"))
    return run.found()


@play.right(STAGES, [f"{way}-{sizes}" for way in WAYS for sizes in ("2,1", "3,3,3", "2,1,2")], bound=NEAR)
@play.right(STAGES, [f"{way}-1,1,1,1" for way in WAYS if "caller" in way], bound=NEAR)
@play.refused(STAGES, {f"{way}-1,1": "WindowError: set_gradient_acc" for way in WAYS if "counted" in way})
def epochs_are_short(case):
    """Some of them shorter than a window, behind a whole one; a count of rollouts refuses a short one at the start."""
    run = _driven(case)
    for passes in case.variant.split("-")[-1].split(","):
        run.epoch(int(passes))
    return run.found()


def _evaluates(run):
    def behind(last):
        run.engine.eval()
        with torch.no_grad():
            for number in range(1 + run.rank * (run.engine.zero_optimization_stage() < 3)):
                run.loss(run.engine, 99 + number)
        run.engine.train()

    return behind


def _zeroes(run):
    def behind(last):
        if not last:
            run.engine.zero_grad()

    return behind


def _asks(run):
    def behind(last):
        assert run.engine.is_gradient_accumulation_boundary() == last
        run.engine.get_global_grad_norm()

    return behind


BEHIND = {"evaluates": _evaluates, "zeroes": _zeroes, "asks": _asks}


@play.right(STAGES, [f"{way}-{kind}" for way in WAYS for kind in BEHIND], bound=NEAR)
def something_happens_behind_each_backward(case):
    """An evaluation, zero_grad() inside a window as frameworks have it, or questions."""
    run = _driven(case)
    behind = BEHIND[case.variant.split("-")[-1]](run)
    for _ in range(3):
        run.epoch(4, behind=behind)
    return run.found()


@play.right(STAGES[:2], WAYS, bound=NEAR)
def passes_inside_a_window_run_under_no_sync(case):
    """As accelerate's accumulate() has them on ZeRO 0 and 1."""
    run = _driven(case)
    run.epoch(8, within=lambda last: contextlib.nullcontext() if last else run.engine.no_sync())
    return run.found()


@play.right(STAGES, WAYS, bound=NEAR)
def another_engine_goes_on_with_a_checkpoint(case):
    """Behind an epoch that has ended with a short window."""
    run, after = _driven(case, by=adam), _driven(case, by=adam)
    run.epoch(4)
    run.epoch(3)
    run.engine.save_checkpoint(case.folder)
    dist.barrier()
    after.engine.load_checkpoint(case.folder)
    run.engine = after.engine
    run.epoch(4)
    run.epoch(3)
    return run.found()


@play.right(STAGES[:3], ["whole-counted", "divided-counted"], bound=NEAR)
def one_graph_has_two_backwards(case):
    """By retain_graph, with the loss and twice the loss."""
    run = _driven(case)
    for index in range(3):
        loss = run.loss(run.engine, index)
        for last in (False, True):
            run.engine.set_gradient_accumulation_boundary(is_boundary=last)
            run.backward((1 + last) * loss, retain_graph=not last)
        run.engine.step()
        run.right.step(1.5 * sum(run.loss(run.right.model, index, rank) for rank in range(run.ranks)) / run.ranks)
    return run.found()


@play.right(STAGES, [f"{way}-zero{stage}" for way in ("in turn", "inside") for stage in range(4)], bound=NEAR)
def two_engines_take_turns(case):
    """A critic of another stage: behind the actor's epochs, or inside of them behind each of its backwards."""
    way, stage = case.variant.split("-zero")
    actor = Framework(case.cell, divides=True, by_caller=False)
    critic = Framework(STAGES[int(stage)], divides=False, by_caller=True, passes=3)
    for _ in range(3):
        if way == "in turn":
            actor.epoch(2)
            critic.epoch(3)
        else:
            actor.epoch(4, behind=lambda last: critic.epoch(3) if last else None)
    one, other = actor.found(), critic.found()
    return Found(max(one.apart, other.apart), [*one.got, *other.got], [*one.right, *other.right])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_one_process_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
