"""`ds-parity verify`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_parity.cli.console import leave, out, plain, print_json, progress, show, verdict
from ds_parity.cli.options import (
    Folder,
    Json,
    Junit,
    MaxTokens,
    Model,
    Ranks,
    Report,
    Rollouts,
    Seed,
    Timeout,
    Tokenizer,
    Train,
)
from ds_parity.errors import ConfigError

if TYPE_CHECKING:
    from ds_parity.parity.verification.verify import Verification


_OF_THE_MATRIX = ("config", "matrix", "bare", "folder", "as_json")  # --bare beside it has a message of its own


def verify(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(
            help="extended DeepSpeed JSON: a path, or base64; with --matrix: quick, or a part of a row's name",
            show_default=False,
        ),
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="every configuration that people run")] = False,
    ranks: Ranks = 2,
    windows: Annotated[int, typer.Option(min=1, help="number of windows to train on")] = 5,
    seed: Seed = 0,
    model: Model = "ds_parity.parity.data.model:build",
    rollouts: Rollouts = None,
    tokenizer: Tokenizer = None,
    max_tokens: MaxTokens = None,
    train: Train = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="deepspeed, deepspeed-loop or torch; may be repeated. By default all; with --train deepspeed-loop "
            "alone, and torch judges its loss too",
            autocompletion=lambda: ["deepspeed", "deepspeed-loop", "torch"],
        ),
    ] = None,
    bare: Annotated[
        bool,
        typer.Option("--bare", help="judge bare DeepSpeed against plain torch: any version from 0.16 on"),
    ] = False,
    timeout: Timeout = 600,
    folder: Folder = Path("ds_parity_out"),
    report: Report = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Train with the reference engines and with ds_parity on real ranks, and compare every step."""
    from ds_parity.config import load_config
    from ds_parity.parity import report as reports

    if matrix:
        _refuse_beside_matrix(context)
    if bare and (matrix or against):
        raise ConfigError("--bare judges one configuration against torch: leave --matrix and --against out")
    if matrix:
        raise typer.Exit(_verify_matrix(config, folder, as_json))
    if config is None:
        raise ConfigError("verify: no configuration: give the path of an extended DeepSpeed JSON, or --matrix")
    extended = load_config(config)
    reports.check(report, junit)
    from ds_parity.parity.verification import verify as harness

    options: dict[str, Any] = {"windows": windows, "seed": seed, "model": model}
    options |= {"rollouts": rollouts, "tokenizer": tokenizer, "max_tokens": max_tokens, "train": train}
    options |= {} if bare else {"against": tuple(against or ())}
    runs, _ = (harness.of_bare if bare else harness.scenarios)(extended, ranks, **options)
    total = sum(len(references) + 1 for _, references in runs)
    with progress(total) as bar:
        verified = harness.verify(extended, folder, ranks=ranks, timeout=timeout, progress=bar, bare=bare, **options)
    _print(verified, folder, as_json)
    if report or junit:
        leave(reports.of_verification(verified, extended, ranks, folder), report, junit)
    raise typer.Exit(0 if verified.equal else 1)


def _refuse_beside_matrix(context: typer.Context) -> None:
    """Refuse whatever was given that the matrix would not read, an option's default written out included."""
    parameters = [it for it in context.command.params if it.name not in _OF_THE_MATRIX]
    # By its name: newer releases of typer bring a click of their own, whose sources equal none of the package's.
    given = [it.opts[0] for it in parameters if getattr(context.get_parameter_source(it.name), "name", "") != "DEFAULT"]
    if not given:
        return
    they = f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} of one configuration"
    if {"--report", "--junit"} & {*given}:
        raise ConfigError(f"{they}: --matrix leaves its matrix.html in --out")
    raise ConfigError(
        f"{they}: --matrix has references and data of its own, also models, loops, ranks and a time limit; leave "
        f"{'it' if len(given) == 1 else 'them'} out, or give a configuration in place of --matrix"
    )


def _print(verified: Verification, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "equal": verified.equal,
                "sentence": verified.sentence,
                "outcomes": {
                    outcome.title: {**plain(outcome.comparison), **outcome.diagnosis.plain()}
                    for outcome in verified.outcomes
                },
                "left_out": [str(reason) for reason in verified.left_out],
                "accelerator": verified.accelerator,
            }
        )
        return
    for outcome in verified.outcomes:
        show(outcome.comparison, outcome.title, outcome.diagnosis)
    for reason in verified.left_out:
        out.print(f"left out: {reason}", markup=False, soft_wrap=True)
    out.print(f"ran on: {verified.accelerator}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"traces: {folder}", markup=False, highlight=False)
    verdict(verified.equal, verified.sentence)


def _verify_matrix(subset: str | None, folder: Path, as_json: bool) -> int:
    with redirect_stdout(
        sys.stderr
    ):  # DeepSpeed logs to standard output, from its import on; a machine reads that of ds_parity
        from ds_parity.parity.matrix import summary
        from ds_parity.parity.matrix import whole_matrix as harness

    wanted = harness.chosen(subset)
    folder = folder / "matrix"
    with progress(harness.calls(wanted, folder)) as report:
        matrix = harness.verify(wanted, folder, report)
    if as_json:
        print_json(harness.plain(matrix))
    else:
        out.print(summary.render(matrix.results))
        for number, note in enumerate(summary.notes(matrix.results), start=1):
            out.print(f"[{number}] {note}", markup=False, highlight=False, soft_wrap=True)
        out.print(", ".join(f"{name} {value}" for name, value in matrix.facts.items()), markup=False, highlight=False)
        out.print(f"report: {folder / 'matrix.html'}", markup=False, highlight=False, soft_wrap=True)
        verdict(matrix.equal, summary.summary(matrix.results))
    return 0 if matrix.equal else 1
