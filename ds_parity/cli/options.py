"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[str, typer.Argument(help="extended DeepSpeed JSON: a path, or base64", show_default=False)]
Ranks = Annotated[int, typer.Option(min=1, help="ranks, those that AutoTP has share a model included")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
# Torch takes no larger ones.
MOST_SEED = 2**63 - 1
Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="seed of weights, rollouts and sizes of micro-batches")]
Timeout = Annotated[float, typer.Option(min=1, help="seconds in which all ranks must finish")]
Model = Annotated[
    str,
    typer.Option(
        help="package.module:function that takes a seed and returns an nn.Module; or hf:config.json of transformers"
    ),
]
Rollouts = Annotated[str | None, typer.Option(help="your own rollouts, JSON Lines: prompt, completion, reward")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="makes tokens of the rollouts: a local folder or tokenizer.json; by default they are bytes"),
]
Train = Annotated[
    str | None, typer.Option(help="package.module:function(engine, micro_batches): your own loop and loss")
]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="shorten rollouts to this many tokens")]
Folder = Annotated[Path, typer.Option("--out", help="folder for traces and logs")]
Report = Annotated[Path | None, typer.Option(help="folder for report.html and its pictures", show_default=False)]
Junit = Annotated[Path | None, typer.Option(help="file for JUnit XML", show_default=False)]

# What `compare` reads.
TRACES = "a trace of ds_parity, JSON Lines, CSV, trainer_state.json, TensorBoard's event files or their folder"
