"""Counts that are logged otherwise, where nothing else differs: no other window has the same losses and norms."""

import json

import pytest

from ds_parity.parity.diagnosis.certain import OTHER_SPLIT
from ds_parity.trace import Trace
from tests.commands import ds_parity
from tests.parity.test_forgotten_lengths import found, run, times

NUMBERS = [(2.30123, 1.04217, 80), (4.17442, 2.58109, 85), (2.88071, 1.93466, 87), (3.08592, 2.05318, 81)]


def written(path, times, digits, columns):
    """A log in JSON lines, in which rollouts are so many times the true ones."""
    with path.open("w") as out:
        for step, (loss, norm, tokens) in enumerate(NUMBERS, start=1):
            row = {
                "step": step,
                "loss": float(f"{loss:.{digits}g}"),
                "grad_norm": float(f"{norm:.{digits}g}"),
                "lr": 0.1,
            }
            row |= {"rollouts": int(18 * times), "tokens": tokens, "passes": 3, "total": 18.0}
            out.write(json.dumps({name: row[name] for name in columns}) + "\n")


KNOWN = ["step", "loss", "grad_norm", "lr", "rollouts"]


@pytest.mark.parametrize("digits", [5, 6])
@pytest.mark.parametrize("times", [2, 0.5, 4])
@pytest.mark.parametrize("columns", [KNOWN, [*KNOWN, "tokens"], [*KNOWN, "tokens", "passes"]])
def test_rollouts_alone_are_logged_otherwise(tmp_path, columns, times, digits):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, factor in zip(paths, (1, times), strict=True):
        written(path, factor, digits, columns)
    maps = [word for name in columns[4:] for word in ("--map", f"{name}={name}")]
    ran = ds_parity("compare", *paths, "--json", *maps)
    causes = json.loads(ran.stdout)["causes"]
    assert causes[0]["name"] == "reported-counts", causes


@pytest.mark.parametrize("change", [{"passes": 2}, {"passes": 8, "idle_passes": 1}])
def test_passes_alone_may_be_of_micro_batches_of_another_size(change):
    one = run()
    other = Trace(one.header, tuple(it.model_copy(update=change) for it in one.steps))
    diagnosis = found(one, other)
    assert diagnosis.causes == ()
    assert diagnosis.classes == ("data", "logging")
    assert "micro-batches of another size make the same step" in diagnosis.certain[0]


def test_passes_beside_rollouts_are_logged_otherwise():
    one = run()
    other = Trace(one.header, tuple(it.model_copy(update={"passes": 2, "rollouts": 24}) for it in one.steps))
    assert [cause.name for cause in found(one, other).causes] == ["reported-counts"]


@pytest.mark.parametrize("options", [{"scale": times(2.0)}, {"logged": lambda at, norm: norm / 4}, {"decay": 0.1}])
def test_passes_of_another_split_hide_no_other_fault(options):
    """What differs beside them is named as it is where passes are the same."""
    one, other = run(told=False), run(told=False, **options)
    halves = Trace(other.header, tuple(it.model_copy(update={"passes": 8, "idle_passes": 1}) for it in other.steps))
    alike, split = found(one, other), found(one, halves)
    assert [cause.name for cause in split.causes] == [cause.name for cause in alike.causes]
    assert split.classes == alike.classes
    *others, said = split.certain
    assert tuple(others) == alike.certain
    assert said.startswith(
        f"{len(one.steps)} windows of the same rollouts have another number of passes, from step 1 on"
    )


def test_a_window_that_alone_has_other_passes_is_said():
    one = run()
    other = Trace(one.header, tuple(it.model_copy(update={"passes": 3} if it.step == 4 else {}) for it in one.steps))
    assert (
        found(one, other)
        .certain[0]
        .startswith("a window of the same rollouts has another number of passes, from step 4 on")
    )


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        (({"total": 8.0}, {"total": 4.0}), False),
        (({"total": 7.0, "idle_passes": 1}, {"total": 3.0, "idle_passes": 1}), False),
        (({"total": 900.0}, {"total": 901.0}), True),
        (({"rollouts": 12}, {"rollouts": 13}), False),
        (({"rollouts": None}, {"rollouts": None}), False),
    ],
)
def test_passes_of_other_windows_or_that_these_are_divided_by_are_no_other_split(changes, split):
    """With the weight `pass` another split is another mean; a total of tokens that differs is of another fault."""
    sides = [
        Trace(
            run().header,
            tuple(it.model_copy(update={"passes": passes, "loss": loss, **change}) for it in run().steps),
        )
        for passes, loss, change in zip((4, 2), (1.0, 9.0), changes, strict=True)
    ]
    assert any(OTHER_SPLIT in said for said in found(*sides).certain) is split
