"""A ratio that is worse than its kept quartiles fails, where it is so twice: figures made up, nothing is measured."""

import pytest

from benchmarks.checking import CHECKED, ROOT, Ratio, checked, judged, main, ratios
from benchmarks.results import RESULTS, sections


def table(*cells):
    """A section of two columns, one row for each pair of cells."""
    rows = "\n".join(f"| row {number} | {a} | {b} |" for number, (a, b) in enumerate(cells))
    return f"## Time\n\nOurs / theirs.\n\n|  | ZeRO 0 | ZeRO 1 |\n| --- | --- | --- |\n{rows}\n\n*now*\n"


KEPT = table(("1.10 (1.00 .. 1.20)", "0.99 (0.95 .. 1.01), 8 beside 24 passes"))


def runs(*texts):
    """Measures what it is given, one text after the other; knows what it was asked for."""
    left, asked = list(texts), []

    def measure(names):
        asked.append(list(names))
        return dict.fromkeys(names, left.pop(0))

    measure.asked = asked
    return measure


def verdict(section, *texts):
    """Whether the check passes, and what it says."""
    lines = []
    return checked([section], {section: KEPT}, runs(*texts), lines.append), lines


def test_ratios_are_read_with_their_quartiles_and_named_by_row_and_column():
    assert ratios("by-hand", KEPT) == {
        "by-hand, row 0, ZeRO 0": Ratio(1.1, 1.0, 1.2),
        "by-hand, row 0, ZeRO 1": Ratio(0.99, 0.95, 1.01),
    }


@pytest.mark.parametrize(
    ("section", "median", "said"),
    [
        ("by-hand", "1.20", "as kept"),
        ("by-hand", "1.21", "worse"),
        ("by-hand", "0.99", "better"),
        ("recipe", "1.00", "as kept"),
        ("recipe", "0.99", "worse"),
        ("recipe", "1.21", "better"),
    ],
)
def test_a_median_beyond_the_kept_quartile_is_worse_or_better(section, median, said):
    first, other = judged(section, KEPT, table((f"{median} (0.10 .. 9.00)", "0.99 (0.95 .. 1.01)")))
    assert str(first).startswith(said)
    assert str(other).startswith("as kept")


@pytest.mark.parametrize("section", ["by-hand", "recipe"])
def test_the_same_figures_pass_and_are_measured_once(section):
    measure = runs(KEPT)
    assert checked([section], {section: KEPT}, measure, lambda _: None)
    assert measure.asked == [[section]]


def test_a_ratio_that_is_worse_twice_fails_and_is_named_in_words():
    worse = table(("1.30 (1.25 .. 1.40)", "0.99 (0.95 .. 1.01)"))
    passes, lines = verdict("by-hand", worse, worse)
    assert not passes
    assert lines[0] == (
        "worse    by-hand, row 0, ZeRO 0: now 1.3 (1.25 .. 1.4), kept 1.1 (1 .. 1.2); worse when it was measured "
        "again, too"
    )
    assert lines[-1] == "2 ratios, 1 of them worse than their quartiles in RESULTS.md, twice."


def test_a_ratio_that_is_worse_once_passes():
    worse = table(("1.30 (1.25 .. 1.40)", "0.99 (0.95 .. 1.01)"))
    other = table(("1.10 (1.00 .. 1.20)", "1.30 (1.25 .. 1.40)"))
    assert verdict("by-hand", worse, KEPT)[0]
    assert verdict("by-hand", worse, other)[0], "another one the second time"


def test_a_benchmark_that_writes_nothing_fails():
    passes, lines = verdict("by-hand", "", "")
    assert not passes
    assert lines[0].startswith("worse    by-hand, row 0, ZeRO 0: not measured")


def test_nothing_to_compare_fails():
    assert not checked(["by-hand"], {}, lambda _: {}, lambda _: None)


def test_every_section_that_is_checked_is_kept_with_ratios_and_has_its_benchmark():
    kept = sections(RESULTS)
    for name, kind in CHECKED.items():
        assert ratios(name, kept[name]), name
        assert (ROOT / "benchmarks" / kind.test.split("::")[0]).exists()
    assert any(kind.usual for kind in CHECKED.values())


def test_a_section_without_ratios_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["exchange"])
    assert ended.value.code == 2
    assert "no section with ratios: exchange" in capsys.readouterr().err
