"""A checkpoint of an optimizer whose states lie on NVMe: DeepSpeed does not load it, so that it is refused."""

from pathlib import Path

import pytest

from ds_parity.parity.matrix.needed import LIBAIO, lacking
from tests.distributed.cells import config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}


def _engine(device, folder):
    offload = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    extended = {**config(3, passes=2), **ADAM}
    del extended["scheduler"]
    extended["zero_optimization"]["offload_optimizer"] = offload
    engine = build(extended)
    one_pass(engine, 0)
    return engine


def _said(engine, folder, tag):
    calls = {
        "save": lambda: engine.save_checkpoint(folder, tag=tag),
        "load": lambda: engine.load_checkpoint(folder, tag="of the CPU"),
        "no checkpoint": lambda: engine.load_checkpoint(f"{folder}/nothing"),
    }
    said = {name: from_all(refusal(call)) for name, call in calls.items()}
    return {**said, "written": Path(folder, tag).exists()}


@on_two_ranks
def swapped_states(folder):
    """What is said where DeepSpeed says that states are swapped, and, with libaio, where they are."""
    engine = _engine("cpu", folder)
    engine.save_checkpoint(folder, tag="of the CPU")
    engine.__wrapped__.optimizer.swap_optimizer = True
    results = {"said": _said(engine, folder, "said")}
    engine.__wrapped__.optimizer.swap_optimizer = False
    engine.destroy()
    if not lacking([LIBAIO]):
        engine = _engine("nvme", f"{folder}/swapped")
        results["swapped"] = _said(engine, folder, "of NVMe")
        engine.destroy()
    return results


@pytest.mark.parametrize("kind", ["said", "swapped"])
def test_neither_a_save_nor_a_load_of_swapped_states_is_taken_for_right(two_ranks, kind):
    if kind == "swapped" and (why := lacking([LIBAIO])):
        pytest.skip(why)
    found = two_ranks.of(swapped_states)[kind]
    for name in ("save", "load"):
        for said in found[name]:
            assert said.startswith(f"CheckpointError: {name}_checkpoint(")
            assert "with the optimizer's states on NVMe" in said
    assert found["no checkpoint"] == ["nothing was raised"] * 2
    assert not found["written"]
