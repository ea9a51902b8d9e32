"""A comparison for people: a table and a verdict."""

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from ds_parity.parity.comparison.bounds import greatest
from ds_parity.parity.comparison.fields import Comparison, Difference, HiddenRows, Row
from ds_parity.parity.diagnosis import Cause, Diagnosis, grouped

COLUMNS = ("step", "passes", "rollouts", "loss", "lr", "grad norm", "greatest difference", "")
_ABSENT = "-"


def render(comparison: Comparison) -> Table:
    """One line a step: the candidate's counts and figures, what lies furthest off, and `ok` or `DIFFERS`."""
    table = Table(title=f"candidate against reference, {comparison.tier} tier ({comparison.dtype})")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("greatest difference", "") else "right")
    for row in in_order(comparison.rows, comparison.hidden):
        if isinstance(row, HiddenRows):
            table.add_section()
            table.add_row(*[""] * (len(COLUMNS) - 2), hidden_rows(row), style="dim")
            table.add_section()
        else:
            table.add_row(*cells(row), style="bold red" if row.differences else None)
    return table


def in_order(rows: Iterable[Row], hidden: Iterable[HiddenRows]) -> Iterator[Row | HiddenRows]:
    """Rows, with what is left out between them in its place."""
    behind = {one.after: one for one in hidden}
    for row in rows:
        yield row
        if row.step in behind:
            yield behind[row.step]


def hidden_rows(rows: HiddenRows) -> str:
    """What is not shown, in a sentence."""
    differing = (
        f"{rows.differing} of them {'differs' if rows.differing == 1 else 'differ'}" if rows.differing else "all equal"
    )
    return f"{number(rows.count, 'step')} left out between {rows.after} and {rows.before}: {differing}"


def verdict(comparison: Comparison) -> str:
    """The notes, then equal or not with the numbers, then what was not compared.

    Equal: how near each bounded field came to its bound. Not equal: the first difference.
    """
    lines = [f"note: {note}" for note in comparison.notes]
    steps = number(comparison.steps, "step")
    first = comparison.first
    if first is None:
        lines.append(f"equal: {steps}; {_nearest(comparison)}")
    else:
        count = number(comparison.count, "difference")
        lines.append(f"differs: {count} in {steps} ({comparison.tier} tier); the first: {sentence(first)}")
    if comparison.not_compared:
        lines.append(f"not compared: {', '.join(comparison.not_compared)}")
    return "\n".join(lines)


def explained(diagnosis: Diagnosis, most: int = 3) -> list[str]:
    """What is known of a difference, in lines: causes that fit or none, what is certain, and what would tell."""
    groups = grouped(diagnosis.causes)
    lines = [line for group in groups[:most] for line in _group(group)]
    if len(groups) > most:
        lines.append(f"    also fit: {', '.join(cause.name for group in groups[most:] for cause in group)}")
    if diagnosis.classes and not groups:
        lines.append(
            f"cause: unknown. No known fault predicts this record; it is one of {', '.join(diagnosis.classes)}"
        )
    lines += [f"    certain: {fact}" for fact in diagnosis.certain]
    if diagnosis.not_excluded:
        lines.append(f"    some known faults that leave such a record: {', '.join(diagnosis.not_excluded)}")
    if diagnosis.next:
        lines.append(f"    what would tell: {diagnosis.next}")
    return lines


def how_sure(cause: Cause) -> str:
    """How a cause fits, and how often one with such a fit was right."""
    return f"{cause.fit.words}; {cause.fit.measured}"


def _group(group: Sequence[Cause]) -> Iterator[str]:
    """Causes that the record can't tell apart."""
    first = group[0]
    names = (
        first.name if len(group) == 1 else f"one of {', '.join(it.name for it in group)} (the record fits them alike)"
    )
    yield f"likely cause ({first.likelihood:.0%}): {names}: {first.evidence}"
    yield f"    fit: {how_sure(first)}"
    for it in group:
        yield f"    remedy: {it.remedy}" if len(group) == 1 else f"    remedy of {it.name}: {it.remedy}"


def sentence(difference: Difference) -> str:
    """A difference in a sentence: where, both values in full, how far apart, and the rule."""
    where = "all steps" if difference.step is None else f"step {difference.step}"
    values = f"candidate {difference.candidate!r}, reference {difference.reference!r}"
    if difference.difference is None or difference.bound is None:
        return f"{where}, {difference.field}: {values}: {difference.why}"
    numbers = f"difference {difference.difference:.3g}, bound {difference.bound:.3g}"
    return f"{where}, {difference.field}: {values} ({numbers}): {difference.why}"


def _nearest(comparison: Comparison) -> str:
    """What makes equal traces equal; without anything to bound, all that is compared is compared bit for bit."""
    if not comparison.measured:
        return "every compared field bit for bit"
    parts = (f"{it.field} {it.difference:.2g} of {it.bound:.2g} allowed" for it in comparison.measured)
    return f"greatest difference {', '.join(parts)}"


def cells(row: Row) -> tuple[str, ...]:
    """A step's line: what stands under `COLUMNS`."""
    record = row.candidate
    if record is None:
        figures = (str(row.step), *[_ABSENT] * 5)
    else:
        lr = ", ".join(_figure(value) for value in record.lr or ()) or _ABSENT
        figures = (
            str(row.step),
            _count(record.passes),
            _count(record.rollouts),
            _figure(record.loss),
            lr,
            _figure(record.grad_norm),
        )
    return (*figures, _furthest(row), "DIFFERS" if row.differences else "ok")


def _furthest(row: Row) -> str:
    """What fails, if something does; the greatest difference otherwise."""
    if row.differences:
        first = row.differences[0]
        return first.field if first.difference is None else f"{first.difference:.2e} {first.field}"
    known = [(name, getattr(row, name)) for name in ("loss", "lr", "grad_norm", "weights")]
    known = [(name, value) for name, value in known if value is not None]
    most = greatest(value for _, value in known)
    names = [name for name, value in known if value == most or math.isnan(value)]
    return f"{most:.2e} {names[0]}" if names else _ABSENT


def _figure(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.6g}"


def _count(value: int | None) -> str:
    return _ABSENT if value is None else str(value)


def number(count: int, noun: str) -> str:
    """A count with its noun, in the plural where it isn't 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def coefficients(measured: list[list[float]], expected: list[list[float]], term: str = "") -> Table:
    """A row a pass, a column a rank: the coefficient measured, beside the one expected; red where they differ."""
    ranks = len(expected[0])
    what, nothing = (f"the term {term} of each micro-batch", "0") if term else ("each micro-batch", "idle")
    table = Table(title=f"with what coefficient {what} entered the step: measured | expected")
    table.add_column("pass", justify="right")
    for rank in range(ranks):
        table.add_column(f"rank {rank}", justify="right")
    largest = max(max(row) for row in expected)
    for index, (got, wanted) in enumerate(zip(measured, expected, strict=True)):
        cells = [_coefficient(a, b, largest, nothing) for a, b in zip(got, wanted, strict=True)]
        table.add_row(str(index), *cells)
    return table


def _coefficient(measured: float, expected: float, largest: float, nothing: str) -> str:
    text = f"{measured:8.5f} | {expected:.5f}" if expected else f"{measured:8.5f} | {nothing}"
    return text if abs(measured - expected) <= 0.05 * largest else f"[bold red]{text}[/bold red]"
