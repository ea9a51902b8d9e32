"""Put what the harness printed into the README, between the marks of each part.

python tools/update_readme.py matrix ds_parity_out/matrix/matrix.md     what `ds-parity verify --matrix` left
python tools/update_readme.py figures ds_parity_out/controls            what `ds-parity controls` left
"""

import argparse
import sys
from pathlib import Path

from ds_parity.errors import DsParityError
from ds_parity.parity.subjects.controls.known import known
from ds_parity.trace import StepRecord, read_trace

README = Path(__file__).parent.parent / "README.md"
MARKS = {
    "matrix": ("<!-- matrix: made by `make matrix` -->", "<!-- matrix: end -->"),
    "figures": ("<!-- figures: made by `make figures` -->", "<!-- figures: end -->"),
}
STEPS = 3
# What people write by hand, by the control that does so, and the quantity in which it shows.
BY_HAND = {
    "mean-of-micro-batches": ("the mean of the micro-batches' means", "gradient norm"),
    "dp-mean-left-in": ("divided by the global total, and averaged over ranks too", "gradient norm"),
    "gas-scaled-twice": ("divided by the number of passes, and by DeepSpeed again", "gradient norm"),
    "scheduler-per-pass": ("the scheduler stepped after every pass", "LR"),
    "boundary-off-by-one": ("`micro_step % n == 0`, tested before counting", "rollouts"),
}
_FIELDS = {
    "gradient norm": lambda step: step.grad_norm,
    "LR": lambda step: step.lr[0],
    "rollouts": lambda step: step.rollouts,
}


def figures(folder: Path) -> str:
    """Return the wrong figures beside the right ones, from the traces of the controls.

    Raises:
        TraceError: a trace is not there, or can't be read.
    """
    rows = ["| written by hand | steps 1 to 3 | right, and ds_parity's | by hand | loss reported |", "|" + "---|" * 5]
    for name, (description, quantity) in BY_HAND.items():
        at = folder / known()[name].scenario
        right, candidate, wrong = (_steps(at / f"{engine}.jsonl") for engine in ("torch", "ds_parity", name))
        shown = [_shown(steps, quantity) for steps in (right, candidate, wrong)]
        if shown[0] != shown[1]:
            raise DsParityError(f"{name}: ds_parity came to {quantity} {shown[1]}, and {shown[0]} is right")
        same = [f"{step.loss:.3g}" for step in right] == [f"{step.loss:.3g}" for step in wrong]
        loss = "the same" if same else "another"
        rows.append(f"| {description} (*{name}*) | {quantity} | {shown[0]} | **{shown[2]}** | {loss} |")
    return "\n".join(rows) + "\n"


def _steps(path: Path) -> tuple[StepRecord, ...]:
    return read_trace(path).steps[:STEPS]


def _shown(steps: tuple[StepRecord, ...], quantity: str) -> str:
    return ", ".join(f"{_FIELDS[quantity](step):.3g}" for step in steps)


def put(readme: Path, part: str, text: str) -> None:
    """Replace what stands between the marks of a part.

    Raises:
        DsParityError: the marks don't stand there once each.
    """
    begin, end = MARKS[part]
    page = readme.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise DsParityError(f"{readme}: the marks {begin} and {end} must stand there once each")
    before, rest = page.split(begin)
    readme.write_text(f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")


def main() -> int:
    """Parse, replace, say what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=MARKS)
    parser.add_argument("source", type=Path, help="what the harness left behind: matrix.md, or the controls' folder")
    parser.add_argument("--readme", type=Path, default=README)
    given = parser.parse_args()
    if not given.source.exists():
        print(f"{given.source}: there is no such file; run make {given.part}", file=sys.stderr)
        return 2
    try:
        text = figures(given.source) if given.part == "figures" else given.source.read_text()
        put(given.readme, given.part, text)
    except DsParityError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{given.readme}: {len(text.splitlines())} lines between the marks of {given.part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
