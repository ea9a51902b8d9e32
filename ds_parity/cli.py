"""The command line, thin: parses, calls, prints. Exit code 0: equal, 1: differs, 2: bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ds_parity._version import __version__
from ds_parity.errors import ConfigError, DsParityError

if TYPE_CHECKING:
    from ds_parity.parity.comparison.compare import Comparison
    from ds_parity.parity.decomposition import ProbeResult
    from ds_parity.parity.diagnosis import Cause
    from ds_parity.parity.report import Contents

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# A pipe has no width of its own, and 80 columns would cut numbers short.
_WIDTH = None if sys.stdout.isatty() else 120
out, err = Console(width=_WIDTH), Console(stderr=True)

Config = Annotated[str, typer.Argument(help="extended DeepSpeed JSON: a path, or base64", show_default=False)]
Ranks = Annotated[int, typer.Option(min=1, help="data-parallel ranks")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Seed = Annotated[int, typer.Option(min=0, help="of weights, rollouts and raggedness")]
Timeout = Annotated[float, typer.Option(min=1, help="seconds for all ranks to finish")]
Model = Annotated[str, typer.Option(help="package.module:function that takes a seed and returns an nn.Module")]
Rollouts = Annotated[str | None, typer.Option(help="JSON Lines of your own: prompt, completion, reward")]
Train = Annotated[
    str | None, typer.Option(help="package.module:function(engine, micro_batches): your own loop and loss")
]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="shorten rollouts to this many tokens")]
_TRACES = "a trace of ds_parity, JSON Lines, CSV, trainer_state.json, TensorBoard's event files or their folder"
Folder = Annotated[Path, typer.Option("--out", help="folder for traces and logs")]
Report = Annotated[Path | None, typer.Option(help="folder for report.html and its pictures", show_default=False)]
Junit = Annotated[Path | None, typer.Option(help="file for JUnit XML", show_default=False)]


def main() -> None:
    """Run the command line; whatever is wrong with the input ends in one message and exit code 2."""
    try:
        app()
    except DsParityError as error:
        err.print(f"ds-parity: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"ds-parity {__version__}")
        raise typer.Exit


@app.callback(help="Step DeepSpeed's optimizer by rollouts, and prove that the step is right.")
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def verify(
    config: Annotated[
        str | None,
        typer.Argument(
            help="extended DeepSpeed JSON: a path, or base64; with --matrix: quick, or a part of a row's name",
            show_default=False,
        ),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="every configuration that people run")] = False,
    ranks: Ranks = 2,
    windows: Annotated[int, typer.Option(min=1, help="windows' worth of rollouts")] = 5,
    seed: Seed = 0,
    model: Model = "ds_parity.parity.model:build",
    rollouts: Rollouts = None,
    max_tokens: MaxTokens = None,
    train: Train = None,
    timeout: Timeout = 600,
    folder: Folder = Path("ds_parity_out"),
    report: Report = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Train with the reference engines and with ours on real ranks, and compare the traces."""
    from ds_parity.config import load_config
    from ds_parity.parity import report as reports

    if matrix and (report or junit):
        raise ConfigError("--report and --junit are of one configuration: --matrix leaves its matrix.html in --out")
    if matrix:
        raise typer.Exit(_verify_matrix(config, folder, as_json))
    if config is None:
        raise ConfigError("verify: no configuration: give the path of an extended DeepSpeed JSON, or --matrix")
    extended = load_config(config)
    reports.check(report, junit)
    from ds_parity.parity import verify as harness

    options: dict[str, Any] = {"windows": windows, "seed": seed, "model": model}
    options |= {"rollouts": rollouts, "max_tokens": max_tokens, "train": train}
    total = sum(len(references) + 1 for _, references in harness.scenarios(extended, ranks, **options)[0])
    with _progress(total) as progress:
        verified = harness.verify(extended, folder, ranks=ranks, timeout=timeout, progress=progress, **options)
    if as_json:
        _print_json(
            {
                "equal": verified.equal,
                "outcomes": {
                    outcome.title: {**_plain(outcome.comparison), "causes": _causes(outcome.causes)}
                    for outcome in verified.outcomes
                },
                "left_out": [str(reason) for reason in verified.left_out],
                "accelerator": verified.accelerator,
            }
        )
    else:
        for outcome in verified.outcomes:
            _show(outcome.comparison, outcome.title, outcome.causes)
        for reason in verified.left_out:
            out.print(f"left out: {reason}", markup=False, soft_wrap=True)
        out.print(f"ran on: {verified.accelerator}", markup=False, highlight=False, soft_wrap=True)
        out.print(f"traces: {folder}", markup=False, highlight=False)
        _verdict(verified.equal, "every step is equal" if verified.equal else "the runs differ")
    if report or junit:
        _leave(reports.of_verification(verified, extended, ranks, folder), report, junit)
    raise typer.Exit(0 if verified.equal else 1)


@app.command()
def rewrite(config: Config, ranks: Ranks = 1) -> None:
    """Print the plain DeepSpeed JSON to standard output, and what was changed and why to standard error."""
    from ds_parity.config import load_config
    from ds_parity.config import rewrite as rewritten

    result = rewritten(load_config(config), ranks)
    sys.stdout.write(json.dumps(result.config, indent=2) + "\n")
    for change in result.changes:
        line = f"{change.key}: {change.before!r} -> {change.after!r}: {change.why}"
        err.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def compare(
    reference: Annotated[Path, typer.Argument(help=f"the trace that is right: {_TRACES}", show_default=False)],
    candidate: Annotated[Path, typer.Argument(help="the trace in question: the same", show_default=False)],
    tier: Annotated[
        str | None,
        typer.Option(help="exact or reassociated; by default exact, unless a side is foreign or torch or ranks differ"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16: what the runs compute in")] = "fp32",
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="NAME=COLUMN of whichever side is foreign: loss=train/loss, step=_step+1, lr= (none)"
        ),
    ] = None,
    map_reference: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN of the reference alone")] = None,
    map_candidate: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN of the candidate alone")] = None,
    mean_loss: Annotated[
        bool, typer.Option("--mean-loss", help="a foreign loss is the mean over the steps since the one logged before")
    ] = False,
    report: Report = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Compare two traces step by step: ds_parity's own, or what another trainer left behind."""
    from ds_parity.parity import report as reports
    from ds_parity.parity.comparison.bounds import Tier
    from ds_parity.parity.comparison.compare import compare as compared
    from ds_parity.parity.diagnosis import diagnose
    from ds_parity.trace.foreign import open_pair

    reports.check(report, junit)
    if tier not in (None, *[str(known) for known in Tier]):
        raise ConfigError(f"--tier is {tier!r}: it must be {' or '.join(map(str, Tier))}")
    a, b = open_pair(
        reference, candidate, both=maps or (), left=map_reference or (), right=map_candidate or (), mean_loss=mean_loss
    )
    foreign = a.header.foreign or b.header.foreign
    alike = a.header.ranks == b.header.ranks and "torch" not in (a.header.engine, b.header.engine) and not foreign
    chosen = Tier(tier) if tier else (Tier.EXACT if alike else Tier.REASSOCIATED)
    result = compared(a, b, chosen, dtype)
    causes = diagnose(a, b, result)
    if as_json:
        _print_json({**_plain(result), "causes": _causes(causes)})
    else:
        _show(result, f"{candidate} against {reference}, {chosen} tier", causes)
        _verdict(result.equal, "equal" if result.equal else "the traces differ")
    if report or junit:
        sides = reports.Side(a, str(reference)), reports.Side(b, str(candidate))
        _leave(reports.of_traces(result, *sides, causes), report, junit)
    raise typer.Exit(0 if result.equal else 1)


@app.command()
def probe(
    config: Config,
    ranks: Ranks = 2,
    seed: Seed = 0,
    subject: Annotated[
        str, typer.Option(help="package.module:function(scenario, record) that runs the window")
    ] = "ds_parity.parity.candidate:run",
    model: Model = "ds_parity.parity.model:build_tiny",
    rollouts: Rollouts = None,
    max_tokens: MaxTokens = 256,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="by default 1e-5 in fp32, 2e-2 in bf16 and fp16")
    ] = None,
    timeout: Timeout = 300,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Show with what coefficient each micro-batch of each rank really entered one step."""
    from ds_parity.config import load_config
    from ds_parity.parity import probing

    options = {"seed": seed, "model": model, "rollouts": rollouts, "max_tokens": max_tokens}
    with _progress(1) as report:
        result, limit = probing.probe_config(
            load_config(config), subject, folder, ranks=ranks, timeout=timeout, progress=report, **options
        )
    limit = limit if tolerance is None else tolerance
    right = result.within(limit)
    if as_json:
        _print_json({**asdict(result), "tolerance": limit, "right": right})
    else:
        _show_probe(result)
        _verdict(right, f"{result.pattern} (greatest error {result.error:.2g} of {limit:g} allowed)")
    raise typer.Exit(0 if right else 1)


@app.command()
def plan(
    rollouts: Annotated[
        Path | None,
        typer.Argument(help="JSON Lines: prompt, completion, reward; the bundled ones by default", show_default=False),
    ] = None,
    ranks: Ranks = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="the most tokens in a micro-batch")] = 4096,
    target: Annotated[int, typer.Option(min=1, help="rollouts, or prompts, that close a window")] = 64,
    count: Annotated[str, typer.Option(help="what the target counts: rollout or prompt")] = "rollout",
    layout: Annotated[str, typer.Option(help="packed (end to end) or padded (to the longest)")] = "packed",
    oversize: Annotated[str, typer.Option(help="longer rollouts: refuse, or own (micro-batch)")] = "refuse",
    report: Annotated[
        Path | None, typer.Option(help="folder for a picture of every window, up to 20", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the windows, passes and idle passes that rollouts come to."""
    from ds_parity.parity.rollouts import load_rollouts
    from ds_parity.planning import picture
    from ds_parity.planning import plan as planned_for

    options: dict[str, Any] = {"count": count, "layout": layout, "oversize": oversize}
    planned = planned_for(load_rollouts(rollouts), dp_world_size=ranks, target=target, max_tokens=max_tokens, **options)
    found = picture.figures(planned)
    if report is not None:
        picture.write_pngs(planned, report)
    if as_json:
        _print_json(found)
        return
    out.print(picture.table(planned))
    if planned.windows:
        out.print("window 0:\n" + picture.drawn(planned.windows[0], max_tokens), markup=False, highlight=False)
    for name, value in found.items():
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if value is not None else "-"
        out.print(f"{name.replace('_', ' ')}: {shown}", markup=False, highlight=False)


@app.command()
def controls(
    config: Config,
    only: Annotated[list[str] | None, typer.Option("--only", help="a control's name; may be repeated")] = None,
    timeout: Timeout = 900,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Put known bugs into the engine, one at a time: each must be caught, and named."""
    from ds_parity.config import load_config
    from ds_parity.parity.controls import run as harness
    from ds_parity.parity.controls import tables

    extended = load_config(config)
    with _progress(len(harness.plan(extended, only))) as report:
        found = harness.run_controls(extended, folder / "controls", names=only, timeout=timeout, progress=report)
    if as_json:
        _print_json({"good": harness.good(found), "summary": tables.summary(found), "findings": tables.plain(found)})
    else:
        out.print(tables.render(found))
        for note in tables.notes():
            out.print(f"not run: {note}", markup=False, highlight=False, soft_wrap=True)
        _verdict(harness.good(found), tables.summary(found))
    raise typer.Exit(0 if harness.good(found) else 1)


@app.command()
def calibrate(
    scenarios: Annotated[int, typer.Option(min=1, help="random clean scenarios")] = 200,
    ranks: Ranks = 2,
    seed: Annotated[int, typer.Option(min=0, help="of the draw")] = 0,
    timeout: Timeout = 3600,
    folder: Folder = Path("ds_parity_out"),
    as_json: Json = False,
) -> None:
    """Measure how far sound runs lie apart: the constants of the bound, and that it raises no false alarm."""
    from ds_parity.parity import calibrate as harness

    drawn = harness.drawn(scenarios, seed, ranks)
    with _progress(2 * len(drawn)) as report:
        found = harness.calibrate(drawn, folder / "calibrate", timeout=timeout, progress=report)
    if as_json:
        keys = ("type", "quantity", "measured", "in_force", "scenarios")
        rows = [dict(zip(keys, row, strict=True)) for row in found.table()]
        _print_json({"alarms": found.alarms, "constants": rows, "accelerator": found.accelerator})
    else:
        for dtype, quantity, measured, in_force, count in found.table():
            line = f"{dtype:5} {quantity:10} measured {measured:8.4f}, in force {in_force:6.3f}, {count} scenarios"
            out.print(line, markup=False, highlight=False)
        for name in found.alarms:
            out.print(f"false alarm: {name}", markup=False, highlight=False)
        out.print(f"ran on: {found.accelerator}", markup=False, highlight=False, soft_wrap=True)
        _verdict(not found.alarms, f"{len(found.alarms)} false alarms in {len(drawn)} clean scenarios")
    raise typer.Exit(1 if found.alarms else 0)


def _verify_matrix(subset: str | None, folder: Path, as_json: bool) -> int:
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output, from its import on; a machine reads ours
        from ds_parity.parity.matrix import tables
        from ds_parity.parity.matrix import verify as harness

    wanted = harness.chosen(subset)
    folder = folder / "matrix"
    with _progress(harness.calls(wanted, folder)) as report:
        matrix = harness.verify(wanted, folder, report)
    if as_json:
        _print_json(harness.plain(matrix))
    else:
        out.print(tables.render(matrix.results))
        for number, note in enumerate(tables.notes(matrix.results), start=1):
            out.print(f"[{number}] {note}", markup=False, highlight=False, soft_wrap=True)
        out.print(", ".join(f"{name} {value}" for name, value in matrix.facts.items()), markup=False, highlight=False)
        out.print(f"report: {folder / 'matrix.html'}", markup=False, highlight=False, soft_wrap=True)
        _verdict(matrix.equal, tables.summary(matrix.results))
    return 0 if matrix.equal else 1


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting ranks", total=total)
        yield lambda done, title: bar.update(task, completed=done, description=title)


def _show(comparison: Comparison, title: str, explained: Sequence[Cause] = ()) -> None:
    from ds_parity.parity.tables import causes, render, verdict

    out.print(f"\n{title}", style="bold", markup=False, highlight=False, soft_wrap=True)
    out.print(render(comparison))
    out.print(verdict(comparison), markup=False, highlight=False, soft_wrap=True)
    for line in causes(explained):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _leave(contents: Contents, report: Path | None, junit: Path | None) -> None:
    from ds_parity.parity import report as reports

    for path in reports.write(contents, report, junit):
        err.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)


def _show_probe(result: ProbeResult) -> None:
    from ds_parity.parity.tables import coefficients

    out.print(coefficients(result.measured, result.expected))
    if result.alike:
        alike = f"{result.alike} have the gradient of another micro-batch: of those, only the sum was measured"
        out.print(alike, highlight=False)
    out.print(f"unexplained by any combination of the gradients: {result.residual:.2g} of the update", highlight=False)


def _verdict(good: bool, sentence: str) -> None:
    out.print(("PASS: " if good else "FAIL: ") + sentence, style="bold green" if good else "bold red", highlight=False)


def _causes(found: Sequence[Cause]) -> list[dict[str, Any]]:
    return [{**asdict(cause), "remedy": cause.remedy} for cause in found]


def _plain(comparison: Comparison) -> dict[str, Any]:
    rows = [{**asdict(row), "candidate": row.candidate and row.candidate.model_dump()} for row in comparison.rows]
    return {**asdict(comparison), "rows": rows, "equal": comparison.equal}


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
