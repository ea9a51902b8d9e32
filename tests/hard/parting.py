"""What ranks do of which one parts from the others: it does, or was given, something else. Held in test_parting.py."""

import sys
import time

from tests.distributed.cells import config
from tests.distributed.engines import build, one_pass, refusal

PASSES = 6  # of every rank that does not part
CHANGES = {
    "stage": lambda c: c["zero_optimization"].update(stage=(c["zero_optimization"]["stage"] + 1) % 4),
    "dtype": lambda c: c["bf16"].update(enabled=not c["bf16"]["enabled"]),
    "clipping": lambda c: c.update(gradient_clipping=0.25),
    "no clipping": lambda c: c.pop("gradient_clipping"),
    "target": lambda c: c.update(gradient_accumulation_passes=c["gradient_accumulation_passes"] + 4),
    "lookahead": lambda c: c["ds_parity"].update(lookahead=c["ds_parity"].get("lookahead", 0) + 3),
    "overshoot": lambda c: c["ds_parity"].update(overshoot="reset"),
    "learning rate": lambda c: c["optimizer"]["params"].update(lr=0.01),
    "scheduler": lambda c: c["scheduler"]["params"].update(warmup_num_steps=11),
    "buckets": lambda c: c["zero_optimization"].update(reduce_bucket_size=1000),
    "a fault": lambda c: c["ds_parity"].update(overshoot="cary"),
    "a fault of ZeRO": lambda c: c["zero_optimization"].update(elastic_checkpoint=True),
}


class Batch:
    """A micro-batch by its counts."""

    def __init__(self, rollouts=1, tokens=3):
        self.rollouts, self.prompts, self.tokens = rollouts, 0, tokens


def run(rank, kind, stage, drive, odd, at, limit):
    """Train for PASSES passes, but on the rank `odd`, which does `kind` in its pass `at`."""
    engine = build(_extended(stage, drive, limit))
    (_loop if drive == "loop" else _passes)(engine, kind if rank == odd else "trains", at, rank, limit)
    return engine.global_steps


def configurations(rank, stage, odd):
    """Build an engine for each of CHANGES, which `odd` alone was given: what each rank raises, and after how long."""
    found = {}
    for name, change in CHANGES.items():
        extended = _extended(stage, "loop", 60.0)
        if rank == odd:
            change(extended)
        begun = time.monotonic()
        found[name] = [refusal(lambda: build(extended)), time.monotonic() - begun]  # noqa: B023  # called here
    return found


def checkpoints(rank, stage, odd, folder, doing):
    """Save, save again or load: the rank `odd` breaks before the second."""
    engine = build(_extended(stage, "loop", 5.0))
    for number in range(4):
        one_pass(engine, number, rollouts=1, tokens=3)
    engine.save_checkpoint(folder, "first")
    if rank == odd:
        raise ValueError("this rank broke")
    if doing == "saves":
        engine.save_checkpoint(folder, "second")
    else:
        engine.load_checkpoint(folder)
        one_pass(engine, 0, rollouts=1, tokens=3)


def _extended(stage, drive, limit):
    extended = config(stage, passes=8, exchange_timeout=limit, lookahead=3 if drive == "ahead" else 0)
    extended["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return extended


def _loop(engine, kind, at, rank, limit):
    for number in range(PASSES):
        if number == at:
            if kind in ("finishes", "leaves"):
                break
            if kind == "skips":
                continue
            _part(kind, limit)
        counts = {"rollouts": -1} if (kind, number) == ("refuses", at) else {"rollouts": 1}
        one_pass(engine, number + 100 * rank, **counts, tokens=3)
    if kind != "leaves":
        engine.finish()


def _passes(engine, kind, at, rank, limit):
    ahead = {"lookahead": 4} if kind == "looks ahead" else {}
    for number, _ in enumerate(engine.passes(_stream(kind, at, limit), **ahead)):
        if number == at and kind in ("finishes", "leaves"):
            break
        if number == at:
            _part(kind, limit)
        one_pass(engine, number + 100 * rank)
    if kind == "finishes":
        engine.finish()


def _stream(kind, at, limit):
    for number in range(PASSES):
        if number == at and kind == "stream raises":
            raise ValueError("the stream broke")
        if number == at and kind == "stream exits":
            sys.exit(0)
        yield Batch(rollouts=0 if number == at and kind == "refuses" else 1)


def _part(kind, limit):
    if kind == "raises":
        raise ValueError("this rank broke")
    if kind == "exits":
        sys.exit(0)
    if kind == "sleeps":
        time.sleep(3 * limit)
