"""What every adapter of an optimizer wrapper can do; where DeepSpeed needs nothing more, the plain answer."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_parity.engine.internals.kept import KeptGradients
from ds_parity.engine.internals.moved_weights import MovedWeights
from ds_parity.engine.internals.passing_through import let_others_pass
from ds_parity.engine.internals.surface import Engine, GradScaler, Parameter
from ds_parity.engine.internals.timers import let_timers_be, start_backward_timers


class Adapter(ABC):
    """What ds_parity does with the gradients that a DeepSpeed engine accumulates, under one optimizer wrapper.

    With losses divided by the expected total E, the window's gradient stands at sum(w * grad l) / E; the step needs it
    times E / T, where T is the actual total.

    Args:
        engine: the bare DeepSpeed engine.

    Attributes:
        engine: the bare DeepSpeed engine.
        kept: watches over the gradients between the backwards of a window.
        moved: knows of the steps that have changed the weights.
        keeps_whole_gradients: the window's gradients are reduced together at its end (`coalesce_grad_reduction`).
    """

    keeps_whole_gradients = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kept = KeptGradients(self)
        self.moved = MovedWeights()

    # The division.

    def averaged_over(self, ranks: int, peers: int) -> int:
        """Return what DeepSpeed divides the sum of all ranks' gradients by.

        With sequence parallelism the sum runs over data- x sequence-parallel ranks. ZeRO 0 to 2 and BF16_Optimizer
        divide it by the data-parallel ranks (engine.py, _reduce_non_expert_gradients; stage_1_and_2.py,
        average_tensor), ZeRO 3 by all of them (coalesced_collectives.py, reduce_scatter_coalesced).

        Args:
            ranks: data-parallel ranks (>= 1).
            peers: ranks that share a micro-batch, 1 without sequence parallelism.
        """
        return ranks if self.engine.gradient_average else 1

    def unscaled_loss_scale(self) -> float:
        """Return the loss scale that `engine.backward` leaves out, by which the loss must be multiplied before it."""
        return 1.0

    # The window.

    def prepare(self) -> None:
        """Put right, once and before training, what the wrapper would leave out or lose."""
        self.kept.guard()
        let_timers_be(self.engine)
        let_others_pass(self.engine)
        if (scaler := self.grad_scaler()) is not None:
            # torch makes the scale with the first loss; a rank may end its first window without one.
            scaler.scale(torch.zeros((), device=self.engine.device))

    @abstractmethod
    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the model's parameters that the optimizer steps, group by group."""

    def groups_of_optimizer(self) -> Iterable[Iterable[Parameter]]:
        """Return the same by the groups that the optimizer was given, of which DeepSpeed may make several."""
        return self.groups()

    def begin_window(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Forget what the last window's passes used."""

    def used_parameters(self) -> int:
        """Return a checksum of the parameters that got gradients in the window; 0 where ranks need not agree on it.

        ZeRO 0 fills zeros in, but not for what is frozen: there ranks must agree on that.
        """
        return self.frozen_parameters()

    def frozen_parameters(self) -> int:
        """Return a checksum of what the optimizer steps and is frozen now; 0 where nothing is.

        DeepSpeed leaves it out of what it reduces, so that gradients of different parameters would be added up where
        ranks have frozen different ones (runtime/engine.py, _get_gradients_for_reduction; stage_1_and_2.py, 0.19.8).
        """
        known = (parameter for group in self.groups() for parameter in group)
        frozen = [number for number, parameter in enumerate(known) if not parameter.requires_grad]
        return zlib.crc32(repr(frozen).encode()) & 0xFFFFFF | 1 if frozen else 0

    def refuse_unreduced(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Raise WindowError where the boundary's pass has left a gradient of the window unreduced."""

    def begin_backward(self) -> None:
        """Do what DeepSpeed leaves to a hook that only a forward of the engine registers."""
        start_backward_timers(self.engine)

    def end_backward(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Make the next backward add to what this one has accumulated, whatever runs in between."""

    def copy_first_gradient(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Make a window's first gradient replace those of the last window, whatever was called in between."""

    def gradients_seen(self) -> object:
        """Return what changes when a gradient is accumulated, replaced or dropped; equal while none is.

        Torch adds in place and counts what it does to a tensor in place. Identities and counts are compared, so that
        no gradient is kept alive by this.
        """
        return [None if (g := p.grad) is None else (id(g), g._version) for p in self._trained]

    def dense_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that lie with their parameters, without sparse ones."""
        return [g for p in self._trained if (g := p.grad) is not None and g.layout == torch.strided]

    _came_in = 0  # gradients, since the engine was built

    @property
    def gradients_in(self) -> int:
        """How many gradients have come in since the engine was built; 0 where nobody counts them (ZeRO 0)."""
        return self._came_in

    @property
    def clears_strays(self) -> bool:
        """Whether `discard` also takes away what a stray backward has accumulated."""
        return True

    def holds_gradients(self) -> bool:
        """Whether some gradient is there that is not zero; waits for the device, so it is asked in doubt only."""
        return any(p.grad is not None and bool(p.grad.count_nonzero()) for p in self._trained)

    def prepare_pipeline(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Get ready to reduce what a stage of a pipeline has trained; in place of `prepare`."""

    def forget_last_window(self, boundary: bool) -> None:  # noqa: B027  # most wrappers need nothing here
        """Clear what the last window left of parameters that this one's first pass did not use.

        It is called after that pass.

        Args:
            boundary: that pass is the window's last too.
        """

    def has_every_gradient(self) -> bool:
        """Whether every parameter has a gradient accumulated on this rank, so that an idle pass need not be run.

        Ranks that have others would reduce buckets of different sizes. ZeRO 0 fills zeros in; ZeRO 3 knows no idle pass
        that need not be run.
        """
        return self.engine.zero_optimization_stage() == 0

    @property
    def silent_inside_windows(self) -> bool:
        """Whether DeepSpeed talks to other ranks in the boundary's backward alone: ZeRO 0 and 1 without experts."""
        return self.engine.zero_optimization_stage() < 2 and not self.engine.has_moe_layers

    @functools.cached_property
    def experts_apart(self) -> bool:
        """Whether experts of DeepSpeed's MoE layer lie on different ranks (moe/layer.py, `ep_size`)."""
        return any(getattr(module, "ep_size", 1) > 1 for module in self.engine.module.modules())

    @functools.cached_property
    def _synchronised(self) -> list[torch.nn.Module]:
        return [one for one in self.engine.module.modules() if isinstance(one, torch.nn.SyncBatchNorm)]

    @property
    def shares_statistics(self) -> bool:
        """Whether the statistics of a forward are those of all ranks' samples (torch's SyncBatchNorm, in training)."""
        return any(one.training for one in self._synchronised)

    @property
    def reduces_in_hooks(self) -> bool:
        """Whether hooks of a backward reduce, so that DeepSpeed's own call for it finds nothing to reduce."""
        return False

    @property
    def inside_no_sync(self) -> bool:
        """Whether the loop is inside `engine.no_sync()`, where a boundary's gradients are not reduced."""
        return self.engine.inside_no_sync_ctxt

    # The boundary.

    @property
    def corrects_every_step(self) -> bool:
        """Whether each step needs `corrected`, by a factor of 1 too: DeepSpeed unscales those by the wrong scale.

        A step at which a dynamic loss scale grows is unscaled by the new scale, and so applied at half its size (step()
        in stage_1_and_2.py, stage3.py, fused_optimizer.py and unfused_optimizer.py); a GradScaler's scale is left out
        of clipping and norm on ZeRO 1 to 3, and a step that it skips on ZeRO 0 is counted as taken.
        """
        return self.engine.fp16_enabled() or self.grad_scaler() is not None

    @abstractmethod
    def corrected(self, expected: float, total: float) -> AbstractContextManager[None]:
        """Return a context around DeepSpeed's `step()` in which the gradient is expected / total times what it was.

        Args:
            expected: what losses were divided by (> 0).
            total: what they should have been divided by (> 0).
        """

    def deliver(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Give the optimizer the gradients of what the boundary's pass did not use, once its backward has run.

        So a loop reads, and changes, what is stepped by. `complete` does it where no backward was marked as the last.
        """

    def complete(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Give the optimizer the gradients of what the boundary's pass did not use; call it before `step()`."""

    def refresh(self) -> None:  # noqa: B027  # most wrappers load all weights that they have
        """Go on from the model's weights, which were loaded without the optimizer's states."""

    def forget_copies(self) -> None:  # noqa: B027  # ZeRO 3 alone has copies of weights, and of hpZ
        """Forget copies of the weights that were loaded over, as a load leaves them."""

    def refuse_loading_over_copies(self) -> None:  # noqa: B027  # likewise
        """Refuse a load, before anything is loaded, where copies would stay as they are."""

    def show_stepped_weights(self) -> None:  # noqa: B027  # ZeRO 3 has done it; without a wrapper there are no others
        """Give the model the weights that the optimizer steps, which were loaded by place, and the model's by name.

        DeepSpeed leaves that to the next step, so that a window would be of weights that nobody has trained.
        """

    def reduce(self) -> None:
        """Reduce what is accumulated, as the boundary's backward would have: for a window that ends without one.

        This is what DeepSpeed's step() does under `managed_gradient_accumulation: false` (engine.py, step).
        """
        self.engine.allreduce_gradients()

    def reduce_for_loop(self, *args: Any, **kwargs: Any) -> None:
        """Reduce because the loop calls for it, as DeepSpeed's method does."""
        self.engine.allreduce_gradients(*args, **kwargs)

    def drop_whole_gradients(self) -> None:
        """Drop what this rank has not reduced yet, as DeepSpeed's `zero_grad` on ZeRO 3 does on a GPU alone."""
        for parameter in self._trained:
            parameter.grad = None

    def before_coalesced(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Prepare the one reduction at the end of DeepSpeed's `coalesce_grad_reduction`."""

    def discard(self) -> None:
        """Throw the accumulated gradients away, as DeepSpeed does on an overflow; the engine can go on after it."""
        self.engine.zero_grad()

    def release_parameters(self) -> None:  # noqa: B027  # most wrappers need nothing here
        """Partition what passes left gathered: for a boundary that takes no step, in which DeepSpeed would."""

    def loss_scale(self) -> float | None:
        """Return the fp16 loss scale as DeepSpeed logs it, None in other precisions.

        Source: engine.py, _get_optimizer_loss_scale.
        """
        if not self.engine.fp16_enabled():
            return None
        scale = self._fp16_scale()
        return None if scale is None else float(scale)

    def grad_scaler(self) -> GradScaler | None:
        """Return the GradScaler of `torch_autocast` in fp16: the wrapper keeps it on ZeRO 1 to 3, the engine on 0."""
        kept = getattr(self.engine.optimizer, "torch_autocast_gradscaler", None)
        return kept or self.engine.torch_autocast_z0_gradscaler

    def load_grad_scaler(self, state: Mapping[str, Any] | None) -> None:
        """Let the GradScaler go on as one that was saved, which DeepSpeed does not do.

        One that begins anew skips a step for each halving down to a scale that fits
        (tools/deepspeed_faults/autocast_fp16_scale_not_saved.py).

        Args:
            state: its `state_dict()`; None or empty where none was saved.
        """
        scaler = self.grad_scaler()
        if scaler is not None and state:
            scaler.load_state_dict(dict(state))

    @functools.cached_property
    def _trained(self) -> list[Parameter]:
        # A model may have other parameters, which another engine trains.
        parameters = (p for group in self.groups() for p in group)
        return list({id(p): p for p in parameters}.values())

    def _fp16_scale(self) -> float | None:
        scale: float | None = getattr(self.engine.optimizer, "cur_scale", None)
        return scale

    # Checkpoints.

    @property
    def writes_latest_itself(self) -> bool:
        """Whether DeepSpeed's checkpoint engine writes files, and `latest`, behind the caller's back."""
        return self.engine.checkpoint_engine.is_decoupled()

    def repair_universal_checkpoint(self, groups: list[dict[str, object]], names: list[list[str]]) -> None:
        """Put right what loading a universal checkpoint leaves wrong.

        ZeRO 3 gives every parameter group the values of the first, such as the learning rate, and all of them one
        tensor as Adam's `step`, which then runs as many times too fast (stage3.py, 0.19.8,
        load_hp_checkpoint_state_from_checkpoint_dir_stage3). Each stage gives torch's own optimizers the `step` of
        DeepSpeed's Adam on the CPU, which is an int: torch's raise in their first step.

        Args:
            groups: hyperparameters of the parameter groups, as they were saved; another number of groups is left alone.
                A tensor among them is copied, because DeepSpeed gives all groups that of the first.
            names: of all that each group had, also of what is kept by nobody; none where the checkpoint does not tell.
        """
        optimizer = self.engine.optimizer
        own = self.engine.basic_optimizer
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
            elif isinstance(state.get("step"), int) and _keeps_tensors(own):
                state["step"] = _step_of_torch(state["step"], parameter.device, own.param_groups)
        if len(groups) == len(optimizer.param_groups):
            for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: _like(group.get(name), value) for name, value in hyperparameters.items()})
        if len(names) == len(optimizer.param_groups):
            known = set().union(*names)
            for group, own_names in zip(optimizer.param_groups, names, strict=True):
                for name in known.intersection(group).difference(own_names):
                    del group[name]


def _like(own: object, value: object) -> object:
    """Return a value of a group that is no other's, where this engine has it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if not isinstance(own, torch.Tensor) else value.detach().to(own.device, copy=True)


def _keeps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's, or a subclass of one, that has its `step` as a tensor."""
    of_torch = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    named = next(of_torch, torch.optim.Optimizer)
    return named not in (torch.optim.Optimizer, torch.optim.SparseAdam)


def _step_of_torch(step: int, device: torch.device, groups: list[dict[str, Any]]) -> torch.Tensor:
    """Return a `step` as torch makes it of a number: torch/optim/adam.py, __setstate__, which on ZeRO 3 finds none."""
    fused, there = (any(group.get(name) for group in groups) for name in ("fused", "capturable"))
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
    return torch.tensor(float(step), dtype=dtype, device=device if fused or there else "cpu")
