"""`ds-parity init` writes a configuration and a script that run as they stand, and never writes over anything."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_parity.cli.entry import app
from ds_parity.cli.init_command import StartingPrecision
from ds_parity.config import load_config, parse, rewrite
from ds_parity.config.starting import PRECISIONS, starting
from ds_parity.errors import ConfigError
from tests.commands import ds_parity, started

ROOT = Path(__file__).parent.parent
STAGES = (0, 1, 2, 3)


class TestFiles:
    def test_are_a_configuration_and_a_script_in_the_folder_and_the_next_commands_are_named(self, tmp_path):
        ran = started("init", "mine/first", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        folder = tmp_path / "mine" / "first"
        assert sorted(path.name for path in folder.iterdir()) == ["ds_config.json", "train.py"]
        assert "deepspeed --num_accelerators 2 train.py" in ran.stdout
        assert "ds-parity verify ds_config.json" in ran.stdout

    def test_are_in_the_current_folder_where_none_is_given(self, tmp_path):
        assert ds_parity("init", cwd=tmp_path).returncode == 0
        assert (tmp_path / "train.py").exists()

    def test_have_the_stage_the_precision_and_the_target_that_were_asked_for(self, tmp_path):
        options = ["--stage", 3, "--precision", "fp16", "--target", 48]
        assert ds_parity("init", *options, cwd=tmp_path).returncode == 0
        written = json.loads((tmp_path / "ds_config.json").read_text())
        assert (written["zero_optimization"]["stage"], written["fp16"]["enabled"]) == (3, True)
        assert written["gradient_accumulation_passes"] == 48
        assert load_config(str(tmp_path / "ds_config.json")) == starting(3, "fp16", 48)

    @pytest.mark.parametrize("name", ["ds_config.json", "train.py"])
    def test_that_are_there_already_are_left_and_nothing_else_is_written(self, tmp_path, name):
        (tmp_path / name).write_text("keep me")
        ran = ds_parity("init", cwd=tmp_path)
        assert ran.returncode == 2
        assert f"{name} is there already" in " ".join(ran.stderr.split())
        assert "give another folder" in " ".join(ran.stderr.split())
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "keep me")]

    def test_are_written_whole_or_not_at_all(self, tmp_path, monkeypatch):
        """A disk that fills up leaves no half of a file, for which the next start would give up."""
        opened = Path.open

        def full(path, *given, **named):
            if path.name == "train.py":
                raise OSError(28, "No space left on device")
            return opened(path, *given, **named)

        monkeypatch.setattr(Path, "open", full)
        result = CliRunner().invoke(app, ["init", str(tmp_path / "run")])
        assert isinstance(result.exception, ConfigError)
        assert not any((tmp_path / "run").iterdir())

    def test_of_a_name_that_no_file_can_have_are_refused(self, tmp_path):
        ran = ds_parity("init", "long" * 80, cwd=tmp_path)
        assert ran.returncode == 2
        assert "can't be written" in ran.stderr
        assert "Traceback" not in ran.stderr

    def test_cannot_be_written_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("keep me")
        for folder in ("file", "file/deeper"):
            ran = ds_parity("init", folder, cwd=tmp_path)
            assert ran.returncode == 2
            assert "can't be written" in " ".join(ran.stderr.split())
            assert "Traceback" not in ran.stderr

    @pytest.mark.parametrize("options", [("--stage", 4), ("--precision", "fp8"), ("--target", 0)])
    def test_of_what_there_is_not_are_refused(self, tmp_path, options):
        ran = ds_parity("init", *options, cwd=tmp_path)
        assert ran.returncode == 2
        assert options[0] in ran.stderr
        assert list(tmp_path.iterdir()) == []

    def test_are_written_without_torch(self, tmp_path):
        code = "import sys; sys.argv = ['ds-parity', 'init']\nfrom ds_parity.cli.entry import app\n"
        code += "app(standalone_mode=False)\nassert not {'torch', 'deepspeed'} & set(sys.modules)"
        run = [sys.executable, "-c", code]
        subprocess.run(run, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)


@pytest.mark.parametrize(("stage", "precision"), product(STAGES, PRECISIONS))
def test_every_configuration_is_one_that_ds_parity_takes(stage, precision):
    config = starting(stage, precision, 12)
    assert parse(config).gradient_accumulation_passes == 12
    for ranks in (1, 2, 4, 8):
        assert rewrite(config, ranks).config["zero_optimization"]["stage"] == stage


def test_the_command_knows_every_precision():
    assert tuple(StartingPrecision) == PRECISIONS


def test_the_script_is_one_that_a_linter_and_a_formatter_leave_as_it_is(tmp_path):
    assert ds_parity("init", cwd=tmp_path).returncode == 0
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--config", str(ROOT / "pyproject.toml")]
    subprocess.run([*ruff, "check", *rules, str(tmp_path / "train.py")], check=True, timeout=60)
    subprocess.run([*ruff, "format", "--check", *rules, str(tmp_path / "train.py")], check=True, timeout=60)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_it_writes_trains_on_two_ranks_and_is_verified(tmp_path):
    """As a user goes on from there."""
    assert ds_parity("init", "--target", 8, cwd=tmp_path).returncode == 0
    launcher = Path(sys.executable).parent / "deepspeed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    trained = subprocess.run(
        [sys.executable, str(launcher), "--num_accelerators", "2", "train.py"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    said = trained.stdout + trained.stderr
    assert trained.returncode == 0, said
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(steps) == 8
    assert all(", 8 rollouts, " in step for step in steps)
    verified = started("verify", "ds_config.json", "--windows", 2, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "PASS: every step is equal" in verified.stdout
