"""Universal checkpoints of parameter groups that end before the last rank's part of them begins."""

import pytest
import torch

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_universal_off_the_cpu import _losses

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
CASES = {
    f"{stage} {precision} {'torch' if torch_adam else 'DeepSpeed'}": (stage, precision, torch_adam)
    for stage, precision in ((1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"))
    for torch_adam in (True, False)
}


def _engine(stage, precision, torch_adam, *, universal):
    """A layer, and another whose one bias is a parameter group of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    *others, bias = model.parameters()
    groups = [{"params": [bias], "weight_decay": 0.0}, {"params": others}]
    keys = config(stage, precision, 2) | {"checkpoint": {"load_universal": universal}}
    keys["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": torch_adam}}
    return ds_parity.initialize(model=model, model_parameters=groups, config=keys)[0]


def _goes_on(path, *case):
    saved = _engine(*case, universal=False)
    _losses(saved, range(3))
    saved.save_checkpoint(path)
    said = converted(path, 3)
    assert said in (None, "nothing was raised"), said
    due, loaded = _losses(saved, range(3, 7)), _engine(*case, universal=True)
    loaded.load_checkpoint(path)
    return [due, _losses(loaded, range(3, 7))]


@at_length_on_two_ranks
def universal_of_small_groups(folder):
    return {name: from_all(_goes_on(f"{folder}/{name}", *case)) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_bit_for_bit(two_ranks_at_length, name):
    for due, found in two_ranks_at_length.of(universal_of_small_groups)[name]:
        assert found == due
        assert len(set(due)) == 4
