"""Streams and idle passes on ranks: what is run, what is read when, and what it comes to; asserted in test_passes.py."""

import time
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

import ds_parity
from ds_parity.collation import collate, micro_batches, to_device
from ds_parity.losses import DirectPreference
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from ds_parity.parity.running import weights
from ds_parity.planning import PreferencePair
from tests.distributed.cells import STAGES, config
from tests.distributed.ranked import build, forward, one_pass, refusal

TASKS = [
    "skipped_idle",
    "explicit_idle",
    "online",
    "grpo",
    "turns_by_share",
    "turns_that_end_open",
    "preferences",
    "heads",
    "misuse_of_passes",
]


@dataclass
class Batch:
    seed: int = 0
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 3


def run(engine, stream, **options):
    """Run a stream; returns how many passes were handed out and what every boundary left."""
    handed, steps = 0, []
    for batch in engine.passes(stream, **options):
        handed += 1
        engine.backward(forward(engine, batch.seed))
        engine.step()
        if engine.window.passes == 0:
            steps.append(engine.last_step.step)
    return handed, steps


def skipped_idle(folder):
    """Seven micro-batches on rank 0, two on rank 1: rank 1 idles inside a window, at its end, and through an open one."""
    found = {}
    for stage in STAGES:
        for ahead in (0, 3):
            reached = []
            for skip in (True, False):
                engine = build(config(stage, passes=6))
                count = 2 if dist.get_rank() else 7
                handed, steps = run(engine, [Batch(n) for n in range(count)], lookahead=ahead, skip_idle=skip)
                last = engine.last_step
                reached.append((weights.vector(engine.module), handed, steps, last, engine.micro_steps))
            (one, handed, steps, last, passes), (other, every, all_steps, _, _) = reached
            found[f"{stage} {ahead}"] = {
                "equal": torch.equal(one, other),
                "handed": _told(handed),
                "without skipping": _told(every),
                "steps": [_told(steps), _told(all_steps)],
                "last": last.model_dump(),
                "micro_steps": passes,
            }
    return found


def explicit_idle(folder):
    """A stream that says itself where it is idle: the first passes of rank 1, before it has anything to re-run."""
    found = {}
    for stage in STAGES:
        engine, nothing = build(config(stage, passes=4)), Batch(9, 0, 0, 0)
        stream = [nothing, nothing, Batch(1), nothing] if dist.get_rank() else [Batch(n) for n in range(3)] + [nothing]
        handed, steps = run(engine, stream)
        plain = build(config(stage, passes=4))
        for n in range(3):
            if dist.get_rank() and n < 2:
                plain.idle(forward(plain, 9))
                plain.step()
            else:
                one_pass(plain, 1 if dist.get_rank() else n, rollouts=1)
        equal = torch.equal(weights.vector(engine.module), weights.vector(plain.module))
        found[stage] = {"handed": _told(handed), "steps": _told(steps), "equal": equal}
    return found


def online(folder):
    """Rollouts that are made while training goes on: each of them by the weights of the moment, on a slow rank."""
    found = {}
    for stage in STAGES:
        reached = []
        for slow in (True, False):
            engine, asked = build(config(stage, passes=6)), []

            def produced(engine=engine, asked=asked, slow=slow):
                for n in range(6):
                    asked.append(engine.micro_steps)
                    time.sleep(0.03 if slow and dist.get_rank() else 0)
                    yield Batch(n)

            run(engine, produced(), lookahead=0)
            reached.append(weights.vector(engine.module))
        found[stage] = {"asked": _told(asked), "equal": torch.equal(*reached)}
    return found


PROMPTS = ["a", "b", "a", "c", "b", "a", "a"]
REWARDS = [1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 1.0]


def grpo(folder):
    """Seven rollouts of three prompts dealt out in turn, so that groups lie on both ranks; then some on one rank alone."""
    rank = dist.get_rank()
    engine = build(config(2, passes=4))
    own = engine.group_advantages(PROMPTS[rank::2], REWARDS[rank::2])
    centred = engine.group_advantages(PROMPTS[rank::2], REWARDS[rank::2], by_std=False)
    alone = engine.group_advantages([] if rank else PROMPTS, [] if rank else REWARDS)
    short = refusal(lambda: engine.group_advantages(["a"], [1.0] * (1 + rank)))
    return {"own": _told(own), "centred": _told(centred), "alone": _told(alone), "short": _told(short)}


def turns_by_share(folder):
    """Turns of a rollout, each with its share of the rollout's loss, under a weight of rollouts and summed losses."""
    found = {}
    for stage in STAGES:
        extended = config(stage, passes=4, loss_reduction="sum")
        whole, turned = build(extended), build(extended)
        for seed in (1, 3):
            whole.backward(forward(whole, seed) + forward(whole, seed + 1), rollouts=1, tokens=6)
            whole.step()
            turned.backward(forward(turned, seed), rollouts=0, tokens=3)
            turned.step()
            turned.backward(forward(turned, seed + 1), rollouts=1, tokens=3)
            turned.step()
        one, other = whole.last_step, turned.last_step
        moved = weights.vector(whole.module) - weights.vector(turned.module)
        found[stage] = {
            "difference": float(moved.abs().max()),
            "loss": [one.loss, other.loss],
            "norm": [one.grad_norm, other.grad_norm],
            "passes": [one.passes, other.passes],
            "idle": other.idle_passes,
            "rollouts": [one.rollouts, other.rollouts],
        }
    mean = build(config(1, passes=4))
    found["mean"] = refusal(lambda: mean.backward(forward(mean, 1), rollouts=0, tokens=3))
    return found


def turns_that_end_open(folder):
    """The data ends after turns that finish no rollout: nothing to divide by, nothing stepped, nothing left behind."""
    found = {}
    for stage in STAGES:
        engine, fresh = (build(config(stage, passes=4, loss_reduction="sum")) for _ in range(2))
        before = weights.vector(engine.module)
        one_pass(engine, 5, rollouts=0, tokens=3)
        engine.finish()
        unmoved = torch.equal(before, weights.vector(engine.module))
        for one in (engine, fresh):
            for seed in (1, 2):
                one_pass(one, seed, rollouts=1)
        found[stage] = {
            "unmoved": unmoved,
            "clean": torch.equal(weights.vector(engine.module), weights.vector(fresh.module)),
            "stepped": not torch.equal(before, weights.vector(engine.module)),
        }
    return found


def preferences(folder):
    """DPO over planned micro-batches of two ranks, weighed by tokens, beside the whole batch in plain torch."""
    held = preference_pairs(24)
    found = {}
    for stage in STAGES:
        module = DirectPreference(build_tiny(), loss_weight="token")
        whole = DirectPreference(build_tiny().double(), loss_weight="token")
        extended = config(stage, passes=len(held), loss_weight="token")
        engine, *_ = ds_parity.initialize(model=module, model_parameters=module.parameters(), config=extended)
        planned = ds_parity.plan(held, dp_world_size=dist.get_world_size(), target=len(held), max_tokens=1500)
        for batch in engine.passes(to_device(one, engine.device) for one in micro_batches(planned, dist.get_rank())):
            loss, margins, tokens = engine(**batch.inputs)
            engine.record("accuracy", (margins > 0).float())
            engine.record("margin", margins, tokens)
            engine.backward(loss)
            engine.step()
        loss, margins, tokens = whole(**collate(held).inputs)
        loss.backward()
        step = engine.last_step
        found[stage] = {
            "loss": [step.loss, float(loss)],
            "norm": [step.grad_norm, float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))],
            "accuracy": [step.metrics["accuracy"], float((margins > 0).double().mean())],
            "margin": [step.metrics["margin"], float((margins * tokens).sum() / tokens.sum())],
            "passes": step.passes,
            "means": float(margins.mean()),
        }
    return found


class _Heads(torch.nn.Module):
    """Two heads; a micro-batch uses one or both, and the other has no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, seed, both):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(self.body.weight.device)
        out = self.a(self.body(x)).pow(2).mean()
        return out + self.b(self.body(x)).pow(2).mean() if both else out


def heads(folder):
    """Rank 1 uses one head alone and is idle after it: its stand-in, which uses both, is what keeps ranks alike.

    ZeRO 2 and 3 reduce in every pass, and take no ranks that use other parameters in one.
    """
    found = {}
    both, one = Batch(1), Batch(2)
    streams = {
        "closed": ([both] * 4, [one, Batch(3, 0, 0, 0), Batch(3, 0, 0, 0), one]),
        "open": ([both] * 3, [one]),
    }
    for stage, (name, stream) in product((0, 1), streams.items()):
        reached = []
        for skip in (True, False):
            module = _Heads()
            extended = config(stage, passes=6 if name == "closed" else 12)
            engine, *_ = ds_parity.initialize(model=module, model_parameters=module.parameters(), config=extended)
            handed = 0
            for batch in engine.passes(stream[dist.get_rank()], idle=Batch(3, 0, 0, 0), skip_idle=skip):
                handed += 1
                engine.backward(engine(batch.seed, batch is not one))
                engine.step()
            reached.append((weights.vector(engine.module), handed))
        (skipped, handed), (run_all, _) = reached
        found[f"{stage} {name}"] = {"equal": torch.equal(skipped, run_all), "handed": _told(handed)}
    return found


def misuse_of_passes(folder):
    """Counts that contradict a turn's, turns under a mean, and a step that is owed while a pass could be skipped."""
    turn = Batch(1, 0, 0, 5)
    found = {}
    by_token = build(config(1, passes=20, loss_weight="token"))
    for _ in by_token.passes([turn], finish=False):
        found["contradicted"] = refusal(lambda: by_token.backward(forward(by_token, 1), rollouts=7, tokens=999))
        break
    by_rollout = build(config(1, passes=20))
    parts = Batch(1, 2, 0, 9)
    parts.held = ("a turn", "a turn", "a last turn", "a whole one")
    found["parts"] = refusal(lambda: next(iter(by_rollout.passes([parts]))))
    owed = build(config(1, passes=20, exchange_timeout=20))

    def without_step():
        stream = [Batch(1), Batch(9, 0, 0, 0)] if dist.get_rank() else [Batch(1), Batch(2)]
        for batch in owed.passes(stream, finish=False):
            owed.backward(forward(owed, batch.seed))

    begun = time.perf_counter()
    found["owed"] = refusal(without_step)
    found["seconds"] = time.perf_counter() - begun
    return found


def preference_pairs(count):
    """A right and a wrong solution of a question each, of many lengths; a reference that knows nothing, but for some noise."""
    answers = {}
    for rollout in load_rollouts():
        answers.setdefault(rollout.prompt_id, {}).setdefault(rollout.reward, rollout)
    both = [answer for answer in answers.values() if len(answer) == 2][:count]
    pairs = [shorten((answer[1.0], answer[0.0]), 200 + 30 * (n % 7)) for n, answer in enumerate(both)]
    return [
        PreferencePair(*pair, -6.3 * pair[0].loss_tokens, (0.3 * (n % 3) - 6.5) * pair[1].loss_tokens)
        for n, pair in enumerate(pairs)
    ]


def _told(own):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told
