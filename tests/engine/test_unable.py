"""Engines that an older release can't step on a CPU as they were asked to: refused once they are built."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.releases import release
from ds_parity.engine.internals import installed
from ds_parity.engine.internals.unable import refuse_unable
from ds_parity.errors import ConfigError


def adam(*decays, mode):
    """DeepSpeed's Adam as its configuration makes it; no kernel is compiled."""
    made = FusedAdam.__new__(FusedAdam)
    made.adam_w_mode = mode
    made.param_groups = [{"weight_decay": decay} for decay in decays]
    return made


def built(optimizer, wrapper=None, experts=False):
    """An engine as far as it is asked for its optimizers and layers."""
    made = SimpleNamespace(basic_optimizer=optimizer, optimizer=wrapper or optimizer, has_moe_layers=experts)
    made.zero_optimization_stage = lambda: 1
    return made


@pytest.fixture
def on(monkeypatch):
    """Lets another release, on another accelerator, be the one that is there."""

    def put(version, accelerator="cpu"):
        monkeypatch.setattr(installed, "installed", lambda: release(version))
        there = SimpleNamespace(device_name=lambda: accelerator)
        monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: there)

    return put


@pytest.mark.parametrize("decays", [(0.1,), (0.0, 0.1)])
def test_a_decay_that_is_decoupled_against_the_configuration_is_refused(on, decays):
    on("0.19.5")
    with pytest.raises(
        ConfigError, match=r"adam_w_mode = false with weight_decay = 0.1: DeepSpeed 0.19.5 .*torch_adam"
    ):
        refuse_unable(built(adam(*decays, mode=0)))


@pytest.mark.parametrize(
    ("version", "accelerator", "optimizer"),
    [
        ("0.19.6", "cpu", adam(0.1, mode=0)),
        ("0.19.5", "cuda", adam(0.1, mode=0)),
        ("0.19.5", "cpu", adam(0.1, mode=1)),
        ("0.19.5", "cpu", adam(0.0, mode=0)),
        ("0.19.5", "cpu", torch.optim.Adam([torch.zeros(1)], weight_decay=0.1)),
    ],
    ids=["a later release", "a GPU", "a decoupled decay", "no decay", "torch's"],
)
def test_what_steps_as_it_was_asked_to_is_taken(on, version, accelerator, optimizer):
    on(version, accelerator)
    refuse_unable(built(optimizer))


@pytest.mark.parametrize(
    ("version", "experts", "refused"), [("0.19.0", True, 1), ("0.19.0", False, 0), ("0.19.2", True, 0)]
)
def test_experts_whose_norm_raises_are_refused(on, version, experts, refused):
    on(version)
    engine = built(None, BF16_Optimizer.__new__(BF16_Optimizer), experts)
    with pytest.raises(ConfigError, match=r'grad_accum_dtype = "fp32" with DeepSpeed') if refused else nullcontext():
        refuse_unable(engine)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_an_optimizer_of_matrices_that_a_function_has_made_is_refused():
    muon = torch.optim.Muon(torch.nn.Linear(2, 2, bias=False).parameters())
    with pytest.raises(ConfigError, match="the optimizer is torch's Muon"):
        refuse_unable(built(muon))


def test_an_adagrad_in_whose_place_another_one_is_stepped_is_refused():
    given, other = (torch.optim.Adagrad([torch.zeros(1)]) for _ in range(2))
    refuse_unable(built(given))
    refuse_unable(built(given, SimpleNamespace(optimizer=given)))
    with pytest.raises(ConfigError, match="on stage 1 the installed DeepSpeed builds another one"):
        refuse_unable(built(given, SimpleNamespace(optimizer=other)))


F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("first", "trained", "refused"),
    [
        (F32, [F32], ""), (B16, [B16], ""), (F32, [B16], ""), (F32, [B16, F32], ""), (F64, [F32], ""),
        (B16, [F32], "first parameter .* is bfloat16, while trained ones are float32"),
        (F16, [F32], "is float16, while"), (F32, [F32, F64], "is float32, while trained ones are float64"),
        (F16, [B16], "is float16, while trained ones are bfloat16"),
    ],
)  # fmt: skip
def test_a_first_parameter_narrower_than_trained_ones_is_refused(first, trained, refused):
    wrapper = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    wrapper.dtype = first
    wrapper.bit16_groups = [[torch.zeros(1, dtype=one)] for one in trained]
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        refuse_unable(built(torch.optim.SGD([torch.zeros(1)]), wrapper))
