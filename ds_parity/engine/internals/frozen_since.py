"""Weights that are frozen in this model, and were not, or had another name, in the one that was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from deepspeed.moe.utils import is_moe_param
from torch.utils._python_dispatch import TorchDispatchMode

from ds_parity.engine.internals.model_names import in_names_of, name_of_state
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.engine.internals.unstepped import WHOLE_MODEL, given_whole, set_to

_FROZEN: Final = "frozen_param_fragments"
_SHAPES: Final = "frozen_param_shapes"


@contextmanager
def without_copies(engine: Engine, *, strict: bool, custom: bool) -> Iterator[None]:
    """Return a context in which a load asks for no copy of a frozen weight that its state of the model has whole.

    ZeRO 2 and 3 save a copy of each weight that is frozen then, and look for one of each that is frozen now, also where
    the model's state has had it already, or has nothing of it, which load_module_strict=False allows, or has it under
    the name without torch's checkpoint_wrapper (load_module_state_dict of runtime/engine.py, 0.19.8, which ends in a
    KeyError). So it does for experts, which each rank has loaded: copies are the first rank's alone, and would replace
    those of all (tools/deepspeed_faults/frozen_experts.py). A copy would replace what a function has made, too
    (tools/deepspeed_faults/frozen_by_function.py): it is loaded where the function has left a weight as it was.

    Args:
        engine: a bare DeepSpeed engine, of no pipeline.
        strict: a weight that the checkpoint lacks is an error.
        custom: a function of the caller's loads the model; it has been given all weights, but on ZeRO 3.
    """
    by_function = custom and int(engine.zero_optimization_stage()) != WHOLE_MODEL

    def finding(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            copies, values = checkpoint.get(_FROZEN), checkpoint["module"]
            if copies is None:
                return load(checkpoint, *args, **kwargs)
            own = dict(engine.module.named_parameters())
            there, shapes = in_names_of(own, copies), in_names_of(own, checkpoint.get(_SHAPES) or {})
            # Copies that nobody asks for may be those of weights with other names: nothing may be called absent then.
            absent = by_function or (len(there) == len(copies) and not strict)
            spared: list[Parameter] = [
                one
                for name, one in own.items()
                if not one.requires_grad and one.is_floating_point() and (name not in there or is_moe_param(one))
                if _needs_none(one, name_of_state(name), values, absent=absent)
            ]
            with ExitStack() as until_loaded:
                until_loaded.enter_context(set_to(True, spared))
                function = kwargs.get("custom_load_fn")
                if by_function and function is not None:
                    kwargs["custom_load_fn"] = _sparing(function, own.values(), until_loaded)
                return load({**checkpoint, _FROZEN: {**copies, **there}, _SHAPES: shapes}, *args, **kwargs)

        return loaded

    with wrapped(engine, "load_module_state_dict", finding):
        yield


def _sparing(function: Callable[..., Any], parameters: Iterable[Parameter], until: ExitStack) -> Callable[..., None]:
    """Return a function behind which no copy is asked for of the frozen weights that it has written."""
    frozen = [one for one in parameters if not one.requires_grad and one.is_floating_point()]

    def loading(src: Any, dst: Any) -> None:
        before = [_seen(one) for one in frozen]
        with _Writes() as writes:
            function(src=src, dst=dst)
        pairs = zip(frozen, before, strict=True)
        written = [one for one, seen in pairs if seen[0] in writes.places or _seen(one) != seen]
        until.enter_context(set_to(True, written))

    return loading


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whose memory is written, by `data` and without a gradient, too, which torch's count of writes leaves out.

    Attributes:
        places: where the memory of each tensor that was written begins.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch do what it is asked to."""
        given = dict(kwargs or {})
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(argument.name)
                for one in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(one, torch.Tensor):
                        self.places.add(one.untyped_storage().data_ptr())
        return func(*args, **given)


def _seen(parameter: Parameter) -> tuple[int, int, str, str]:
    """Return where the memory of a weight begins, as `_Writes` tells it, and what tells of a write past torch."""
    values = parameter.detach().float()  # one weight at a time: all of them may not fit twice
    total, norm = (repr(one.item()) for one in (values.sum(), torch.linalg.vector_norm(values)))
    return parameter.untyped_storage().data_ptr(), parameter.data_ptr(), total, norm


def _needs_none(parameter: Parameter, name: str, values: Mapping[str, Any], *, absent: bool) -> bool:
    return given_whole(parameter, values[name]) if name in values else absent
