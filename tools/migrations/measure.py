"""Run the migrations, and keep what they came to: NAME/found.json, of which the pages' tables are made.

    deepspeed --num_accelerators 2 tools/migrations/measure.py            # all of them
    deepspeed --num_accelerators 2 tools/migrations/measure.py openrlhf

`make migrations` does both, and then `make pages`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tools.migrations.common import Found, launched  # noqa: E402  the path must be set before

NAMES = ("openrlhf", "open_instruct", "fast_llm", "skyrl", "open_instruct_dpo", "onevision")
BY_COUNTS = ("roll",)
"""Their pages' tables follow from counts alone: their loops are run by tests, and nothing of them is kept."""
WITH_TRL = ("trl_grpo", "trainer")
"""They take the extra hf."""
_DIGITS = 6


def measured(name: str, folder: Path) -> Found:
    """Return what a migration comes to, its numbers rounded to six digits; called on every rank.

    Args:
        name: of the migration.
        folder: for its traces, the same on every rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: Found = _rounded(importlib.import_module(f"tools.migrations.{name}.scenes").found(folder))
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        # A coefficient of 1e-9 is a 0 that was measured.
        return 0.0 if abs(value) < 10**-_DIGITS else float(f"{value:.{_DIGITS}g}")
    return value


def _lines(found: Found) -> str:
    """Return JSON with a line for each run, so that a change of one is a change of its line."""
    parts = []
    for name, value in found.items():
        runs = value if isinstance(value, dict) else {}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in runs.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}" if runs else f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Run those that are named, and write their files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = NAMES + (WITH_TRL if importlib.util.find_spec("trl") else ())
    parser.add_argument("names", nargs="*", default=every, help="of the migrations (all, where TRL is installed)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher's
    given = parser.parse_args()
    deepspeed.init_distributed()
    for name in given.names:
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        found = measured(name, Path(folder[0]))
        if dist.get_rank() == 0:
            (HERE / name / "found.json").write_text(_lines(found))
            print(f"{name}: {HERE / name / 'found.json'}")


if __name__ == "__main__":
    sys.exit(launched(main))
