"""Loops drawn at random, with several loss terms and whatever happens between passes, step as an fp64 oracle does."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import STAGES, Found, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import sample
from tests.hard.unforeseen.random_loops import IDLE, NAMES, Steps, Three, drawn, momentum, weighs
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


class Loop:
    """An engine that runs a plan in one of the ways that a loop may take, beside the plan's steps."""

    def __init__(self, case):
        seed = int(case.variant)
        self.case, self.rank = case, dist.get_rank()
        self.chance = random.Random(-seed)  # alike on every rank
        self.plan = drawn(seed, dist.get_world_size(), ragged=case.cell.stage < 2)
        self.steps = Steps(Three(), self.plan)
        self.got, self.right, self.ran = [], [], 0
        self.by_passes = not self.plan.caller and self.chance.random() < 0.5
        self.lookahead = self.chance.choice(("window", 0, 1, 3)) if self.plan.alike else "window"
        self.engine = self.built()

    def built(self):
        plan, model = self.plan, Three()
        terms = {name: {"weight": unit, "coefficient": factor} for name, (unit, factor) in plan.terms.items()}
        section = {"terms": terms, "loss_reduction": "sum" if plan.summed else "mean"}
        section["last_window"] = "drop" if plan.drop else "step"
        section |= {"boundary": "caller"} if plan.caller else {"overshoot": plan.overshoot}
        extended = config(self.case.cell, plan.target, clip=plan.clip, optimizer=False, section=section)
        return engine_of(extended, model, optimizer=momentum(model))

    def run(self):
        if self.by_passes:
            self.run_passes()
        else:
            self.run_windows()
        self.engine.finish()
        right = {name: one.detach() for name, one in self.steps.model.named_parameters()}
        return Found(distance(weights_of(self.engine), right), self.got, self.right)

    def run_windows(self):
        plan = self.plan
        for number, window in enumerate(plan.windows):
            last = plan.ends_open and number == len(plan.windows) - 1
            own = window[self.rank]
            if not plan.alike or self.chance.random() < 0.3:
                self.promise(own)
            if plan.caller:
                self.callers_window(own, ends=not last)
            else:
                for one in own:
                    self.backward(one)
                    self.engine.step()
            if last:
                self.engine.finish()
            self.settled(number)

    def callers_window(self, own, *, ends):
        stage, way = self.case.cell.stage, self.chance.random()
        coalesces = stage and way < 0.3
        announces = ends and not coalesces and way < 0.6
        with self.engine.coalesce_grad_reduction() if coalesces else nullcontext():
            for number, one in enumerate(own):
                if announces:
                    self.engine.set_gradient_accumulation_boundary(number == len(own) - 1)
                self.backward(one)
        if announces and not own:
            self.engine.set_gradient_accumulation_boundary(True)
        if ends:
            self.engine.step()

    def run_passes(self):
        own = [one for window in self.plan.windows for one in window[self.rank]]
        while own and not own[-1].active:
            own.pop()
        stream = [
            ds_parity.MicroBatch({"one": one}, rollouts=one.rollouts, tokens=one.tokens, weight=self.own_weights(one))
            for one in own
        ]
        idle = None if own else ds_parity.MicroBatch({"one": IDLE})
        number = 0
        for batch in self.engine.passes(
            stream, lookahead=self.lookahead, idle=idle, skip_idle=self.chance.random() < 0.5
        ):
            one = batch.inputs["one"]
            self.engine.backward(self.losses(one, whole=True))
            self.engine.step()
            if self.engine.window.passes == 0:
                self.settled(number)
                number += 1
        if number < len(self.plan.windows):
            self.settled(number)

    def own_weights(self, one):
        own = {name: one.weight for name, (unit, _) in self.plan.terms.items() if unit == "weight"}
        own |= dict.fromkeys(one.without, 0)
        return own if one.active else dict.fromkeys(own, 0)

    def promise(self, own):
        sums = dict.fromkeys(self.plan.terms, 0.0)
        for one in own:
            for name, weight in weighs(self.plan, one).items():
                sums[name] += weight
        self.engine.expect(
            rollouts=sum(one.rollouts for one in own),
            tokens=sum(one.tokens for one in own),
            passes=sum(one.active for one in own),
            weight={} if self.plan.alike else sums,
        )

    def losses(self, one, *, whole=False):
        """The terms of a micro-batch; `whole`: also those that it lacks, with their weight 0."""
        x, y = (part.to(self.engine.device) for part in sample(self.rank, one.seed, 3))
        call = self.engine.module if one.seed % 3 == 0 else self.engine
        losses = {
            name: vector.sum() if self.plan.summed else vector.mean()
            for name, vector in zip(NAMES, call(x, y), strict=True)
            if name in self.plan.terms
        }
        if not whole and self.case.cell.stage < 2:
            losses = {name: loss for name, loss in losses.items() if name not in one.without or len(losses) == 1}
        return losses

    def backward(self, one):
        self.ran += 1
        if self.ran % 5 == 1:  # ZeRO 3 gathers in a forward, so all ranks run it
            with torch.no_grad():
                self.engine(*(part.to(self.engine.device) for part in sample(self.rank, 50, 2)))
        self.engine.optimizer.zero_grad()
        losses = self.losses(one)
        if one.active:
            self.engine.backward(losses, rollouts=one.rollouts, tokens=one.tokens, weight=self.own_weights(one))
        elif self.ran % 2:
            self.engine.idle(sum(losses.values()))
        else:
            self.engine.backward(losses, rollouts=0, tokens=0)

    def settled(self, number):
        """Take the oracle's step of a window, compare what was reported, and do what comes between windows."""
        plan, last = self.plan, self.engine.last_step
        dropped = plan.drop and number == len(plan.windows) - 1
        self.got.append([last.rollouts, last.skipped])
        self.right.append([sum(one.rollouts for own in plan.windows[number] for one in own), dropped])
        if not dropped:
            self.steps.take(plan.windows[number])
            # Without clipping DeepSpeed computes no norm on ZeRO 0 in fp32.
            norm = self.steps.norms[-1] if last.grad_norm is None else last.grad_norm
            self.got += [last.loss, norm, *last.metrics.values()]
            means = self.steps.means[-1]
            self.right += [self.steps.losses[-1], self.steps.norms[-1], *(means[name] for name in sorted(means))]
        self.between(plan.events[number], number)

    def between(self, event, number):
        if event == "rate":
            for group in (*self.engine.optimizer.param_groups, *self.steps.optimizer.param_groups):
                group["lr"] *= 0.5
        elif event == "advantages":
            self.engine.group_advantages(["a", "b"], [1.0, float(self.rank)])
        elif event == "evaluate":
            self.engine.eval()
            with torch.no_grad():
                self.losses(IDLE)
            self.engine.train()
        elif event in ("save", "resume"):
            self.engine.save_checkpoint(self.case.folder, f"saved{number}")
            if event == "resume" and not self.by_passes:
                self.engine = self.built()
                self.engine.load_checkpoint(self.case.folder, f"saved{number}")
        elif event == "empty" and self.plan.caller:
            with pytest.raises(ds_parity.WindowError, match="without a backward"):
                self.engine.step()


@play.right(STAGES, [str(seed) for seed in range(14)], bound=3e-6)
def a_plan_is_run(case):
    """Several terms, in windows of either kind, known ahead by any way; checkpoints and more between them."""
    return Loop(case).run()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)
