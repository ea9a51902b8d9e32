"""What ranks do of which one parts from the others: it does, or was given, something else. Held in test_parting.py."""

import sys
import time
from copy import deepcopy

from cells import config
from ranked import build, one_pass

import ds_parity

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


def run(rank, kind, stage, drive, odd, at, *, dtype="fp32", limit=5.0, change=None):
    """Train for PASSES passes, but on the rank `odd`, which does `kind` in its pass `at`."""
    extended = config(stage, dtype, passes=8, exchange_timeout=limit, lookahead=3 if drive == "ahead" else 0)
    extended["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    kind = kind if rank == odd else "trains"
    if kind == "config":
        extended = deepcopy(extended)
        CHANGES[change](extended)
    engine = build(extended)
    (_loop if drive == "loop" else _passes)(engine, kind, at, rank, limit)
    return engine.global_steps


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


def kept(rank, kind, stage, drive, odd, at, **keywords):
    """The same, on ranks that outlive what they raise: the error, as text, and the seconds that it took."""
    begun = time.monotonic()
    try:
        run(rank, kind, stage, drive, odd, at, **keywords)
    except (ds_parity.DsParityError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    seconds = time.monotonic() - begun
    time.sleep(max(0.0, keywords.get("limit", 5.0) + 3 - seconds))
    return [text, seconds]
