"""Ranks that fall out of sync: every rank raises an error that says so, and none waits longer than its limit."""

import re
import time

import pytest
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def desync(folder):
    """Ranks in different places: every rank raises at once."""
    rank = dist.get_rank()
    engine = build(config(1, passes=8))
    one_pass(engine, 1)
    pass_count = refusal(engine.finish if rank else lambda: one_pass(engine, 2))
    settings = refusal(lambda: build(config(1, passes=8, overshoot="reset" if rank else "carry")))
    stage = refusal(lambda: build(config(1 + rank, passes=8)))
    fault = refusal(lambda: build(config(1, passes=8, overshoot="cary" if rank else "carry")))
    trace = refusal(lambda: build(config(1, passes=8, trace="/dev/null/trace")))
    places = {
        "_comment": f"of rank {rank}",
        "steps_per_print": 10 + rank,
        "csv_monitor": {"enabled": False, "output_path": f"{folder}/{rank}"},
    }
    own = refusal(lambda: build({**config(1, passes=8, trace=f"{folder}/{rank}.jsonl"), **places}))
    ahead = build(config(1, passes=8))
    lookahead = refusal(lambda: next(iter(ahead.passes([Batch()], lookahead=2 + rank))))
    results = {"pass count": pass_count, "settings": settings, "stage": stage, "fault": fault, "trace": trace}
    return from_all({**results, "own": own, "lookahead": lookahead, **_alone()})


def _alone():
    """Rank 1 refuses, or its stream breaks, where the others have a pass; all go on with another engine after it."""
    results = {}
    for stage, ahead in ((1, 0), (2, 0), (3, 3)):
        for name, stream in (("refuses", _refused), ("breaks", _broken)):
            engine = build(config(stage, passes=8, lookahead=ahead, exchange_timeout=60))
            begun = time.perf_counter()
            message = refusal(lambda: [one_pass(engine, 1) for _ in engine.passes(stream())])  # noqa: B023  # called here
            results[f"{name}, ZeRO {stage}"] = [message, time.perf_counter() - begun]
    return results


def _refused():
    yield Batch()
    parts = Batch()
    parts.rollouts = 1 - dist.get_rank()
    yield parts
    yield Batch()


def _broken():
    yield Batch()
    if dist.get_rank():
        raise ds_parity.TraceError("the stream broke")
    yield Batch()


def test_ranks_that_part_are_told_on_every_rank(two_ranks):
    for message in (messages["pass count"] for messages in two_ranks.of(desync)):
        assert message.startswith("RankDesyncError: ranks are not in the same place: rank 0 runs a pass")
        assert "rank 1 finishes" in message
        assert "idle()" in message


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("settings", 'ds_parity.overshoot (rank 0 has "carry"; rank 1 has "reset")'),
        ("stage", "zero_optimization.stage (rank 0 has 1; rank 1 has 2)"),
        ("lookahead", "look-ahead (rank 0 has 2; rank 1 has 3)"),
    ],
)
def test_ranks_that_were_told_different_things_are_told_so_on_every_rank(two_ranks, case, what):
    for message in (messages[case] for messages in two_ranks.of(desync)):
        assert message.startswith(f"RankDesyncError: ranks differ in {what}. All ranks need the same configuration")


def test_ranks_may_log_what_and_where_they_like(two_ranks):
    assert [theirs["own"] for theirs in two_ranks.of(desync)] == ["nothing was raised"] * 2


@pytest.mark.parametrize(
    ("case", "odd", "says"),
    [("fault", 1, 'ConfigError: .*overshoot = "cary"'), ("trace", 0, "TraceError: .*/dev/null/trace")],
)
def test_a_rank_that_cannot_start_tells_the_others(two_ranks, case, odd, says):
    messages = [theirs[case] for theirs in two_ranks.of(desync)]
    assert re.match(says, messages[odd], re.DOTALL)
    others = f"RankDesyncError: this rank stops because others did: rank {odd} raised {says}"
    assert re.match(others, messages[1 - odd], re.DOTALL)


@pytest.mark.parametrize(
    "case", ["refuses, ZeRO 1", "refuses, ZeRO 2", "refuses, ZeRO 3", "breaks, ZeRO 1", "breaks, ZeRO 3"]
)
def test_a_rank_that_raises_alone_in_passes_tells_the_others_long_before_the_limit(two_ranks, case):
    (message, _), (own, seconds) = [theirs[case] for theirs in two_ranks.of(desync)]
    says = (
        "WindowError: a micro-batch of 3 loss tokens finishes 0"
        if "refuses" in case
        else "TraceError: the stream broke"
    )
    assert own.startswith(says)
    stopped = "RankDesyncError: this rank stops because another did: rank 0 runs a pass in window 0, pass "
    assert message.startswith(stopped + ("0" if "ZeRO 3" in case else "1"))  # read ahead, on ZeRO 3
    assert f"rank 1 has raised {says}" in message
    assert seconds < 20


@on_two_ranks
def silence_of_a_rank(folder):
    """One rank never comes: the others raise when the time is up."""
    engine = build(config(1, passes=8, exchange_timeout=2.5))
    begun = time.perf_counter()
    message = refusal(lambda: one_pass(engine, 1)) if dist.get_rank() == 0 else "silent"
    seconds = time.perf_counter() - begun
    dist.barrier()
    return {"message": message, "seconds": seconds}


def test_a_silent_rank_ends_the_wait_when_the_time_is_up(two_ranks):
    result = two_ranks.of(silence_of_a_rank)
    assert result["message"].startswith("RankDesyncError: rank 0 runs a pass, and waited in window 0, pass 0")
    assert "up to 2.5 s" in result["message"]
    assert 2 < result["seconds"] < 10
