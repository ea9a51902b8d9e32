"""Run DeepSpeed's own tests bare, through ds_parity, and through ds_parity with the key set.

    python tools/run_upstream_tests.py ~/DeepSpeed                       # the usual selection, about 20 minutes
    python tools/run_upstream_tests.py ~/DeepSpeed unit/v1/zero          # these folders, files or tests of its tests/
    python tools/run_upstream_tests.py ~/DeepSpeed.git --at v0.19.5      # a bare repository, at a tag

Four modes: `bare`; `plain`, where `deepspeed.initialize` is ds_parity's and the configuration as it was; `keyed`,
where `gradient_accumulation_passes` is set to what the configuration means (gradient_accumulation_steps x data-parallel
ranks); and `caller`, where `ds_parity.boundary` is (for configurations without accumulation steps of their own).
The tests of the checkout run against the DeepSpeed that is installed: only its tests/ folder is taken.

Exit code 0: what passes bare passes through the wrapper, or is refused by an error of ds_parity, or expects what the
key replaces (`DEFINED`); the last two with the key only. 1: a test ends otherwise. 2: bad input.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODES = ("bare", "plain", "keyed", "caller")
KEYED = ("keyed", "caller")
SURROUNDINGS = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}  # the caller's own win
# Accumulation, ZeRO, schedulers, configuration, checkpoints: the files with the most to say for their time.
USUAL = (
    "unit/v1/zero/test_zero2_offload_multi_backward.py",
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py",
    "unit/v1/zero/test_zero_cpu_offload_grad_accum.py",
    "unit/v1/half_precision/test_gradient_clipping_default.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/runtime/test_lr_schedulers.py",
    "unit/runtime/test_ds_config_dict.py",
    "unit/runtime/test_ds_initialize.py",
    "unit/runtime/half_precision/test_zero_optim_overflow.py",
    "unit/checkpoint/test_lr_scheduler.py",
    "unit/checkpoint/test_zero_optimizer.py",
)
MORE = (
    "unit/v1/zero",
    "unit/v1/half_precision",
    "unit/runtime/test_data.py",
    "unit/runtime/test_ds_config_model.py",
    "unit/runtime/test_multi_output_model.py",
    "unit/runtime/test_multiple_models.py",
    "unit/runtime/test_autocast.py",
    "unit/runtime/half_precision",
    "unit/runtime/zero",
    "unit/checkpoint",
    "unit/monitor",
)
REFUSAL = "ds_parity.errors."
# Tests whose expectation the key replaces: (the pattern of their names, the message that they fail with, why).
DEFINED = (
    (
        "unit/v1/zero/test_zero.py::TestGradientAllreduceOp::test[*-sum-2.0-*]",
        "Greatest relative difference: 0.5 ",
        "gradient_allreduce_op sum on 2 ranks expects twice the mean; with the key a step is divided by its total, "
        "however DeepSpeed adds gradients up",
    ),
)
HANGS = ("no sign of life", "Test hanged")  # the second is DeepSpeed's own
PATIENCE = 30  # seconds beyond the time that DeepSpeed gives a test itself
COLLECTING = 180  # seconds at least until the first test starts: torch and DeepSpeed are imported, the tests collected
# Ranks compile these at first use. If they are killed while they do, later ranks wait for their lock for ever.
BUILD_OPS = """
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None and builder.is_compatible():
        builder.load(verbose=False)
"""


@dataclass
class Outcome:
    """How one test ended in one mode: passed, failed, error, skipped, hung or missing; and why."""

    status: str = "missing"
    message: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """What all tests did: outcomes by test and mode, and the differences from bare by class."""

    versions: dict[str, str]
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    defined: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)


def main() -> int:
    """Parse, run, print; return the exit code."""
    given = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ranks of a test must not outlive this process
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        try:
            tests = take_tests(given.source, given.at, Path(scratch))
        except OSError as error:
            print(f"{given.source}: {error}; give a DeepSpeed checkout, or a bare repository of it", file=sys.stderr)
            return 2
        paths = given.paths or ([*USUAL, *MORE] if given.all else list(USUAL))
        files = _files(tests, paths)
        missing = [path for path in paths if not (tests / path.partition("::")[0]).exists()]
        if missing and given.paths:
            print(f"no such test in {given.source}/tests: {', '.join(missing)}", file=sys.stderr)
            return 2
        report = run(tests, given, files)
    print_report(report, given.modes)
    print(f"every outcome, with its message: {given.json}")
    return 1 if report.differs else 0


def take_tests(source: Path, at: str, scratch: Path) -> Path:
    """Copy tests/ of a checkout or a bare repository; the package beside it would hide the installed one."""
    if (source / "tests" / "unit").is_dir():
        shutil.copytree(source / "tests", scratch / "tests")
    else:
        # A partial mirror complains of files outside of tests/, so that git's exit code says nothing.
        packed = subprocess.run(["git", "-C", source, "archive", at, "tests"], check=False, capture_output=True)
        subprocess.run(["tar", "-x", "-C", scratch], input=packed.stdout, check=False, capture_output=True)
        if not (scratch / "tests" / "unit").is_dir():
            raise OSError(f"no tests/unit at {at}: {packed.stderr.decode(errors='replace').strip()[-300:]}")
    return scratch / "tests"


def run(tests: Path, given: argparse.Namespace, files: list[str]) -> Report:
    """Run files one by one in every mode; what is known is kept after each of them."""
    report = Report({name: version(name) for name in ("ds_parity", "deepspeed", "torch")})
    subprocess.run([sys.executable, "-c", BUILD_OPS], env={**SURROUNDINGS, **os.environ}, check=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        by_test: dict[str, dict[str, Outcome]] = {}
        for mode in given.modes:
            started = time.monotonic()
            of_mode = run_file(tests, [file], mode, given.timeout)
            for test, outcome in of_mode.items():
                by_test.setdefault(test, {})[mode] = outcome
            print(f"{file} {mode}: {_counts(of_mode.values())}, {time.monotonic() - started:.0f} s", flush=True)
        report.outcomes.update(by_test)
        for mode in given.modes[1:]:
            _repeat(report, by_test, tests, mode, given.timeout)
            for test, outcomes in by_test.items():
                _classify(report, test, mode, outcomes)
        given.json.write_text(json.dumps(asdict(report), indent=1))
    return report


def run_file(tests: Path, ids: list[str], mode: str, timeout: float) -> dict[str, Outcome]:
    """Run tests in one pytest; where it crashes or hangs, the rest goes on in another one."""
    outcomes: dict[str, Outcome] = {}
    while ids:
        lines, ended = _pytest(tests, ids, mode, timeout)
        seen = _outcomes(lines)
        outcomes.update(seen)
        collected = next((line["collected"] for line in lines if "collected" in line), None)
        if collected is None:
            if not seen:
                outcomes[ids[0]] = Outcome("error", ended)
            break
        ids = [test for test in collected if test not in outcomes]
        started = [line["started"] for line in lines if "started" in line and line["started"] in ids]
        if ids:
            outcomes[started[-1] if started else ids[0]] = Outcome(
                "hung" if any(sign in ended for sign in HANGS) else "crashed", ended
            )
            ids = [test for test in ids if test not in outcomes]
    return outcomes


def _pytest(tests: Path, ids: list[str], mode: str, timeout: float) -> tuple[list[dict], str]:
    results, log = tests.parent / "results.jsonl", tests.parent / "pytest.log"
    results.write_text("")
    (tests.parent / "ids").write_text("\n".join(ids))
    path = os.pathsep.join([str(HERE / "upstream"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    set_to = {"DS_PARITY_UPSTREAM": mode, "DS_PARITY_RESULTS": str(results), "PYTHONPATH": path.rstrip(os.pathsep)}
    usual = {**SURROUNDINGS, "DS_UNITTEST_TIMEOUT": str(int(timeout))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "upstream_plugin",
        "-p",
        "no:cacheprovider",
        f"@{tests.parent}/ids",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=tests,
            env={**usual, **os.environ, **set_to},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            ended = _wait(process, results, timeout + PATIENCE)
        finally:
            # Ranks that hang outlive pytest; they are in its session.
            _kill(process)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return lines, f"{ended}: {log.read_text()[-2000:]}"


def _wait(process: subprocess.Popen, results: Path, timeout: float) -> str:
    # Collecting and every test write a line each. Before the first of them a test's own seconds would be too few on a
    # busy machine, and tests that are not collected are tests without an outcome.
    size, since = 0, time.monotonic()
    while process.poll() is None:
        now = results.stat().st_size
        patience = timeout if now else max(timeout, COLLECTING)
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            return f"no sign of life in {patience:.0f} s"
        time.sleep(0.2)
    return f"pytest ended with code {process.returncode}"


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcomes(lines: list[dict]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    done = {line["test"] for line in lines if line.get("when") in ("teardown", "collect")}
    for line in lines:
        if line.get("test") not in done:
            continue
        outcome = outcomes.setdefault(line["test"], Outcome("passed"))
        outcome.seconds += line.get("seconds", 0.0)
        if line["outcome"] == "failed" and outcome.status != "failed":
            outcome.status, outcome.message = "failed" if line["when"] == "call" else "error", line["message"]
        elif line["outcome"] == "skipped":
            outcome.status, outcome.message = "skipped", line["message"]
    return outcomes


def _repeat(report: Report, by_test: dict[str, dict[str, Outcome]], tests: Path, mode: str, timeout: float) -> None:
    # A port that is taken or a machine that is busy fails a test too: what differs is run once more before it counts.
    again = [test for test, outcomes in by_test.items() if _worse(outcomes, mode) and not _is_refusal(outcomes[mode])]
    if not again:
        return
    for test, outcome in run_file(tests, again, mode, timeout).items():
        first = by_test.setdefault(test, {}).get(mode, Outcome())
        if outcome.status != first.status:
            report.unsteady.append(f"{mode} {test}: {first.status}, then {outcome.status}")
        by_test[test][mode] = outcome


def _classify(report: Report, test: str, mode: str, outcomes: dict[str, Outcome]) -> None:
    if not _worse(outcomes, mode):
        return
    outcome = outcomes[mode]
    where = f"{mode} {test}"
    if mode in KEYED and _is_refusal(outcome):
        report.refused[where] = outcome.message.partition(REFUSAL)[2]
    elif mode in KEYED and (why := _defined(test, outcome)):
        report.defined[where] = why
    else:
        report.differs[where] = f"{outcomes['bare'].status} bare, {outcome.status}: {outcome.message[-600:]}"


def _worse(outcomes: dict[str, Outcome], mode: str) -> bool:
    bare, here = outcomes.setdefault("bare", Outcome()), outcomes.setdefault(mode, Outcome())
    return bare.status != here.status and (mode == "plain" or bare.status == "passed")


def _defined(test: str, outcome: Outcome) -> str:
    # Brackets in a test's name are its own, not a pattern's.
    for name, message, why in DEFINED:
        if fnmatchcase(test, name.replace("[", "[[]")) and message in outcome.message:
            return why
    return ""


def _is_refusal(outcome: Outcome) -> bool:
    return REFUSAL in outcome.message


def _counts(outcomes: object) -> str:
    counts = Counter(outcome.status for outcome in outcomes)  # type: ignore[attr-defined]
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0]))


def print_report(report: Report, modes: list[str]) -> None:
    """Print every test with its outcomes, the figures of every file, and what differs."""
    print("\n" + " ".join(f"{mode:8}" for mode in modes) + " test")
    files: dict[str, list[dict[str, Outcome]]] = {}
    for test, outcomes in report.outcomes.items():
        print(" ".join(f"{outcomes.get(mode, Outcome()).status:8}" for mode in modes), test)
        files.setdefault(test.partition("::")[0], []).append(outcomes)
    print("\n" + ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    for file, tests in files.items():
        print(file)
        for mode in modes:
            print(f"    {mode:6} {_counts(outcomes.get(mode, Outcome()) for outcomes in tests)}")
    _print_class("departs on purpose (the message of ds_parity says why)", report.refused)
    _print_class("departs by definition", report.defined)
    _print_class("DIFFERS", report.differs)
    if report.unsteady:
        print("\nended otherwise when run again:", *report.unsteady, sep="\n    ")
    verdict = f"FAIL: {len(report.differs)} outcomes differ" if report.differs else "PASS: what passes bare passes"
    print(f"\n{verdict}; {len(report.refused)} refused by ds_parity, {len(report.defined)} by definition")


def _print_class(title: str, tests: dict[str, str]) -> None:
    if tests:
        print(f"\n{title}: {len(tests)}")
    reasons: dict[str, list[str]] = {}
    for test, reason in tests.items():
        reasons.setdefault(reason, []).append(test)
    for reason, names in reasons.items():
        print(f"  {reason[-600:].strip()}", *names, sep="\n      ")


def _files(tests: Path, paths: list[str]) -> list[str]:
    files: dict[str, None] = {}
    for path in paths:
        if (tests / path).is_dir():
            files.update(
                dict.fromkeys(str(file.relative_to(tests)) for file in sorted((tests / path).rglob("test_*.py")))
            )
        elif (tests / path.partition("::")[0]).exists():
            files[path] = None
    return list(files)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a DeepSpeed checkout, or a bare repository of it")
    parser.add_argument("paths", nargs="*", help="folders, files or tests below tests/, such as unit/v1/zero")
    parser.add_argument("--at", default="HEAD", help="the revision of a bare repository")
    parser.add_argument("--all", action="store_true", help="everything on ZeRO, precision and checkpoints (hours)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--timeout", type=float, default=240, help="seconds that one test may take")
    parser.add_argument("--json", type=Path, default=Path("ds_parity_out/upstream.json"))
    given = parser.parse_args()
    given.modes = [mode for mode in MODES if mode in given.modes or mode == "bare"]
    return given


if __name__ == "__main__":
    raise SystemExit(main())
