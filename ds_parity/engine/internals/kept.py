"""The gradients that an open window has accumulated: only the backwards that ds_parity drives may change them.

What is trained may change between windows alone, too: a gradient that was accumulated before its parameter was frozen
is lost or reduced on some ranks alone, and ZeRO has no place for one that was frozen when the engine was built
(tools/deepspeed_faults/frozen_on_the_way.py).

DeepSpeed does not tell whose gradient it accumulates. A backward that runs elsewhere (`loss.backward()`, or one inside
a forward, as in DeepSpeed's TiledFusedLogitsLoss) enters the step without a division and without a count, and
`zero_grad()` takes away what has been counted already (tools/deepspeed_faults/zero_grad_mid_window.py).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_parity.engine.internals.converted import Types
from ds_parity.engine.internals.newcomers import Newcomers, names_of
from ds_parity.engine.internals.stepped import guard_optimizers
from ds_parity.engine.internals.untrained import Untrained
from ds_parity.engine.internals.written import Samples
from ds_parity.errors import WindowError

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter
    from ds_parity.engine.internals.surface import Parameter

_LOG = logging.getLogger("ds_parity")


class KeptGradients:
    """Watches over the gradients between the backwards of a window.

    Args:
        adapter: knows where the gradients are.

    Attributes:
        broken: a stray gradient is where nothing takes it out, so that the engine can't go on.
        untrained: warns of a loop in which no other check runs.
    """

    # Engines that end a window just now: two may share an optimizer.
    _ending = 0

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._newcomers = Newcomers(adapter)
        self._kept = False
        self._noted: object = None
        self._samples = Samples(adapter)
        self._flags_noted: list[bool] = []
        self._flags_at_start: list[bool] = []
        self._homeless: list[tuple[str, Parameter]] = []
        self._types = Types()
        self._warned = self._warned_of_frozen = False
        self._ended = False
        self.broken = False
        self.untrained = Untrained(adapter)

    def end(self) -> None:
        """Guard nothing any more: the engine is destroyed."""
        self._ended = True
        self._newcomers.end()

    def refuse_ended(self) -> None:
        """Raise WindowError where the engine was destroyed: DeepSpeed has let go of what it reduces gradients with."""
        if self._ended:
            raise WindowError(
                "the engine was destroyed (engine.destroy()), and takes no more backward() and step(): gradients would "
                "not be reduced; build a new engine, and load a checkpoint into it"
            )

    def guard(self) -> None:
        """Make `zero_grad()` of the engine and of its optimizers do nothing inside a window, and refuse their `step()`.

        A loop that was written for torch calls it before every pass, and accelerate's optimizers take it so, too
        (accelerate/utils/deepspeed.py, DeepSpeedOptimizerWrapper.zero_grad). `step()` clears gradients in any case.
        """
        engine = self._adapter.engine
        # What a model has accumulated before it came here belongs to no window.
        engine.zero_grad()
        self._noted = self._adapter.gradients_seen()
        self._flags_noted = self._flags_at_start = self._flags()
        self._types.note(self._named)
        self._newcomers.begin()
        self._guard_one(engine)
        self._guard_one(engine.optimizer)
        # Inside a wrapper the client's optimizer has buffers in place of gradients: with CPU offload DeepSpeed needs
        # them in the next window, too, and raises an AttributeError without them. It never calls this itself.
        if engine.basic_optimizer is not engine.optimizer:
            self._guard_one(engine.basic_optimizer, always=True)
        guard_optimizers(self, engine)

    def keeps_steps(self, *, always: bool) -> bool:
        """Whether nobody but an engine may step the optimizer now.

        Args:
            always: also between windows.
        """
        return not (self._ended or KeptGradients._ending) and (always or self._kept)

    def after_backward(self) -> None:
        """Note the gradients as the backward that just ran has left them."""
        self._kept = True
        self._noted = self._adapter.gradients_seen()
        self._samples.note()
        self.untrained.after_backward()

    def note_again(self) -> None:
        """Note the gradients anew where DeepSpeed goes over to keep them elsewhere; they were right just before."""
        self._noted = self._adapter.gradients_seen()
        if self._kept:
            self._samples.note()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let what runs inside use and clear the gradients: it ends the window."""
        self.broken = self.broken or (not self._adapter.clears_strays and self._has_strays())
        self._kept = False
        KeptGradients._ending += 1
        try:
            yield
        finally:
            KeptGradients._ending -= 1
            self._samples.forget()
            self._adapter.begin_window()
            self._adapter.copy_first_gradient()
            self._noted = self._adapter.gradients_seen()

    def note_use(self) -> None:
        """Note that the engine is in use: it is saved or loaded."""
        self._newcomers.use()

    def refuse_newcomers(self) -> None:
        """Raise WindowError where a gradient of the window belongs to a parameter that no optimizer holds."""
        self._newcomers.refuse()

    def explain_forward(self, error: AttributeError) -> None:
        """Raise WindowError where a forward has raised because of a parameter that came later, or a compiled model.

        Args:
            error: that the forward has raised.
        """
        self._newcomers.explain(error)
        # DeepSpeed has put dictionaries of its own in the place of those of every module, and a wrapper has none.
        if "_in_forward" in str(error) and any(hasattr(m, "_orig_mod") for m in self._adapter.engine.module.modules()):
            raise WindowError(
                f"a forward of a model that torch.compile() has given, on ZeRO stage 3, has raised ({error}): "
                "DeepSpeed finds no parameters behind torch's wrapper there; give initialize() the model itself, and "
                "call engine.compile() after it"
            ) from error

    def explain_backward(self, error: IndexError) -> None:
        """Raise WindowError where a backward has raised because no parameter got a gradient in it: ZeRO 2 does.

        Args:
            error: that the backward has raised.
        """
        if self._adapter.gradients_seen() == self._noted:
            self._newcomers.refuse()
            raise WindowError(
                "the loss has nothing of the model in it, no parameter got a gradient: DeepSpeed's ZeRO stage "
                f"{self._adapter.engine.zero_optimization_stage()} raises where there is none to reduce ({error}). Its "
                "pass is counted, so load a checkpoint; where a rank has nothing to train, give engine.idle(loss) the "
                "loss of a forward like those of the others, or add 0.0 * (what the forward gave).sum() to the loss"
            ) from error

    def refuse_freezing(self, window: int) -> None:
        """Raise WindowError where a parameter was frozen or unfrozen at a time at which it can't be, or converted.

        Args:
            window: index of the open window, for the message.
        """
        self._types.refuse(self._named, window)
        flags = self._flags()
        if flags != self._flags_noted:
            own = {id(p) for group in self._adapter.groups() for p in group}
            changed = self._differing(flags, self._flags_noted)
            self._refuse_inside([one for one in changed if id(one[1]) in own], window)
            self._warn_of_frozen([one for one in changed if id(one[1]) in own and not one[1].requires_grad])
            new = [one for one in self._differing(flags, self._flags_at_start) if one[1].requires_grad]
            self._homeless = [one for one in new if id(one[1]) not in own]
            self._flags_noted = flags
        # What has no gradient may belong to another engine over the same model.
        lost = [one for one in self._homeless if one[1].grad is not None]
        if lost:
            raise WindowError(
                f"{names_of(lost)}: trained now, but the optimizer of ZeRO stage "
                f"{self._adapter.engine.zero_optimization_stage()} holds nothing for it, because it was frozen when "
                "the engine was built: its gradient would never be applied; build the engine with all that will ever "
                "be trained, and freeze it after that, or build a new engine"
            )

    def _refuse_inside(self, own: list[tuple[str, Parameter]], window: int) -> None:
        if self._kept and own:
            raise WindowError(
                f"requires_grad of {names_of(own)} changed inside window {window}: gradients that its passes have "
                "accumulated would be lost, or ranks' weights would differ; freeze and unfreeze between windows, where "
                "engine.window.passes is 0"
            )

    def _warn_of_frozen(self, frozen: list[tuple[str, Parameter]]) -> None:
        # torch's own optimizers leave out what has no gradient; DeepSpeed's wrappers give them zeros.
        if not frozen or self._warned_of_frozen or isinstance(self._adapter.engine.optimizer, torch.optim.Optimizer):
            return
        self._warned_of_frozen = True
        _LOG.warning(
            "%s: frozen after the engine was built. DeepSpeed steps it by a gradient of zeros, so that momentum, the "
            "moments of Adam and weight decay go on moving it; where it must stand still, freeze it before the engine "
            "is built, or give it a parameter group of its own and set the group's lr to 0. This is said once",
            names_of(frozen),
        )

    def refuse_strays(self, window: int, *, ends: bool) -> None:
        """Raise WindowError where gradients are not as the last backward, or the end of the last window, left them.

        Args:
            window: index of the open window, for the message.
            ends: it is about to end.
        """
        if self.broken or self._has_strays() or self._samples.differ(ends=ends):
            # Where strays are in DeepSpeed's buckets already, no discard takes them out.
            self.broken = not self._adapter.clears_strays
            raise self._of_strays(window)

    def _has_strays(self) -> bool:
        if not self._kept:
            self._adapter.copy_first_gradient()
        if self._adapter.gradients_seen() == self._noted:
            return False
        # Between windows there is nothing to lose: gradients that somebody cleared there are no stray.
        return self._kept or self._adapter.holds_gradients()

    def _of_strays(self, window: int) -> WindowError:
        of_two = (
            "the step of another engine over this model, which on ZeRO stage 0 clears the gradients of all its "
            "parameters (let one window end before the other engine's begins, or use ZeRO 1 to 3 there); "
        )
        return WindowError(
            f"gradients were changed outside of engine.backward() in window {window}: they would enter the step "
            "without a division by the window's total and without a count, or gradients that were counted are gone. "
            f"Causes: {of_two if self._newcomers.clears_all() else ''}"
            "loss.backward() in place of engine.backward(loss); a function that runs a backward inside the "
            "forward (of DeepSpeed's, TiledFusedLogitsLoss does; SequenceTiledCompute and TiledMLP do not); "
            "model.zero_grad(); gradients that are changed by hand before the step (clipping: set gradient_clipping; "
            "masks and noise: parameter.register_hook, or ZeRO 1 to 3 with safe_set_full_grad, divided by "
            "engine.window.correction). Hand every loss to engine.backward(), and leave gradients to engine.step(). "
            "This window can't be mended: "
            + ("load a checkpoint" if self._adapter.clears_strays else "load a checkpoint into a new engine")
        )

    @functools.cached_property
    def _named(self) -> list[tuple[str, Parameter]]:
        return list(self._adapter.engine.module.named_parameters())

    def _differing(self, flags: list[bool], others: list[bool]) -> list[tuple[str, Parameter]]:
        return [one for one, flag, other in zip(self._named, flags, others, strict=True) if flag != other]

    def _flags(self) -> list[bool]:
        return [p.requires_grad for _, p in self._named]

    def _guard_one(self, owner: Any, *, always: bool = False) -> None:
        zero_grad: Callable[..., None] = owner.zero_grad
        # An optimizer may outlive its engine, and must neither keep it alive nor be bound by it then.
        watching = weakref.ref(self)

        @functools.wraps(zero_grad)
        def guarded(*args: Any, **kwargs: Any) -> None:
            kept = watching()
            if kept is None or kept._ended or not (always or kept._kept):
                zero_grad(*args, **kwargs)
            elif kept._kept and not kept._warned:
                kept._warned = True
                _LOG.warning(
                    "zero_grad() inside a window has no effect: the gradients of its passes have been counted, and "
                    "engine.step() clears them when the window ends; remove the call. This is said once"
                )

        owner.zero_grad = guarded


def note_gradients(parameters: list[Parameter], note: Callable[[int], None]) -> None:
    """Have a method called with the place of each parameter that gets a gradient, whoever's backward that is.

    Args:
        parameters: that are trained.
        note: a bound method. A parameter may outlive its object, and does not keep it alive.
    """
    noting = weakref.WeakMethod(note)

    def noted(number: int, _: torch.Tensor) -> None:
        called = noting()
        if called is not None:
            called(number)

    for number, parameter in enumerate(parameters):
        if parameter.requires_grad:  # a frozen one can't have a hook, and may have been handed over
            hook = functools.partial(noted, number)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
