"""What is refused before a pass or a step runs, because DeepSpeed would run it wrong; the other ranks are told."""

from __future__ import annotations

from typing import Any

import torch

from ds_parity.engine.among_ranks import AmongRanks
from ds_parity.engine.arguments import parts_of, refuse_what_is_no_loss
from ds_parity.engine.internals.moved_away import refuse_moved_away
from ds_parity.engine.internals.schedule import refuse_unfit
from ds_parity.errors import WindowError
from ds_parity.window import Counts

_SHARED_EXPERTS = (
    "experts on different ranks (DeepSpeed's MoE with ep_size above 1): other ranks' tokens run through this rank's "
    "experts, and its own through theirs",
    "use ep_size 1",
)
_SHARED_STATISTICS = (
    "torch's SyncBatchNorm in training: what an idle pass runs would enter the statistics that other ranks' losses "
    "depend on",
    "call eval() on these modules",
)


def refuse_no_loss(driver: AmongRanks, loss: Any) -> None:
    """Raise WindowError before anything is counted where a loss, or one of its terms, is none."""
    driver.adapter.kept.refuse_ended()
    try:
        for name, part in parts_of(loss).items():
            refuse_what_is_no_loss(part, name)
    except WindowError:
        # Inside passes(), and where each backward reduces, the others wait in DeepSpeed by now, and hear nothing there.
        if driver.queue is None and (driver.adapter.silent_inside_windows or not driver.settings.by_caller):
            with driver.telling():
                raise
        raise


def refuse_idle(driver: AmongRanks, counts: Counts) -> None:
    """Raise WindowError in an idle pass where what other ranks compute depends on this rank's.

    Args:
        driver: that is to run the pass.
        counts: what this rank's micro-batch contains.
    """
    if driver.adapter.experts_apart:
        shared = _SHARED_EXPERTS
    elif driver.ranks > 1 and driver.adapter.shares_statistics:
        shared = _SHARED_STATISTICS
    else:
        return
    if driver.ledger.weighting.silences(counts):
        with driver.telling():
            raise WindowError(
                f"an idle pass with {shared[0]}, so that silencing this rank alone gives a wrong gradient; give "
                f"every rank as many micro-batches that weigh something, or {shared[1]}"
            )


def refuse_strays(driver: AmongRanks, *, newcomers: bool, ends: bool = False) -> None:
    """Raise WindowError where gradients, states, or which parameters there are, changed outside of `backward`.

    Args:
        driver: whose window it is.
        newcomers: look through all modules for parameters that came after the engine was built.
        ends: the window is about to end, so that the accelerator may be waited for.
    """
    with driver.telling():
        # Inside coalesce_grad_reduction() gradients are reduced, and nothing is stepped.
        steps = ends and not driver.adapter.keeps_whole_gradients
        refuse_moved_away(driver.engine, driver.ledger.window.index, steps=steps)
        driver.adapter.kept.refuse_freezing(driver.ledger.window.index)
        driver.adapter.kept.refuse_strays(driver.ledger.window.index, ends=ends)
        if newcomers:
            driver.adapter.kept.refuse_newcomers()


def refuse_ending_here(driver: AmongRanks) -> None:
    """Raise WindowError for `step()` and `finish()` where DeepSpeed can't step: it has an assertion, or breaks.

    The caller tells the other ranks.
    """
    if torch.is_inference_mode_enabled() and driver.engine.zero_optimization_stage() == 3:
        raise WindowError(
            f"step() or finish() under torch.inference_mode(), in window {driver.ledger.window.index}, on ZeRO stage "
            "3: the weights that DeepSpeed gathers from there on could not be trained any more (torch: Inference "
            "tensors cannot be saved for backward); call it outside, or under torch.no_grad()"
        )
    if driver.adapter.inside_no_sync:
        raise WindowError(
            f"step() or finish() inside no_sync(), in window {driver.ledger.window.index}: DeepSpeed does not step "
            "there; call it behind the block, or leave no_sync() out: DeepSpeed communicates only where it must"
        )


def refuse_schedule(driver: AmongRanks, given: Any, doing: str) -> None:
    """Raise WindowError where the scheduler's `step()` does not take what it would be given in the coming step.

    Args:
        driver: whose window ends.
        given: `lr_kwargs` of the loop.
        doing: what the loop has called ("step()").
    """
    with driver.telling():
        refuse_unfit(driver.engine.lr_scheduler, given, f"{doing} in window {driver.ledger.window.index}")
