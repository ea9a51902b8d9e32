"""The configurations of the scenarios here, and an engine beside its oracle, driven pass by pass."""

from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.oracle import RATE, Net, Oracle, descent, sample

TARGET = 8  # rollouts: two passes of two rollouts on each of two ranks


@dataclass(frozen=True)
class Cell:
    """Where the optimizer's state lies."""

    stage: int
    offload: bool = False

    def __str__(self):
        return f"zero{self.stage}{'-offload' if self.offload else ''}"


STAGES = tuple(Cell(stage) for stage in range(4))
CELLS = (*STAGES, *(Cell(stage, offload=True) for stage in (1, 2, 3)))


@dataclass
class Found:
    """What a rank has found in a scenario.

    Attributes:
        apart: the greatest distance of a weight from the oracle's.
        got: numbers that the engine reported.
        right: what they should be.
    """

    apart: float = 0.0
    got: Any = field(default_factory=list)
    right: Any = field(default_factory=list)


def config(cell, target=TARGET, *, clip=0.0, optimizer=True, section=None, zero=None, **more):
    """An extended configuration of plain descent, unless `optimizer` says that the caller brings one."""
    offload = {"offload_optimizer": {"device": "cpu"}} if cell.offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": cell.stage, **offload, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"optimizer": {"type": "SGD", "params": {"lr": RATE}}} if optimizer else {}),
        "ds_parity": {"exchange_timeout": 15.0, **(section or {})},
        **more,
    }


def engine_of(extended, model=None, **given):
    """An engine over a model, by default a new Net."""
    model = Net() if model is None else model
    if not given.keys() & {"model_parameters", "optimizer"}:
        given["model_parameters"] = list(model.parameters())
    return ds_parity.initialize(model=model, config=extended, **given)[0]


def weights_of(engine):
    """Every weight in fp64 on the host, by name; collective."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: one.detach().double().cpu().clone() for name, one in parameters.items()}


def distance(one, other):
    """The greatest difference of a weight; NaN where one is."""
    apart = [(one[name] - value).abs().max() for name, value in other.items()]
    return float(sum(apart)) if any(bool(value.isnan()) for value in apart) else float(max(apart))


class Watched:
    """An engine beside the oracle that takes the same steps.

    Attributes:
        engine: the engine under test.
        oracle: what it should do.
        rank: of this process.
    """

    def __init__(self, cell, target=TARGET, *, model=None, right=None, clip=0.0, by=descent, given=None, **options):
        """Build both.

        Args:
            cell: where the state lies.
            target: rollouts of a window.
            model: by default a Net.
            right: the oracle's model, if it is another.
            clip: the greatest norm of a gradient; 0: any.
            by: makes the oracle's optimizer from its model.
            given: keywords of `ds_parity.initialize`.
            options: of `config`.
        """
        model = Net() if model is None else model
        section = options.get("section") or {}
        self.oracle = Oracle(
            model if right is None else right,
            target,
            clip=clip,
            optimizer=by,
            overshoot=section.get("overshoot", "carry"),
            of_target=section.get("loss_weight") == "target",
        )
        self.engine = engine_of(config(cell, target, clip=clip, **options), model, **(given or {}))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def inputs(self, index, size=2):
        """What this rank has in a pass, on the device."""
        return [one.to(self.engine.device) for one in sample(self.rank, index, size)]

    def loss(self, index, size=2, *more):
        """The engine's loss of it."""
        return self.engine(*self.inputs(index, size), *more)

    def passes(self, indices, size=2):
        """Run passes as a usual loop does, each of `size` rollouts on every rank."""
        for index in indices:
            self.engine.backward(self.loss(index, size), rollouts=size)
            self.engine.step()
            self.noted(index, size)

    def noted(self, index, *sizes, more=(), factor=1.0):
        """Tell the oracle of a pass of all ranks: the rollouts of each; one number for all, by default 2."""
        sizes = sizes if len(sizes) == self.ranks else (sizes or (2,)) * self.ranks
        for rank, size in enumerate(sizes):
            if size:
                x, y = (one.double() for one in sample(rank, index, size))
                own = more(rank) if callable(more) else more
                self.oracle.add(size, lambda model, x=x, y=y, own=own: factor * model(x, y, *own))
        self.oracle.end_pass(sum(sizes))

    def found(self, got=(), right=()):
        """Finish both, and return what was found; beside `got`, the rollouts and the loss of the last step."""
        self.engine.finish()
        self.oracle.finish()
        last = self.engine.last_step
        return Found(
            self.apart(),
            [*got, last.rollouts, last.loss, self.engine.global_steps],
            [*right, self.oracle.steps[-1], self.oracle.losses[-1], len(self.oracle.losses)],
        )

    def apart(self):
        """The greatest distance of a weight from the oracle's."""
        return distance(weights_of(self.engine), self.oracle_weights())

    def oracle_weights(self):
        """The oracle's weights, by name."""
        return {name: one.detach().clone() for name, one in self.oracle.model.named_parameters()}
