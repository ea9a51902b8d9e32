"""A pytest plugin: parity as a test of the user's own project.

    def test_parity(ds_parity_verify):
        ds_parity_verify("ds_config.json", model="my_project.model:build", rollouts="tests/rollouts.jsonl")

A failure shows the table of steps, the first difference and its likely causes. With `golden="trace.jsonl"` the steps
are also compared with a trace that was kept; `--ds-parity-update` writes it anew.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ds_parity.parity.verification.verify import Outcome, Verification

_UPDATE = "--ds-parity-update"
_OPTIONS = {
    *("against", "bare", "max_tokens", "model", "ranks", "rollouts", "seed", "timeout", "tokenizer", "train", "windows")
}
# Of a scenario, what the harness sets itself.
_SET = {"name", "shape"}


class ProvesLittleWarning(UserWarning):
    """Steps are equal, and would be so too if something were wrong: training hardly moved the weights, for example."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes goldens."""
    group = parser.getgroup("ds_parity")
    group.addoption(
        _UPDATE, action="store_true", help="write the golden traces of ds_parity_verify anew; needs a clean tree"
    )


@pytest.fixture
def ds_parity_verify(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Verification]:
    """Return a function that trains with the reference engines and with ds_parity's, and fails where they differ.

    Its arguments are those of `ds-parity verify`: `config` (a path, or a dict), and by name `ranks`, `windows`, `seed`,
    `model`, `rollouts`, `tokenizer`, `max_tokens`, `train`, `against` (a name, or several), `bare`, `timeout`; and
    `golden`, a trace to compare the steps with. Paths are relative to the test's folder. It returns what was compared,
    and warns (`ProvesLittleWarning`) where equal steps prove little.
    """

    def verify(
        config: str | Path | dict[str, Any], *, golden: str | Path | None = None, **options: Any
    ) -> Verification:
        from ds_parity.errors import DsParityError

        __tracebackhide__ = True  # pytest shows the line of the test, which is what is to be changed
        try:
            return _run(config, golden, options, request, tmp_path)
        except DsParityError as error:
            raise error.with_traceback(None) from None

    return verify


def _run(
    config: str | Path | dict[str, Any],
    golden: str | Path | None,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    folder: Path,
) -> Verification:
    from ds_parity.config import load_config
    from ds_parity.parity.verification import verify as harness

    _refuse_unknown(options)
    here = request.path.parent
    options = _beside(here, options)
    update = bool(golden) and request.config.getoption(_UPDATE)
    if golden and update:
        _refuse_dirty_tree(here / golden)
    elif golden and not (here / golden).exists():
        pytest.fail(f"{golden}: there is no such trace yet; write it with pytest {_UPDATE}", pytrace=False)
    extended = config if isinstance(config, dict) else load_config(str(here / config))
    where = (str(here), str(request.config.rootpath))
    verified = harness.verify(extended, folder, import_from=where, **options)
    if not verified.equal:
        pytest.fail("\n\n".join(map(_shown, verified.outcomes)), pytrace=False)
    if golden:
        _compare_with_golden(verified.outcomes[-1], here / golden, update=update)
    if any(outcome.comparison.proves_little for outcome in verified.outcomes):
        warnings.warn(verified.sentence, ProvesLittleWarning, stacklevel=3)  # where the test calls it
    return verified


def _beside(here: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with paths relative to a test's folder, and one name of a reference as several."""
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("rollouts", "tokenizer"):
        if options.get(name):
            options[name] = str(here / options[name])
    if isinstance(model := options.get("model"), str) and model.startswith("hf:"):
        options["model"] = f"hf:{here / model.removeprefix('hf:')}"
    if isinstance(options.get("against"), str):
        options["against"] = (options["against"],)
    return options


def _refuse_unknown(options: dict[str, Any]) -> None:
    from dataclasses import fields

    from ds_parity.config.faults import nearest
    from ds_parity.errors import ConfigError
    from ds_parity.parity.running.scenario import Scenario

    known = _OPTIONS | {field.name for field in fields(Scenario)} - _SET
    for name in options:
        if name not in known:
            near = nearest(name, known)
            way_out = f"did you mean {near}?" if near else f"choose from {', '.join(sorted(_OPTIONS))}"
            raise ConfigError(f"ds_parity_verify() has no argument {name!r}; {way_out}")


def _shown(outcome: Outcome) -> str:
    from rich.console import Console

    from ds_parity.parity.report.terminal import explained, render, verdict

    written = StringIO()
    Console(width=120, file=written).print(render(outcome.comparison))
    table = written.getvalue().rstrip()
    return "\n".join([outcome.title, table, verdict(outcome.comparison), *explained(outcome.diagnosis)])


def _compare_with_golden(outcome: Outcome, golden: Path, *, update: bool) -> None:
    from dataclasses import replace

    from ds_parity.parity.comparison.bounds import Tier
    from ds_parity.parity.comparison.compare import compare
    from ds_parity.parity.diagnosis import diagnose
    from ds_parity.trace import TraceWriter, read_trace

    trace = outcome.candidate
    if update:
        versions = {**(trace.header.versions or {}), "commit": _git(golden.parent, "rev-parse", "HEAD").strip()}
        with TraceWriter(golden, trace.header.model_copy(update={"versions": versions})) as writer:
            for step in trace.steps:
                writer.write(step)
        return
    kept = read_trace(golden)
    comparison = compare(kept, trace, Tier.REASSOCIATED, outcome.scenario.dtype)
    if not comparison.equal:
        against_golden = replace(
            outcome, reference=f"golden {golden}", comparison=comparison, diagnosis=diagnose(kept, trace, comparison)
        )
        commit = (kept.header.versions or {}).get("commit", "unknown")
        pytest.fail(
            f"{_shown(against_golden)}\n{golden} was written at commit {commit}; write it anew with {_UPDATE}",
            pytrace=False,
        )


def _refuse_dirty_tree(golden: Path) -> None:
    # A golden says at which commit it was made, which must be all that it was made of.
    # Ended by NUL, because git quotes names on lines; behind what was renamed or copied stands its earlier name.
    entries = iter(_git(golden.parent, "status", "--porcelain", "-z", "--untracked-files=no").split("\0")[:-1])
    changed = [(entry[3:], next(entries) if entry[0] in "RC" else "")[0] for entry in entries]
    others = [path for path in changed if Path(path).name != golden.name]
    if others:
        pytest.fail(f"{_UPDATE}: the tree has changes ({', '.join(others[:5])}); commit them first", pytrace=False)


def _git(folder: Path, *arguments: str) -> str:
    try:
        ended = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.fail(
            f"{_UPDATE}: git {' '.join(arguments)} in {folder} failed ({error}): goldens need a commit", pytrace=False
        )
    return os.fsdecode(ended.stdout)
