"""The plugin in a project of its own: a test that passes, one that fails with its reasons, and goldens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]

TESTS = str(Path(__file__).parent)
# Where DeepSpeed's operators lie: pytester gives the project another home, and they would be compiled anew.
DEVICE = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
COMPILED = Path.home() / ".cache" / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_{DEVICE}"
CONFIG = """{
  "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 4, "gradient_clipping": 1.0,
  "optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "zero_allow_untested_optimizer": true,
  "zero_optimization": {"stage": 1}, "ds_parity": {"loss_weight": "token"}
}"""
OPTIONS = 'model="ds_parity.parity.data.model:build_tiny", windows=3, max_tokens=64'


def git(folder, *arguments):
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(pytester, monkeypatch):
    """A committed project with a configuration; returns a function that runs a test body in it.

    In this process, which has torch loaded, where no `start` asks for one of its own.
    """
    (pytester.path / "ds_config.json").write_text(CONFIG)
    git(pytester.path, "init", "-q")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR") or str(COMPILED))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))

    def run(body, *arguments, start=False):
        pytester.makepyfile(test_it=f"def test_parity(ds_parity_verify):\n    {body}\n")
        git(pytester.path, "add", "test_it.py", "ds_config.json")
        git(pytester.path, "commit", "-qm", "x", "--allow-empty")
        runs = pytester.runpytest_subprocess if start else pytester.runpytest_inprocess
        return runs("-p", "no:cacheprovider", *arguments)

    return run


def test_a_missing_configuration_is_told_without_ranks(project):
    """The plugin is found by pytest alone, as in any environment in which ds_parity is installed."""
    result = project('ds_parity_verify("nowhere.json")', start=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nowhere.json*"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('model="hf:small.json"', "model hf:{}/small.json: there is"),
        ('tokenizer="own"', "tokenizer '{}/own': there is"),
    ],
)
def test_files_are_looked_for_beside_the_test(project, pytester, given, told):
    result = project(f'ds_parity_verify("ds_config.json", {given})')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{told.format(pytester.path)} no such file*"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("windos=2", "E *ConfigError: ds_parity_verify() has no argument 'windos'; did you mean windows?"),
        ("colour=2", "E *ConfigError: ds_parity_verify() has no argument 'colour'; choose from against, bare, *"),
        ('name="own"', "E *ConfigError: ds_parity_verify() has no argument 'name'; choose from against, bare, *"),
        ("bare=True, model=None, windows=0", "E *ConfigError: *windows*"),
        ('bare=True, against="deepspeed"', "E *ConfigError: bare DeepSpeed is judged against torch alone: *"),
        ('against="torhc"', "E *ConfigError: --against is 'torhc': it must be one of *"),
        ("windows=0", "E *ConfigError: *"),
    ],
)
def test_a_wrong_argument_is_one_sentence(project, given, told):
    result = project(f'ds_parity_verify("ds_config.json", {given})')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([told])
    assert "Traceback" not in result.stdout.str()
    assert "ds_parity_verify(" in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str()


def test_a_golden_is_written_from_a_clean_tree_only(project, pytester):
    project("pass")
    (pytester.path / "ds_config.json").write_text(CONFIG + "\n")
    pytester.makepyfile(
        test_it='def test_parity(ds_parity_verify):\n    ds_parity_verify("ds_config.json", golden="g")\n'
    )
    dirty = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--ds-parity-update")
    dirty.assert_outcomes(failed=1)
    dirty.stdout.fnmatch_lines(["*the tree has changes (*ds_config.json*"])


@pytest.mark.parametrize("golden", ["golden é.jsonl", "two words.jsonl", 'a "quoted".jsonl', "new\nline.jsonl"])
@pytest.mark.parametrize("other", [False, True])
def test_a_golden_whose_name_git_quotes_may_have_changed(project, pytester, golden, other):
    """And another file whose name is quoted may not. Ranks are not started: the configuration is none."""
    written = pytester.path / golden
    for path in (written, pytester.path / "é other", pytester.path / "moved"):
        path.write_text("a\n" * 9)
    (pytester.path / "ds_config.json").write_text("{}")
    git(pytester.path, "add", ".")
    project(f'ds_parity_verify("nowhere.json", golden={golden!r})')
    written.write_text("b\n")
    if other:
        git(pytester.path, "mv", "moved", "renamed")
        (pytester.path / "é other").write_text("b\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--ds-parity-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*the tree has changes (renamed, é other)*" if other else "*nowhere.json*no such file*"]
    )


def test_a_golden_that_is_not_there_is_told_without_ranks(project):
    result = project('ds_parity_verify("ds_config.json", golden="golden.jsonl")')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*golden.jsonl: there is no such trace yet*--ds-parity-update*"])


@pytest.mark.ranks
@pytest.mark.slow
class TestWithRanks:
    def test_a_users_own_loop_runs_in_both_engines_and_its_golden_is_held(self, project, pytester):
        """Bit for bit against the engine driven by hand. Each call of the fixture starts ranks, so there are few."""
        call = f'ds_parity_verify("ds_config.json", {OPTIONS}, train="training:nll", golden="golden.jsonl")'
        project(call, "--ds-parity-update", start=True).assert_outcomes(passed=1)
        golden = (pytester.path / "golden.jsonl").read_text()
        assert git(pytester.path, "rev-parse", "HEAD").strip() in golden
        (pytester.path / "golden.jsonl").write_text(golden.replace('"grad_norm":', '"grad_norm":1'))
        held = project(call, start=True)
        held.assert_outcomes(failed=1)
        held.stdout.fnmatch_lines(["*grad_norm*", "*was written at commit*"])

    def test_a_training_function_that_differs_fails_with_the_table_and_the_cause(self, project):
        result = project(f'ds_parity_verify("ds_config.json", {OPTIONS}, train="training:halved")', start=True)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["*ragged against deepspeed-loop*", "*grad norm*", "*DIFFERS*", "*likely cause*", "*remedy*"]
        )
