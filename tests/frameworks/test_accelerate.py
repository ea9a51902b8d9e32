"""accelerate's own loop steps as it does without ds_parity, and is refused where it counts otherwise."""

import logging
from itertools import product

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from tests.frameworks.small import (
    STEPS,
    WINDOWS,
    Trace,
    assert_same_windows,
    configuration,
    ended,
    fresh_state,
    installed,
    model,
    on_two_ranks,
    pair,
    register,
    sentences,
)

pytestmark = [pytest.mark.hf, pytest.mark.ranks]


def accelerator_for(config, steps=STEPS, dtype="fp32"):
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    fresh_state()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=steps,
        mixed_precision="bf16" if dtype == "bf16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())],
    )


def prepared(accelerator, config, data, *, own_scheduler=False):
    from accelerate.utils import DummyOptim, DummyScheduler

    net = model()
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    if own_scheduler:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": rates}
        optimizer = DummyOptim(net.parameters(), lr=1e-2)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=3)
    return accelerator.prepare(net, optimizer, loader, scheduler)


def loop(accelerator, trace, net, optimizer, loader, scheduler, epochs=2, **counts):
    """The loop of accelerate's documentation."""
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                trace.loss(loss)
                accelerator.backward(loss, **counts)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                trace.step(net, optimizer)


def with_accelerate(wrapped, stage, dtype, own_scheduler=False, extra=0, epochs=2, **section):
    """Accelerate's own loop; `extra`: micro-batches a rank that fill no window at the end of an epoch."""
    with installed(wrapped):
        config = configuration(wrapped, stage, dtype, **section)
        accelerator = accelerator_for(config, dtype=dtype)
        data = sentences((WINDOWS // 2 * STEPS + extra) * 4)
        parts = prepared(
            accelerator, accelerator.state.deepspeed_plugin.deepspeed_config, data, own_scheduler=own_scheduler
        )
        trace = Trace()
        loop(accelerator, trace, *parts, epochs=epochs)
        return trace.result(parts[0])


LOOPS = {"accelerate": {}, "accelerate, own scheduler": {"own_scheduler": True}}
CELLS = [
    *product(LOOPS, (2, 3), ("fp32", "bf16")),
    # accelerate runs passes inside a window in no_sync() there
    *product(["accelerate"], (0, 1), ("fp32",)),
]
UNIFORM = {"stage": 2, "dtype": "fp32"}
BY_ROLLOUT = {**UNIFORM, "lr_progress": "rollout"}
for run, stage, dtype in CELLS:
    register(with_accelerate, stage=stage, dtype=dtype, **LOOPS[run])
register(with_accelerate, **BY_ROLLOUT)
# accelerate's own step() ends the window, whatever it contains.
BY_CALLER = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32")]
for stage, dtype in BY_CALLER:
    register(with_accelerate, stage=stage, dtype=dtype, boundary="caller")


@pytest.mark.parametrize(("run", "stage", "dtype"), CELLS)
def test_uniform_windows_are_bit_identical_with_and_without_us(framework_ranks, run, stage, dtype):
    """Losses of both ranks, LR, gradient norms, weights."""
    bare, wrapped = pair(framework_ranks, with_accelerate, stage=stage, dtype=dtype, **LOOPS[run])
    assert_same_windows(bare, wrapped, stage)


@pytest.mark.parametrize(("stage", "dtype"), BY_CALLER)
def test_windows_that_accelerates_step_ends_are_bit_identical_too(framework_ranks, stage, dtype):
    bare, wrapped = pair(framework_ranks, with_accelerate, stage=stage, dtype=dtype, boundary="caller")
    assert_same_windows(bare, wrapped, stage)


def caller_cut_short(wrapped):
    """Epochs that end after one pass of a window, which accelerate's step() ends, too."""
    return with_accelerate(wrapped, 2, "fp32", extra=1, **({"boundary": "caller"} if wrapped else {}))


register(caller_cut_short)


def test_a_window_of_fewer_passes_is_divided_by_what_it_contains(framework_ranks):
    bare, wrapped = pair(framework_ranks, caller_cut_short)
    assert [len(step["losses"][0]) for step in wrapped["steps"]] == [3, 3, 1] * 2
    assert wrapped["steps"][2]["grad_norm"] == pytest.approx(3 * bare["steps"][2]["grad_norm"], rel=1e-5)


def test_weights_move_in_every_step(framework_ranks):
    """But for accelerate's first, whose warm-up starts at 0: else equality would prove little."""
    for run, stage, dtype in CELLS:
        bare, _ = pair(framework_ranks, with_accelerate, stage=stage, dtype=dtype, **LOOPS[run])
        assert len({step["weights"] for step in bare["steps"]}) >= 3, (run, stage, dtype)


def test_the_loss_of_the_last_step_is_that_of_its_passes_over_all_ranks(framework_ranks):
    """accelerate's losses are means of micro-batches."""
    _, wrapped = pair(framework_ranks, with_accelerate, **UNIFORM)
    mean = sum(sum(rank) for rank in wrapped["steps"][-1]["losses"]) / 2 / 3
    assert wrapped["last"]["loss"] == pytest.approx(mean, rel=1e-6)


def test_an_lr_that_moves_by_rollouts_is_where_uniform_windows_have_it(framework_ranks):
    bare, wrapped = pair(framework_ranks, with_accelerate, **BY_ROLLOUT)
    assert wrapped["steps"] == bare["steps"]


def cut_short(wrapped, last_window="step"):
    """Two epochs of accelerate that each end after one pass of a window; what ds_parity says of it."""
    said, logger = [], logging.getLogger("ds_parity")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        section = {"last_window": last_window} if wrapped else {}
        return {**with_accelerate(wrapped, 2, "fp32", extra=1, **section), "said": said}
    finally:
        logger.removeHandler(handler)


register(cut_short)


def test_the_short_window_of_an_accelerate_loop_is_normalised_by_what_it_holds(framework_ranks):
    """Bare DeepSpeed divides its one pass by 3."""
    bare, wrapped = pair(framework_ranks, cut_short)
    assert [len(step["losses"][0]) for step in wrapped["steps"]] == [3, 3, 1] * 2
    assert wrapped["steps"][:2] == bare["steps"][:2]
    assert wrapped["steps"][2]["grad_norm"] == pytest.approx(3 * bare["steps"][2]["grad_norm"], rel=1e-5)


def test_a_short_window_is_told_of(framework_ranks):
    said = framework_ranks.of(cut_short, wrapped=True)["said"]
    assert len(said) == 2
    assert said[0].startswith(
        "window 2 is ended by its caller after 1 of 3 passes a rank, at 4 of the 12 rollouts that close it"
    )


def cut_short_refused(last_window):
    return ended(lambda: cut_short(True, last_window))


RULES = ("drop", "error")
for rule in RULES:
    on_two_ranks.call(cut_short_refused, last_window=rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_short_window_is_refused_where_it_may_not_step(framework_ranks, rule):
    for error in framework_ranks.of(cut_short_refused, last_window=rule):
        assert error.startswith("WindowError: window 2 is ended by its caller after 1 of 3 passes")
        assert f"ds_parity.last_window is '{rule}'" in error


def refused(how):
    """An accelerate loop whose boundary, counts or keys do not fit."""
    steps, section, own_scheduler, counts = STEPS, {}, False, {}
    if how == "accumulates less":
        steps = 2
    if how == "scheduler out of reach":
        section, own_scheduler = {"lr_progress": "rollout"}, True
    if how == "ragged counts":
        counts = {"rollouts": 3}
    if how == "uneven passes":
        section = {"passes": 5}

    def run():
        with ds_parity.install():
            config = configuration(True, 2, "fp32", **section)
            accelerator = accelerator_for(config, steps)
            filled = accelerator.state.deepspeed_plugin.deepspeed_config
            parts = prepared(accelerator, filled, sentences(WINDOWS * STEPS * 4), own_scheduler=own_scheduler)
            if how == "changed to less":
                accelerator.gradient_accumulation_steps = 2
            if how == "changed to more":
                accelerator.gradient_accumulation_steps = 4
            if how == "ranks differ":
                accelerator.gradient_accumulation_steps = STEPS - dist.get_rank()
            loop(accelerator, Trace(), *parts, **counts)

    return ended(run)


REFUSALS = {
    "accumulates less": ["ConfigError", "gradient_accumulation_steps = 2", "6 passes / 2 data-parallel ranks = 3"],
    "changed to less": [
        "WindowError",
        "(True) before pass 1 of window 0",
        "8 of the 12 rollouts",
        "accumulate 3 passes",
    ],
    "changed to more": [
        "WindowError",
        "(False) before pass 2 of window 0",
        "12 of the 12 rollouts",
        "accumulate 3 passes",
    ],
    "ranks differ": ["RankDesyncError", "rank 1 ends the window", "rank 0 goes on"],
    "ragged counts": [
        "WindowError",
        "(False) before pass 1 of window 0",
        "12 of the 12",
        "engine.backward(loss, rollouts",
    ],
    "uneven passes": ["ConfigError", "gradient_accumulation_passes = 5 on 2 data-parallel ranks", "multiple of 2"],
    "scheduler out of reach": ["ConfigError", "lr_progress is 'rollout'", "the framework steps its own"],
}
for how in REFUSALS:
    on_two_ranks.call(refused, how=how)


@pytest.mark.parametrize("how", REFUSALS)
def test_what_contradicts_the_counts_is_refused_on_every_rank(framework_ranks, how):
    errors = framework_ranks.of(refused, how=how)
    assert len(errors) == 2
    for error in errors:
        assert all(part in error for part in REFUSALS[how]), error
