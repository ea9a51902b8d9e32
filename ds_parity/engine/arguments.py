"""What `backward` is given: what a micro-batch holds where nobody says, and what can't be taken."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ds_parity.config import MAX_LOOKAHEAD, Settings
from ds_parity.errors import WindowError
from ds_parity.window import Counts, Weighting


def counts_of(settings: Settings, usual_rollouts: int, given: Mapping[str, int]) -> Counts:
    """Return the counts of a micro-batch: those given, and the usual number of rollouts where they are left out.

    Args:
        settings: the extra keys.
        usual_rollouts: what a micro-batch holds where nobody says.
        given: rollouts, prompts, tokens, as far as they were given.

    Raises:
        WindowError: the loss is weighed by tokens, or the window counts prompts, and these were left out.
    """
    call = f"backward({', '.join(f'{name}={count}' for name, count in given.items()) or 'loss'})"
    if settings.loss_weight == "token" and "tokens" not in given:
        raise WindowError(
            f"{call} without tokens= although ds_parity.loss_weight is 'token': the loss is weighed by its tokens; "
            "pass tokens=, how many loss tokens the micro-batch holds"
        )
    if settings.count == "prompt" and "prompts" not in given:
        raise WindowError(
            f"{call} without prompts= although ds_parity.count is 'prompt': nothing would bring the window nearer to "
            "its end; pass prompts=, how many the micro-batch finishes (0 where their other rollouts are still to come)"
        )
    return Counts(**{"rollouts": usual_rollouts, **given})


def refuse_contradiction(announced: Counts, given: Mapping[str, int]) -> None:
    """Raise WindowError where counts given inside `passes` aren't the micro-batch's own.

    The loop may repeat them, also in an idle pass, where it says what the stand-in holds.
    """
    wrong = {name: count for name, count in given.items() if announced.active and count != getattr(announced, name)}
    if wrong:
        raise WindowError(
            f"backward() got {wrong} but passes() has announced {announced}: inside passes() the counts are the "
            "micro-batch's own; call backward(loss) alone"
        )


def refuse_mean_of_parts(weighting: Weighting, counts: Counts, sequences: int = 0) -> None:
    """Raise WindowError where a loss is a mean over rollouts, of some of which the micro-batch contains parts alone.

    Args:
        weighting: of the window.
        counts: what the micro-batch contains.
        sequences: of how many sequences it consists, 0 where nobody knows.
    """
    parts = sequences > counts.rollouts or (counts.active and not counts.rollouts)
    if parts and weighting.over_rollouts:
        raise WindowError(
            f"a micro-batch of {counts.tokens} loss tokens{f' in {sequences} sequences' if sequences else ''} finishes "
            f"{counts.rollouts} rollouts, and ds_parity.loss_weight {weighting.name!r} with loss_reduction 'mean' "
            "says that its loss is a mean over the rollouts that it finishes: turns that are not their rollout's last "
            "would weigh nothing. Choose loss_weight 'token', or loss_reduction 'sum' with a loss that adds up each "
            "turn's share of its rollout; an idle pass has no tokens"
        )


def refuse_scaling(scale_wrt_gas: bool) -> None:
    """Raise WindowError where a caller divides by itself."""
    if not scale_wrt_gas:
        raise WindowError(
            "backward(scale_wrt_gas=False): ds_parity divides the loss by the window's total, and that is the only "
            "division; pass the micro-batch's plain loss and leave scale_wrt_gas out"
        )


def refuse_what_is_no_loss(loss: Any) -> None:
    """Raise WindowError before anything is counted: a pass that is counted and has no gradient can't be taken back."""
    if not torch.is_grad_enabled():
        raise WindowError(
            "backward() under torch.no_grad() or torch.inference_mode(): what is computed there has no graph, and the "
            "loss is divided before its backward; call forward and backward() outside of them"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None or loss.is_complex():
        what = f"of shape {tuple(loss.shape)} and {loss.dtype} " if isinstance(loss, torch.Tensor) else ""
        raise WindowError(
            f"backward() got a {type(loss).__name__} {what}that is no loss: it must be a real tensor of one element "
            "with a graph behind it; add up the parts of a loss before, and leave torch.no_grad() and detach() out"
        )


def chunk_of(lookahead: Any) -> int:
    """Return how many passes are exchanged together (>= 1).

    Raises:
        WindowError: the look-ahead of `passes()` is none that the key could have.
    """
    try:
        passes = -1 if isinstance(lookahead, bool) else operator.index(lookahead)
    except TypeError:
        passes = -1
    if not 0 <= passes <= MAX_LOOKAHEAD:
        raise WindowError(
            f"passes(lookahead={lookahead!r}): must be a whole number from 0 to {MAX_LOOKAHEAD}, because each exchange "
            "costs as much as so many passes; leave it out for that of ds_parity.lookahead"
        )
    return max(1, passes)


def iterator_of(stream: Any) -> Iterator[Any]:
    """Return the iterator of a stream; raise WindowError where it has none."""
    try:
        return iter(stream)
    except TypeError as error:
        raise WindowError(
            f"passes() got a {type(stream).__name__}, which can't be iterated ({error}): it must be a stream of "
            "micro-batches; on a rank without data, passes([])"
        ) from error


def counts_in(batch: Any) -> Counts:
    """Return the counts that a micro-batch of a stream says it contains.

    Raises:
        WindowError: it says none, or one that can't be right.
    """
    lacking = [name for name in Counts.__slots__ if not hasattr(batch, name)]
    if lacking:
        of = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        without = " and ".join(part for part in (", ".join(lacking[:-1]), lacking[-1]) if part)
        raise WindowError(
            f"passes() got a {type(batch).__name__}{of} without {without}: ranks announce what a micro-batch contains "
            "before it runs, so it must say so; yield ds_parity.MicroBatch(inputs, rollouts=..., prompts=..., "
            "tokens=...) or any object with these three attributes, or leave passes() out and give the counts to "
            "engine.backward(loss, rollouts=...)"
        )
    return Counts(batch.rollouts, batch.prompts, batch.tokens)


def holds_nothing(batch: Any, counts: Counts) -> bool:
    """Whether a micro-batch of a stream contains nothing, and has no inputs either that an idle pass could run.

    One that keeps what it runs elsewhere, in attributes of its own, has no `inputs` at all, and is left to the loop.
    """
    if counts != Counts() or not hasattr(batch, "inputs"):
        return False
    inputs = batch.inputs
    return inputs is None or (isinstance(inputs, Mapping) and not inputs)


def refuse_what_runs_nothing(idle: Any) -> None:
    """Raise WindowError where what was given to stand in is no micro-batch, or has no inputs that could be run."""
    counts_in(idle)
    if holds_nothing(idle, Counts()):
        raise WindowError(
            f"passes(idle=...) got a micro-batch without inputs (its inputs are {idle.inputs!r}): idle passes run "
            "their forward with them; give the smallest micro-batch that the model can run, for example "
            "ds_parity.collate([]) for a model of tokens, or leave idle= out"
        )
