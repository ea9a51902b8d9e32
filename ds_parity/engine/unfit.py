"""Models that DeepSpeed can't train with a configuration, which it says by a bare error, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from torch.nn.parameter import UninitializedParameter

from ds_parity.config.features import Wanted
from ds_parity.engine.internals.unable import ONE_DTYPE, refuse_matrices, word
from ds_parity.errors import ConfigError

_PARTITIONED: Final = 3
_WITH_ROWS: Final = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def refuse_unfit(
    model: Any,
    config: Mapping[str, Any],
    groups: Iterable[Sequence[torch.Tensor]] = (),
    chosen: Iterable[torch.Tensor] = (),
) -> None:
    """Raise where a model, or what is to be trained of it, and the ZeRO stage do not go together.

    Args:
        model: that an engine is to be built over; anything that is no `torch.nn.Module` passes.
        config: of DeepSpeed; where its ZeRO stage is "auto", nothing is refused.
        groups: the parameters of the optimizer, or of `model_parameters`, group by group.
        chosen: all of these, with groups and without; none: those of the model.

    Raises:
        ConfigError: its parameters are partitioned and the stage is not 3; it has a MoE layer of DeepSpeed's, trains
            parameters of several dtypes, or has one without elements, on stage 3; on stage 1 or 2 one group has trained
            ones in fp64 beside others, or frozen ones alone, or no expert of such a layer is trained; a gradient has a
            dtype that stage 0 does not reduce, is complex, or is sparse on another stage; or a parameter has no shape
            yet.
    """
    wanted = Wanted(config)
    chosen = list(chosen)
    stage, trained = wanted.stage, {id(one) for one in chosen}
    if stage is None or not isinstance(model, torch.nn.Module):
        return
    _refuse_lazy(model)
    _refuse_complex(model, trained if stage else ())
    if stage:
        _refuse_sparse(model, stage, trained)
    if stage < _PARTITIONED:
        _refuse_partitioned(model, stage)
    else:
        _refuse_experts(model)
        _refuse_without_elements(model)
    if wanted.precision == "fp32":  # the others convert every parameter
        if stage == 0:
            _refuse_unreduced(model)
        else:
            _refuse_dtypes(model, stage, groups, chosen)
    if stage in (1, 2):
        _refuse_frozen(groups, stage)
        _refuse_experts_in_parts(model, wanted, stage, trained)


def _trained(model: torch.nn.Module, chosen: Container[int]) -> dict[str, torch.Tensor]:
    return {n: one for n, one in model.named_parameters() if one.requires_grad and (not chosen or id(one) in chosen)}


def _refuse_complex(model: torch.nn.Module, chosen: Container[int]) -> None:
    # AssertionErrors on stages 0 and 3; 1 and 2 throw the imaginary part away (zero/stage_1_and_2.py, 0.19.8).
    found = [name for name, one in _trained(model, chosen).items() if one.is_complex()]
    if found:
        raise ConfigError(
            f"{found[0]} is complex: DeepSpeed reduces real numbers, and its ZeRO drops imaginary parts; keep the real "
            "and the imaginary part in two parameters"
        )


def _refuse_sparse(model: torch.nn.Module, stage: int, chosen: Container[int]) -> None:
    # torch's NotImplementedError or RuntimeError in the first backward, out of DeepSpeed's buckets (0.19.8).
    trained = {id(one) for one in _trained(model, chosen).values()}
    owners = [
        (name, module, {id(p) for p in module.parameters(recurse=False)}) for name, module in model.named_modules()
    ]
    sparse = [one for one in owners if isinstance(one[1], _WITH_ROWS) and one[1].sparse and one[2] & trained]
    # Beside the dense gradient of a head that shares the weight, autograd makes all of it dense.
    dense = {parameter for one in owners if one not in sparse for parameter in one[2]}
    for name, module, own in sparse:
        if not own & dense:
            raise ConfigError(
                f"zero_optimization.stage = {stage}, and {name or 'the model'} is a {type(module).__name__} with "
                "sparse=True: DeepSpeed's ZeRO has no place for a sparse gradient, and torch raises in the first "
                "backward; build it with sparse=False, or use stage 0"
            )


def _refuse_lazy(model: torch.nn.Module) -> None:
    # DeepSpeed counts elements, and sends them to the other ranks ("Attempted to use an uninitialized parameter").
    lazy = [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"{lazy[0]} has no shape yet (torch.nn.LazyLinear and its like), and DeepSpeed needs all of them to build "
            "an engine: run the model once, on any batch, before initialize()"
        )


def _refuse_without_elements(model: torch.nn.Module) -> None:
    # An AssertionError in the first forward that gathers it (0.18.4 to 0.19.8): its status stays "not available".
    empty = [name for name, one in model.named_parameters() if not getattr(one, "ds_numel", one.numel())]
    if empty:
        raise ConfigError(
            f"zero_optimization.stage = 3, and {empty[0]} has no elements: a forward of DeepSpeed's gathers none of "
            "that size, and raises, on some of the ranks only; leave the parameter out of the model, also where no "
            "forward uses it, or use stage 0, 1 or 2"
        )


def _refuse_dtypes(
    model: torch.nn.Module, stage: int, groups: Iterable[Sequence[torch.Tensor]], chosen: Sequence[torch.Tensor]
) -> None:
    # On stage 3 zero/utils.py, defragment (0.19.8) raises an AssertionError without a word, and with offload_param all
    # become what the first one is; 1 and 2 make the parts of a group of what is the widest of it.
    trained = [one for one in chosen or model.parameters() if one.requires_grad]
    held = [trained] if stage == _PARTITIONED else [[one for one in group if one.requires_grad] for group in groups]
    for group in held or [trained]:
        kinds: dict[torch.dtype, torch.Tensor] = {}
        for one in group:
            kinds.setdefault(one.dtype, one)
        if len(kinds) > 1 and (stage == _PARTITIONED or torch.float64 in kinds):
            found = ", ".join(f"{_named(model, one)} is {word(dtype)}" for dtype, one in kinds.items())
            raise ConfigError(
                f"zero_optimization.stage = {stage}, and the parameters that are trained have {len(kinds)} dtypes "
                f"({found}): DeepSpeed keeps them in one buffer, which has one dtype; {ONE_DTYPE}"
            )


def _named(model: torch.nn.Module, parameter: torch.Tensor) -> str:
    return next((name for name, one in model.named_parameters() if one is parameter), "one that is not the model's")


def _refuse_unreduced(model: torch.nn.Module) -> None:
    # runtime/engine.py, split_half_float_double_sparse (0.19.8): an AssertionError in the first step, which reduces the
    # gradients of all parameters of the model.
    reduced = get_accelerator().supported_dtypes()
    trained = {name: one.dtype for name, one in _trained(model, ()).items()}
    other = {name: dtype for name, dtype in trained.items() if dtype not in reduced}
    if other:
        name, dtype = next(iter(other.items()))
        others = "" if len(set(trained.values())) > 1 else ", or use stage 1 or 2"
        raise ConfigError(
            f"zero_optimization.stage = 0, and {name} is {word(dtype)}: DeepSpeed reduces no gradient of that dtype "
            f"there on this accelerator; {ONE_DTYPE}{others}"
        )


def refuse_optimizer(optimizer: Any, config: Mapping[str, Any]) -> None:
    """Raise where DeepSpeed can't step an optimizer.

    Args:
        optimizer: an optimizer, a function that makes one (which passes), or None.
        config: of DeepSpeed, whose section `optimizer` may name one of torch's.

    Raises:
        ConfigError: its step() has an argument without a default: a closure, which DeepSpeed gives to none. Or it is
            torch's Muon on ZeRO 1 to 3, which only steps matrices.
    """
    wanted = Wanted(config)
    refuse_matrices(optimizer, wanted.stage)
    kind: Any = type(optimizer)
    if optimizer is None:
        kind = getattr(torch.optim, str(wanted.value("optimizer.type")), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return
    _, *arguments = inspect.signature(kind.step).parameters.values()
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in arguments):
        raise ConfigError(
            f"the optimizer is {kind.__name__}, whose step() evaluates the loss again by a closure: DeepSpeed has none "
            "to give, as the micro-batches of a window are gone by then; choose another one (AdamW, SGD)"
        )


def _refuse_frozen(groups: Iterable[Sequence[torch.Tensor]], stage: int) -> None:
    # stage_1_and_2.py, __init__ (0.19.8): an IndexError, and in bf16_optimizer.py torch's ValueError. What is empty
    # from the start is left out (runtime/engine.py).
    for number, parameters in enumerate(groups):
        if parameters and not any(one.requires_grad for one in parameters):
            raise ConfigError(
                f"zero_optimization.stage = {stage}, and all {len(parameters)} parameters of group {number} are frozen "
                "(requires_grad is False): DeepSpeed partitions what is trained, and builds no engine with a group of "
                "nothing; leave the group out, or freeze its parameters after initialize()"
            )


def _refuse_partitioned(model: torch.nn.Module, stage: int) -> None:
    # Nothing gathers them there, and the forward finds empty tensors ("'weight' must be 2-D").
    born = [name for name, one in model.named_parameters() if hasattr(one, "ds_id")]
    if born:
        raise ConfigError(
            f"zero_optimization.stage = {stage}, and {born[0]} is partitioned: the model was built under "
            "deepspeed.zero.Init, or an engine of stage 3 has trained it before. Only ZeRO stage 3 gathers such "
            "parameters, and the forward of other stages finds none; set the stage to 3, or build the model anew "
            "outside of zero.Init (transformers' from_pretrained enters it while an HfDeepSpeedConfig of stage 3 is "
            "kept)"
        )


def _layers_of_experts(model: torch.nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, MoE)]


def _refuse_experts(model: torch.nn.Module) -> None:
    # engine.py, _validate_zero3_moe_compatibility (0.19.8): an AssertionError.
    if layers := _layers_of_experts(model):
        raise ConfigError(
            f"zero_optimization.stage = 3, and {layers[0]} is DeepSpeed's own MoE layer: DeepSpeed partitions no "
            "experts that have a group of ranks of their own; use stage 0, 1 or 2, or experts without DeepSpeed's "
            "layer, as a ZeRO-3 leaf module (zero_optimization.leaf_module)"
        )


def _refuse_experts_in_parts(model: torch.nn.Module, wanted: Wanted, stage: int, trained: Container[int]) -> None:
    # zero/stage_1_and_2.py, _configure_moe_settings (0.19.8): AssertionErrors, but for experts on different ranks that
    # stage 1 reduces over all of them (tools/deepspeed_faults/experts_not_contiguous.py).
    if not (layers := _layers_of_experts(model)):
        return
    which = f"zero_optimization.stage = {stage}, and {layers[0]} is DeepSpeed's own MoE layer"
    different = any(one.ep_size > 1 for one in model.modules() if isinstance(one, MoE))
    contiguous = (stage > 1 or different) and not wanted.offloads  # which puts it on
    keys = ["reduce_scatter", *(["contiguous_gradients"] if contiguous else [])]
    off = [path for key in keys if wanted.off(path := f"zero_optimization.{key}")]
    if off:
        raise ConfigError(
            f"{which}: {off[0]} is off, and DeepSpeed reduces the gradients of experts in one way alone there; "
            "remove the key, or use stage 0"
        )
    if not any(is_moe_param(one) for one in _trained(model, trained).values()):
        raise ConfigError(
            f"{which}: none of its experts is trained, and DeepSpeed partitions such a model with a parameter group of "
            "experts alone there; use stage 0, or train a parameter of one of them"
        )
