"""BF16_Optimizer: ZeRO 1 in bf16 with gradients accumulated in fp32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.kept import note_gradients
from ds_parity.engine.internals.linked_states import keep_states_linked
from ds_parity.engine.internals.surface import Bf16Optimizer, Parameter


class Bf16(Adapter):
    """Gradients lie in flat fp32 buffers, from which the norm is taken."""

    @property
    def _optimizer(self) -> Bf16Optimizer:
        optimizer: Bf16Optimizer = self.engine.optimizer
        return optimizer

    def _keep_copies(self) -> None:
        """Keep the model's weights, those in fp32 and the optimizer's states together, in steps and in loads."""
        self._keep_in_place()
        self._load_masters()
        keep_states_linked(self._optimizer, self.engine.basic_optimizer, self._optimizer.fp32_groups_flat_partition)

    def _keep_in_place(self) -> None:
        """Give parameters their places in the flat buffers again: in each step, and before masters are made of them.

        `model.to(...)` there and back, and `parameter.data = tensor`, give them memory of their own, which no step of
        DeepSpeed's reaches: they would be trained no more, without an error (0.19.8, measured by tests/distributed/
        test_converted.py). The other wrappers give them theirs in each step.
        """
        optimizer = self._optimizer
        places = [(one, one.data) for group in optimizer.bf16_groups for one in group]
        update, restore = optimizer.update_lp_params, optimizer._restore_from_bit16_weights

        def update_lp_params() -> None:
            update()
            # Nothing is copied into a place: the step has written it, and a loop may have kept it to put it back.
            for parameter, place in places:
                alike = parameter.shape == place.shape and parameter.dtype == place.dtype
                if alike and parameter.device == place.device and parameter.data_ptr() != place.data_ptr():
                    parameter.data = place

        def restore_from_bit16_weights() -> None:
            # In whatever type they were loaded, and cloned first: what one has may lie in the place of another.
            alike = [(one, place) for one, place in places if one.shape == place.shape]
            moved = [(*pair, pair[0].data.clone()) for pair in alike if pair[0].data_ptr() != pair[1].data_ptr()]
            for parameter, place, values in moved:
                place.copy_(values)
                parameter.data = place
            restore()

        optimizer.update_lp_params = update_lp_params  # type: ignore[method-assign]
        optimizer._restore_from_bit16_weights = restore_from_bit16_weights  # type: ignore[method-assign]

    def _load_masters(self) -> None:
        """Make masters of the model's weights in a load with `load_from_fp32_weights: false`, as the other wrappers do.

        DeepSpeed leaves them as they were, and the next step would undo what was loaded (_load_legacy_checkpoint,
        0.19.8; tools/deepspeed_faults/masters_of_before.py).
        """
        optimizer = self._optimizer
        load = optimizer.load_state_dict

        def load_state_dict(state_dict_list: Any, **options: Any) -> None:
            load(state_dict_list, **options)
            if not options.get("checkpoint_folder") and not options.get("load_from_fp32_weights"):
                optimizer.refresh_fp32_params()

        optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]

    def show_stepped_weights(self) -> None:
        """Copy the weights in fp32 to the model's, on every rank."""
        self._optimizer.update_lp_params()

    def has_every_gradient(self) -> bool:
        """Return True: the wrapper reduces its whole buffers, which are zero where a parameter has no gradient."""
        return True

    def complete(self) -> None:
        """Let the norm see every gradient: a rank leaves out those that its own passes did not use, whatever came in.

        Ranks would clip by norms of their own, and weights would differ (bf16_optimizer.py, get_grads_for_norm).
        """
        self._optimizer.fp32_groups_has_gradients = [
            [True] * len(group) for group in self._optimizer.fp32_groups_has_gradients
        ]

    def prepare(self) -> None:
        """Count the gradients that come in, and keep those of several forwards for one backward.

        DeepSpeed clears the bf16 gradients in a hook of each forward's result (bf16_optimizer.py, backward_prologue):
        a backward of two forwards would lose what the one has brought when it comes to the other. They are clear by
        then, because `end_backward` has cleared them.
        """
        super().prepare()
        self._keep_copies()
        optimizer = self._optimizer
        optimizer.backward_prologue = _nothing
        if optimizer.immediate_grad_update:
            accumulate = optimizer.accumulate_hp_grads_and_remove_lp

            def accumulated(lp_param: Parameter, group_idx: int, param_idx: int) -> None:
                accumulate(lp_param, group_idx, param_idx)
                # Up to 0.19.5 it stays there, and is added again with what the next backward of a window, or one inside
                # this backward (reentrant checkpointing), brings.
                lp_param.grad = None

            optimizer.accumulate_hp_grads_and_remove_lp = accumulated  # type: ignore[method-assign]
        note_gradients(self._trained, self._note)

    def prepare_pipeline(self) -> None:
        """Let the columns of a pipeline clip by one norm, whatever each has used."""
        self._keep_copies()
        given = self._optimizer.get_grads_for_norm

        def get_grads_for_norm(*args: Any, **kwargs: Any) -> Any:
            self.complete()
            return given(*args, **kwargs)

        self._optimizer.get_grads_for_norm = get_grads_for_norm  # type: ignore[method-assign]

    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of DeepSpeed's groups."""
        return self._optimizer.bf16_groups

    def end_backward(self) -> None:
        """Clear the bf16 gradients, which are in the fp32 buffers by now.

        DeepSpeed clears them in a hook of `engine.forward`'s result, so that a loop which calls `engine.module` would
        have them added a second time (tools/deepspeed_faults/forward_past_the_engine.py).
        """
        self._optimizer.clear_lp_grads()

    def gradients_seen(self) -> object:
        """Return also how many came in: with `immediate_grad_update` DeepSpeed's hooks take them away at once."""
        return super().gradients_seen(), self._came_in

    def _note(self, _: int) -> None:
        self._came_in += 1

    def holds_gradients(self) -> bool:
        """Whether one of both copies has a gradient that is not zero."""
        flats = self._optimizer.fp32_groups_gradients_flat
        return super().holds_gradients() or any(bool(flat.count_nonzero()) for flat in flats)

    @contextmanager
    def corrected(self, expected: float, total: float) -> Iterator[None]:
        """Multiply the flat buffers in place."""
        # The wrapper has no loss scale on which the factor could ride.
        for flat in self._optimizer.fp32_groups_gradients_flat:
            flat.mul_(expected / total)
        yield

    def discard(self) -> None:
        """Clear both copies of the gradients."""
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads()


def _nothing() -> None:
    """Do nothing."""
