"""Train once more, in one process of plain torch, on what a run has consumed, and write a trace to compare it with.

    deepspeed --num_accelerators 2 tools/train_online.py --sync --record --output recorded
    python tools/online/replay.py --output recorded
    ds-parity compare recorded/replay.jsonl recorded/trace.jsonl

It shares no code with the engine and none with `ds_parity.losses`: a window is one batch, in fp64, its loss is written
out below, and torch's own AdamW takes the step. What was consumed is read from OUTPUT/consumed, so the replay sees the
same rollouts in the same windows; how they were spread over ranks and micro-batches must not matter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from ds_parity.config import load_config
from ds_parity.trace import StepRecord, TraceWriter
from ds_parity.trace.heading import header
from online import task
from online.account import ledger_of
from online.arrivals import Sampled, rollouts_of


def windows(output: Path) -> dict[int, list[Sampled]]:
    """Return the rollouts of each step, of all ranks."""
    found: dict[int, list[Sampled]] = {}
    for path in sorted((output / "consumed").glob("rank*.jsonl")):
        for step, groups in ledger_of(path, "groups")[0].items():
            rollouts = [one for group in groups for one in rollouts_of(group, step - 1)]
            found.setdefault(step, []).extend(rollouts)
    return dict(sorted(found.items()))


def window_loss(model: nn.Module, rollouts: list[Sampled], given: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a window, GRPO's clipped objective for each token, summed and divided once; and its metrics.

    Args:
        model: in fp64.
        rollouts: of the window.
        given: norm, clip_low, clip_high, cap and kl as in train_online.py, and `reference`, the policy of the start.
    """
    total, kl, units, cut = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0.0, 0.0
    ids = torch.full((len(rollouts), max(len(one.tokens) for one in rollouts)), task.PAD)
    for row, one in enumerate(rollouts):
        ids[row, : len(one.tokens)] = torch.tensor(one.tokens)
    scores = model(ids).log_softmax(-1)
    with torch.no_grad():
        reference = given["reference"](ids).log_softmax(-1) if given["kl"] else None
    for row, one in enumerate(rollouts):
        places = torch.arange(one.prompt_length, len(one.tokens))
        logp = scores[row, places - 1, ids[row, places]]
        losses, clipped = _clipped(logp, one, given)
        divisor = {"token": 1, "rollout": len(places), "dr_grpo": task.LONGEST}[given["norm"]]
        total, cut = total + losses.sum() / divisor, cut + clipped
        units += len(places) if given["norm"] == "token" else 1
        if reference is not None:
            apart = reference[row, places - 1, ids[row, places]] - logp
            kl = kl + (apart.exp() - apart - 1).sum() / divisor
    means = {"clipped": cut / len(rollouts)}
    if reference is not None:
        means |= {"policy": float(total.detach()) / units, "kl": float(kl.detach()) / units}
    return (total + given["kl"] * kl) / units, means


def _clipped(logp: Tensor, one: Sampled, given: dict[str, Any]) -> tuple[Tensor, float]:
    """Return the losses of a rollout's tokens, and the share of them that clipping has cut off."""
    ratio = (logp - torch.tensor(one.logps, dtype=torch.float64)).exp()
    bounded = ratio if given["cap"] is None else ratio.clamp(max=given["cap"])
    clipped = ratio.clamp(1 - given["clip_low"], 1 + given["clip_high"])
    above = (ratio > bounded) & (one.advantage < 0)
    off = ((clipped * one.advantage < ratio * one.advantage) | above).double().mean()
    return -torch.minimum(bounded * one.advantage, clipped * one.advantage), float(off)


def metrics_of(rollouts: list[Sampled]) -> dict[str, float]:
    """Return the means that need no policy."""
    sums = {
        "reward": sum(one.reward for one in rollouts),
        "lag": sum(one.lag for one in rollouts),
        "length": sum(one.loss_tokens for one in rollouts),
    }
    return {name: value / len(rollouts) for name, value in sums.items()}


def replay(args: argparse.Namespace) -> int:
    """Train on every window and write the trace; returns how many there were."""
    config = load_config(args.deepspeed_config)
    model, reference = (task.build(0).double() for _ in range(2))
    for one in (model, reference):
        one.load_state_dict(torch.load(args.output / "start.pt", weights_only=True))
    options = {k: v for k, v in config["optimizer"]["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    section = config["scheduler"]
    # A schedule is a formula, and this one is DeepSpeed's.
    scheduler = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
    given = {**vars(args), "reference": reference, "cap": args.ratio_cap if args.old == "clip" else None}
    writer = TraceWriter(
        args.output / "replay.jsonl", header("training", config, engine="torch", ranks=1, device="cpu")
    )
    consumed = windows(args.output)
    for step, rollouts in consumed.items():
        loss, means = window_loss(model, rollouts, given)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        lr = tuple(float(group["lr"]) for group in optimizer.param_groups)
        optimizer.step()
        scheduler.step()
        tokens = sum(one.loss_tokens for one in rollouts)
        writer.write(
            StepRecord(
                step=step,
                passes=None,
                idle_passes=None,
                rollouts=len(rollouts),
                prompts=len({one.prompt_id for one in rollouts}),
                tokens=tokens,
                # With terms, the total of a step is the sum of theirs.
                total=float(tokens if args.norm == "token" else len(rollouts)) * (2 if args.kl else 1),
                loss=float(loss.detach()),
                lr=lr,
                grad_norm=float(norm),
                metrics=means | metrics_of(rollouts),
            )
        )
    writer.close()
    return len(consumed)


def main() -> None:
    """Read the arguments; those of the loss must be those of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="of the run that was recorded")
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--norm", choices=["token", "rollout", "dr_grpo"], default="token")
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--clip_low", type=float, default=0.2)
    parser.add_argument("--clip_high", type=float, default=0.28)
    parser.add_argument("--old", choices=["drop", "clip"], default="drop")
    parser.add_argument("--ratio_cap", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{replay(args)} windows replayed: {args.output / 'replay.jsonl'}")


if __name__ == "__main__":
    main()
