"""Scenarios with sequence parallelism: the bundled decoder over DeepSpeed's own Ulysses attention, one slice each."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_parity.config.autotp import autotp_size
from ds_parity.errors import ConfigError
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import TinyDecoder, causal_attention
from ds_parity.parity.data.rollouts import PAD
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.references.private_state import forget_tensor_groups


def placed(scenario: Scenario) -> tuple[nn.Module, Any]:
    """Return the scenario's model, sliced where it is to be, and the mpu that DeepSpeed takes its groups from.

    Raises:
        ConfigError: the model is not the bundled decoder, and can't be sliced.
    """
    groups.mpu = None  # DeepSpeed keeps that of the engine before
    module = scenario.build_for_engine()
    if autotp_size(scenario.config) > 1:
        return dividable(module, autotp_size(scenario.config)), None
    if scenario.sequence_parallel == 1:
        return module, None
    mpu = _mpu(scenario.sequence_parallel)
    return SequenceParallel(module, mpu.get_sequence_parallel_group()), mpu


def dividable(module: nn.Module, size: int) -> nn.Module:
    """Return a scenario's model as DeepSpeed's AutoTP takes it, whose groups are of `size` ranks from here on.

    AutoTP reads the plan of a model of transformers from `config` of the module that it is given.
    """
    config = getattr(getattr(module, "policy", None), "config", None)
    if config is not None:
        module.config = config
    forget_tensor_groups(size)
    return module


@cache
def _mpu(size: int) -> Any:
    # Where it is used: DeepSpeed up to 0.16 has no such groups, and all other scenarios run there.
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


class SequenceParallel(PolicyGradient):
    """The loss of a whole micro-batch where each rank of a group holds a slice of its tokens.

    It is `gathered` as in DeepSpeed's ALST tutorial, so the ranks' gradients sum to the size of the group times that of
    the unsliced model.

    Args:
        whole: the loss over an unsliced `TinyDecoder`; its parameters are taken over in their order.
        group: the ranks that share a micro-batch; the decoder's heads are a multiple of them.

    Raises:
        ConfigError: the decoder is another one.
    """

    def __init__(self, whole: Any, group: Any) -> None:
        if not isinstance(whole.policy, TinyDecoder):
            raise ConfigError(
                f"sequence_parallel with a {type(whole.policy).__name__}: only the bundled decoder can be sliced; "
                "leave `model` as it is, or use sequence_parallel 1"
            )
        super().__init__(whole.policy, whole.loss_weight, whole.loss_reduction, whole.objective)
        self._group = group
        for block in whole.policy.blocks:
            block.mix = _Ulysses(group)

    def forward(self, input_ids: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:  # type: ignore[override]
        """Return the micro-batch's loss, the same on every rank of the group; shapes as in `PolicyGradient`."""
        size, length = dist.get_world_size(self._group), input_ids.shape[1]
        slice_length = -(-length // size)
        beyond = slice_length * size - length
        first = dist.get_rank(self._group) * slice_length
        own = slice(first, first + slice_length)
        tokens = F.pad(input_ids, (0, beyond), value=PAD)[:, own]
        targets = F.pad(input_ids[:, 1:], (0, beyond + 1), value=PAD)[:, own]
        mask = F.pad(loss_mask, (0, beyond + 1))[:, own]
        losses = self.token_losses(self.policy(tokens, first=first), targets, advantages[:, None])
        rows = (losses * mask.to(losses.dtype)).sum(-1)
        return self.reduce(gathered(rows, self._group), loss_mask.to(losses.dtype))


def gathered(tensor: Tensor, group: Any) -> Tensor:
    """Return every rank's tensor, stacked along a new last dimension; backward adds up the gradients of all ranks.

    It does what `torch.distributed.nn.functional.all_gather` does, which in torch 2.13 raises in backward over gloo in
    a group that has no rank 0.
    """
    return _Gathered.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[..., dist.get_rank(ctx.group)], None


class _Ulysses(nn.Module):
    """Causal attention over slices: all-to-all to whole sequences of some heads, and back."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.sharded = DistributedAttention(_LengthFirst(), group, scatter_idx=2, gather_idx=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length_first = [heads.transpose(1, 2).contiguous() for heads in (query, key, value)]
        return self.sharded(*length_first, batch_dim_idx=0).transpose(1, 2)  # type: ignore[no-any-return]


class _LengthFirst(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return mixed.transpose(1, 2).contiguous()
