"""From what the ranks answered to a verdict on each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from ds_parity.config import versions
from ds_parity.config.releases import Release
from ds_parity.engine.ranks.hostsum import CAPACITY
from ds_parity.errors import DsParityError
from ds_parity.parity.matrix.cell_runs import Answers, calls_of
from ds_parity.parity.matrix.cells import CHECKS, Cell
from ds_parity.parity.matrix.known_faults import FAULTS
from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from ds_parity.parity.report.terminal import sentence
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.verification.verify import outcome, title

# A second copy of the gradients would be 1; a window's other allocations differed by less than 0.001.
_MEMORY = 0.1
# Bytes that an exchange holds while a backward runs, whatever the model: the message that comes in has room for
# CAPACITY numbers, and the one that goes out may fill it. Beside LoRA's 5 KB of gradients 1,016 bytes were measured.
_MESSAGES = 2 * 8 * CAPACITY


class Status(StrEnum):
    """What a check, or a cell, came to."""

    RIGHT = "right"
    CORRECTED = "corrected"
    REFUSED = "refused"
    NOT_RUN = "not run"
    LEFT_OUT = "left out"
    DIFFERS = "differs"
    FAILED = "failed"


@dataclass(frozen=True)
class CellFinding:
    """One check of a cell. `corrected`: DeepSpeed's own run is wrong, ds_parity's is right."""

    check: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Result:
    """One cell."""

    cell: Cell
    findings: tuple[CellFinding, ...]
    seconds: float

    @property
    def status(self) -> Status:
        """The worst status of its checks."""
        order = (Status.FAILED, Status.DIFFERS, Status.NOT_RUN, Status.REFUSED, Status.CORRECTED, Status.RIGHT)
        statuses = {finding.status for finding in self.findings}
        return next((status for status in order if status in statuses), Status.FAILED)

    @property
    def good(self) -> bool:
        """Whether the cell is right, or refused as it should be, or can't be run here."""
        return self.status in (Status.RIGHT, Status.CORRECTED, Status.REFUSED, Status.NOT_RUN)

    @property
    def why(self) -> str:
        """What to know of the cell beyond its status: the first finding that gave it."""
        return next((f"{f.check}: {f.detail}" for f in self.findings if f.status is self.status), "nothing was checked")


def judge(cell: Cell, answers: Answers, folder: Path, here: Release | None = None) -> Result:
    """Return what the answers and traces of a cell come to.

    Args:
        cell: of the matrix.
        answers: of its calls.
        folder: where traces lie.
        here: the DeepSpeed that they were made with; None: one of which nothing is known.
    """
    if cell.not_run is not None:
        return Result(cell, (CellFinding("not run", Status.NOT_RUN, cell.not_run),), 0.0)
    mine = {at: answers[at] for at in (one.title for one in calls_of(cell, folder)) if at in answers}
    seconds = sum(answer.get("seconds", 0.0) for answer in mine.values())
    refused = cell.refusal or _engine_refusal(cell, mine)
    if refused is not None:
        return Result(cell, (_refusal(cell, refused, here),), seconds)
    if _to_be_refused(cell, here):
        detail = "ds_parity takes what the matrix, or the table of releases, says it refuses"
        return Result(cell, (CellFinding("refusal", Status.DIFFERS, detail),), seconds)
    return Result(cell, tuple(_finding(check, cell, mine, folder, here) for check in CHECKS), seconds)


def _engine_refusal(cell: Cell, answers: Answers) -> str | None:
    asked = (f"{cell.name}: refusal", title(cell.ragged, "ds_parity"))
    said = next((answers[at]["raised"] for at in asked if "raised" in answers.get(at, {})), None)
    kind, _, reason = (said or "").partition(": ")
    # A loop, or a model, may be refused where it runs.
    kinds = ("ConfigError", "WindowError") if cell.stage in cell.variant.refused else ("ConfigError",)
    return reason if kind in kinds else None


def _refusal(cell: Cell, reason: str, here: Release | None) -> CellFinding:
    expected = Status.REFUSED if _to_be_refused(cell, here) else Status.DIFFERS
    return CellFinding("refusal", expected, reason.removeprefix("1 fault: "))


def _to_be_refused(cell: Cell, here: Release | None) -> bool:
    """Return whether the matrix says that a cell is refused everywhere, or the table of releases that it is here."""
    if cell.stage in cell.variant.refused:
        return True
    by_call = any(versions.refused_by_call(name, here, _accelerator()) is not None for name in cell.calls)
    return by_call or (here is not None and any(versions.refused(cell.ragged.config, here)))


@cache
def _accelerator() -> str:
    # Not with the module: DeepSpeed takes seconds to import, and most of what reads results asks for nothing of it.
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def _finding(check: str, cell: Cell, answers: Answers, folder: Path, here: Release | None) -> CellFinding:
    if check in cell.left_out:
        return CellFinding(check, Status.LEFT_OUT, cell.left_out[check])
    checks: dict[str, Callable[[], CellFinding]] = {
        "probe": lambda: _probe(cell, answers),
        "memory": lambda: _memory(cell, answers, _known_of(cell, here)),
    }
    try:
        return checks.get(check, lambda: _comparison(check, cell, answers, folder, here))()
    except _UnansweredError as error:
        return _unanswered(check, cell, error, _known_of(cell, here) if error.engine in _BARE else None)
    except DsParityError as error:
        return CellFinding(check, Status.FAILED, f"{type(error).__name__}: {error}")


def _unanswered(check: str, cell: Cell, error: _UnansweredError, known: str | None) -> CellFinding:
    if known is None:
        return CellFinding(check, Status.FAILED, str(error))
    if check == "memory":
        return CellFinding(check, Status.LEFT_OUT, f"there is nothing to compare with: {error}")
    return _excused(check, cell, f"{known} (bare, {error})")


_BARE = ("deepspeed", "deepspeed-loop")


def _excused(check: str, cell: Cell, known: str) -> CellFinding:
    """Return what a difference from a DeepSpeed comes to that is known to be wrong."""
    if not _is_judged(cell):
        return CellFinding(check, Status.NOT_RUN, f"nothing can judge it here: {known}, and it is the only reference")
    return CellFinding(check, Status.CORRECTED, known)


def _is_judged(cell: Cell) -> bool:
    """Return whether something judges the cell that is not DeepSpeed's: only that can show that ds_parity is right."""
    return not {"torch", "probe"} <= cell.left_out.keys()


def _known_of(cell: Cell, here: Release | None) -> str | None:
    """Return what this DeepSpeed is known to get wrong of what the cell asks for, and ds_parity corrects.

    What no release gets right is not among it: such a fault belongs to the matrix (`Variant.faults`), and
    `deepspeed-loop` corrects what it can of it, so that a difference from it is ours.
    """
    if here is None:
        return None
    known = versions.asked_for(cell.ragged.config, here, versions.Verdict.CORRECTED)
    said = (f"DeepSpeed {here}: {entry.what} ({entry.evidence}); corrected" for _, entry in known if entry.right_from)
    return next(said, None)


class _UnansweredError(Exception):
    """A call of the cell raised, or was never reached.

    Attributes:
        engine: that was to run.
    """

    def __init__(self, engine: str, raised: str) -> None:
        super().__init__(f"{engine}: {raised}")
        self.engine = engine


def _answer(answers: Answers, at: str) -> dict[str, Any]:
    answer = answers.get(at, {"raised": "it was not run"})
    if "raised" in answer:
        raise _UnansweredError(at.rsplit(": ", maxsplit=1)[-1], answer["raised"])
    return answer


def _probe(cell: Cell, answers: Answers) -> CellFinding:
    answer = _answer(answers, cell.probed.name)
    result = ProbeResult(**{name: value for name, value in answer.items() if name != "seconds"})
    limit = TOLERANCE[cell.probed.dtype]
    detail = result.said(limit)
    return CellFinding("probe", Status.RIGHT if result.within(limit) else Status.DIFFERS, detail)


def _comparison(reference: str, cell: Cell, answers: Answers, folder: Path, here: Release | None) -> CellFinding:
    scenario = cell.uniform if reference == "deepspeed" else cell.ragged
    for engine in (reference, "ds_parity"):
        _answer(answers, title(scenario, engine))
    comparison = outcome(scenario, reference, folder).comparison
    fault = FAULTS.get(cell.variant.faults.get(cell.stage, "")) if reference == "deepspeed" else None
    if comparison.equal:
        mended = f"; {fault.name} is not to be seen here: has DeepSpeed mended it?" if fault else ""
        return CellFinding(reference, Status.RIGHT, f"{comparison.steps} steps equal{mended}")
    assert comparison.first is not None
    if fault is not None:
        return CellFinding(reference, Status.CORRECTED, f"DeepSpeed: {fault.what} ({fault.script}); {fault.remedy}")
    if reference in _BARE and (wrong := _known_of(cell, here)) is not None:
        return _excused(reference, cell, wrong)
    return CellFinding(reference, Status.DIFFERS, sentence(comparison.first))


def _memory(cell: Cell, answers: Answers, known: str | None) -> CellFinding:
    ds_parity, by_hand = (_answer(answers, title(cell.ragged, engine)) for engine in ("ds_parity", "deepspeed-loop"))
    if not ds_parity["peaks"]:
        return CellFinding("memory", Status.FAILED, "there was no second step to measure")
    # A copy is there in every window; what a thread frees late is not.
    gradients = _gradient_bytes(cell.ragged, ds_parity["parameters"])
    extra = (min(ds_parity["peaks"]) - min(by_hand["peaks"])) / gradients
    too_much = extra > _MEMORY + _MESSAGES / gradients
    detail = f"peak of a step {extra:+.4f} of the gradients, compared with DeepSpeed in a hand-written loop"
    if too_much and known is not None:
        # Gradients that a step forgets to clear cost the next one nothing.
        return CellFinding("memory", Status.LEFT_OUT, f"{detail}, whose step is wrong: {known}")
    return CellFinding("memory", Status.DIFFERS if too_much else Status.RIGHT, detail)


def _gradient_bytes(scenario: Scenario, parameters: int) -> float:
    stage = scenario.config["zero_optimization"]["stage"]
    return (
        parameters
        * (4 if scenario.storage == "fp32" else 2)
        / (scenario.ranks * scenario.sequence_parallel if stage >= 2 else 1)
    )


def equal(results: Iterable[Result]) -> bool:
    """Whether cells were run, and all are good."""
    every = list(results)
    run = [result for result in every if result.status is not Status.NOT_RUN]
    return bool(run) and all(result.good for result in every)
