"""accelerate's own loop on two ranks, and what of it can't be reconciled; asserted in test_frameworks.py."""

import logging

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from deepspeed.accelerator import get_accelerator

import ds_parity
from tests.frameworks.small import STEPS, WINDOWS, Trace, configuration, ended, fresh_state, installed, model, sentences


def accelerator_for(config, steps=STEPS, dtype="fp32"):
    fresh_state()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=steps,
        mixed_precision="bf16" if dtype == "bf16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())],
    )


def prepared(accelerator, config, data, *, own_scheduler=False):
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


def with_accelerate(ours, stage, dtype, own_scheduler=False, extra=0, epochs=2, **section):
    """Accelerate's own loop; `extra`: micro-batches a rank that fill no window at the end of an epoch."""
    with installed(ours):
        config = configuration(ours, stage, dtype, **section)
        accelerator = accelerator_for(config, dtype=dtype)
        data = sentences((WINDOWS // 2 * STEPS + extra) * 4)
        parts = prepared(
            accelerator, accelerator.state.deepspeed_plugin.deepspeed_config, data, own_scheduler=own_scheduler
        )
        trace = Trace()
        loop(accelerator, trace, *parts, epochs=epochs)
        return trace.result(parts[0])


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


def cut_short(ours, last_window="step"):
    """Two epochs of accelerate that each end after one pass of a window; what ours says of it."""
    said, logger = [], logging.getLogger("ds_parity")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        section = {"last_window": last_window} if ours else {}
        return {**with_accelerate(ours, 2, "fp32", extra=1, **section), "said": said}
    finally:
        logger.removeHandler(handler)


def cut_short_refused(last_window):
    return ended(lambda: cut_short(True, last_window))
