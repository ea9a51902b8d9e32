"""Files are compared piece by piece, to the same verdict as traces in memory. Memory does not grow with them."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_parity.errors import TraceError
from ds_parity.parity.comparison import blocks, tally
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare, setting
from ds_parity.parity.diagnosis import diagnose
from ds_parity.parity.report.series import gaps, read_run
from ds_parity.parity.report.thinning import MOST
from ds_parity.trace import Trace, columns
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.foreign import open_pair
from tests.parity.comparison.comparing import on_disk, record, trace, two_traces, weights
from tests.parity.comparison.moved import runs

EXACT, REASSOCIATED = Tier.EXACT, Tier.REASSOCIATED
BOTH = pytest.mark.parametrize("tier", [EXACT, REASSOCIATED])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@settings(max_examples=120, deadline=None)
@given(runs(), st.sampled_from([1, 900, 1 << 17]), st.sampled_from([1, 3, columns.SIZE]))
def test_a_file_is_compared_as_the_trace_in_memory_whatever_is_read_at_once(folder, drawn, size, held):
    (tier, dtype), traces = drawn
    files = [on_disk(folder / side, one) for side, one in zip("ab", traces, strict=True)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(columns, "BYTES", size)
        patched.setattr(blocks, "SIZE", held)
        streamed = compare(*files, tier, dtype)
        causes = diagnose(*files, streamed)
    whole = compare(*traces, tier, dtype)
    assert repr(streamed) == repr(whole)
    assert causes == diagnose(*traces, whole)


@BOTH
@settings(max_examples=60, deadline=None)
@given(two_traces(most=8))
def test_what_is_not_kept_of_long_traces_is_counted(tier, traces):
    whole = compare(*traces, tier)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("WHOLE", "ENDS", "DIFFERING"):
            patched.setattr(tally, name, 1)
        short = compare(*traces, tier)
    assert (short.equal, short.steps, short.count) == (whole.equal, whole.steps, whole.count)
    assert repr(replace(short, differences=(), rows=(), hidden=())) == repr(replace(whole, differences=(), rows=()))
    assert repr(short.first) == repr(whole.first)
    places = {row.step: at for at, row in enumerate(whole.rows)}
    assert len(short.rows) + sum(it.count for it in short.hidden) == whole.steps
    for it in short.hidden:
        between = whole.rows[places[it.after] + 1 : places[it.before]]
        assert (it.count, it.differing) == (len(between), sum(bool(row.differences) for row in between))


def long(steps, **changes):
    return trace(
        *(record(step, **{name: change(step) for name, change in changes.items()}) for step in range(1, steps + 1))
    )


def test_of_many_steps_the_ends_and_the_first_that_differ_are_kept_and_all_differences_counted():
    bad = long(3000, loss=lambda step: 0.75 if step > 1500 else 0.5)
    comparison = compare(long(3000), bad, EXACT)
    steps = [row.step for row in comparison.rows]
    assert steps == [*range(1, 11), 1500, *range(1501, 1521), *range(2991, 3001)]
    assert [(it.after, it.before, it.count, it.differing) for it in comparison.hidden] == [
        (10, 1500, 1489, 0), (1520, 2991, 1470, 1470),
    ]  # fmt: skip
    assert (comparison.steps, comparison.count, len(comparison.differences)) == (3000, 1500, 1000)
    assert compare(bad, bad, EXACT).count == 0


def test_up_to_a_thousand_steps_every_row_is_kept():
    assert len(compare(long(1000), long(1000), EXACT).rows) == 1000
    assert len(compare(long(1001), long(1001), EXACT).rows) == 20


def test_one_step_far_behind_that_is_an_ulp_off_is_found(folder):
    bad = long(2500, loss=lambda step: math.nextafter(0.5, 1) if step == 2222 else 0.5)
    comparison = compare(on_disk(folder / "a", long(2500)), on_disk(folder / "b", bad), EXACT)
    assert [(it.step, it.field) for it in comparison.differences] == [(2222, "loss")]


def test_the_scale_of_losses_is_that_of_the_whole_file(folder):
    reference = long(600, loss=lambda step: 1e3 if step == 600 else 1e-9)
    other = long(600, loss=lambda step: 1e3 if step == 600 else 2e-4)
    assert compare(on_disk(folder / "a", reference), on_disk(folder / "b", other), REASSOCIATED).equal
    assert not compare(on_disk(folder / "b", other), on_disk(folder / "a", long(600)), REASSOCIATED).equal


@pytest.mark.parametrize(
    ("end", "since", "cause"), [(2000, 1100, "sticky-boundary"), (1999, 9999, "partial-window-leak")]
)
def test_the_cause_of_a_late_difference_is_found_from_the_steps_around_it(folder, end, since, cause):
    ragged = {"rollouts": lambda step: 4 + step % 3 if step < 2000 else 1, "weights": lambda step: None}
    bad = {**ragged, "grad_norm": lambda step: 2.0 + 0.1 * (step % 3) if step > since else 2.0}
    traces = long(2000, **ragged), long(end, **bad)
    files = [on_disk(folder / side, held) for side, held in zip("ab", traces, strict=True)]
    seen, whole = (diagnose(*pair, compare(*pair, EXACT)) for pair in (files, traces))
    assert cause in {*seen.not_excluded, *(cause.name for cause in seen.causes)}
    assert seen == whole


FAULTS = {
    "cut short": lambda lines: [*lines[:-1], lines[-1][:-9]],
    "no header": lambda lines: lines[1:],
    "schema version 2": lambda lines: [lines[0].replace(b'"schema_version":1', b'"schema_version":2'), *lines[1:]],
    "step 300 is doubled": lambda lines: [*lines[:301], lines[300], *lines[301:]],
    "step 300 is missing": lambda lines: [*lines[:300], *lines[301:]],
    "loss: .*got '0.5'": lambda lines: [*lines[:300], lines[300].replace(b'"loss":0.5', b'"loss":"0.5"'), *lines[301:]],
    "tokens: .*got -1": lambda lines: [*lines[:300], lines[300].replace(b'"tokens":100', b'"tokens":-1'), *lines[301:]],
}


@pytest.mark.parametrize("begin", [900, 1001, 1002, 1200])
@pytest.mark.parametrize("ahead", [None, 1501])
def test_a_file_that_begins_behind_a_thousand_steps_is_looked_at_from_there_on(folder, begin, ahead):
    def step(number, at):
        return record(number, weights=None, lr=(1e-3 / (1 + at),), loss=0.5 if at == number else 0.7)

    due = trace(*(step(n, n) for n in range(1, 2001)))
    own = trace(*(step(n, n + 1 if ahead and n >= ahead else n) for n in range(begin, 2001)))
    files = [on_disk(folder / side, one) for side, one in zip("ab", (due, own), strict=True)]
    found = diagnose(*files, compare(*files, REASSOCIATED))
    begins = f"the candidate begins with step {begin}, and the reference with step 1"
    assert any(said.startswith(begins) for said in found.certain), found.certain
    assert ahead is None or {"schedule", "logging"} <= {*found.classes}


ROUNDED = float(np.float32(1e-3))


@pytest.mark.parametrize("rate", [1e-3, ROUNDED])
@pytest.mark.parametrize("split", [range(1, 1401), [3], []])
def test_what_is_no_reason_hides_no_fault_behind_a_thousand_steps(folder, split, rate):
    def own(number):
        passes = {"passes": 9} if number in split else {}
        return record(number, weights=None, lr=(rate,), loss=0.5 if number < 1200 else 0.7, **passes)

    due = trace(*(record(n, weights=None, lr=(1e-3,)) for n in range(1, 1401)))
    sides = due, trace(*map(own, range(1, 1401)))
    files = [on_disk(folder / side, one) for side, one in zip("ab", sides, strict=True)]
    found = diagnose(*files, compare(*files, REASSOCIATED))
    assert found.certain[0] == "first to differ, in step 1200: loss"
    assert any("another number of passes" in said for said in found.certain) is bool(split)
    assert any("agree to fp32" in said for said in found.certain) is (rate != 1e-3)
    # What lies around the first difference that is a reason was looked at.
    alone = trace(*(record(n, weights=None, lr=(1e-3,), loss=0.5 if n < 1200 else 0.7) for n in range(1, 1401)))
    files = [on_disk(folder / side, one) for side, one in zip("ab", (due, alone), strict=True)]
    same = diagnose(*files, compare(*files, REASSOCIATED))
    assert (found.causes, found.classes) == (same.causes, same.classes)


@pytest.mark.parametrize("halved", [range(1, 51), range(1350, 1401)])
def test_rates_that_are_others_where_nothing_is_looked_at_are_not_taken_for_rounded_ones(folder, halved):
    def own(number):
        rate = 5e-4 if number in halved else ROUNDED
        return record(number, weights=None, lr=(rate,), loss=0.5 if number < 100 else 0.7)

    due = trace(*(record(n, weights=None, lr=(1e-3,)) for n in range(1, 1401)))
    files = [
        on_disk(folder / side, one) for side, one in zip("ab", (due, trace(*map(own, range(1, 1401)))), strict=True)
    ]
    found = diagnose(*files, compare(*files, REASSOCIATED))
    assert not any("agree to fp32" in said for said in found.certain)
    assert "lr-rounded" not in [cause.name for cause in found.causes]
    assert found.certain[0].startswith("first to differ, in step 1: LR")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize("size", [1, columns.BYTES])
def test_a_file_that_is_not_whole_is_an_error_that_names_it_and_never_a_pass(folder, monkeypatch, fault, side, size):
    monkeypatch.setattr(columns, "BYTES", size)
    good, bad = folder / "good", folder / "bad"
    on_disk(good, long(400))
    bad.write_bytes(b"".join(FAULTS[fault](good.read_bytes().splitlines(keepends=True))))
    with pytest.raises(TraceError, match=f"bad, line .*{fault}"):
        compare(*map(TraceFile.open, (bad, good) if side == "reference" else (good, bad)), EXACT)


@BOTH
def test_files_of_other_lengths_differ_and_other_configurations_are_said_first(folder, tier):
    one, other = on_disk(folder / "a", long(600)), on_disk(folder / "b", replace(long(300), header=long(1).header))
    comparison = compare(one, other, tier)
    assert comparison.first.why == "step 301 is in the reference only"
    assert comparison.count == 300
    moved = trace(*long(2).steps, config_hash="cd")
    assert compare(one, on_disk(folder / "b", moved), tier).notes[0].startswith("the headers differ in config_hash")
    empty = on_disk(folder / "b", Trace(one.header, ()))
    for sides in ((one, empty), (empty, one), (empty, empty)):
        assert "has no steps" in compare(*sides, tier).first.why


def test_two_files_of_our_own_are_read_piece_by_piece_and_all_others_as_they_were(folder):
    ours = on_disk(folder / "a", long(2)).path
    (folder / "theirs.csv").write_text("step,loss\n1,0.5\n2,0.5\n")
    assert all(isinstance(it, TraceFile) for it in open_pair(ours, ours))
    assert all(isinstance(it, Trace) for it in open_pair(ours, folder / "theirs.csv"))


class TestPictures:
    """What is drawn of files is what would be drawn of the traces."""

    steps, names = (1, 3000), ("loss", "lr", "rollouts")

    @pytest.fixture
    def pair(self):
        noisy = long(
            3000,
            loss=lambda step: math.nan if step == 77 else math.sin(step * step),
            lr=lambda step: (step * 1e-3, 1.0),
        )
        return long(3000), noisy

    def test_lines_and_skipped_steps(self, folder, pair):
        held, read = (read_run(it, self.names, self.steps) for it in (pair[1], on_disk(folder / "b", pair[1])))
        assert {name: len(lines) for name, lines in read.lines.items()} == {"loss": 1, "lr": 2, "rollouts": 1}
        for name in self.names:
            for one, other in zip(held.lines[name], read.lines[name], strict=True):
                assert one.stretch == other.stretch == 12
                assert all(
                    np.array_equal(getattr(one, it), getattr(other, it), equal_nan=True) for it in ("low", "high")
                )
                assert np.array_equal(one.odd.drawn, other.odd.drawn)
                assert (one.odd.first, one.odd.count, one.odd.digest) == (
                    other.odd.first,
                    other.odd.count,
                    other.odd.digest,
                )

    def test_differences_with_none_that_matters_lost(self, folder, pair):
        read = gaps(
            setting(*(on_disk(folder / side, it) for side, it in zip("ab", pair, strict=True)), EXACT), ["loss"]
        )["loss"]
        held = gaps(setting(*pair, EXACT), ["loss"])["loss"]
        assert repr(read) == repr(held)
        assert read.odd.tolist() == [77]
        assert len(read.over[0]) <= MOST


PEAK = """
import resource, sys
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace.columns import TraceFile
files = [TraceFile.open(path) for path in sys.argv[1:]]
found = compare(*files, Tier.REASSOCIATED)
diagnose(*files, found)
print(found.steps, found.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def copied(path, trace, steps):
    """A long file, of one record under all numbers."""
    file = on_disk(path, trace)
    head, line = path.read_bytes().splitlines(keepends=True)
    with path.open("wb") as written:
        written.write(head)
        written.writelines(line.replace(b'"step":1,', b'"step":%d,' % step) for step in range(1, steps + 1))
    return str(file.path)


def test_memory_does_not_grow_with_the_steps_even_where_every_one_differs(tmp_path):
    sketch = tuple(1.0 / at for at in range(1, 17))
    one, other = (trace(record(1, weights=weights(sketch=sketch), lr=(lr,))) for lr in (1e-3, 2e-3))
    peaks = []
    for steps in (5_000, 50_000):
        files = [copied(tmp_path / side, it, steps) for side, it in zip("ab", (one, other), strict=True)]
        ran = subprocess.run(
            [sys.executable, "-c", PEAK, *files], capture_output=True, text=True, check=True, timeout=60
        )
        counted, differences, peak = map(int, ran.stdout.split())
        assert (counted, differences) == (steps, steps)
        peaks.append(peak / 1024)
    assert peaks[1] - peaks[0] <= 4  # MiB; measured 0.2 and less, where holding the steps took 250
