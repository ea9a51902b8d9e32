"""Loops in the shape of real trainers: each step is that of one process over its whole window.

PipelineRL's adapters and streams, PPO's epochs over the same rollouts with a value head, and OpenRLHF's two engines.
"""

import copy
import itertools

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import STAGES, Cell, Found, config, engine_of
from tests.hard.unforeseen.language import Policy, Process, by_rollout, clipped, rollout
from tests.hard.unforeseen.scenarios import Scenarios

peft = pytest.importorskip("peft")

play = Scenarios()

CELLS = (*STAGES, Cell(2, offload=True), Cell(3, offload=True))
# Rollouts of each micro-batch: 25 of both ranks together, whose third window of 8 ends with them and has one too many.
SIZES = ([2, 3, 1, 2, 2, 3, 1, 2, 2], [1, 2, 4])
NEAR = 1e-5  # a few dozen steps


def drawn(rank, epoch, sizes):
    """The micro-batches of a rank: lists of rollouts."""
    return [[rollout(rank, 50 * epoch + index, n) for n in range(size)] for index, size in enumerate(sizes)]


def windows(of_ranks, target):
    """The micro-batches of each window; what is left at the end is the last one."""
    found, window, count, closes_at = [], [], 0, target
    for index in range(max(map(len, of_ranks))):
        here = [own[index] for own in of_ranks if index < len(own)]
        window, count = [*window, *here], count + sum(map(len, here))
        if count >= closes_at:
            found.append(window)
            window, closes_at = [], (count // target + 1) * target
    return [*found, window] if window else found


def streamed(micro_batches):
    for rollouts in micro_batches:
        tokens = sum(one["tokens"] for one in rollouts)
        yield ds_parity.MicroBatch({"rollouts": rollouts}, rollouts=len(rollouts), tokens=tokens)


def descent(rate=0.3):
    return lambda model: torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)


def adapted(recomputes):
    chosen = peft.LoraConfig(r=4, target_modules=["query", "value", "up"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(Policy(recomputes), chosen)


def beside_its_base(model, run, rollouts):
    """The policy's loss and its distance to the base: the same module, its adapters switched off."""
    said = by_rollout(run(rollouts), rollouts)
    with torch.no_grad(), model.disable_adapter():
        base = by_rollout(run(rollouts), rollouts)
    apart = [torch.exp(old - new) - (old - new) - 1 for new, old in zip(said, base, strict=True)]
    return [own + 0.1 * more for own, more in zip(clipped(said, rollouts), apart, strict=True)]


def mean_of(losses, unit):
    return torch.cat(losses).mean() if unit == "token" else torch.stack([one.mean() for one in losses]).mean()


@play.right(CELLS, ["token-", "rollout-plain", "token-reentrant"], bound=NEAR)
def adapters_are_trained_by_streams(case):
    """PipelineRL's: one rank runs out of data, each step is followed by an evaluation, each epoch by a checkpoint."""
    unit, recomputes = case.variant.split("-")
    model = adapted(recomputes)
    right = Process(model, descent(), clip=0.5)
    trained = [one for one in model.parameters() if one.requires_grad]
    extended = config(case.cell, 8, clip=0.5, optimizer=False, section={"loss_weight": unit})
    engine = engine_of(extended, model, optimizer=torch.optim.SGD(trained, lr=0.3))
    for epoch in range(2):
        for window in windows([drawn(rank, epoch, SIZES[rank]) for rank in range(2)], 8):
            right.step(mean_of([one for own in window for one in beside_its_base(right.model, right.model, own)], unit))
        for batch in engine.passes(streamed(drawn(dist.get_rank(), epoch, SIZES[dist.get_rank()]))):
            engine.backward(mean_of(beside_its_base(engine.module, engine, batch.inputs["rollouts"]), unit))
            engine.step()
            if engine.window.passes == 0:
                engine.eval()
                with torch.no_grad():
                    engine(batch.inputs["rollouts"])
                engine.train()
        engine.save_checkpoint(case.folder, f"epoch{epoch}")
        engine.load_checkpoint(case.folder)
    return Found(right.apart(engine), [engine.global_steps, engine.last_step.loss], [6, right.losses[-1]])


def with_values(rows, rollouts):
    """Losses of the policy and of the values, a tensor for each rollout."""
    said, values = (by_rollout(one, rollouts) for one in rows)
    apart = [(own - one["return"]).pow(2) for own, one in zip(values, rollouts, strict=True)]
    return clipped(said, rollouts), apart


def in_groups(model):
    """AdamW, whose value head has a rate and a decay of its own."""
    named = dict(model.named_parameters())
    head = [one for name, one in named.items() if "valued" in name]
    body = [one for name, one in named.items() if "valued" not in name]
    groups = [{"params": body, "lr": 0.02}, {"params": head, "lr": 0.005, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, eps=1e-3)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 1 / (2 + step)])


@play.right(STAGES, ["summed", "terms"], bound=1e-4)
def epochs_run_over_the_same_rollouts(case):
    """PPO's: three epochs of each phase, in other orders, of two steps each; a value head; ratios to the old policy."""
    terms = {"policy": {"weight": "token"}, "value": {"weight": "rollout", "coefficient": 0.5}}
    alike = {"loss_weight": "token"}
    section = {"terms": terms, "lookahead": "window"} if case.variant == "terms" else alike
    model = Policy(valued=True)
    right = Process(model, in_groups, clip=1.0)
    rates, optimizer = falling(right._optimizer), in_groups(model)
    extended = config(case.cell, 6, clip=1.0, optimizer=False, section=section)
    engine = engine_of(extended, model, optimizer=optimizer, lr_scheduler=falling(optimizer))

    def combined(pieces):
        policy, values = ([one for piece in pieces for one in piece[kind]] for kind in (0, 1))
        return torch.cat(policy).mean() + 0.5 * mean_of(values, "rollout" if case.variant == "terms" else "token")

    for phase in range(2):
        of_ranks = [drawn(rank, phase, sizes) for rank, sizes in enumerate(([2, 1, 3, 2], [1, 2, 1, 1]))]
        for rollouts in (own for micro_batches in of_ranks for own in micro_batches):
            with torch.no_grad():
                for one, said in zip(rollouts, by_rollout(right.model(rollouts)[0], rollouts), strict=True):
                    one["old"] = said
        for epoch in range(3):
            of_ranks = [[*own[1:], own[0]] for own in of_ranks] if epoch else of_ranks
            for window in windows(of_ranks, 6):
                right.step(combined([with_values(right.model(own), own) for own in window]))
                rates.step()
            for batch in engine.passes(streamed(of_ranks[dist.get_rank()])):
                rollouts = batch.inputs["rollouts"]
                policy, values = with_values(engine(rollouts), rollouts)
                apart = {"policy": torch.cat(policy).mean(), "value": mean_of(values, "rollout")}
                engine.backward(apart if case.variant == "terms" else combined([(policy, values)]))
                engine.step()
    there, here = ([group["lr"] for group in one.param_groups] for one in (right._optimizer, optimizer))
    return Found(right.apart(engine), [engine.global_steps, *here], [len(right.losses), *there])


@play.right(CELLS, ["divided", "token"], bound=NEAR)
def actor_and_critic_have_dynamic_batches(case):
    """OpenRLHF's: a window has one to three micro-batches; behind it the weights are averaged and written out."""
    own = {"loss_weight": "divided", "across_ranks": "mean"} if case.variant == "divided" else {"loss_weight": "token"}
    models = [Policy(), Policy(valued=True)]
    for one in models[1].head.parameters():
        one.requires_grad_(False)
    losses = [
        lambda model, own: torch.cat(clipped(by_rollout(model(own), own), own)),
        lambda model, own: torch.cat(with_values(model(own), own)[1]),
    ]
    makers, clips = (descent(), descent(0.01)), (0.3, 0.0)
    right = [Process(*each) for each in zip(models, makers, clips, strict=True)]
    averages = [copy.deepcopy(models[0]).double(), copy.deepcopy(right[0].model)]
    engines = []
    for model, made, clip in zip(models, makers, clips, strict=True):
        optimizer = made(model)
        extended = config(case.cell, clip=clip, optimizer=False, section={"boundary": "caller", **own})
        engines.append(engine_of(extended, model, optimizer=optimizer))
    for window in range(4):
        of_ranks = [drawn(rank, window, [2, 1, 3][: 1 + window % 3]) for rank in range(2)]
        tokens = sum(one["tokens"] for micro_batches in of_ranks for rollouts in micro_batches for one in rollouts)
        for rollouts in of_ranks[dist.get_rank()]:
            for engine, loss in zip(engines, losses, strict=True):
                each = loss(engine, rollouts)
                divided = each.sum() / tokens * 2 if case.variant == "divided" else each.mean()
                engine.backward(divided, rollouts=len(rollouts), tokens=len(each))
        for engine, process, loss in zip(engines, right, losses, strict=True):
            engine.step()
            process.step(torch.cat([loss(process.model, one) for one in itertools.chain(*of_ranks)]).mean())
        whole = list(engines[0].module.parameters())
        with deepspeed.zero.GatheredParameters(whole, enabled=case.cell.stage == 3):
            _average(averages[0], [one.detach().double().cpu() for one in whole])
        _average(averages[1], [one.detach() for one in right[0].model.parameters()])
        engines[0].save_16bit_model(case.folder, f"window{window}.bin")
    far = max(
        float((one - other).abs().max().detach())
        for one, other in zip(averages[0].parameters(), averages[1].parameters(), strict=True)
    )
    apart = max(far, *(process.apart(engine) for process, engine in zip(right, engines, strict=True)))
    return Found(apart, [one.last_step.loss for one in engines], [one.losses[-1] for one in right])


def _average(average, weights):
    with torch.no_grad():
        for one, new in zip(average.parameters(), weights, strict=True):
            one.mul_(0.9).add_(new, alpha=0.1)


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_one_process_does(outcomes, case):
    outcomes.assert_right(case)
