"""No tensor of the package lies where `torch.set_default_device` says: GPU users set it, and ranks talk on the host."""

import ast
import inspect
import textwrap
from pathlib import Path

import torch
from torch.utils import _device

import ds_parity
from ds_parity import MicroBatch, Rollout, collate

PACKAGE = Path(ds_parity.__file__).parent
# Functions whose tensors lie on the default device where no device is given, as torch itself lists them.
MAKERS = {function.__name__ for function in _device._device_constructors()}
# Calls without a device, each with the reason; none so far.
EXCUSED = {}


def without_device(text):
    """Yield the line and text of each call of torch that leaves the device to the default."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            made_by_torch = ast.unparse(node.func).startswith("torch.")
            if made_by_torch and "device" not in {keyword.arg for keyword in node.keywords}:
                yield node.lineno, ast.unparse(node)


def test_every_tensor_is_made_on_a_device_that_is_named():
    found = {
        (str(path.relative_to(PACKAGE)), call): line
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, call in without_device(path.read_text())
    }
    assert found.keys() == EXCUSED.keys(), found


def test_a_call_without_a_device_would_be_noticed():
    def seeded():
        torch.zeros(3, device="cpu")
        torch.zeros_like(torch.arange(3), dtype=torch.float32)
        torch.stack([torch.full((), 1.0), torch.tensor([1], dtype=torch.float64)])

    calls = sorted(call for _, call in without_device(textwrap.dedent(inspect.getsource(seeded))))
    assert calls == ["torch.arange(3)", "torch.full((), 1.0)", "torch.tensor([1], dtype=torch.float64)"]


def test_collated_tensors_are_on_the_host_whatever_the_default_device():
    rollouts = [Rollout("a", (1, 2, 3), 1, 1.0, 0.5), Rollout("b", (4, 5), 1, 0.0, -0.5)]
    for layout in ("packed", "padded"):
        right = collate(rollouts, layout=layout)
        torch.set_default_device("meta")
        try:
            made = collate(rollouts, layout=layout)
        finally:
            torch.set_default_device(None)
        assert isinstance(made, MicroBatch)
        assert made.inputs.keys() == right.inputs.keys()
        assert all(torch.equal(made.inputs[name], right.inputs[name]) for name in right.inputs)
