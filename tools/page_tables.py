"""Tables of README.md and docs/ that are made of the package itself: keys, symptoms, DeepSpeed's faults, figures."""

import ast
import json
import re
from pathlib import Path

from ds_parity.config import Settings
from ds_parity.config.settings import key_path
from ds_parity.errors import DsParityError
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.subjects.controls.known import known
from ds_parity.trace import StepRecord, read_trace

FAULTS = Path(__file__).parent / "deepspeed_faults"
# What a reader sees, by the cause that `ds-parity compare` names.
SYMPTOMS = {
    "dp-mean-left-in": "the gradient norm is half of the right one on two ranks, and a quarter on four",
    "gas-scaled-twice": "the gradient norm is too small by the number of passes",
    "divided-already": "the gradient norm is too small by the total: the number of rollouts or tokens of a step",
    "sum-over-ranks": "the gradient norm is off by the number of ranks, and your code divides the loss",
    "constant-factor": "the gradient norm is off by one factor in all steps",
    "another-divisor": "the gradients have the right direction, and another length in every step",
    "mean-of-micro-batches": "gradient norms are off by another factor in every step, and losses agree",
    "term-by-another": "the means of all loss terms agree, and loss and gradient norm do not",
    "term-of-last-window": "the same, from the second step on",
    "target-not-actual": "gradient norms are off by total / target",
    "idle-counted": "gradient norms shrink where ranks idle",
    "idle-nan": "the loss or the gradient norm becomes NaN in a step with idle passes",
    "boundary-off-by-one": "step 1 contains one micro-batch",
    "local-count": "windows are too long by the number of ranks",
    "equality-boundary": "a window does not end where micro-batches jump over the target",
    "partial-window-leak": "rollouts at the end of the data appear in no step",
    "scheduler-per-pass": "the learning rate changes too fast by the number of passes in a window",
    "scheduler-budget-in-passes": "the learning rate hardly changes",
    "scheduler-on-skipped-step": "the learning rate changes in a step that an overflow skipped",
    "no-scheduler": "the learning rate does not change",
    "schedule-off-by-steps": "the learning rates are those of other steps, from the first step or from a resume on",
    "scheduler-stepped-often": "the learning rate changes two or more times too fast",
    "base-lr": "the learning rate is off by one factor in all steps",
    "lr-reported-a-step-off": "the learning rate of each step is that of the next one, and everything else agrees",
    "last-backward-only": "on ZeRO 1 and 2 the gradient is that of the last micro-batch",
    "late-boundary": "gradient norms are off, losses agree, and your loop sets the boundary flag itself",
    "implicit-clip": "loss, learning rate and gradient norm agree, and weights do not, from a large gradient on",
    "weight-decay": "the same, and weights differ by a share of themselves",
    "lr-in-use": "the same, and updates have the right direction and another length",
    "returned-loss-scaled": "the loss is too small by the number of passes, and weights agree",
    "metrics-mean-of-ranks": "the reported loss is off, and gradient norm and weights agree",
    "reported-norm": "the reported gradient norm is off, and weights agree",
    "resume-resets-schedule": "all agrees up to a resume, and then the learning rate begins again",
    "resume-resets-window": "all agrees up to a resume, and then windows are cut differently",
    "resume-loses-optimizer": "all agrees up to a resume, and then weights differ by the momentum",
    "adam-step-count": "all agrees up to a resume, and then Adam's updates are longer, less so with every step",
    "resume-repeats-data": "all agrees up to a resume, and then the tokens of step 1 appear again",
    "initial-weights": "weights are far apart after step 1, and stay as far apart",
    "data-or-seed": "step 1 has the same learning rate and rollouts, and another loss",
}
STEPS = 3
# What people write by hand, by the control that does so, and the quantity in which it shows.
BY_HAND = {
    "mean-of-micro-batches": ("it averages the means of the micro-batches", "gradient norm"),
    "dp-mean-left-in": (
        "it divides by the total of all ranks, and DeepSpeed then averages over ranks",
        "gradient norm",
    ),
    "gas-scaled-twice": ("it divides by the number of passes, and DeepSpeed does so again", "gradient norm"),
    "scheduler-per-pass": ("it steps the scheduler after every pass", "learning rate"),
    "boundary-off-by-one": ("it tests `micro_step % n == 0` before it counts the pass", "rollouts"),
}
_FIELDS = {
    "gradient norm": lambda step: step.grad_norm,
    "learning rate": lambda step: step.lr[0],
    "rollouts": lambda step: step.rollouts,
}


def keys() -> str:
    """Return the table of the configuration's keys."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        # Required but for windows that the caller ends, as its meaning says.
        required = field.is_required() or name == "gradient_accumulation_passes"
        default = "required" if required else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{key_path(name)}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def symptoms() -> str:
    """Return the table from what a reader sees to the cause and its remedy."""
    rows = ["| you see | possible cause | what to do |", "|---|---|---|"]
    rows += [f"| {seen} | *{name}* | {REMEDIES[name]} |" for name, seen in SYMPTOMS.items()]
    return "\n".join(rows) + "\n"


def faults() -> str:
    """Return a table of DeepSpeed's faults, and a section for each: its script's docstring, and what ds_parity does.

    Raises:
        DsParityError: the table in the scripts' folder lacks one.
    """
    remedies = _what_ds_parity_does()
    overview, sections = ["| script | fault |", "|---|---|"], []
    for path in sorted(FAULTS.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        summary, command, *details = docstring.split("\n\n")
        if path.stem not in remedies:
            raise DsParityError(f"{FAULTS / 'README.md'}: there is no row for {path.stem}")
        overview.append(f"| [{path.stem}](#{path.stem}) | {summary} |")
        parts = [f"## {path.stem}", f"**{summary}**", *details, f"**ds_parity** {remedies[path.stem]}.", command]
        sections.append("\n\n".join(parts))
    return "\n\n".join(["\n".join(overview), *sections]) + "\n"


def _what_ds_parity_does() -> dict[str, str]:
    """Return the last column of the table in the scripts' folder, by script; `the same` goes on with the one before."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (FAULTS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != 4 or cells[0] in ("script", "---"):
            continue
        name = cells[0].strip("`") if cells[0].startswith("`") else name
        also = f"{cells[2]}: " if name in found else ""
        found.setdefault(name, []).append(also + re.sub(r"^corrects: (?=[a-z])", "corrects this: it ", cells[3]))
    return {name: "; ".join(texts) for name, texts in found.items()}


def figures(folder: Path, names: tuple[str, ...]) -> str:
    """Return the wrong figures beside the right ones, from the traces of the controls.

    Args:
        folder: what `ds-parity controls` left.
        names: of the faults; keys of `BY_HAND`.

    Raises:
        TraceError: a trace is not there, or can't be read.
        DsParityError: ds_parity's own figures are not the right ones.
    """
    rows = [
        "| what the loop does | steps 1 to 3 | right (and ds_parity) | this loop | loss right? |",
        "|" + "---|" * 5,
    ]
    for name in names:
        description, quantity = BY_HAND[name]
        at = folder / known()[name].scenario
        right, candidate, wrong = (_steps(at / f"{engine}.jsonl") for engine in ("torch", "ds_parity", name))
        printed = [_printed(steps, quantity) for steps in (right, candidate, wrong)]
        if printed[0] != printed[1]:
            raise DsParityError(f"{name}: ds_parity came to {quantity} {printed[1]}, and {printed[0]} is right")
        same = [f"{step.loss:.3g}" for step in right] == [f"{step.loss:.3g}" for step in wrong]
        loss = "yes" if same else "no"
        rows.append(f"| {description} | {quantity} | {printed[0]} | **{printed[2]}** | {loss} |")
    return "\n".join(rows) + "\n"


def _steps(path: Path) -> tuple[StepRecord, ...]:
    return read_trace(path).steps[:STEPS]


def _printed(steps: tuple[StepRecord, ...], quantity: str) -> str:
    return ", ".join(f"{_FIELDS[quantity](step):.3g}" for step in steps)
