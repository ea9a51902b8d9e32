"""The oldest DeepSpeed that is supported: rows of the matrix that it gets wrong by itself, and that most people run.

Its package is installed beside the environment, without what it depends on, so that torch stays the one that is there;
package and operators are kept in the user's cache. `make test-versions` runs all rows, each release in an environment
of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.config.versions import OLDEST

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ds_parity"
ROWS = ("precision: bf16", "offload_optimizer, fp32")


@pytest.fixture(scope="module")
def older():
    """The environment variables of a process that imports the oldest DeepSpeed."""
    package = CACHE / "deepspeed" / str(OLDEST)
    if not (package / "deepspeed").is_dir():
        wanted = ["--target", str(package), "--no-deps", f"deepspeed=={OLDEST}"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
        if made.returncode:
            pytest.skip(f"deepspeed=={OLDEST} can't be installed here: {made.stderr.strip().splitlines()[-1:]}")
    paths = [str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    operators = os.environ.get("DS_PARITY_OLDER_OPERATORS", str(CACHE / "operators" / str(OLDEST)))
    # The launcher and ninja lie beside the interpreter.
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_EXTENSIONS_DIR": operators, "PATH": found}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_oldest_release_is_right_or_corrected_on_what_most_people_run(older, tmp_path):
    command = [sys.executable, "-m", "tools.versions.measure", "--matrix", *ROWS, "--into", str(tmp_path)]
    ran = subprocess.run(command, env=older, capture_output=True, text=True, timeout=850, check=False, cwd=ROOT)
    results = tmp_path / f"{OLDEST}.json"
    assert results.exists(), ran.stdout[-2000:] + ran.stderr[-2000:]
    cells = json.loads(results.read_text())["cells"]
    statuses = {(cell["name"], cell["stage"]): cell["status"] for cell in cells}
    wrong = [cell for cell in cells if cell["status"] not in ("right", "corrected", "refused")]
    assert not wrong, "\n".join(
        f"{cell['group']}: {cell['name']} on ZeRO {cell['stage']}: {cell['why']}" for cell in wrong
    )
    assert ran.returncode == 0
    assert statuses["bf16", 2] == "right"
    assert statuses["bf16", 3] in ("right", "corrected")  # bare DeepSpeed may read weights too early on a CPU
    for corrected in (("bf16", 0), ("bf16, fp32 accumulation", 1), ("offload_optimizer, fp32", 2)):
        assert statuses[corrected] == "corrected"
