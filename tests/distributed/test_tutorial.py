"""The tutorial's files run as they stand there, in a folder of their own, and print what the tutorial says."""

import importlib
import io
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from ds_parity.cli.entry import app
from tests.beside import Errand, begun_with_the_session
from tests.distributed.sets import on_two_ranks
from tests.pages import blocks, text, titled

pytestmark = pytest.mark.ranks

FILES = titled("tutorial")
SCRIPTS = ("plain.py", "train.py", "uneven.py")
RUN = "from ds_parity.cli import main; main()"


def save(folder):
    folder.mkdir(parents=True)
    for name, code in FILES.items():
        (folder / name).write_text(code)


@on_two_ranks
def tutorial(folder):
    """What each script prints on the first rank; all ranks share a folder, as on one machine."""
    folder = Path(folder)
    if dist.get_rank() == 0:
        save(folder)
    dist.barrier()
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            return {script: _printed(script) for script in SCRIPTS}
    finally:
        sys.path.remove(str(folder))
        for module in ("data", "loop"):
            sys.modules.pop(module, None)


def _printed(script):
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    dist.barrier()
    if script == "train.py" and dist.get_rank() == 0:  # the next script writes a trace of the same name
        shutil.copy("run.jsonl", "reference.jsonl")
    return [line for line in printed.getvalue().splitlines() if "step" in line and "[" not in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_what_the_page_shows(two_ranks, script):
    shown = re.search(
        rf"    deepspeed --num_accelerators 2 {script}\n.*?```text\n(.*?)```", text("tutorial"), re.DOTALL
    )
    printed = two_ranks.of(tutorial)[script]
    words, numbers = re.compile(r"-?\d+\.?\d*"), re.compile(r"-?\d+(?:\.\d+)?")
    assert words.sub("", shown[1]).splitlines() == words.sub("", "\n".join(printed)).splitlines()
    assert [*map(float, numbers.findall(shown[1]))] == pytest.approx(
        [*map(float, numbers.findall("\n".join(printed)))], abs=0.002
    )


def test_losses_agree_and_gradient_norms_do_not(two_ranks):
    plain, right = (two_ranks.of(tutorial)[script] for script in SCRIPTS[:2])
    assert len(plain) == len(right) == 6
    losses, norms = (
        [[float(re.search(rf"{what} (-?[0-9.]+)", line)[1]) for line in lines] for lines in (plain, right)]
        for what in ("loss", "norm")
    )
    assert losses[0][0] == losses[1][0]
    assert all(one != other for one, other in zip(*norms, strict=True))


def test_compare_says_of_the_cause_what_the_page_shows(two_ranks):
    folder = two_ranks.folder_of(tutorial)
    result = CliRunner().invoke(app, ["compare", str(folder / "reference.jsonl"), str(folder / "plain.jsonl")])
    assert result.exit_code == 1
    (shown,) = blocks("tutorial", "text", under="4. Find the cause")
    # Lines are broken where the page ends.
    printed = " ".join(result.stdout.split())
    assert " ".join(shown.split()) in printed, printed
    assert "mean-of-micro-batches" in shown


def verified(folder):
    """How each command of the page that trains or probes ends, and what it says."""
    save(folder)
    commands = re.findall(r"^    ds-parity ((?:verify|probe) .*)$", text("tutorial"), re.MULTILINE)
    return {command: _ran(command, folder) for command in commands}


def _ran(command, folder):
    started = [sys.executable, "-c", RUN, *command.split()]
    ran = subprocess.run(started, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    return ran.returncode, ran.stdout[-2000:] + ran.stderr[-2000:]


@begun_with_the_session("verified_tutorial")
def verifying(folder, _):
    return Errand("tests.distributed.test_tutorial:verified", (folder / "tutorial",))


@pytest.fixture(scope="session")
def verified_tutorial(begun):
    return begun.result("verified_tutorial")


@pytest.mark.slow
def test_the_loop_is_verified_as_the_page_says(verified_tutorial):
    assert {command.split()[0] for command in verified_tutorial} == {"verify", "probe"}
    for command, (code, said) in verified_tutorial.items():
        assert code == 0, f"{command}: {said}"
