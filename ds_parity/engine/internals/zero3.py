"""DeepSpeedZeroOptimizer_Stage3: ZeRO 3, with offload and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import z3_leaf_parameter

from ds_parity.engine.internals.leaves import Leaves
from ds_parity.engine.internals.surface import Engine, Parameter, Zero3Optimizer, Zero3Parameter
from ds_parity.engine.internals.zero import Zero
from ds_parity.errors import CheckpointError


class Zero3(Zero):
    """Gradient partitions are copied by a window's first gradient, and added to by the later ones.

    So what the first pass leaves out is added to the gradient of an old window, and what the whole window leaves out is
    stepped by it again (tools/deepspeed_faults/stale_gradient.py); with offload, what the boundary's pass leaves out
    never reaches the optimizer (used_in_some_passes.py). `forget_last_window` and `complete` put both right.

    Args:
        engine: the bare DeepSpeed engine.
    """

    _coalesced = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._copied: set[int] = set()  # parameters whose gradient the window's first backward has copied

    def prepare(self) -> None:
        """Note which parameters get gradients, and add up what one backward brings twice.

        Reentrant checkpointing runs a backward of its own for each use of a block: a module that is used twice, or two
        forwards for one backward. DeepSpeed would copy the second gradient over the first
        (tools/deepspeed_faults/reached_twice.py).
        """
        # DeepSpeed reduces those of a leaf module together, with zeros for what no token entered.
        self._together = sum(1 << number for number, p in enumerate(self._trained) if z3_leaf_parameter(p))
        self._leaves = Leaves(self.engine.module, self._trained)
        super().prepare()
        optimizer, copied = self._optimizer, self._copied
        partition = optimizer.partition_grads

        def partition_grads(params_to_release: list[Zero3Parameter], grad_partitions: list[torch.Tensor]) -> Any:
            if optimizer.micro_step_id:
                return partition(params_to_release, grad_partitions)
            pairs = list(zip(params_to_release, grad_partitions, strict=True))
            first, again = ([one for one in pairs if (one[0].ds_id in copied) is known] for known in (False, True))
            copied.update(parameter.ds_id for parameter in params_to_release)
            buffers = partition([one[0] for one in first], [one[1] for one in first]) if first else []
            if again:
                optimizer.micro_step_id = 1
                buffers = [*buffers, *partition([one[0] for one in again], [one[1] for one in again])]
                optimizer.micro_step_id = 0
            return buffers

        optimizer.partition_grads = partition_grads  # type: ignore[method-assign]
        self._follow_writes(optimizer.set_fp32_grad_for_param)
        self._let_any_size_be_written(optimizer.set_full_hp_param)

    def _follow_writes(self, write: Callable[[torch.Tensor, Zero3Parameter], None]) -> None:
        """Let a loop write its own gradient of a step (`safe_set_full_grad`), of a parameter of any size.

        DeepSpeed raises a RuntimeError on the last ranks where ranks do not divide the parameter's size, and with
        offload clips by the norm of what was there before.
        """
        optimizer = self._optimizer

        def set_gradient(value: torch.Tensor, param: Zero3Parameter) -> None:
            row, part = self._row_and_part(value, param)
            write(row, param)
            if optimizer.offload_optimizer and param.requires_grad:
                self._renew_norm(optimizer.get_param_id(param), self._on_accelerator(part), torch.float32)

        optimizer.set_fp32_grad_for_param = set_gradient  # type: ignore[method-assign]

    def _let_any_size_be_written(self, write: Callable[..., None]) -> None:
        """Let a loop write weights and states (`safe_set_full_fp32_param`, `safe_set_full_optimizer_state`), likewise.

        The last ranks alone raise in bare DeepSpeed, so that the others wait for them where they meet next.
        """
        optimizer = self._optimizer

        def set_full(value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None) -> None:
            if not param.requires_grad or value.numel() != param.ds_numel:
                write(value, param, optim_state_key)  # does nothing, or raises before anything is written
                return
            _, part = self._row_and_part(value, param)
            optimizer.set_local_hp_param(part, param, optim_state_key)

        optimizer.set_full_hp_param = set_full  # type: ignore[method-assign]

    def _row_and_part(self, value: torch.Tensor, param: Zero3Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is written to a parameter as one row with the padding of its partitions, and this rank's part."""
        length, rank = param.partition_numel(), self._optimizer._get_param_partition_rank(param)
        row = value.flatten()
        row = torch.nn.functional.pad(row, (0, max(0, length * (rank + 1) - row.numel())))
        return row, row.narrow(0, length * rank, length)

    def _note(self, number: int) -> None:
        super()._note(number)
        # Weights are gathered in the order in which modules run, which is that of the gradients, and buckets of
        # gradients end where they are full. Small weights that are never released, in one bucket, would be right in any
        # order. Those of a leaf module come together.
        if not (self._together >> number & 1 or self.keeps_whole_gradients):
            self._note_order(number)

    def begin_window(self) -> None:
        """Forget what the last window used."""
        super().begin_window()
        self._coalesced = False

    @property
    def _reduced_once(self) -> bool:
        # Weights are gathered as modules run, too: where ranks use other parameters of the same size, those of one are
        # taken for those of another, and no error shows (tools/deepspeed_faults/experts_without_leaves.py).
        return self._coalesced

    @property
    def _optimizer(self) -> Zero3Optimizer:
        optimizer: Zero3Optimizer = self.engine.optimizer
        return optimizer

    def end_backward(self) -> None:
        """Add what the backward used to what the window did, and let the next one begin anew."""
        super().end_backward()
        self._copied.clear()
        self._coalesced = self._coalesced or self.keeps_whole_gradients
        if not self.keeps_whole_gradients:
            self._leaves.refuse_unreduced()

    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of DeepSpeed's groups."""
        return cast("Iterable[Iterable[Parameter]]", self._optimizer.fp16_groups)

    def groups_of_optimizer(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of the optimizer's groups: DeepSpeed's are parts of them."""
        found: dict[int, list[Parameter]] = {}
        for number, group in enumerate(self.groups()):
            of = self._optimizer.sub_group_to_group_id[number]
            found[of] = [*found.get(of, []), *group]
        return [found[number] for number in sorted(found)]

    def averaged_over(self, ranks: int, peers: int) -> int:
        """Return all ranks, sequence-parallel ones included."""
        return super().averaged_over(ranks * peers, peers)

    def copy_first_gradient(self) -> None:
        """Copy the next gradient: DeepSpeed takes the end of a loop's own `allreduce_gradients()` for a backward's."""
        self._optimizer.micro_step_id = 0
        self._copied.clear()

    def gradients_seen(self) -> object:
        """Return how many came in, and whether the next gradient is copied over the last one: `zero_grad` sets it."""
        return super().gradients_seen(), self._optimizer.micro_step_id == 0

    def forget_last_window(self, boundary: bool) -> None:
        """Clear the partitions of what the window's first pass did not use."""
        # The set is cleared at the last step, so after the first pass it contains exactly what that pass used.
        partitions = self._partitions()
        for left_out in partitions.keys() - self._optimizer._offload_boundary_param_ids:
            partitions[left_out].zero_()

    def deliver(self) -> None:
        """With offload, give the optimizer the partitions of what the boundary's pass did not use."""
        optimizer = self._optimizer
        if not optimizer.offload_optimizer:
            return
        gradients: dict[int, Any] = {}
        offsets: dict[int, Any] = {}
        for group in optimizer.fp16_groups:
            for parameter in group:
                # One that was frozen meanwhile has a gradient there, too: that of its last window.
                if optimizer.get_param_id(parameter) in optimizer.norm_for_param_grads:
                    continue
                # The last ranks hold nothing of a parameter with fewer elements than there are ranks.
                if parameter.partition_numel() * optimizer._get_param_partition_rank(parameter) < parameter.ds_numel:
                    buffer = self._on_accelerator(self._partitions()[parameter.ds_id])
                    optimizer._offload_grad_partition_at_boundary(parameter, buffer, gradients, offsets)
        # Once for all parameters, as partition_grads does: with NVMe each call is a write.
        optimizer._swap_out_offload_fp32_gradients(gradients, offsets)

    def reduce(self) -> None:
        """End the window: every backward has reduced already."""
        self._optimizer.finalize_gradient_accumulation_boundary()

    def discard(self) -> None:
        """Do what DeepSpeed's step does where the gradient overflows."""
        # The order is that of step(): forget what was used, partition, then clear.
        self._optimizer._pre_step()
        self.release_parameters()
        self._optimizer._overflow_clean_up(self._optimizer.loss_scale)

    def forget_copies(self) -> None:
        """Forget hpZ's copies, of which DeepSpeed renews those of trained parameters alone (hpz_keeps_frozen.py)."""
        for parameter in cast("Iterable[Zero3Parameter]", self.engine.module.parameters()):
            parameter.ds_secondary_tensor = None

    def refuse_loading_over_copies(self) -> None:
        """Refuse a load where copies would stay as they are.

        Raises:
            CheckpointError: copies of frozen weights are quantized, and DeepSpeed quantizes none anew
                (runtime/zero/partition_parameters.py, _partition_param_sec, 0.19.8; read, and not run: it needs a GPU).
        """
        for parameter in cast("Iterable[Zero3Parameter]", self.engine.module.parameters()):
            if hasattr(parameter.ds_secondary_tensor, "ds_quant_scale"):
                raise CheckpointError(
                    "load_checkpoint() with zero_quantized_nontrainable_weights and zero_hpz_partition_size: passes "
                    "would use the frozen weights that the engine was built with; load those into the model before "
                    "initialize(), or leave one of the two out"
                )

    def release_parameters(self) -> None:
        """Partition what passes left gathered, as every `step()` does first."""
        self._optimizer._partition_all_parameters()

    @staticmethod
    def _on_accelerator(partition: torch.Tensor) -> torch.Tensor:
        # DeepSpeed takes the norm there (stage3.py, _finalize_offload_gradient_accumulation), and adds up norms of all
        # parameters: one on the CPU among them would be a sum over two devices.
        if get_accelerator().on_accelerator(partition):
            return partition
        return partition.to(get_accelerator().current_device_name(), non_blocking=True)

    def _partitions(self) -> Mapping[int, torch.Tensor]:
        return self._optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
