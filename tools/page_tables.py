"""Tables of README.md and docs/ that are made of the package itself, or of what the harness left."""

import ast
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from ds_parity.config import Settings
from ds_parity.config.settings import key_path
from ds_parity.errors import DsParityError
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.doctor.measured import FAULT, PATH, RIGHT, measured
from ds_parity.parity.subjects.controls.known import known
from ds_parity.planning import Rollout, plan
from ds_parity.trace import StepRecord, read_trace
from tools.from_pipelinerl.quotas import deal, packed

FAULTS = Path(__file__).parent / "deepspeed_faults"
# What a reader sees, by the cause that `ds-parity compare` names.
SYMPTOMS = {
    "dp-mean-left-in": "the gradient norm is half of the right one on two ranks, and a quarter on four",
    "gas-scaled-twice": "the gradient norm is the right one divided by the number of passes",
    "divided-already": "the gradient norm is the right one divided by the rollouts or tokens of the step",
    "sum-over-ranks": "the gradient norm is the right one times or divided by the number of ranks",
    "constant-factor": "the gradient norm is wrong by the same factor in all steps",
    "another-divisor": "the gradients have the right direction, and another length in every step",
    "mean-of-micro-batches": "gradient norms are wrong by a different factor in every step, and losses agree",
    "weighed-by-another-unit": "the same, and windows have rollouts of unequal lengths",
    "term-by-another": "the means of all loss terms agree, and loss and gradient norm do not",
    "term-of-last-window": "the means of all loss terms agree; from the second step on, loss and gradient norm do not",
    "target-not-actual": "the gradient norm of each step is the right one times total / target",
    "idle-counted": "gradient norms shrink where ranks idle",
    "idle-nan": "the loss or the gradient norm becomes NaN in a step with idle passes",
    "boundary-off-by-one": "step 1 contains one micro-batch, or every window ends a pass early",
    "local-count": "every window contains the target times the number of ranks",
    "another-target": "windows end at another number of rollouts, and begin where the one before has ended",
    "another-overshoot": "the surplus of a window counts in the next one in one run, and not in the other",
    "equality-boundary": "a window does not end where micro-batches jump over the target",
    "partial-window-leak": "rollouts at the end of the data appear in no step",
    "scheduler-per-pass": "the learning rate changes with every pass, and not with every step",
    "scheduler-budget-in-passes": "the learning rate hardly changes",
    "scheduler-on-skipped-step": "the learning rate changes in a step that an overflow skipped",
    "no-scheduler": "the learning rate does not change",
    "schedule-off-by-steps": "the learning rates are those of other steps, from the first step or from a resume on",
    "scheduler-stepped-often": "the learning rate changes two or more times too fast",
    "another-lowest-lr": "the learning rate comes down to another lowest value",
    "another-highest-lr": "the learning rate goes up to another highest value",
    "another-warm-up": "the learning rates of the warm-up are others, and later ones agree",
    "base-lr": "the learning rate is wrong by the same factor in all steps",
    "lr-reported-a-step-off": "the learning rate of each step is that of the next one, and everything else agrees",
    "last-backward-only": "on ZeRO 1 and 2 the gradient is that of the last micro-batch",
    "first-passes-lost": "the gradient is that of the window without its first passes",
    "rank-left-out": "the gradient is that of all ranks but one",
    "gradient-not-zeroed": "from the second step on, the gradient of the step before is added to each",
    "mask-left-out": "the loss is that of all tokens, prompts with them",
    "late-boundary": "gradient norms are wrong, losses agree, and your loop sets the boundary flag itself",
    "implicit-clip": "loss, learning rate and gradient norm agree, and weights do not, from a large gradient on",
    "weight-decay": "loss, learning rate and gradient norm agree, and weights differ by a share of themselves",
    "lr-in-use": "updates have the right direction and another length, and learning rate and gradient norm agree",
    "loss-with-this-gradient": "the loss has other values, and gradient norms and weights agree",
    "returned-loss-scaled": "the loss is the right one divided by the number of passes, and weights agree",
    "metrics-mean-of-ranks": "the reported loss is wrong, and gradient norm and weights agree",
    "reported-norm": "the reported gradient norm is wrong, and weights agree",
    "resume-resets-schedule": "all agrees up to a resume, and then the learning rate begins again",
    "resume-resets-window": "all agrees up to a resume, and then windows begin at other rollouts",
    "resume-loses-optimizer": "all agrees up to a resume, and then weights differ by the momentum",
    "adam-step-count": "all agrees up to a resume, and then Adam's updates are longer, less so with every step",
    "resume-repeats-data": "all agrees up to a resume, and then the tokens of step 1 appear again",
    "initial-weights": "weights are far apart after step 1, and stay as far apart",
    "data-or-seed": "step 1 has the same learning rate and rollouts, and another loss",
}
STEPS = 3
# The comparison of a plan with PipelineRL's quotas.
WINDOW, MAX_TOKENS, RANKS = 64, 2048, (2, 4, 8, 16)
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
    for path in sorted(FAULTS.glob("[!_]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        summary, command, *details = docstring.split("\n\n")
        if path.stem not in remedies:
            raise DsParityError(f"{FAULTS / 'README.md'}: there is no row for {path.stem}")
        overview.append(f"| [{path.stem}](#{path.stem}) | {summary} |")
        remedy = fill(f"**ds_parity** {remedies[path.stem]}.", 120, break_long_words=False, break_on_hyphens=False)
        parts = [f"## {path.stem}", f"**{summary}**", *details, remedy, command]
        sections.append("\n\n".join(parts))
    return "\n\n".join(["\n".join(overview), *sections]) + "\n"


def fault_versions() -> str:
    """Return the table fault x version, as it was measured, and notes on cells that a word does not tell all of."""
    versions, newest = list(measured()), list(measured())[-1]
    names = sorted({name for scripts in measured().values() for name in scripts})
    rows = ["| script | " + " | ".join(versions) + " |", "|---" * (1 + len(versions)) + "|"]
    notes: dict[str, int] = {}
    for name in names:
        usual = _at_fault(measured()[newest].get(name, {}))
        cells = [_cell(measured()[version].get(name, {}), usual, notes) for version in versions]
        rows.append(f"| [{name}](#{name}) | " + " | ".join(cells) + " |")
    told = [_wrapped(f"{number}. ", note.rstrip(".") + ".") for note, number in notes.items()]
    torches = ", ".join(sorted(set(json.loads(PATH.read_text())["torch"].values())))
    return "\n\n".join(["\n".join(rows), f"Measured with torch {torches}. Notes:", "\n".join(told)]) + "\n"


def _wrapped(mark: str, text: str) -> str:
    return fill(mark + text, 120, subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False)


def _at_fault(places: dict[str, str]) -> list[str]:
    return [place for place, outcome in places.items() if outcome == FAULT]


def _cell(places: dict[str, str], usual: list[str], notes: dict[str, int]) -> str:
    """Return what a version does: a word, and numbers of notes where places differ from those of the newest version."""
    if not places:
        return "not run"
    if all(outcome.startswith("not there") for outcome in places.values()):
        return "not there"
    others: dict[str, list[str]] = {}
    for place, outcome in places.items():
        if outcome not in (FAULT, RIGHT):
            others.setdefault(outcome, []).append(place)
    faults = _at_fault(places)
    told = [f"{'; '.join(named)}: {outcome.partition(': ')[2]}" for outcome, named in others.items()]
    if faults and faults != usual:
        told.insert(0, f"The fault is there on {'; '.join(faults)}")
    word = "**fault**" if faults else "other" if others else "right"
    return f"{word} [{notes.setdefault('. '.join(told), len(notes) + 1)}]" if told else word


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


def quotas() -> str:
    """Return the passes of PipelineRL's quotas beside those of a plan, for all bundled rollouts."""
    rollouts = load_rollouts()
    windows = [rollouts[at : at + WINDOW] for at in range(0, len(rollouts) - WINDOW + 1, WINDOW)]
    columns = [_quotas(windows, ranks) for ranks in RANKS]
    names = ("passes with quotas", "idle passes with quotas, on all ranks", "passes, planned", "idle passes, planned")
    rows = ["| | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |", "|---" * (1 + len(RANKS)) + "|"]
    for name, counts in zip(names, zip(*columns, strict=True), strict=True):
        rows.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows) + "\n"


def _quotas(windows: list[Sequence[Rollout]], ranks: int) -> tuple[int, int, int, int]:
    """Passes, and idle passes of all ranks: with quotas, and planned."""
    rows = [row for window in windows for row in deal(window, ranks, packed(MAX_TOKENS))]
    planned = plan(list(chain(*windows)), dp_world_size=ranks, target=WINDOW, max_tokens=MAX_TOKENS)
    return len(rows), sum(row.count([]) for row in rows), planned.passes, planned.idle_passes


def controls(folder: Path) -> str:
    """Return how many controls were caught and named, for each configuration.

    Args:
        folder: of files that `ds-parity controls CONFIGURATION.json --json` printed, each with the name of its
            configuration.
    """
    rows = [
        "| configuration | faults caught | named first | false alarms | weakest signal / greatest noise |",
        "|" + "---|" * 5,
    ]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        faults = [one for one in result["findings"] if not one["clean"]]
        clean = [one for one in result["findings"] if one["clean"]]
        caught, named = sum(one["caught"] for one in faults), sum(_named(one) for one in faults)
        alarms = sum(one["caught"] for one in clean)
        _, _, margins = result["summary"].partition("the weakest signal over the greatest noise: ")
        least = min((float(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= in )", margins)), default=None)
        cells = [f"{caught} of {len(faults)}", str(named), f"{alarms} of {len(clean)}"]
        rows.append(f"| `{path.name}` | {' | '.join(cells)} | {'-' if least is None else f'{least:,.0f}'} |")
    return "\n".join(rows) + "\n"


def _named(finding: dict[str, Any]) -> bool:
    """Whether the first cause is the fault, or one that leaves the same traces."""
    name = finding["engine"]
    return bool(finding["causes"]) and finding["causes"][0]["name"] in (name, *known()[name].like)


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
        "| what the loop does | steps 1 to 3 | right, and with ds_parity | with this loop | is the loss right? |",
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
