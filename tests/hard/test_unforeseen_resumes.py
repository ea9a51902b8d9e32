"""A checkpoint that is loaded into a configuration which differs from the one that saved it, in one thing or in two."""

import pytest
import torch

from ds_parity.parity.running.half_precision import fp16_allowed
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Watched, config, engine_of
from tests.hard.unforeseen.oracle import RATE, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
TARGET = 6  # windows of two passes and of one, in turn, so that a surplus is saved
CLIP = 0.4  # some steps are clipped by it, and others are not
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WHOLE = [cell for cell in CELLS if not cell.offload]
ABOVE = {
    "into-buckets": ({}, {"zero": {"reduce_bucket_size": 10, "allgather_bucket_size": 10}}),
    "out-of-buckets": ({"zero": {"reduce_bucket_size": 10}}, {}),
    "into-overlap": ({"zero": {"overlap_comm": False}}, {"zero": {"overlap_comm": True}}),
    "out-of-contiguous": ({"zero": {"contiguous_gradients": True}}, {"zero": {"contiguous_gradients": False}}),
    "into-offload": ({}, {"zero": OFFLOAD}),
    "out-of-offload": ({"zero": OFFLOAD}, {}),
    "into-scatter": ({"zero": {"reduce_scatter": False}}, {"zero": {"reduce_scatter": True}}),
}
EVERYWHERE = {
    "same": ({}, {}),
    "into-clipping": ({}, {"clip": CLIP}),
    "out-of-clipping": ({"clip": CLIP}, {}),
    "other-clipping": ({"clip": CLIP}, {"clip": CLIP / 4}),
    "into-look-ahead": ({}, {"section": {"lookahead": 3}}),
    "fp32-communication": ({}, {"communication_data_type": "fp32"}),
    "other-timeout": ({}, {"section": {"exchange_timeout": 20.0}}),
}
STAGE3 = {
    "into-persistence": ({"zero": {"stage3_param_persistence_threshold": 0}}, {}),
    "out-of-persistence": ({}, {"zero": {"stage3_param_persistence_threshold": 0}}),
    "less-prefetch": ({}, {"zero": {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}}),
}


def momentum(model, rate=RATE):
    """An optimizer whose state is seen in every step."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def groups(model, rate=RATE):
    """The same with two groups, of which one decays."""
    return torch.optim.SGD(
        [
            {"params": list(model.body.parameters()), "weight_decay": 0.1},
            {"params": list(model.head.parameters()), "lr": rate / 2},
        ],
        lr=rate,
        momentum=0.9,
    )


def saved_by(case, options, by=momentum):
    """An engine that has taken two steps and saved, beside its oracle."""
    model = Net()
    watched = Watched(
        case.cell, TARGET, model=model, by=by, given={"optimizer": by(model)}, optimizer=False, **dict(options)
    )
    watched.passes(range(3))
    watched.engine.save_checkpoint(case.folder, "saved")
    return watched


def loaded_into(watched, case, options, *, cell=None, by=momentum, target=TARGET):
    """Put another engine, of other weights, in the place of the one that saved."""
    model = Net(seed=5)
    extended = config(cell or case.cell, target, optimizer=False, **options)
    watched.engine = engine_of(extended, model, optimizer=by(model))
    for index in range(20, 23):  # it has moved, and has a surplus of its own
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
    watched.engine.load_checkpoint(case.folder)
    watched.oracle._clip = options.get("clip", 0.0)
    watched.passes(range(3, 9))
    return watched.found()


@play.right(CELLS, EVERYWHERE)
def another_configuration_goes_on(case):
    """As the oracle does, by what the configuration that loads says of steps to come."""
    saved, loaded = EVERYWHERE[case.variant]
    return loaded_into(saved_by(case, saved), case, loaded)


@play.right([one for one in WHOLE if one.stage], ABOVE)
def another_zero_section_goes_on(case):
    """Where gradients and states lie changes no step."""
    saved, loaded = ABOVE[case.variant]
    return loaded_into(saved_by(case, saved), case, loaded)


@play.right([Cell(3), Cell(3, offload=True)], STAGE3)
def another_zero3_section_goes_on(case):
    """The same of what ZeRO 3 alone has."""
    saved, loaded = STAGE3[case.variant]
    return loaded_into(saved_by(case, saved), case, loaded)


@play.right([Cell(1), Cell(2), Cell(1, offload=True), Cell(2, offload=True)])
def stages_1_and_2_load_each_other(case):
    """They have one format."""
    return loaded_into(saved_by(case, {}), case, {}, cell=Cell(3 - case.cell.stage, offload=case.cell.offload))


@play.right([Cell(0), Cell(1)])
def gradients_are_prescaled_since(case):
    """DeepSpeed refuses that on the other stages."""
    return loaded_into(saved_by(case, {}), case, {"prescale_gradients": True})


@play.right(CELLS)
def rates_are_the_checkpoints(case):
    """They are kept in the groups."""
    return loaded_into(saved_by(case, {}), case, {}, by=lambda model: momentum(model, 3 * RATE))


@play.right(CELLS)
def groups_go_on_twice(case):
    """Two groups, and once more from what was saved behind a load."""
    watched = saved_by(case, {}, groups)
    loaded_into(watched, case, {}, by=groups)
    watched.engine.save_checkpoint(case.folder, "again")
    for index in range(30, 33):  # none of it is left
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
    watched.engine.load_checkpoint(case.folder, "again")
    watched.passes(range(9, 12))
    return watched.found()


@play.right(CELLS, ["reset", "caller"])
def another_boundary_goes_on(case):
    """With the surplus forgotten, or with windows that the caller ends; the saved steps stay as they were."""
    watched = saved_by(case, {})
    oracle = watched.oracle
    oracle._overshoot = "reset"
    if case.variant == "reset":
        section = {"overshoot": "reset"}
    else:
        section, oracle._target = {"boundary": "caller"}, 1
    oracle._closes_at = oracle._begun_anew()
    return loaded_into(watched, case, {"section": section})


@play.refused(
    STAGES,
    {
        "target": "CheckpointError: the checkpoint was counting towards a target of 6 rollouts, "
        "this configuration says 8",
        "micro-batch": "CheckpointError: the checkpoint was counting "
        "towards a target of 6 rollouts, this configuration says 18",
    },
)
def another_target_is_refused(case):
    """Given by itself, or by the rollouts of a micro-batch."""
    if case.variant == "target":
        return loaded_into(saved_by(case, {}), case, {}, target=TARGET + 2)
    return loaded_into(saved_by(case, {}), case, {"train_micro_batch_size_per_gpu": 3})


@play.refused(
    [Cell(1), Cell(2), Cell(1, offload=True), Cell(2, offload=True)],
    "CheckpointError: the checkpoint was saved with zero_optimization.round_robin_gradients = ",
)
def another_order_of_parameters_is_refused(case):
    """Every rank would have the momentum of other parameters."""
    return loaded_into(saved_by(case, {}), case, {"zero": {"round_robin_gradients": True}})


def turned(model, rate=RATE):
    """The parameters in another order, of which some have equal sizes."""
    return torch.optim.SGD(list(model.parameters())[::-1], lr=rate, momentum=0.9)


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's own with the names of SGD's groups and states."""

    def __init__(self, params, lr):
        super().__init__(params, dict(torch.optim.SGD([torch.zeros(1)], lr=lr, momentum=0.9).defaults))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                kept = self.state[one].setdefault("momentum_buffer", torch.zeros_like(one))
                kept.mul_(group["momentum"]).add_(one.grad)
                one.sub_(kept.sign(), alpha=group["lr"])


def signs(model, rate=RATE):
    """The same parameters, stepped otherwise."""
    return Sign(model.parameters(), lr=rate)


OTHERS = {
    "order": "CheckpointError: ",
    "optimizer": "CheckpointError: another optimizer than this engine's Sign saved the checkpoint: SGD",
}


@play.refused(STAGES, OTHERS)
def states_of_others_are_refused(case):
    """Another order of parameters, and another optimizer with the same names."""
    return loaded_into(saved_by(case, {}), case, {}, by={"order": turned, "optimizer": signs}[case.variant])


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 128.0}}
PRECISIONS = {"bf16 into fp16": (BF16, FP16), "fp32 into fp16": ({}, FP16), "fp16 into bf16": (FP16, BF16)}


def saved_and_loaded(case, saving, loading):
    """Step an engine, save it, and load it into another; each is what `config` and `engine_of` are given."""
    with fp16_allowed():
        for number, (options, by, given) in enumerate((saving, loading)):
            model = Net(seed=number)
            optimizer = by(model)
            engine = engine_of(
                config(case.cell, TARGET, optimizer=False, **options), model, optimizer=optimizer, **given(optimizer)
            )
            if number:
                engine.load_checkpoint(case.folder)
                continue
            kind = next(engine.module.parameters()).dtype
            for index in range(3):
                x, y = sample(engine.global_rank, index, 2)
                engine.backward(engine(x.to(engine.device, kind), y.to(engine.device)).float(), rollouts=2)
                engine.step()
            engine.save_checkpoint(case.folder, "saved")


def nothing_more(optimizer):
    """No keyword beside the optimizer."""
    return {}


@play.refused(STAGES, dict.fromkeys(PRECISIONS, "CheckpointError: "))
def another_precision_is_refused(case):
    """A loss scale of another precision would make steps of nothing, or of 128 times their length."""
    saved, loaded = PRECISIONS[case.variant]
    saved_and_loaded(case, (saved, momentum, nothing_more), (loaded, momentum, nothing_more))


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), whose groups have the betas that Adam's have."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                kept = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                one.sub_(torch.lerp(kept, one.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                kept.lerp_(one.grad, 1 - group["betas"][1])


def lion(model):
    """Steps by signs."""
    return Lion(model.parameters(), RATE / 10)


def adam(model):
    """Steps by two moments."""
    return torch.optim.AdamW(model.parameters(), RATE / 10)


OPTIMIZERS = {"Lion into AdamW": (lion, adam), "AdamW into Lion": (adam, lion), "SGD into AdamW": (momentum, adam)}


@play.refused(STAGES, dict.fromkeys(OPTIMIZERS, "CheckpointError: "))
def another_optimizers_states_are_refused(case):
    """Also where the names in their groups are the same."""
    saved, loaded = OPTIMIZERS[case.variant]
    saved_and_loaded(case, ({}, saved, nothing_more), ({}, loaded, nothing_more))


def falling(optimizer):
    """A schedule of torch's."""
    return {"lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))}


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
SCHEDULES = {
    "torch's into DeepSpeed's": (({}, momentum, falling), (WARMUP, momentum, nothing_more)),
    "DeepSpeed's into torch's": ((WARMUP, momentum, nothing_more), ({}, momentum, falling)),
}


@play.refused(STAGES, dict.fromkeys(SCHEDULES, "CheckpointError: "))
def another_schedule_is_refused(case):
    """Their states have other names."""
    saved_and_loaded(case, *SCHEDULES[case.variant])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_goes_on_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_what_would_part(outcomes, case):
    outcomes.assert_refused(case)
