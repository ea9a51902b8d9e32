"""Layers of a pipeline whose own loads rename, drop or make what a universal checkpoint has of them."""

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_pipelines import alone_in_the_process
from tests.distributed.test_universal_of_pipelines import copy_layers, pipeline, saved

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class _Layer(nn.Module):
    """Of an old release or a new one, whose state goes through `saved` and `loaded`."""

    def __init__(self, old):
        super().__init__()
        self.old, self.inner = old, nn.Linear(6, 6)
        self._register_state_dict_hook(self.saved)
        self.register_load_state_dict_pre_hook(self.loaded)

    @staticmethod
    def saved(module, state, prefix, _):
        """Change nothing."""

    @staticmethod
    def loaded(module, state, prefix, *_):
        """Change nothing."""

    def forward(self, x):
        return self.inner(x)


class _Dropped(_Layer):
    """A new release has no buffer, and drops that of an old one."""

    def __init__(self, old):
        super().__init__(old)
        if old:
            self.register_buffer("mask", torch.ones(6))

    @staticmethod
    def loaded(module, state, prefix, *_):
        if not module.old:
            state.pop(f"{prefix}mask", None)


class _Loose(_Dropped):
    """The same, whose own load is not strict."""

    @staticmethod
    def loaded(module, state, prefix, *_):
        """Change nothing."""

    def load_state_dict(self, state, strict=True, **options):
        return super().load_state_dict(state, strict=False, **options) and None


class _Renamed(_Layer):
    """A new release has another name for a buffer."""

    def __init__(self, old):
        super().__init__(old)
        self.register_buffer("mean" if old else "average", torch.full((6,), 1.0 + old))

    @staticmethod
    def loaded(module, state, prefix, *_):
        if not module.old and f"{prefix}mean" in state:
            state[f"{prefix}average"] = state.pop(f"{prefix}mean")


class _Later(_Layer):
    """A buffer that is there from the first forward on, which its load makes."""

    def __init__(self, old):
        super().__init__(old)
        self.register_buffer("mean", None)

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}mean" in state:
            module.mean = torch.zeros_like(state[f"{prefix}mean"])

    def forward(self, x):
        if self.mean is None:
            self.mean = torch.full((6,), 3.0, device=x.device)
        return super().forward(x)


class _Counted(_Layer):
    """Its state has a count once there is one."""

    def __init__(self, old):
        super().__init__(old)
        self.count = 0

    @staticmethod
    def saved(module, state, prefix, _):
        if module.count:
            state[f"{prefix}count"] = torch.tensor(module.count)

    @staticmethod
    def loaded(module, state, prefix, *_):
        module.count = int(state.pop(f"{prefix}count", 0))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class _Doubled(_Layer):
    """Its state has a trained weight twice as large, and its load takes the key without a look at it."""

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"] * 2

    @staticmethod
    def loaded(module, state, prefix, *_):
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"] / 2


class _Summed(_Layer):
    """Its state has a sum of a trained weight, which its load drops with that."""

    @staticmethod
    def saved(module, state, prefix, _):
        state[f"{prefix}sum"] = state[f"{prefix}inner.weight"].sum()

    @staticmethod
    def loaded(module, state, prefix, *_):
        if f"{prefix}inner.weight" in state:
            state.pop(f"{prefix}sum")


def _has(layer):
    """What a load brings back."""
    own = {name: one.tolist() for name, one in layer.named_buffers()}
    return [own, getattr(layer, "count", None)]


KINDS = {"dropped": _Dropped, "loose": _Loose, "renamed": _Renamed, "later": _Later, "counted": _Counted}
KINDS |= {"doubled": _Doubled, "summed": _Summed}


@at_length_on_two_ranks
@alone_in_the_process
def layers_of_universal(folder):
    """By kind, release and strictness: what a load ends in, what the first layer has, and what was saved of it."""
    results = {}
    for name, kind in KINDS.items():
        path = f"{folder}/{name}"

        def layers(old, kind=kind):
            return [LayerSpec(kind, old), *(LayerSpec(nn.Linear, 6, 6) for _ in range(3))]

        engine = pipeline(layers(True))
        saved(engine, path)
        copy_layers(path)
        had = _has(engine.module.forward_funcs[0])
        for old in (True, False):
            for strict in (True, False):
                engine = pipeline(layers(old))
                said = refusal(lambda: engine.load_checkpoint(path, load_module_strict=strict))  # noqa: B023
                results[f"{name} {old} {strict}"] = from_all([said, _has(engine.module.forward_funcs[0]), had])
    return results


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_takes_of_its_file_what_its_own_load_takes(two_ranks_at_length, name, old, strict):
    found = two_ranks_at_length.of(layers_of_universal)[f"{name} {old} {strict}"]
    assert [said for said, _, _ in found] == ["nothing was raised"] * 2
    _, has, had = found[0]  # the first stage has it
    if name in ("dropped", "loose") and not old:
        had = [{}, None]
    if name == "renamed" and not old:
        had = [{"average": had[0]["mean"]}, None]
    assert has == had
