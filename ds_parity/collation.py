"""From rollouts to tensors: padded to the longest, or packed end to end with what the loss needs to keep them apart.

What a micro-batch carries beside its tokens (advantages, ids, rewards) is taken from its own rollouts, never from the
whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_parity.errors import ConfigError
from ds_parity.planning.checks import check_choices, check_prompt, listed, one_number, whole, wrong_tokens
from ds_parity.planning.plans import STREAMS, Plan
from ds_parity.planning.rollout import MicroBatch, PreferencePair, Rollout, Unit

IGNORED = -100
"""Label of a token without loss, by the convention of torch's cross entropy and of Hugging Face's models."""


def collate(
    held: Sequence[Unit],
    *,
    layout: Literal["padded", "packed"] = "padded",
    rollouts: int | None = None,
    prompts: int = 0,
    pad: int = 0,
    pairs: bool = False,
) -> MicroBatch:
    """Make one micro-batch of rollouts, or of preference pairs, on the CPU.

    A rollout is one sequence; a pair is two, the chosen and then the rejected one. An empty `held` gives the
    micro-batch of an idle pass: rows of two tokens `pad`, without loss, and all counts 0.

    Args:
        held: B rollouts or B pairs. Each sequence has a prompt token, since nothing predicts the first token of a row.
        layout: `padded`, one row per sequence, as long as the longest; or `packed`, all of them in one row.
        rollouts: how many rollouts these finish (>= 0); all, where it isn't given. Turns that are not their rollout's
            last finish none.
        prompts: how many prompts these finish (>= 0).
        pad: the token id of padding.
        pairs: whether an idle pass has the inputs of a pair.

    Returns:
        A micro-batch with the inputs `input_ids` (R, T) int64 and `loss_mask` (R, T - 1) fp32, which is 1 where
        input_ids[:, 1:] is a token of a completion. Padded, R is the number of sequences and T the longest. Packed, R
        is 1 and T their sum, and there are `position_ids` (1, T), 0 where a sequence starts, and `segment_ids` (1, T),
        the number of the sequence, from 0. Rollouts have `advantages` (B,) fp32; pairs have `reference_logps` (B, 2)
        fp32, chosen and rejected.

    Raises:
        ConfigError: something is no rollout, a prompt is empty or longer than its sequence, a token is no id, an
            advantage or a log probability is not one finite number of fp32, rollouts and pairs are mixed, a count is
            no whole number >= 0, or the layout is unknown.
    """
    check_choices(layout=layout)
    if whole(pad) is None:
        raise ConfigError(f"pad is {pad!r}: it must be a token id, a whole number; give the tokenizer's pad_token_id")
    for name, count in (("rollouts", rollouts), ("prompts", prompts)):
        if count is not None and ((number := whole(count)) is None or number < 0):
            raise ConfigError(f"{name} is {count!r}: it is how many these finish, and must be a whole number >= 0")
    held = listed(held)
    idle = Rollout(prompt_id="idle", tokens=(pad, pad), prompt_length=2)
    units: Sequence[Unit] = held or [PreferencePair(idle, idle) if pairs else idle]
    rows = [sequence for unit in units for sequence in unit.sequences]
    for row in rows:
        check_prompt(row)
    inputs = _packed(rows) if layout == "packed" else _padded(rows, pad)
    return MicroBatch(
        inputs=inputs | _of_units(units),
        rollouts=len(held) if rollouts is None else rollouts,
        prompts=prompts,
        tokens=sum(row.loss_tokens for row in rows),
        held=tuple(held),
    )


def micro_batches(plan: Plan, rank: int, *, first_window: int = 0, pad: int = 0) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank, pass by pass, idle passes included: a stream for `engine.passes`.

    Rollouts that fill no window (`plan.left`) are in none of them: plan them again in front of what comes next.

    Args:
        plan: the plan of all ranks, made on each of them of the same rollouts in the same order. It must be for as many
            ranks as train, or some of its micro-batches run nowhere. Each micro-batch says of which plan it is, and for
            which rank of how many: `engine.passes` refuses it on another rank and on another number of ranks, and
            `engine.step` where ranks have begun different plans.
        rank: the data-parallel rank (>= 0).
        first_window: the window to begin with, where a resumed run goes on (0 to the number of windows).
        pad: the token id of padding.

    Raises:
        ConfigError: the plan is for fewer ranks, or for more than there are processes; it has fewer windows, or is no
            plan.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is a {type(plan).__name__}: it must be what ds_parity.plan() returned; plan first")
    _refuse_other_ranks(plan, rank)
    window = whole(first_window)
    if window is None or not 0 <= window <= len(plan.windows):
        raise ConfigError(
            f"first_window = {first_window!r}: the plan has {len(plan.windows)} windows, and they count from 0"
        )
    pairs = any(isinstance(unit, PreferencePair) for unit in plan.rollouts[:1])
    number = plan.number(window)
    stream = STREAMS.begin(number, plan.dp_world_size, empty=window == len(plan.windows))
    counts = (count for window in plan.counts[first_window:] for count in window[:, rank, :2].tolist())
    try:
        for chosen, (rollouts, prompts) in zip(plan.of_rank(rank, first_window), counts, strict=True):
            units = [plan.rollouts[index] for index in chosen.tolist()]
            # No name here keeps a micro-batch alive while the loop runs it.
            yield replace(
                collate(units, layout=plan.layout, rollouts=rollouts, prompts=prompts, pad=pad, pairs=pairs),
                planned_for=plan.dp_world_size,
                plan_rank=whole(rank),
                plan_number=number,
                plan_stream=stream,
                plans_begun=STREAMS.latest,
            )
    finally:
        STREAMS.end(number, stream)


def _refuse_other_ranks(plan: Plan, rank: int) -> None:
    ranks = plan.dp_world_size
    number = whole(rank)
    if number is None or not 0 <= number < ranks:
        raise ConfigError(
            f"rank {rank!r}: the plan is for {ranks} data-parallel ranks, numbered from 0 to {ranks - 1}; plan with "
            "dp_world_size=engine.dp_world_size, and give dist.get_rank(engine.data_parallel_group)"
        )
    if dist.is_available() and dist.is_initialized() and ranks > dist.get_world_size():
        raise ConfigError(
            f"the plan is for {ranks} data-parallel ranks, but {dist.get_world_size()} processes train: micro-batches "
            f"of {ranks - dist.get_world_size()} ranks would run nowhere; plan with dp_world_size=engine.dp_world_size"
        )


def labels(micro_batch: MicroBatch) -> Tensor:
    """Return the labels of a micro-batch for models that shift labels themselves.

    Args:
        micro_batch: one that `collate` made.

    Returns:
        (R, T) int64: the tokens that carry the loss, `IGNORED` elsewhere.

    Raises:
        ConfigError: the micro-batch has no such inputs.
    """
    inputs = getattr(micro_batch, "inputs", None)
    if not isinstance(inputs, Mapping) or not {"input_ids", "loss_mask"} <= inputs.keys():
        names = f" with the inputs {sorted(map(str, inputs))}" if isinstance(inputs, Mapping) else ""
        raise ConfigError(
            f"labels() got a {type(micro_batch).__name__}{names}: it needs the inputs input_ids and loss_mask of a "
            "micro-batch that ds_parity.collate() or micro_batches() made; make labels of your own inputs yourself"
        )
    ids: Tensor = inputs["input_ids"]
    scored = torch.nn.functional.pad(inputs["loss_mask"], (1, 0)) > 0
    return ids.where(scored, torch.full_like(ids, IGNORED))


def to_device(micro_batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """Return the micro-batch with every input on `device`; its counts stay on the host.

    Copies to an accelerator come from pinned memory and don't wait for it: they run on the current stream, behind what
    it has to do, and so before whatever is started on that stream afterwards. Code that reads the inputs on another
    stream must let that one wait, as for any tensor.

    Args:
        micro_batch: one whose inputs are tensors.
        device: as in `torch.Tensor.to`.

    Raises:
        ConfigError: it is no `MicroBatch`, or one of its inputs can't be moved.
    """
    target = torch.device(device)
    inputs: Any = micro_batch.inputs if isinstance(micro_batch, MicroBatch) else None
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"to_device() got a {type(micro_batch).__name__}: it takes a ds_parity.MicroBatch, whose inputs are a dict "
            "of tensors; move what is of another class yourself"
        )
    for name, value in inputs.items():
        if not hasattr(value, "to"):
            raise ConfigError(
                f"to_device(): input {name!r} is a {type(value).__name__}: it must be a tensor, or anything else with "
                ".to(device); make a tensor of it, or move the others yourself"
            )
    return replace(micro_batch, inputs={name: _moved(value, target) for name, value in inputs.items()})


def _moved(value: Any, target: torch.device) -> Any:
    if target.type in ("cpu", "meta") or not isinstance(value, Tensor) or value.device.type != "cpu":
        return value.to(target)
    # From pageable memory each copy would wait until the accelerator has done all that is queued on the stream. Pinning
    # costs a copy on the host (docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html); micro-batches are small.
    # Nobody needs to hold the pinned tensor: torch's caching host allocator gives its memory to no other before the
    # copy has run (github.com/pytorch/pytorch/issues/130785).
    return value.pin_memory().to(target, non_blocking=True)


def _padded(rows: Sequence[Rollout], pad: int) -> dict[str, Any]:
    length = max(len(row.tokens) for row in rows)
    ids = [[*row.tokens, *[pad] * (length - len(row.tokens))] for row in rows]
    scored = [[row.prompt_length <= t < len(row.tokens) for t in range(1, length)] for row in rows]
    mask = torch.tensor(scored, dtype=torch.float32, device="cpu")
    return {"input_ids": _ids(ids, rows, 2), "loss_mask": mask}


def _packed(rows: Sequence[Rollout]) -> dict[str, Any]:
    lengths = [len(row.tokens) for row in rows]
    starts = list(accumulate(lengths[:-1], initial=0))
    ids = _ids([token for row in rows for token in row.tokens], rows, 1)
    mask = torch.zeros(len(ids), dtype=torch.float32, device="cpu")
    for start, row in zip(starts, rows, strict=True):
        mask[start + row.prompt_length : start + len(row.tokens)] = 1
    # On the host, whatever the default device is: to_device moves them.
    repeats, begins = (torch.tensor(numbers, device="cpu") for numbers in (lengths, starts))
    places, numbers = (torch.arange(count, device="cpu") for count in (len(ids), len(rows)))
    return {
        "input_ids": ids[None],
        "loss_mask": mask[None, 1:],
        "position_ids": (places - begins.repeat_interleave(repeats))[None],
        "segment_ids": numbers.repeat_interleave(repeats)[None],
    }


def _ids(values: Sequence[Any], rows: Sequence[Rollout], dimensions: int) -> Tensor:
    """Return token ids as int64; where they are none, raise what is said of the row that they come from."""
    ids = _whole_numbers(values, dimensions)
    if ids is None:
        raise wrong_tokens(next((row for row in rows if _whole_numbers(list(row.tokens), 1) is None), rows[0]))
    return ids


def _whole_numbers(values: Sequence[Any], dimensions: int) -> Tensor | None:
    try:
        ids = torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    kind = ids.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or ids.ndim != dimensions:
        return None
    return ids.to(torch.int64)


def _of_units(units: Sequence[Unit]) -> dict[str, Tensor]:
    """Return the inputs that are one number per unit: advantages, or the reference's log probabilities."""
    pairs = [unit for unit in units if isinstance(unit, PreferencePair)]
    if pairs and len(pairs) < len(units):
        raise ConfigError(f"{len(pairs)} of {len(units)} are preference pairs: a micro-batch holds one kind")
    if pairs:
        logps = [[_logp(pair, name) for name in ("chosen_logp", "rejected_logp")] for pair in pairs]
        return {"reference_logps": torch.tensor(logps, dtype=torch.float32, device="cpu")}
    advantages = [_advantage(rollout) for rollout in cast("Sequence[Rollout]", units)]
    return {"advantages": torch.tensor(advantages, dtype=torch.float32, device="cpu")}


def _logp(pair: PreferencePair, name: str) -> float:
    of = f"pair of prompt {pair.prompt_id!r}: {name}"
    return one_number(
        of, getattr(pair, name), "give the sum over the answer's tokens, in nats (0.0 where none is known)"
    )


def _advantage(rollout: Rollout) -> float:
    return one_number(
        f"rollout of prompt {rollout.prompt_id!r}: advantage",
        rollout.advantage,
        "for one of each token (PPO, GAE) write a loss of your own, and keep them in a field of a subclass of Rollout: "
        "micro_batch.held has them row by row",
    )
