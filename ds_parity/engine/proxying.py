"""Methods of the proxy that would hand out, or copy, the engine behind it, or that DeepSpeed can't always run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from ds_parity.config.features import MOVED_OFFLOADED
from ds_parity.engine.half_loaded import refuse_half_loaded
from ds_parity.engine.internals.broadcast import any_shape_is_gathered
from ds_parity.engine.internals.installed import refused_by_call
from ds_parity.engine.internals.tensor_groups import holds_parts, whole_state, whole_where_it_saves
from ds_parity.engine.ranks.agreement import naming_lost_ranks
from ds_parity.errors import ConfigError, WindowError

_ONLY_FUSED: Final = "only for DeepSpeed FusedAdam"


def _no_copy(how: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any) -> NoReturn:
        # It would share the window, the gradients and the groups of ranks with this engine.
        raise WindowError(
            f"a ds_parity engine can't be {how}: its window, gradients and connections to other ranks are those of one "
            "engine; save_checkpoint() keeps its state, and engine.module, the model, can be copied"
        )

    return method


def _returning_proxy(name: str) -> Callable[..., Any]:
    # nn.Module's own return self, which would be the engine without us.
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = getattr(self.__wrapped__, name)(*args, **kwargs)
        return self if returned is self.__wrapped__ else returned

    method.__name__ = name
    return method


def _of_wrapper(name: str) -> Callable[..., Any]:
    # DeepSpeed calls it on its optimizer, whatever that is, and ends in an AttributeError.
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = self.__wrapped__
        if not hasattr(engine.optimizer, name):
            stage = int(engine.zero_optimization_stage())
            # On stage 1, fp32 accumulation in bf16 takes another optimizer (BF16_Optimizer).
            other = "ZeRO stage 2 or 3, or another data_types.grad_accum_dtype" if stage else "ZeRO stage 1, 2 or 3"
            raise ConfigError(
                f"{name}() with zero_optimization.stage = {stage} and the optimizer "
                f"{type(engine.optimizer).__name__}, which has no states that DeepSpeed could move; choose {other}, or "
                "leave the call out"
            )
        if name == "offload_states":
            _refuse_offloaded(engine)
        try:
            return getattr(engine, name)(*args, **kwargs)
        except AssertionError as error:
            # zero/stage3.py (0.19.8), before anything is moved.
            if _ONLY_FUSED not in str(error):
                raise
            raise ConfigError(
                f"{name}() on ZeRO stage 3: DeepSpeed moves the states of its own FusedAdam alone there; train with it "
                '(optimizer.type "Adam" or "AdamW" without torch_adam, and no optimizer offload), move weights and '
                "gradients alone (include=), or leave the call out"
            ) from error

    method.__name__ = name
    return method


def _refuse_offloaded(engine: Any) -> None:
    # DeepSpeed has an assertion against each of both, the second one before 0.19.0 (runtime/engine.py).
    if device := _device(engine.zero_offload_param()):
        raise ConfigError(
            f"offload_states() with zero_optimization.offload_param.device = {device}: DeepSpeed moves no states of an "
            "engine whose parameters are offloaded; leave the call out, or offload_param"
        )
    device = _device(engine.zero_offload_optimizer())
    if device and (why := refused_by_call(MOVED_OFFLOADED.name)):
        raise ConfigError(f"offload_states() with zero_optimization.offload_optimizer.device = {device}: {why}")


def _device(offload: Any) -> str:
    """Return where a section of the configuration offloads to, "" where it does not."""
    # DeepSpeed's models have a member of an enum, or its value.
    device = "none" if offload is None else getattr(offload.device, "value", offload.device)
    return "" if device == "none" else str(device)


@contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    # Where it can't be, DeepSpeed has assertions (runtime/engine.py, no_sync and coalesce_grad_reduction).
    adapter, stage = self._self_driver.adapter, int(self.__wrapped__.zero_optimization_stage())
    if stage > 1:
        raise WindowError(
            f"no_sync() on ZeRO stage {stage}, which reduces gradients in every backward(); leave it out, or, to "
            'reduce once a window, set ds_parity.boundary to "caller" and use coalesce_grad_reduction()'
        )
    if adapter.inside_no_sync:
        raise WindowError(
            "no_sync() inside no_sync() or coalesce_grad_reduction(): nothing is reduced in there anyway; leave the "
            "inner one out"
        )
    with self.__wrapped__.no_sync():
        yield


def allreduce_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
    """Reduce what the loop wants to have reduced, where that does nothing wrong.

    Raises:
        WindowError: hooks of the backward have reduced it.
    """
    engine, adapter = self.__wrapped__, self._self_driver.adapter
    stage = int(engine.zero_optimization_stage())
    # There DeepSpeed ends in an IndexError: the buckets of the last backward are gone.
    if adapter.reduces_in_hooks and (stage > 1 or engine.is_gradient_accumulation_boundary()):
        raise WindowError(
            f"engine.allreduce_gradients() on ZeRO stage {stage}{'' if stage > 1 else ' with overlap_comm'}: gradients "
            "are reduced inside backward(), and nothing is left to reduce; leave the call out, step() follows the last "
            "backward()"
        )
    adapter.reduce_for_loop(*args, **kwargs)


def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the model's weights in one file, as DeepSpeed does, whole under AutoTP too; every rank calls.

    Raises:
        CheckpointError: a load has ended half way.
        RankDesyncError: under AutoTP below ZeRO 3, another rank does something else, or ended.
    """
    engine = self.__wrapped__
    refuse_half_loaded(self._self_driver.state.half_loaded, "save_16bit_model()")
    if not holds_parts(engine):
        with any_shape_is_gathered():
            return engine.save_16bit_model(*args, **kwargs)
    with naming_lost_ranks("save_16bit_model()"), whole_where_it_saves(engine), any_shape_is_gathered():
        self._self_driver.meet_to_save()
        return engine.save_16bit_model(*args, **kwargs)


def _consolidated_16bit_state_dict(self: Any, exclude_frozen_parameters: bool = False) -> Any:
    # What accelerate calls under AutoTP (accelerator.py, get_state_dict). DeepSpeed's own takes parameters out of the
    # buffer of BF16_Optimizer, which steps them no more.
    engine = self.__wrapped__
    if not holds_parts(engine):
        return engine._consolidated_16bit_state_dict(exclude_frozen_parameters)
    return whole_state(engine, engine.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters))


_RETURN_SELF: Final = (
    *("to", "cuda", "cpu", "half", "float", "double", "bfloat16"),
    *("type", "apply", "requires_grad_", "to_empty"),
)
METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _no_copy(how) for name, how in (("__copy__", "copied"), ("__deepcopy__", "copied"))},
    "__reduce_ex__": _no_copy("pickled"),
    **{name: _returning_proxy(name) for name in _RETURN_SELF},
    "no_sync": _no_sync,
    **{one.__name__: one for one in (allreduce_gradients, save_16bit_model, _consolidated_16bit_state_dict)},
    "save_fp16_model": save_16bit_model,
    **{name: _of_wrapper(name) for name in ("offload_states", "reload_states")},
}
"""By their names."""
