"""What the training scripts share: arguments, the data's order, checkpoints, a clean stop, progress."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from bounded import bounded
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

import ds_parity
from ds_parity.config import Settings, load_config, parse
from ds_parity.planning.rollout import Unit

MONITORS = {"csv": "csv_monitor", "tensorboard": "tensorboard"}


def arguments(description: str, more: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Read the command line; the launcher adds --local_rank, DeepSpeed --deepspeed and --deepspeed_config.

    Args:
        description: what `--help` begins with.
        more: adds arguments of one script, and changes defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="ds_parity.parity.data.model:build", help="package.module:function, of a seed"
    )
    parser.add_argument(
        "--rollouts", type=Path, help="JSON lines: prompt, completion, reward (default: GSM8K, bundled)"
    )
    parser.add_argument("--steps", type=bounded(int, 1), default=40, help="optimizer steps in all (%(default)s)")
    parser.add_argument(
        "--max_tokens", type=bounded(int, 1), default=4096, help="tokens in a micro-batch (%(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=bounded(int, -(2**63), 2**63 - 1),
        default=0,
        help="of the model, the data's order and dropout (%(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("train_out"), help="trace, checkpoints, monitor (%(default)s)"
    )
    parser.add_argument(
        "--save_every", type=bounded(int, 1), default=10, help="steps from checkpoint to checkpoint (%(default)s)"
    )
    parser.add_argument("--keep", type=bounded(int, 1), default=2, help="checkpoints to keep (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, where there is one")
    parser.add_argument("--monitor", choices=["none", *MONITORS], default="none", help="of DeepSpeed (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    if more is not None:
        more(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is missing: give a DeepSpeed JSON, such as ds_configs/zero2_bf16.json")
    return args


def configuration(args: argparse.Namespace) -> tuple[dict[str, Any], Settings]:
    """Return the configuration with a trace and a monitor added, and the settings that it contains."""
    config = load_config(args.deepspeed_config)
    settings = parse(config)
    if settings is None or settings.count != "rollout":
        raise ds_parity.ConfigError(
            f"{args.deepspeed_config}: this script cuts its data into steps by rollouts; set "
            "gradient_accumulation_passes, and leave ds_parity.count at 'rollout'"
        )
    config["ds_parity"] = {"trace": str(args.output / "trace.jsonl")} | config.get("ds_parity", {})
    if args.monitor != "none":
        config[MONITORS[args.monitor]] = {"enabled": True, "output_path": str(args.output), "job_name": args.monitor}
    return config, settings


def drawn(groups: Sequence[Sequence[Unit]], seed: int, start: int, count: int) -> list[Unit]:
    """Return units `start` to `start + count` of an endless stream, which has all groups once in every epoch.

    Every epoch has an order of its own. What a step trains on follows from its number, so a resumed run needs to know
    no other position in the data.
    """
    size = sum(map(len, groups))
    if not size:
        raise ds_parity.ConfigError("the rollouts hold nothing to train on: pairs need a prompt with unequal rewards")
    epochs = range(start // size, (start + count - 1) // size + 1)
    shuffled = (random.Random(f"{seed}/{epoch}").sample(groups, len(groups)) for epoch in epochs)
    units = [unit for order in shuffled for group in order for unit in group]
    return units[start - epochs[0] * size :][:count]


class Run:
    """Resumes a run, then looks after it: call `after_pass` behind every step().

    Args:
        engine: the rank's.
        args: of the command line.
        state: called for every checkpoint, on all ranks: what it keeps beside the weights.
        saved: called when a checkpoint is whole, on all ranks.

    Attributes:
        rank: data-parallel rank.
        kept: what `state` had given to the checkpoint that was loaded, {} without one.
    """

    def __init__(
        self,
        engine: ds_parity.ParityEngine,
        args: argparse.Namespace,
        state: Callable[[], dict[str, Any]] = dict,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.args = engine, args
        self._state, self._when_saved = state, saved
        self.kept: dict[str, Any] = {}
        self.rank = dist.get_rank(engine.data_parallel_group)
        self._folder = args.output / "checkpoints"
        self._identity = {"seed": args.seed, "rollouts": str(args.rollouts), "script": Path(sys.argv[0]).name}
        self._resume()
        self._saved = engine.window.index
        self._shown = Shown(engine, args.steps)
        self._seed_step()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def after_pass(self) -> None:
        """Show the window; between windows show the step, and save every so many of them."""
        window = self.engine.window
        self._shown.window(window)
        if window.passes:
            return
        self._shown.step()
        self._seed_step()
        if window.index % self.args.save_every == 0:
            self._save()

    def end(self) -> None:
        """Save where the run ended, at its last step or where it was asked to stop, and print how far it came."""
        step = self.engine.window.index
        if step != self._saved:
            self._save()
        self._shown.end(f"stopped after step {step}; go on with --resume" if step < self.args.steps else "done")

    def _resume(self) -> None:
        if not self.args.resume:
            if (self._folder / "latest").exists():
                raise ds_parity.ConfigError(
                    f"{self._folder} holds checkpoints of another run: give --resume to go on with it, or another "
                    "--output"
                )
            return
        path, state = self.engine.load_checkpoint(str(self._folder))
        if path is not None and state.get("run") != self._identity:
            raise ds_parity.ConfigError(
                f"{path} was trained with {state.get('run')}, now it is {self._identity}: rollouts would be trained on "
                "twice, or never; give what it was trained with, or another --output"
            )
        self.kept = state.get("kept", {}) if path is not None else {}

    def _save(self) -> None:
        step = self.engine.window.index
        state = {"run": self._identity, "kept": self._state()}
        try:
            self.engine.save_checkpoint(str(self._folder), tag=f"step{step}", client_state=state)
        except (OSError, RuntimeError) as error:
            if isinstance(error, ds_parity.DsParityError):
                raise
            raise ds_parity.CheckpointError(
                f"{self._folder}: the checkpoint of step {step} could not be written ({error}), "
                f"{shutil.disk_usage(self._folder).free:,} bytes are free; latest still names the one before: make "
                "space, and go on with --resume"
            ) from error
        self._saved = step
        self._when_saved()
        if dist.get_rank() == 0:
            saved = {int(path.name[4:]): path for path in self._folder.glob("step*") if path.name[4:].isdigit()}
            for number in sorted(number for number in saved if number <= step)[: -self.args.keep]:
                shutil.rmtree(saved[number], ignore_errors=True)

    def _seed_step(self) -> None:
        # DeepSpeed's checkpoints keep the random state of the first rank alone. So dropout is seeded for every step by
        # its number and the rank: a resumed run draws what a run that was never killed would have drawn.
        drawn_by = (self.args.seed << 40) + (self.engine.window.index << 16) + dist.get_rank()
        torch.manual_seed(drawn_by % 2**63)  # of a seed such as a date it has more bits than torch takes

    def _on_signal(self, number: int, frame: Any) -> None:
        self.engine.stop()
        os.write(2, f"rank {self.rank}: {signal.Signals(number).name}, stopping after this step\n".encode())
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C again ends it at once


class Shown:
    """Progress on the first rank: a bar on a terminal, one line per step elsewhere."""

    def __init__(self, engine: ds_parity.ParityEngine, steps: int) -> None:
        self._engine, self._first = engine, dist.get_rank() == 0
        console = Console()
        self._lines = self._first and not console.is_terminal
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[says]}")
        self._bar = Progress(*columns, console=console, disable=self._lines or not self._first)
        self._steps = self._bar.add_task("steps", total=steps, completed=engine.window.index, says="")
        self._fill = self._bar.add_task("window", total=engine.window.target, says="rollouts")
        self._bar.start()
        self._begun, self._before = time.monotonic(), engine.global_samples

    def window(self, window: Any) -> None:
        """Show how full the window is."""
        self._bar.update(self._fill, completed=window.rollouts)

    def step(self) -> None:
        """Show the step that has ended; reading it waits for the accelerator, on this rank alone."""
        if not self._first:
            return
        record = self._engine.last_step
        speed = (self._engine.global_samples - self._before) / (time.monotonic() - self._begun)
        loss = "none" if record.loss is None else f"{record.loss:.4f}"
        metrics = "".join(f", {name} {mean:.3f}" for name, mean in record.metrics.items())
        says = f"loss {loss}, LR {record.lr[0]:.3g}{metrics}, {speed:.1f} rollouts/s"
        self._bar.update(self._steps, completed=record.step, says=says)
        if self._lines:
            print(f"step {record.step}: {says}, {record.rollouts} rollouts in {record.passes} passes", flush=True)

    def end(self, says: str) -> None:
        """Take the bar down, and print `says`."""
        self._bar.stop()
        if self._first:
            print(says, flush=True)


def launch(
    main: Callable[[argparse.Namespace], object],
    description: str,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Run a rank's `main`; bad input ends in a message and code 2."""
    args = arguments(description, more)
    sys.path.append(str(Path.cwd()))
    # Before the first collective: NCCL's ranks would meet on one device.
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        main(args)
    except ds_parity.ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        sys.exit(2)
    except ds_parity.DsParityError as error:
        sys.exit(f"rank {os.environ.get('RANK', '0')}: {error}")
    dist.destroy_process_group()
