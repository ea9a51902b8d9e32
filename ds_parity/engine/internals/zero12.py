"""DeepSpeedZeroOptimizer: ZeRO 1 and 2, with CPU offload and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.linked_states import keep_states_linked
from ds_parity.engine.internals.surface import Parameter, Zero12Optimizer, Zero12Parameter
from ds_parity.engine.internals.zero import Zero, checksum
from ds_parity.errors import WindowError


class Zero12(Zero):
    """ZeRO 2 reduces in every backward, ZeRO 1 in the boundary's, for parameters that have a gradient there.

    With CPU offload DeepSpeed keeps gradients of parameters that a pass leaves out too long, or never takes them along
    (tools/deepspeed_faults/stale_gradient.py and used_in_some_passes.py): a window's first gradient is copied over the
    buffer of the window before, and later ones are added to it; and the optimizer's own gradients are written in the
    boundary's pass, for what that pass uses alone. `forget_last_window` and `complete` do nothing but look at sets
    where every pass uses every parameter.
    """

    _reduced = False  # ZeRO 1 has reduced the open window

    @property
    def _optimizer(self) -> Zero12Optimizer:
        optimizer: Zero12Optimizer = self.engine.optimizer
        return optimizer

    def prepare(self) -> None:
        """Note which parameters get gradients, too; on ZeRO 1, reduce zeros for those that have none."""
        self.begin_window()
        super().prepare()
        if self._fills_zeros:
            self._fill_before(self._optimizer.reduce_gradients)
        keep_states_linked(
            self._optimizer, self.engine.basic_optimizer, self._optimizer.single_partition_of_fp32_groups
        )
        self._keep_in_place()
        if self._optimizer.cpu_offload:
            self._follow_writes(self._optimizer._link_all_hp_params)
            self._clear_with_norms(self._optimizer.reset_cpu_buffers)

    def _clear_with_norms(self, reset: Callable[[], None]) -> None:
        """Clear sums in fp32 behind each step, which one that is skipped leaves in place with CPU offload.

        They stay infinite, so that every later step is skipped, too (tools/deepspeed_faults/skips_for_ever.py).
        """
        sums = self._optimizer.averaged_gradients

        def reset_cpu_buffers() -> None:
            reset()
            sums.update(dict.fromkeys(sums))

        self._optimizer.reset_cpu_buffers = reset_cpu_buffers  # type: ignore[method-assign]

    def _keep_in_place(self) -> None:
        """Let loads see parameters that have memory of their own, which only steps of DeepSpeed's put back.

        `parameter.data = tensor` gives them some, in a loop or in a `custom_load_fn`. Masters are made of the flat
        buffer, so that of weights which were loaded alone nothing would be left behind the next step; and what masters
        give is written there, so that a window would be of old weights.
        """
        optimizer = self._optimizer
        update, restore = optimizer.update_lp_params, optimizer._restore_from_bit16_weights

        def update_lp_params() -> None:
            update()
            for index, _ in enumerate(optimizer.bit16_groups):
                optimizer._update_model_bit16_weights(index)

        def restore_from_bit16_weights() -> None:
            found = [(parameter, parameter.data) for group in optimizer.bit16_groups for parameter in group]
            for index, _ in enumerate(optimizer.bit16_groups):
                optimizer._update_model_bit16_weights(index)
            # Cloned first: what one has may lie in the place of another.
            moved = [(one, values.clone()) for one, values in found if one.data_ptr() != values.data_ptr()]
            for parameter, values in moved:
                parameter.data.copy_(values)
            restore()

        optimizer.update_lp_params = update_lp_params  # type: ignore[method-assign]
        optimizer._restore_from_bit16_weights = restore_from_bit16_weights  # type: ignore[method-assign]

    def show_stepped_weights(self) -> None:
        """Copy the weights in fp32 to the model's, on every rank."""
        self._optimizer.update_lp_params()

    def _follow_writes(self, link: Callable[[], None]) -> None:
        """Renew norms where a loop writes gradients, also once reload_states() has linked parameters anew."""

        def link_all() -> None:
            link()
            self._follow_each()

        self._optimizer._link_all_hp_params = link_all  # type: ignore[method-assign]
        self._follow_each()

    def _follow_each(self) -> None:
        for index, group in enumerate(self._optimizer.params_in_partition):
            for parameter in group:
                self._follow(index, cast("Zero12Parameter", parameter))

    def _follow(self, index: int, parameter: Zero12Parameter) -> None:
        """Take the norm of what a loop writes into the gradient of a step.

        With CPU offload DeepSpeed takes norms as gradients come in, and would clip by that of what was there before.
        """
        optimizer, write = self._optimizer, parameter.set_full_hp_grad

        def set_full_hp_grad(value: torch.Tensor) -> None:
            write(value)
            number = optimizer.get_param_id(parameter)
            _, _, offset, length = optimizer.grad_position[number]
            written = optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, length)
            self._renew_norm(number, written, torch.float64)

        parameter.set_full_hp_grad = set_full_hp_grad  # type: ignore[method-assign]

    @property
    def reduces_in_hooks(self) -> bool:
        """Whether hooks of a backward reduce: on ZeRO 2, and on ZeRO 1 with overlap_comm."""
        return self.engine.zero_optimization_partition_gradients() or self._optimizer.overlap_comm

    @property
    def _fills_zeros(self) -> bool:
        # ZeRO 1 reduces what has a gradient at the boundary, one parameter after the other, so that where ranks have
        # used others, buckets of different parameters are added up.
        return not self.reduces_in_hooks

    def _fill_before(self, reduce: Callable[..., None]) -> None:
        def reduce_gradients(*args: Any, **kwargs: Any) -> None:
            if self._reduced:
                raise WindowError(
                    "engine.allreduce_gradients() behind the last backward() of a window, which has reduced its "
                    "gradients: a second reduction would put zeros in their place; leave the call out, step() follows "
                    "the last backward()"
                )
            self._fill_zeros()
            reduce(*args, **kwargs)
            self._reduced = True

        self._optimizer.reduce_gradients = reduce_gradients  # type: ignore[method-assign]

    def prepare_pipeline(self) -> None:
        """Let a stage of a pipeline reduce zeros for what its window has not used, in each of its columns alike.

        Else buckets of different parameters are added up over columns, and with CPU offload the last gradient of such a
        parameter is applied again (tools/deepspeed_faults/ranks_use_other_parameters.py and stale_gradient.py).
        """
        optimizer, reduce = self._optimizer, self._optimizer.reduce_gradients
        keep_states_linked(optimizer, self.engine.basic_optimizer, optimizer.single_partition_of_fp32_groups)
        self._keep_in_place()
        if optimizer.cpu_offload:
            self._clear_with_norms(optimizer.reset_cpu_buffers)

        def reduce_gradients(*args: Any, **kwargs: Any) -> None:
            self._fill_zeros()
            reduce(*args, **kwargs)
            if optimizer.cpu_offload:
                self._forget_frozen()

        optimizer.reduce_gradients = reduce_gradients  # type: ignore[method-assign]

    def _forget_frozen(self) -> None:
        """Clear the gradients of what was frozen after it was trained."""
        for index, group in enumerate(self._optimizer.params_in_partition):
            for parameter in group:
                if not parameter.requires_grad:
                    self._clear(index, self._optimizer.get_param_id(parameter))

    def _clear(self, index: int, number: int) -> None:
        _, _, offset, length = self._optimizer.grad_position[number]
        self._optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, length).zero_()

    def _fill_zeros(self) -> None:
        optimizer = self._optimizer
        # The hooks of a backward do this; a rank may have run none in a window that its caller has ended.
        optimizer.setup_buckets()
        for parameter in (p for group in optimizer.bit16_groups for p in group if p.requires_grad):
            if optimizer.get_gradient_for_reduction(parameter) is not None:
                continue
            parameter.grad = torch.zeros_like(parameter)
            if optimizer.use_grad_accum_attribute:
                optimizer._fill_param_grad_accum_attribute(parameter)

    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of DeepSpeed's groups."""
        return self._optimizer.bit16_groups

    def _note(self, number: int) -> None:
        super()._note(number)
        # Buckets are filled, and added up over ranks, in the order in which hooks bring gradients: bare DeepSpeed gives
        # [2, 2] where [0.5, 1.5] is right (in_another_order in tests/distributed/test_changing_parameters.py).
        if self.reduces_in_hooks:
            self._note_order(number)

    def _checksum_of_one_reduction(self) -> int:
        # Hooks of the last backward alone have reduced, and it has used all that the window did.
        return checksum(self._last_arrived, super()._checksum_of_one_reduction())

    def begin_window(self) -> None:
        """Forget what the last window used."""
        super().begin_window()
        self._filled, self._reduced = self._fills_zeros, False

    def used_parameters(self) -> int:
        """Return that of all ZeRO stages; of what is frozen where zeros stand in for what a rank has not used."""
        return self.frozen_parameters() if self._filled else super().used_parameters()

    @property
    def _reduced_once(self) -> bool:
        # ZeRO 1 reduces once, whatever has a gradient by then; idle passes that need none are not run there.
        return not self.engine.zero_optimization_partition_gradients()

    def refuse_unreduced(self) -> None:
        """Raise WindowError on ZeRO 1 with overlap_comm, whose boundary reduces what its own pass uses alone."""
        if self.engine.zero_optimization_partition_gradients() or self._filled:
            return
        missing = self._used & ~self._last
        if missing:
            raise WindowError(
                f"{missing.bit_count()} parameters got gradients in a window whose last pass left them out: on ZeRO "
                "stage 1 with overlap_comm DeepSpeed does not reduce them, and ranks' weights would differ "
                "(tools/deepspeed_faults/used_in_some_passes.py); set zero_optimization.overlap_comm to false"
            )

    def gradients_seen(self) -> object:
        """Return how many came in; on ZeRO 1, which has hooks in some configurations alone, also what is there."""
        if self.engine.zero_optimization_partition_gradients():
            return super().gradients_seen()
        return super().gradients_seen(), Adapter.gradients_seen(self)

    def forget_last_window(self, boundary: bool) -> None:
        """With CPU offload, clear the buffers of what the window's first pass did not use."""
        optimizer = self._optimizer
        # A window of one pass bypasses these buffers (stage_1_and_2.py, micro_step_id > 0 or no boundary).
        if not optimizer.cpu_offload or boundary:
            return
        buffers = optimizer.accumulated_grads_in_cpu
        for left_out in buffers.keys() - optimizer._offload_accumulated_param_ids:
            buffers[left_out].zero_()

    def has_every_gradient(self) -> bool:
        """Whether every parameter has a gradient accumulated: ZeRO 1 with overlap_comm reduces only those that do."""
        if self._fills_zeros:
            return True
        # ZeRO 2 is never asked: it reduces in every pass, so that no pass can be left out.
        trained = (p for group in self._optimizer.bit16_groups for p in group if p.requires_grad)
        return all(self._optimizer.get_gradient_for_reduction(p) is not None for p in trained)

    def deliver(self) -> None:
        """With CPU offload, do what the boundary's pass does for the parameters that it used, for all others."""
        if not self._optimizer.cpu_offload:
            return
        for index, group in enumerate(self._optimizer.params_in_partition):
            for parameter in group:
                number = self._optimizer.get_param_id(parameter)
                # One that was frozen meanwhile has a gradient there, too: that of its last window.
                if number not in self._optimizer.norm_for_param_grads:
                    self._complete(index, parameter, number)

    def _complete(self, index: int, parameter: Parameter, number: int) -> None:
        optimizer = self._optimizer
        if number not in optimizer._offload_accumulated_param_ids:
            # No pass of the window used it, so its gradient is 0 and not what the last window left.
            self._clear(index, number)
        elif optimizer._use_compact_grad_partition_buffer(index):
            optimizer.copy_grads_in_partition(parameter, index)
        else:  # as _finalize_cpu_offload_gradient_accumulation does for every parameter
            optimizer._restore_cpu_offload_grad_to_gpu(parameter)
            optimizer.set_norm_for_param_grad_in_gpu(parameter)
            optimizer.update_offload_overflow_tracker_for_param_grad(parameter)
            optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)

    def reduce(self) -> None:
        """Reduce what is accumulated.

        With `overlap_comm` ZeRO 1 leaves the reduction to hooks of the backward (tools/deepspeed_faults/
        allreduce_zero1_overlap.py), so it takes what DeepSpeed does at the end of `coalesce_grad_reduction`.
        """
        if self.engine.zero_optimization_partition_gradients():
            self._optimizer.finalize_gradient_accumulation_boundary()
        elif self._optimizer.overlap_comm:
            self._reduce_without_a_backward()
        else:
            super().reduce()

    def before_coalesced(self) -> None:
        """Fill zeros in for what this rank has no gradient of: buckets are reduced in the parameters' order."""
        self._fill_zeros()
        self._filled = True

    def _reduce_without_a_backward(self) -> None:
        # engine.py, _flush_coalesced_reduction_zero12: a boundary's pass without its backward.
        optimizer = self._optimizer
        if not get_accelerator().resolves_data_dependency():
            optimizer.reduction_stream.synchronize()  # the reduction of the last pass may still use the buckets
        self.before_coalesced()
        for index, group in enumerate(optimizer.bit16_groups):
            for param in group:
                if param.requires_grad and optimizer.get_gradient_for_reduction(param) is not None:
                    optimizer.reduce_ready_partitions_and_remove_grads(param, index)
        optimizer.overlapping_partition_gradients_reduce_epilogue()

    def discard(self) -> None:
        """Clear gradients, and begin the window anew."""
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        # A window begins where this number is the initial one: its first gradient is then copied and not added.
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            # step() alone clears it: what is in it counts as used in the next window, and keeps this one's gradient.
            optimizer._offload_accumulated_param_ids.clear()
        # The keys stay: step() looks them up for every parameter group.
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
