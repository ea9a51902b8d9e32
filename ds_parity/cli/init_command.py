"""`ds-parity init`."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ds_parity.cli.console import out
from ds_parity.config.starting import starting
from ds_parity.errors import ConfigError

_CONFIG, _SCRIPT = "ds_config.json", "train.py"
# The bundled rollouts that have a gradient make at least eight steps of so many.
_MOST = 600


class StartingPrecision(StrEnum):
    """What a model computes in."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP16 = "fp16"


def init(
    folder: Annotated[Path, typer.Argument(help="folder to write to; it is created", show_default=False)] = Path(),
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage")] = 2,
    precision: Annotated[
        StartingPrecision, typer.Option(help="what the model computes in; DeepSpeed has no fp16 on a CPU")
    ] = StartingPrecision.BF16,
    target: Annotated[
        int, typer.Option(min=1, max=_MOST, help="rollouts in an optimizer step, on all ranks together")
    ] = 12,
) -> None:
    """Write a configuration and a training script to start from. Both run without changes."""
    script = files("ds_parity.cli").joinpath(f"{_SCRIPT}.txt").read_text(encoding="utf-8")
    config = json.dumps(starting(stage, str(precision), target), indent=2) + "\n"
    _write({folder / _CONFIG: config, folder / _SCRIPT: script})
    out.print(f"wrote {folder / _CONFIG} and {folder / _SCRIPT}; next:", markup=False, highlight=False, soft_wrap=True)
    commands = [f"deepspeed --num_accelerators 2 {_SCRIPT}", f"ds-parity verify {_CONFIG}"]
    if folder != Path():
        commands.insert(0, f"cd {shlex.quote(str(folder))}")
    for command in commands:
        out.print(f"    {command}", markup=False, highlight=False, soft_wrap=True)


def _write(texts: dict[Path, str]) -> None:
    """Write all files, or none."""
    written: list[Path] = []
    path = next(iter(texts))
    try:
        for path in texts:
            if path.exists() or path.is_symlink():
                raise ConfigError(
                    f"{path} is there already, and init never writes over a file: give another folder, or move it away"
                )
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for half in written:
            half.unlink(missing_ok=True)
        raise ConfigError(f"{path}: can't be written ({error.strerror or error}); give another folder") from error
