"""Counts that are logged otherwise, where nothing else differs: no other window has the same losses and norms."""

import json

import pytest

from tests.commands import ds_parity

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
