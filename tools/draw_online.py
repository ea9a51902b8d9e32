"""Draw the curves of online training as SVG, in a light and in a dark theme.

python tools/draw_online.py                  # docs/pictures/online*.svg, of the figures in online.json beside them
python tools/draw_online.py --run online_out # online_out/curve.svg, of one run
python tools/draw_online.py --gather FOLDER  # online.json anew, of runs in FOLDER/FAULT-SEED
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from draw_pictures import FOLDER, Sheet, write_all
from online.curves import Line, columns, of_one, panel

from ds_parity.trace import read_trace

KEPT = FOLDER / "online.json"
WIDTH = 10
"""Windows that one point of a curve is the mean of."""
SUBJECTS = {
    "none": ("right (ds_parity)", "good"),
    "mean-of-micro-batches": ("mean-of-micro-batches", "rank0 edge"),
    "last-backward-only": ("last-backward-only", "rank1 edge"),
}
"""Fault to its name in the picture, and its colour."""


def gathered(folder: Path) -> dict[str, Any]:
    """Return the figures of runs, made of the seeds in FOLDER/FAULT-SEED that every fault has, up to the shortest."""
    rewards: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*-*/trace.jsonl")):
        fault, seed = path.parent.name.rsplit("-", 1)
        if (path.parent / "done").exists():
            rewards.setdefault(fault, {})[seed] = columns(path, WIDTH)["reward"]
    whole = set.intersection(*(set(seeds) for seeds in rewards.values()))
    points = min(len(seeds[seed]) for seeds in rewards.values() for seed in whole)
    cut = {fault: {seed: seeds[seed][:points] for seed in sorted(whole)} for fault, seeds in rewards.items()}
    one = columns(folder / "none-0" / "trace.jsonl", WIDTH)
    run = len(one["reward"]) * WIDTH
    return {"steps": points * WIDTH, "width": WIDTH, "rewards": cut, "run": run, "one": one}


def rewards_of(found: Mapping[str, Any], fault: str) -> list[Sequence[float]]:
    """Return the curves of all seeds."""
    return list(found["rewards"][fault].values())


def ends_of(found: Mapping[str, Any], fault: str) -> tuple[list[float], list[float]]:
    """Return the reward of each seed over the first and over the last 30 windows."""
    points = 30 // found["width"]
    curves = rewards_of(found, fault)
    return [statistics.fmean(one[:points]) for one in curves], [statistics.fmean(one[-points:]) for one in curves]


def spread(values: Sequence[float]) -> str:
    """Return a mean, and the least and the greatest value."""
    return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def rises(sheet: Sheet) -> str:
    """Draw the reward of all seeds: the mean as a line, the least and the greatest as a band."""
    found = json.loads(KEPT.read_text())
    seeds = len(rewards_of(found, "none"))
    sheet.text(240, 32, "The reward rises", 20, anchor="middle", bold=True)
    said = f"Reward by step, {seeds} seeds: the mean as a line,"
    sheet.text(240, 56, said, 14, ink="muted", anchor="middle")
    sheet.text(240, 76, "the lowest and highest seed as a band.", 14, ink="muted", anchor="middle")
    curves = {fault: list(zip(*rewards_of(found, fault), strict=True)) for fault in SUBJECTS}
    lines = [
        Line(
            [statistics.fmean(p) for p in points],
            SUBJECTS[fault][1],
            [min(p) for p in points],
            [max(p) for p in points],
        )
        for fault, points in curves.items()
    ]
    panel(sheet, 112, "reward", lines, ends=(0.0, 1.0), height=220)
    sheet.text(76, 364, "step 1", 14, ink="muted")
    sheet.text(456, 364, f"step {found['steps']}", 14, ink="muted", anchor="end")
    top, described = 398.0, []
    for fault, (name, ink) in SUBJECTS.items():
        start, end = (spread(values) for values in ends_of(found, fault))
        sheet.box(12, top - 11, 26, 12, ink)
        sheet.text(48, top, name, 15, ink=ink, bold=True)
        sheet.text(48, top + 20, f"first 30 steps {start}, last 30 {end}", 14, ink="muted")
        described.append(f"{name}: {start} to {end}")
        top += 54
    description = f"Mean and range over {seeds} seeds. {'; '.join(described)}."
    return sheet.svg(top - 12, "The reward of online training by step", description)


def one_run(sheet: Sheet) -> str:
    """Draw every column of one run."""
    found = json.loads(KEPT.read_text())
    return of_one(sheet, found["one"], found["run"], "seed 0, means over 10 steps, from left to right")


PICTURES: dict[str, Callable[[Sheet], str]] = {"online": rises, "online-run": one_run}


def of_run(trace: Path, output: Path) -> Path:
    """Draw the trace of one run into a folder; returns the file."""
    steps = len(read_trace(trace).steps)
    width = max(1, min(WIDTH, steps // 10))
    said = f"{steps} steps from left to right, means over {width}"
    path = output / "curve.svg"
    path.write_text(of_one(Sheet("light"), columns(trace, width), steps, said), encoding="utf-8")
    return path


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of one run")
    parser.add_argument("--gather", type=Path, help="folder of runs")
    args = parser.parse_args()
    if args.run is not None:
        print(of_run(args.run / "trace.jsonl", args.run))
        return
    if args.gather is not None:
        KEPT.write_text(json.dumps(gathered(args.gather)) + "\n")
    write_all(PICTURES)


if __name__ == "__main__":
    main()
