"""What the migrations share: real rollouts, small models, and a watch that says what every step was really made of."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from ds_parity.errors import DsParityError
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import informative, load_rollouts, shorten
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.parity.probe.decomposition import decompose
from ds_parity.parity.running.weights import vector
from ds_parity.planning import Rollout
from ds_parity.planning.rollout import MicroBatch
from ds_parity.token_losses import token_logps
from ds_parity.trace import StepRecord, TraceWriter
from ds_parity.trace.foreign import read_pair
from ds_parity.trace.heading import header

Found = dict[str, Any]
"""What a run came to, in plain values, as it is kept in a found.json."""
# A probe needs an update that is the gradient, so it trains by plain SGD and clips nothing.
PROBED = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
PROBED |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
_KNOWN = ("rollouts", "tokens", "loss", "lr", "grad_norm")


@cache
def rollouts(count: int | None = None, longest: int = 512) -> tuple[Rollout, ...]:
    """Return the first bundled rollouts that have a policy gradient, cut to so many tokens; None: all of them."""
    return tuple(shorten(informative(load_rollouts())[:count], longest))


def policy(seed: int = 0) -> nn.Module:
    """Return the small decoder."""
    return build_tiny(seed)


def logps_of(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return (B, T - 1) what the model gives each token, in nats."""
    ids = batch.inputs["input_ids"]
    return token_logps(model(ids)[:, :-1], ids[:, 1:])


class Watch:
    """Hears of every backward and every step() of one engine, and says what each optimizer step was made of.

    Args:
        engine: the bare one, or ds_parity's.
        weight: what a micro-batch should weigh: an attribute of it, `tokens` or `rollouts`.
        mean: (model, micro-batch) to the micro-batch's own mean loss, to probe with; None: nothing is probed.
        twin: another model of the same build, to probe with.
        trace: where to write one, for `ds-parity compare`.
        config: for its header.
        peers: ranks that share a micro-batch (sequence parallelism), which is counted once.
        passes: whether the trace tells the passes of each step, which `compare` wants to be equal.

    Attributes:
        steps: what each optimizer step came to, in plain values.
        weights: a digest of the weights after the last step, once it is closed.
    """

    def __init__(
        self,
        engine: Any,
        weight: str = "tokens",
        mean: Callable[[nn.Module, MicroBatch], Tensor] | None = None,
        twin: nn.Module | None = None,
        trace: Path | None = None,
        config: Found | None = None,
        peers: int = 1,
        passes: bool = False,
    ) -> None:
        self.engine, self.steps, self._peers = engine, list[Found](), peers
        self._weight, self._mean, self._twin = weight, mean, twin
        self._batches: list[MicroBatch] = []
        self._losses: list[float] = []
        self._before = vector(engine.module) if mean is not None else torch.empty(0)
        self._seen, self._lr = engine.global_steps, (0.0,)
        self._trace = trace if dist.get_rank() == 0 else None
        self._config = config or {}
        self._known = (*_KNOWN, "passes") if passes else _KNOWN
        self.weights = ""

    def ran(self, batch: MicroBatch, mean_loss: Tensor) -> None:
        """Note a backward: its micro-batch, and the mean of its own losses. An idle pass is none."""
        if batch.idle:
            return
        self._batches.append(batch)
        self._losses.append(float(mean_loss.detach()))
        self._lr = tuple(self.engine.get_lr())

    def stepped(self) -> None:
        """Note a call of step(); where it has updated the weights, say what it was made of. Collective."""
        if self.engine.global_steps == self._seen:
            return
        self._seen = self.engine.global_steps
        mine = [(loss, getattr(one, self._weight), one.rollouts, one.tokens) for loss, one in self._noted()]
        everyone = self._of_all(mine)
        ran = [one for rank in everyone for one in rank]
        norm = self.engine.get_global_grad_norm()
        total = sum(weight for _, weight, *_ in ran)
        self.steps.append(
            {
                "passes": max(map(len, everyone)),
                "rollouts": sum(one[2] for one in ran),
                "tokens": sum(one[3] for one in ran),
                "loss": sum(loss * weight for loss, weight, *_ in ran) / max(total, 1),
                "lr": self._lr[0],
                "grad_norm": None if norm is None else float(norm),
            }
        )
        if self._mean is not None:
            weights = [[weight for _, weight, *_ in rank] for rank in everyone]
            self.steps[-1] |= self._probed(weights, max(total, 1))
        self._batches, self._losses = [], []

    @property
    def pending(self) -> int:
        """Micro-batches of this rank that have entered no step."""
        return len(self._batches)

    def close(self) -> list[Found]:
        """Write the trace, and return the steps; collective under ZeRO 3."""
        self.weights = hashlib.sha256(vector(self.engine.module).numpy().tobytes()).hexdigest()
        if self._trace is not None:
            device = f"{get_accelerator().device_name()} {get_accelerator().communication_backend_name()}"
            line = header("training", self._config, engine="by hand", ranks=dist.get_world_size(), device=device)
            writer = TraceWriter(self._trace, line.model_copy(update={"records": self._known}))
            for number, one in enumerate(self.steps, start=1):
                writer.write(_record(number, one, one["passes"] if "passes" in self._known else None))
            writer.close()
        return self.steps

    def _of_all(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone[:: self._peers]

    def _noted(self) -> list[tuple[float, MicroBatch]]:
        return list(zip(self._losses, self._batches, strict=True))

    def _probed(self, weights: list[list[float]], total: float) -> Found:
        """Return the coefficients of this step by pass and rank, beside those that it should have."""
        passes, size = max(map(len, weights)), len(self._before)
        own = np.zeros((passes, size))
        for row, batch in zip(own, self._batches, strict=False):
            row[:] = self._gradient(batch)
        everyone = self._of_all(own)
        after = vector(self.engine.module)
        update = ((self._before.double() - after.double()) / self._lr[0]).numpy()
        self._before = after
        padded = [rank + [0.0] * (passes - len(rank)) for rank in weights]
        expected = [[weight / total for weight in row] for row in zip(*padded, strict=True)]
        result = decompose(update, np.stack(everyone, axis=1).reshape(-1, size), expected)
        return {
            "coefficients": result.measured,
            "expected": expected,
            "pattern": result.pattern,
            "unexplained": round(result.residual, 4),
        }

    def _gradient(self, batch: MicroBatch) -> np.ndarray:
        assert self._twin is not None
        assert self._mean is not None
        vector_to_parameters(self._before, self._twin.parameters())
        self._twin.zero_grad()
        self._mean(self._twin, batch).backward()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._twin.parameters()]
        gradient: np.ndarray = torch.cat([one.flatten() for one in flat]).double().numpy()
        return gradient


def _record(step: int, one: Found, passes: int | None) -> StepRecord:
    return StepRecord(
        step=step,
        passes=passes,
        idle_passes=None,
        rollouts=one["rollouts"],
        prompts=None,
        tokens=one["tokens"],
        total=None,
        loss=one["loss"],
        lr=(one["lr"],),
        grad_norm=one["grad_norm"],
        metrics={},
    )


def compared(reference: Path, candidate: Path, tier: Tier = Tier.REASSOCIATED, maps: Sequence[str] = ()) -> Found:
    """Return what `ds-parity compare` says of two traces; `maps` are its options --map-candidate."""
    ours, theirs = read_pair(reference, candidate, right=maps)
    result = compare(ours, theirs, tier)
    found = diagnose(ours, theirs, result)
    causes = grouped(found.causes)
    return {
        "equal": result.equal,
        "differ": sorted({one.field for one in result.differences}),
        "cause": [cause.name for cause in causes[0]] if causes else [],
        "evidence": found.causes[0].evidence if causes else "",
    }


def arguments(description: str | None, argv: Sequence[str] | None, config: Path, **more: Any) -> argparse.Namespace:
    """Read the command line of a loop; `more` are options of one migration with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trace", type=Path, help="file to write, JSON Lines")
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage (%(default)s)")
    parser.add_argument("--probe", action="store_true", help="say with which coefficient micro-batches entered steps")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher's
    for name, (value, meaning) in more.items():
        if value is False:
            parser.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{meaning} (%(default)s)")
    given = parser.parse_args(argv)
    given.config = configuration(config, given.zero, given.probe)
    return given


def configuration(path: Path, zero: int, probe: bool) -> Found:
    """Return the extended configuration of a migration on a ZeRO stage, to be probed or not."""
    config: Found = json.loads(path.read_text())
    config["zero_optimization"] = config.get("zero_optimization", {}) | {"stage": zero}
    return config | (PROBED if probe else {})


def plain_of(config: Found) -> Found:
    """Return the configuration without the keys of ds_parity, for the bare engine."""
    return {name: value for name, value in config.items() if name not in ("ds_parity", "gradient_accumulation_passes")}


def say(name: str, steps: Sequence[Found]) -> None:
    """Print, once, what every step came to."""
    if dist.get_rank():
        return
    for number, one in enumerate(steps, start=1):
        norm = "-" if one["grad_norm"] is None else f"{one['grad_norm']:.6g}"
        print(
            f"{name}, step {number}: {one['rollouts']} rollouts in {one['passes']} passes, loss {one['loss']:.6g}, "
            f"gradient norm {norm}, LR {one['lr']:.3g}"
        )
        for row, wanted in zip(one.get("coefficients", ()), one.get("expected", ()), strict=True):
            print("    " + "   ".join(f"{a:8.5f} of {b:.5f}" for a, b in zip(row, wanted, strict=True)))


def launched(main: Callable[[], None]) -> int:
    """Run a loop; 2 for bad input."""
    try:
        main()
    except DsParityError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
