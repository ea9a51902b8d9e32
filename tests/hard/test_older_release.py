"""The oldest DeepSpeed that is supported: rows of the matrix that it gets wrong by itself, and that most people run.

Its package is installed beside the environment, without what it depends on, so that torch stays the one that is there;
package and operators are kept in the user's cache. `make test-versions` runs all rows, each release in an environment
of its own, and CI the quick ones of this release: so this is not for every day.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.config.versions import OLDEST
from tests.beside import Errand, begun_with_the_session

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ds_parity"
ROWS = ("precision: bf16", "offload_optimizer, fp32")


def environment():
    """The environment variables of a process that imports the oldest DeepSpeed; or why it can't be installed."""
    package = CACHE / "deepspeed" / str(OLDEST)
    if not (package / "deepspeed").is_dir():
        # Under another name until it is whole: this process may be ended at any time.
        making = package.with_name(f"{OLDEST}.{os.getpid()}")
        wanted = ["--target", str(making), "--no-deps", f"deepspeed=={OLDEST}"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
        if made.returncode:
            return f"deepspeed=={OLDEST} can't be installed here: {made.stderr.strip().splitlines()[-1:]}"
        making.rename(package)
    paths = [str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    operators = os.environ.get("DS_PARITY_OLDER_OPERATORS", str(CACHE / "operators" / str(OLDEST)))
    # The launcher and ninja lie beside the interpreter.
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_EXTENSIONS_DIR": operators, "PATH": found}


def measured(folder):
    """The command that measures the rows, run in a process of its own; or why it can't be."""
    older = environment()
    if isinstance(older, str):
        return older
    command = [sys.executable, "-m", "tools.versions.measure", "--matrix", *ROWS, "--into", str(folder)]
    return subprocess.run(command, env=older, capture_output=True, text=True, timeout=850, check=False, cwd=ROOT)


@begun_with_the_session("oldest_release")
def oldest(folder, _):
    """Beside the other tests: it takes as long as many of them."""
    return Errand("tests.hard.test_older_release:measured", (folder,))


@pytest.fixture(scope="session")
def oldest_release(begun):
    """What the command ended in, and the folder of its results."""
    ran = begun.result("oldest_release")
    if isinstance(ran, str):
        pytest.skip(ran)
    return ran, begun.folder_of("oldest_release")


@pytest.mark.timeout(1200)
def test_the_oldest_release_is_right_or_corrected_on_what_most_people_run(oldest_release):
    ran, folder = oldest_release
    results = folder / f"{OLDEST}.json"
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
