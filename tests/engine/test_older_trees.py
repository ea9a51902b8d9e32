"""Guards on the source of older releases, where they are at hand: they find nothing, so that nothing is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.config.features import Wanted
from ds_parity.config.versions import MEASURED
from ds_parity.engine.internals import unread
from ds_parity.engine.internals.guard_list import Changed
from ds_parity.engine.internals.guards import CLASSES, ENGINE, INIT

ROOT = Path(__file__).parents[2]
VERSIONS = Path(os.environ.get("DS_PARITY_VERSIONS", ROOT / "versions"))
SAY = """
from ds_parity.engine.internals.guard_list import changed
print("found:", [one.says for one in changed()])
"""


@pytest.mark.parametrize("version", map(str, MEASURED[:-1]))
def test_guards_find_nothing_in_a_release_that_was_read(version):
    package = VERSIONS / version
    if not (package / "deepspeed").is_dir():
        pytest.skip(f"no deepspeed {version} in {VERSIONS}; name the folder of such folders in DS_PARITY_VERSIONS")
    environment = {**os.environ, "PYTHONPATH": f"{package.resolve()}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", SAY]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200, cwd=ROOT)
    assert "found: []" in said.stdout


@pytest.mark.parametrize(
    ("owner", "used_in", "stages"),
    [
        (CLASSES["Swapper"][0], "internals/older_zero3.py", {3}),
        (INIT, "internals/older.py", {3}),
        (ENGINE, "internals/older_zero12.py", {1, 2}),
        (ENGINE, "internals/older_zero3.py", {3}),
        (ENGINE, "internals/older.py", set()),
    ],
)
def test_a_change_that_a_supplement_relies_on_touches_its_stages_alone(owner, used_in, stages):
    change = Changed("", owner, used_in)
    asked = {stage: Wanted({"zero_optimization": {"stage": stage}}) for stage in range(4)}
    assert {stage for stage in asked if unread.touches(change, asked[stage])} == stages


def test_a_change_of_the_engine_touches_the_wrappers_that_a_supplement_puts_right():
    change = Changed("", ENGINE, "internals/older.py")
    bf16 = {"bf16": {"enabled": True}}
    summed = {**bf16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert unread.touches(change, Wanted(bf16))
    assert unread.touches(change, Wanted(summed))
