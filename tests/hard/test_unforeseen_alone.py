"""One rank does something alone that all ranks must do together, and both live on: every rank is told in time."""

import time

from deepspeed.utils import safe_get_full_fp32_param

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import forward, perceptron

LIMIT = 3.0
IN_TIME = 25.0


def build(stage, caller=False):
    extended = {**config(stage, passes=4, exchange_timeout=LIMIT)}
    if caller:
        extended["ds_parity"] = {**extended["ds_parity"], "boundary": "caller"}
        extended["ds_parity"].pop("overshoot", None)
    model = perceptron()
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended)[0]


def run(engine, caller, passes=4):
    for number in range(passes):
        engine.backward(forward(engine, number), rollouts=1, tokens=3)
        if not caller or number % 2:
            engine.step()


CALLS = {
    "save": lambda e, folder: e.save_checkpoint(folder, "alone"),
    "load": lambda e, folder: e.load_checkpoint(folder, "first"),
    "finish": lambda e, folder: e.finish(),
    "expect": lambda e, folder: e.expect(rollouts=2, tokens=6),
    "advantages": lambda e, folder: e.group_advantages([1, 2], [0.0, 1.0]),
    "passes": lambda e, folder: list(e.passes([])),
    "lookahead": lambda e, folder: list(e.passes([], lookahead=3)),
    "initialize": lambda e, folder: build(0),
    "destroy": lambda e, folder: e.destroy(),
    "save-16bit": lambda e, folder: e.save_16bit_model(folder),
    "read": lambda e, folder: [safe_get_full_fp32_param(one) for one in e.module.parameters()],
}


def alone(rank, stage, what, caller, who, folder):
    engine = build(stage, caller)
    run(engine, caller)
    engine.save_checkpoint(folder, "first")
    begun = time.monotonic()
    said = "nothing was raised"
    try:
        if rank == who:
            CALLS[what](engine, folder)
        run(engine, caller)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    time.sleep(max(0.0, 12 - seconds))  # it lives on, and nobody hears of its end
    return [said, seconds]
