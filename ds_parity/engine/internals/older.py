"""What older releases of DeepSpeed lack or get wrong, supplied to the objects of one engine before anything uses them.

So the adapters meet one DeepSpeed, the one that `surface.py` describes. Each supplement looks at what is there and not
at a version, so that releases in between, which nobody has read, are met as they are. Read in 0.18.4, 0.18.9, 0.19.0,
0.19.3 and 0.19.5; `config/versions.py` says which release needs which, and what was measured with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.releases import release
from ds_parity.engine.internals.guards import ENGINE, INIT, ZERO12, source
from ds_parity.engine.internals.installed import before
from ds_parity.engine.internals.older_checkpoints import keep_state
from ds_parity.engine.internals.older_overflow import supply_overflow
from ds_parity.engine.internals.older_surface import OlderBf16, OlderEngine, OlderHalf
from ds_parity.engine.internals.older_zero3 import supply_zero3
from ds_parity.engine.internals.older_zero12 import supply_zero12
from ds_parity.engine.internals.replaced import replaced
from ds_parity.engine.internals.surface import Engine

_ALIGNED: Final = "flatten_dense_tensors_aligned"
_GATHER: Final = "_allgather_params_coalesced"
_SUPPLIED: Final = "ds_parity_has_supplied"
_WRAPPERS: Final = (
    *(DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3),
    *(BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer),
)


_OF_ZERO_0: Final = "DDP_BFLOAT16"


@contextmanager
def building() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an engine, as later releases build it."""
    _wait_for_every_gather()
    with buffer_without_graph(), _wrappers_told_apart():
        yield


@contextmanager
def _wrappers_told_apart() -> Iterator[None]:
    """Let ZeRO 1 in bf16 with fp32 accumulation have its own wrapper.

    Up to 0.18.5 two kinds of wrappers go by one name (runtime/constants.py), so that it gets the one of ZeRO 0, which
    sums in bf16, and of which each rank has the states of all parameters.
    """
    name = getattr(deepspeed_engine, _OF_ZERO_0, "")
    if name != getattr(deepspeed_engine, "BFLOAT16", None):
        yield
        return
    with replaced(deepspeed_engine, _OF_ZERO_0, f"ddp_{name}"):
        yield


@contextmanager
def buffer_without_graph() -> Iterator[None]:
    """Let the buffer of weights of ZeRO 1 and 2 have no graph.

    0.18.6 to 0.18.10 make it of the parameters themselves where the memory suffices, with a graph behind it, and the
    first step raises "Output 0 of SplitBackward0 is a view and is being modified inplace", with every torch since 1.8
    (DeepSpeed #7948, which detaches the buffer).
    """
    if not before(release("0.19.0")):
        yield
        return
    flatten: Callable[..., Any] = getattr(DeepSpeedZeroOptimizer, _ALIGNED)
    if "use_cpu_data=False).detach()" in (text := source(ZERO12, "__init__")) or "use_cpu_data=False)" not in text:
        yield
        return

    def detached(*args: Any, **kwargs: Any) -> Any:
        return flatten(*args, **kwargs).detach()

    with replaced(DeepSpeedZeroOptimizer, _ALIGNED, detached):
        yield


def _wait_for_every_gather() -> None:
    """Have ZeRO 3 wait for all weights that it gathers: before 0.19.8 it waits for the last of them alone.

    The others may still be on their way, so that a forward reads what was in memory before (DeepSpeed #8539). Only
    gloo, of the CPU, ends them in any order; the streams of other accelerators keep theirs.
    """
    if not before(release("0.19.8")) or get_accelerator().device_name() != "cpu":
        return
    gather: Callable[..., None] = getattr(Init, _GATHER)
    if hasattr(gather, "waits") or "launch_handles[-1].wait()" not in source(INIT, _GATHER):
        return

    def gather_one_by_one(init: Any, param_list: list[Any], *args: Any, **kwargs: Any) -> None:
        for param in param_list:
            gather(init, [param], *args, **kwargs)

    gather_one_by_one.waits = True  # type: ignore[attr-defined]
    # On the class: parameters reach it through what zero.Init has bound to them.
    setattr(Init, _GATHER, gather_one_by_one)


def supply(engine: Engine) -> None:
    """Supply an engine's objects with what their DeepSpeed lacks; nothing is done where it lacks nothing.

    Args:
        engine: a bare DeepSpeed engine that has not run a pass.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, _WRAPPERS) or hasattr(optimizer, _SUPPLIED):
        return
    # What is wrapped here must not be wrapped a second time.
    setattr(optimizer, _SUPPLIED, True)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)) and not hasattr(
        optimizer, "clear_backward_seen_flag"
    ):
        # Up to 0.18.5 a backward's end counts it, and nothing is left for the forward to clear.
        optimizer.clear_backward_seen_flag = _nothing
    if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        supply_overflow(engine, optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        supply_zero12(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        supply_zero3(optimizer)
    elif isinstance(optimizer, BF16_Optimizer):
        _supply_bf16(engine, optimizer)
    else:
        _supply_half(engine, optimizer)


def _nothing() -> None:
    """Do nothing."""


def _supply_bf16(engine: Engine, optimizer: OlderBf16) -> None:
    if not hasattr(optimizer, "custom_loss_scaler"):
        # The wrapper has no loss scale, and up to 0.18.5 none of the names that scale_if_loss() asks for.
        optimizer.scale_if_loss = _itself
    if not before(release("0.19.0")) or "bf16_optimizer" in source(ENGINE, "_backward_epilogue"):
        return
    # Up to 0.18.10 the boundary's gradients were reduced before the backward's end has added its own to them, so that
    # each rank kept those of the last micro-batch to itself (DeepSpeed #7985).
    reduce: Callable[..., None] = engine.allreduce_gradients

    def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
        optimizer.backward_epilogue()
        # DeepSpeed adds them once more behind this, and finds zeros.
        optimizer.clear_lp_grads()
        reduce(*args, **kwargs)

    engine.allreduce_gradients = allreduce_gradients  # type: ignore[method-assign]


def _itself(value: Any) -> Any:
    return value


def _supply_half(engine: Engine, optimizer: OlderHalf) -> None:
    if hasattr(optimizer, "loss_scale_config"):
        return
    # Up to 0.18.5 the wrappers kept their loss scale themselves.
    optimizer.loss_scale_config = weakref.proxy(optimizer)
    if engine.fp16_enabled():
        optimizer.use_grad_scaling = True
        return
    # In bf16 the unfused wrapper divided by fp16's loss scale, by which nothing had multiplied; and no step cleared the
    # gradients, so that each added those of all before it (DeepSpeed #7839).
    optimizer.use_grad_scaling = False
    _unscale(optimizer)
    # Without a scale the fused wrapper counts no iterations, and a corrected step asks for their number.
    optimizer.cur_iter = getattr(optimizer, "cur_iter", 0)
    step: Callable[..., Any] = optimizer.step
    load: Callable[..., Any] = optimizer.load_state_dict

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        optimizer.zero_grad()
        return result

    def loaded(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        # The unfused wrapper takes the scale over that its checkpoint was written with.
        _unscale(optimizer)
        return result

    optimizer.step = stepped
    optimizer.load_state_dict = loaded
    keep_state(cast("OlderEngine", engine))


def _unscale(optimizer: OlderHalf) -> None:
    optimizer.dynamic_loss_scale = False
    optimizer.cur_scale = 1.0
