"""Makes DeepSpeed's pipelines right: the norm by which they clip, the buffers they receive in, and how they load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_parity.engine.internals.experts import groups_of_experts, squares_of
from ds_parity.engine.internals.literal_paths import literal_paths
from ds_parity.engine.internals.replaced import replaced


def averaged_over(engine: Any, columns: int) -> int:
    """Return what DeepSpeed divides the sum of all columns' gradients by.

    Args:
        engine: DeepSpeed's PipelineEngine.
        columns: data-parallel ranks (>= 1).
    """
    return columns if engine.gradient_average else 1


def buffers_of_every_type(engine: Any) -> None:
    """Let a pipeline's engine receive each tensor in a buffer of its own.

    With shapes that change, DeepSpeed has one buffer for what it receives from the stage before and behind, whatever
    types these are: three stages that pass on a mask of whole numbers end the process (runtime/pipe/engine.py,
    _allocate_or_extend_buffers, 0.19.8).

    Args:
        engine: DeepSpeed's PipelineEngine.
    """

    def allocate(_: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=engine.device)

    engine._allocate_or_extend_buffers = allocate


def clip_over_stages(engine: Any) -> None:
    """Let a pipeline's engine on ZeRO 0 in fp32 clip by the norm of all stages and experts, and keep that norm.

    DeepSpeed's own leaves out all stages but the first: it asks the grid for its model-parallel rank, which numbers
    stages too, and counts the parameters of rank 0 alone (runtime/utils.py, clip_grad_norm_; runtime/pipe/topology.py,
    get_model_parallel_rank; 0.19.8). A norm that is not finite takes no step, as on ZeRO 1, clipped or not.

    Args:
        engine: DeepSpeed's PipelineEngine, without tensor parallelism.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = norm = _norm_over_stages(engine)
        if _steps_by(engine, norm):
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_((engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0))

    def look(*_: Any) -> None:
        if not engine.gradient_clipping():
            _steps_by(engine, _norm_over_stages(engine))

    engine.clip_fp32_gradients = clip_fp32_gradients
    # Inside a wrapper of DeepSpeed's, which looks itself, the client's optimizer has no gradients of the model's.
    if engine.optimizer is engine.basic_optimizer and hasattr(engine.optimizer, "register_step_pre_hook"):
        engine.optimizer.register_step_pre_hook(look)


def _norm_over_stages(engine: Any) -> torch.Tensor:
    # The gradient of tied weights has been summed over their stages, and counts once.
    again = {id(parameter) for _, parameter, own, first in _tied(engine.module) if not own and not first}
    once = [parameter for parameter in engine.module.parameters() if id(parameter) not in again]
    squares = squares_of(once, groups_of_experts(engine.module))
    total = torch.stack([torch.zeros((), device=engine.device), *squares]).sum()
    dist.all_reduce(total, group=engine.grid.get_pipe_parallel_group())
    return total.sqrt()


def _steps_by(engine: Any, norm: torch.Tensor) -> bool:
    """Return whether the norm is finite; without gradients, torch's optimizers leave everything as it is."""
    finite = bool(norm.isfinite())
    if not finite:
        for parameter in engine.module.parameters():
            parameter.grad = None
    # The engine counts a step as skipped by this name, which torch's optimizers have not.
    engine.optimizer.overflow = not finite
    return finite


def checkpoint_activations(engine: Any) -> None:
    """Let trained layers whose activations are checkpointed have their gradient, whatever comes to them, and goes.

    By the function that is DeepSpeed's default, what layers return needs a gradient where one of their inputs does, and
    never for their weights' sake: the first layers behind ids of tokens, or behind what is frozen, stay untrained
    (tools/deepspeed_faults/checkpointed_over_ids.py). Nor does it look into a list or a dict, it computes a forward
    anew outside of the autocast in which it was, and raises where a stage passes on two activations
    (CheckpointFunction in runtime/activation_checkpointing/checkpointing.py, 0.19.8). torch's, which is not reentrant,
    is right in all of these. It has no part in what DeepSpeed's may do beside: to partition activations or move them
    off the device, and to keep a tracker of random states.

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    replaced_ones = [checkpointing.checkpoint]
    if engine.torch_autocast_enabled():
        replaced_ones.append(checkpointing.non_reentrant_checkpoint)  # it leaves the autocast, too, and raises
    if engine.module.activation_checkpoint_func not in replaced_ones:
        return

    def computed_anew(layers: Any, *inputs: Any) -> Any:
        if not _has_ways_of_its_own():
            return torch.utils.checkpoint.checkpoint(layers, *inputs, use_reentrant=False)
        if torch.is_grad_enabled() and not any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs):
            return checkpointing.non_reentrant_checkpoint(layers, *inputs)
        return checkpointing.checkpoint(layers, *inputs)

    engine.module.activation_checkpoint_func = computed_anew


def _has_ways_of_its_own() -> bool:
    names = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING")
    return any(getattr(checkpointing, name) for name in names) or bool(
        checkpointing.get_cuda_rng_tracker().get_states()
    )


def count_what_is_not_shared(engine: Any) -> None:
    """Let the norm count what a tied layer has beside the weights that its stages share.

    DeepSpeed marks the whole layer as counted on the first of its stages (runtime/pipe/module.py, _index_tied_modules,
    0.19.8), and so leaves out a bias that another stage uses.

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    for _, parameter, own, first in _tied(engine.module):
        if own and not first:
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]


def count_none(engine: Any) -> None:
    """Let the norm of a stage be 0 where each of its weights counts on another one.

    DeepSpeed's optimizer for bf16 stacks the norms of what counts here, and torch stacks no empty list: the stage
    raises, and the others wait for its part (tools/deepspeed_faults/stage_of_tied_weights.py, 0.19.8).

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    if not isinstance(engine.optimizer, BF16_Optimizer):
        return
    given = engine.optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        found = given(for_clipping=for_clipping)
        if for_clipping:
            return found
        usual, of_experts = found
        return usual or [torch.zeros(1, device=engine.device)], of_experts

    engine.optimizer.get_grads_for_norm = get_grads_for_norm


def lost_by_a_load(engine: Any) -> set[str]:
    """Return a set that will have the names of what this stage trains, and no load gives back.

    A stage saves the layers that it has, and a tied one that it uses by a `forward_fn` is none. What stages share is
    given to all of them by the first one behind a load (runtime/pipe/module.py, _synchronize_tied_weights, 0.19.8), so
    that it is lost where that one has no file of it; what they don't is where its own stage has none.

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    trained: set[str] = set()
    model = engine.module
    saved = {id(one) for layer in modules_of(model) for one in layer.parameters()}
    for name, parameter, own, first in _tied(model):
        if parameter.requires_grad and id(parameter) not in saved and (own or first):
            parameter.register_hook(lambda _, name=name: trained.add(name))  # type: ignore[no-untyped-call]
    return trained


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers of this stage that have files: those that are modules, and no functions of one.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
    """
    return [one for one in model.forward_funcs if isinstance(one, torch.nn.Module)]


def layer_without_a_file(model: Any, folder: Path) -> str | None:
    """Return the name of the file of a layer that this stage does not find; None where it has those of all.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        folder: of the checkpoint's tag.
    """
    with literal_paths():
        for number, layer in enumerate(model.forward_funcs):
            if hasattr(layer, "load_state_dict") and not model.ckpt_layer_path_list(str(folder), number):
                return Path(model.ckpt_layer_path(str(folder), number)).name
    return None


def norms_over_stages(engine: Any) -> int:
    """Return how many norms a step on ZeRO 1 adds up over the stages: one for each parameter group of a stage.

    A stage with fewer of them leaves the others waiting for ever (tools/deepspeed_faults/norms_of_stages.py, 0.19.8).

    Args:
        engine: DeepSpeed's PipelineEngine.

    Returns:
        0 where an optimizer adds up one norm for all groups.
    """
    return len(getattr(engine.optimizer, "bit16_groups", ()))


def shared_weights(model: Any, stepped: Iterable[Any]) -> dict[str, bool]:
    """Return whether each weight is trained that this stage shares with others, by its name.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        stepped: the stage's parameters that the optimizer steps.
    """
    shared = [(name, one) for name, one, own, _ in _tied(model) if not own]
    given = {id(one) for one in stepped} if shared else set()
    return {f"tied_modules.{name}": one.requires_grad and id(one) in given for name, one in shared}


def shared_by_stages(model: Any, key: str) -> set[int]:
    """Return the ids of what stages share of a tied layer that this stage has.

    Args:
        model: DeepSpeed's PipelineModule, of which this rank has a stage.
        key: of the layer's `TiedLayerSpec`.
    """
    # An attribute may be that of an inner module, or a property.
    return {id(attrgetter(name)(model.tied_modules[key])) for name in model.tied_weight_attrs[key]}


def _tied(model: Any) -> Iterator[tuple[str, torch.nn.Parameter, bool, bool]]:
    """Yield the parameters of the tied layers that this stage has, if there are several stages.

    Each with its name behind the key of its layer, with whether each of several stages has one of its own, and with
    whether this is the first stage of the layer.
    """
    for key, tied in model.tied_comms.items():
        shared = shared_by_stages(model, key)
        several, first = len(tied["ranks"]) > 1, model.global_rank == min(tied["ranks"])
        for name, parameter in tied["module"].named_parameters():
            yield f"{key}.{name}", parameter, several and id(parameter) not in shared, first


@contextmanager
def as_it_was_saved(engine: Any) -> Iterator[None]:
    """Return a context in which a pipeline's engine loads what its optimizer has saved, and goes on from weights alone.

    On ZeRO 0 in bf16 the optimizer has the weights in fp32, in parts, and saves them in files of their own, as that of
    ZeRO does. DeepSpeed looks for these only with ZeRO (tools/deepspeed_faults/checkpoint_bf16_pipeline.py).

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    in_parts = not engine.zero_optimization() and isinstance(engine.optimizer, BF16_Optimizer)
    with replaced(engine, "zero_optimization", lambda: True) if in_parts else nullcontext():
        yield
