"""The README's Python on ranks, one block after the other as a reader would run them; asserted in test_readme_blocks.py."""

import json
import re
from contextlib import chdir
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.parity.losses import PolicyGradient
from ds_parity.parity.model import build_tiny
from ds_parity.parity.rollouts import load_rollouts, shorten

TASKS = ["readme"]
README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(json|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(heading, kind):
    """Return the blocks of a kind under a heading of the README."""
    section = re.search(rf"^## {re.escape(heading)}.*?\n(.*?)(?=^##|\Z)", README.read_text(), re.DOTALL | re.MULTILINE)
    return [text for found, text in BLOCK.findall(section[1]) if found == kind]


def readme(folder):
    """The trainer's two loops and the planned one; how many steps each took, and of how many rollouts."""
    rollouts = shorten(load_rollouts()[:320], 96)
    planned = ds_parity.plan(rollouts[:160], dp_world_size=dist.get_world_size(), target=64, max_tokens=512)
    device = get_accelerator().current_device_name()

    def stream():
        return [ds_parity.to_device(one, device) for one in ds_parity.micro_batches(planned, dist.get_rank())]

    place = Path(folder) / f"rank{dist.get_rank()}"
    place.mkdir(parents=True)
    config = json.loads(blocks("In your trainer", "json")[0])
    config["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
    (place / "ds_config.json").write_text(json.dumps(config))
    names = {"model": PolicyGradient(build_tiny(0)), "rollouts": rollouts, "rank": dist.get_rank()}
    counted = []
    with chdir(place):
        for text in [*blocks("In your trainer", "python"), *blocks("Planning", "python")]:
            names["stream"] = stream()
            exec(compile(text, "README.md", "exec"), names)
            engine = names["engine"]
            counted.append((engine.global_steps, engine.global_samples))
    return {"steps": counted}
