"""The code of the page on frameworks runs as it stands there, on two ranks."""

import contextlib
import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from tests.frameworks.small import fresh_state, model, on_two_ranks, recorded, sentences
from tests.pages import blocks

pytestmark = [pytest.mark.hf, pytest.mark.ranks]

PAGE = "frameworks"


@contextlib.contextmanager
def inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def page():
    """Its blocks, one after the other."""
    from accelerate import Accelerator, DeepSpeedPlugin

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        Path("ds_config.json").write_text(blocks(PAGE, "json")[0])
        passes = json.loads(blocks(PAGE, "json")[0])["gradient_accumulation_passes"]
        engines, windows = [], []
        trainer_block, normalised_block, accelerate_block, own_block = blocks(PAGE, "python")
        # These two must know of a machine without a GPU; everything else is the page's.
        host = {
            "use_cpu": get_accelerator().device_name() == "cpu",
            "accelerator_config": {"use_configured_state": True},
        }
        names = {
            "Trainer": recorded(transformers.Trainer),
            "TrainingArguments": functools.partial(
                transformers.TrainingArguments, report_to=[], save_strategy="no", **host
            ),
            "Accelerator": Accelerator,
            "DeepSpeedPlugin": DeepSpeedPlugin,
            "data": sentences(4 * passes),
        }
        for block in (trainer_block, normalised_block, accelerate_block + own_block):
            fresh_state()
            net = model()
            own = {
                "model": net,
                "optimizer": torch.optim.AdamW(net.parameters()),
                "loader": torch.utils.data.DataLoader(names["data"], batch_size=2),
                "stream": stream(passes // 2),
            }
            own["scheduler"] = torch.optim.lr_scheduler.ConstantLR(own["optimizer"])
            space = {**names, **own}
            exec(compile(block, PAGE, "exec"), space)
            engine = space["trainer"].model_wrapped if "trainer" in space else space["model"]
            engines.append(type(engine).__name__)
            windows.append([engine.window.index, engine.window.target])
            if "installation" in space:
                space["installation"].uninstall()
        return {"engines": engines, "windows": windows}


class Batch:
    """A micro-batch of one rank, of as many rollouts as it says."""

    def __init__(self, rollouts):
        self.rollouts, self.prompts, self.tokens = rollouts, 0, 12 * rollouts
        rows = sentences(max(1, rollouts))
        self.inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def stream(passes):
    return [Batch(1 + (number + dist.get_rank()) % 3) for number in range(passes)]


on_two_ranks.call(page)


def test_its_code_trains(framework_ranks):
    ran = framework_ranks.of(page)
    assert ran["engines"] == ["FrameworkEngine"] * 3
    (trained, target), (normalised, alike), (looped, same) = ran["windows"]
    assert target == same == alike
    assert trained == normalised >= 1
    assert looped >= 2
