"""From answers and traces to verdicts: nothing that is absent, wrong or unexpected passes."""

import json
import re
from dataclasses import replace

import pytest

from ds_parity.config.features import MOVED_OFFLOADED
from ds_parity.config.releases import release
from ds_parity.parity.matrix import needed, pages, summary
from ds_parity.parity.matrix.cells import Cell
from ds_parity.parity.matrix.results import Status, equal, judge
from ds_parity.parity.matrix.variant import Variant
from ds_parity.trace import Header, StepRecord, TraceWriter, Weights
from tests.parity.report.reported import Page

PLAIN = Cell(Variant("precision", "plain"), 2)
SUMMED = Variant("communication", "summed", {"gradient_allreduce_op": "sum"}, refused=(3,))
GOOD_PROBE = {
    "measured": [[0.5, 0.5]],
    "expected": [[0.5, 0.5]],
    "residual": 0.0,
    "condition": 2.0,
    "alike": 0,
    "beyond": 1e-7,
    "hidden": False,
    "error": 0.0,
    "pattern": "as expected",
}


def step(number, **changes):
    weights = Weights(checksum="0" * 64, norm=1.0, sketch=(1.0, 2.0))
    counts = {"passes": 2, "idle_passes": 0, "rollouts": 12, "prompts": 3, "tokens": 50, "total": 50.0}
    record = StepRecord(step=number, **counts, loss=0.5, lr=(0.1,), grad_norm=0.25, weights=weights)
    return record.model_copy(update=changes)


def write(folder, scenario, engine, steps):
    header = Header(scenario=scenario.name, seed=3, versions={}, device="cpu", ranks=2, config_hash="x", engine=engine)
    with TraceWriter(folder / scenario.name / f"{engine}.jsonl", header) as writer:
        for record in steps:
            writer.write(record)


@pytest.fixture
def ran(tmp_path):
    """A cell whose traces are alike, and the answers of its calls."""
    for scenario, engines in ((PLAIN.ragged, ("deepspeed-loop", "torch")), (PLAIN.uniform, ("deepspeed",))):
        for engine in (*engines, "ds_parity"):
            write(tmp_path, scenario, engine, [step(1), step(2)])
    answers = {
        f"{scenario.name}: {engine}": {"peaks": [100_000, 200_000], "parameters": 29_000, "seconds": 1.0}
        for scenario in (PLAIN.ragged, PLAIN.uniform)
        for engine in ("deepspeed-loop", "torch", "ds_parity", "deepspeed")
    }
    answers[PLAIN.probed.name] = {**GOOD_PROBE, "seconds": 1.0}
    return answers, tmp_path


def status_of(cell, ran, check):
    result = judge(cell, *ran)
    return next(finding.status for finding in result.findings if finding.check == check)


def test_a_cell_whose_checks_all_hold_is_right(ran):
    result = judge(PLAIN, *ran)
    assert result.status is Status.RIGHT
    assert result.good
    assert [finding.check for finding in result.findings] == ["probe", "deepspeed-loop", "torch", "deepspeed", "memory"]


@pytest.mark.parametrize("reference", ["deepspeed-loop", "torch", "deepspeed"])
def test_a_trace_that_parts_is_a_difference(ran, reference):
    scenario = PLAIN.uniform if reference == "deepspeed" else PLAIN.ragged
    write(ran[1], scenario, reference, [step(1), step(2, loss=0.75)])
    assert status_of(PLAIN, ran, reference) is Status.DIFFERS
    assert not judge(PLAIN, *ran).good


def test_the_exact_tier_sees_the_last_bit_and_the_torch_reference_allows_rounding(ran):
    nearly = [step(1), step(2, loss=0.5 * (1 + 2**-23))]
    for engine in ("deepspeed-loop", "torch"):
        write(ran[1], PLAIN.ragged, engine, nearly)
    assert status_of(PLAIN, ran, "deepspeed-loop") is Status.DIFFERS
    assert status_of(PLAIN, ran, "torch") is Status.RIGHT


@pytest.mark.parametrize("changed", [{"beyond": 0.5}, {"hidden": True}, {"residual": 0.5}, {"condition": float("inf")}])
def test_a_probe_that_is_off_is_a_difference(ran, changed):
    ran[0][PLAIN.probed.name] |= changed
    assert status_of(PLAIN, ran, "probe") is Status.DIFFERS


@pytest.mark.parametrize("engine", ["ds_parity", "deepspeed-loop"])
def test_an_engine_that_raised_or_never_ran_fails_its_checks(ran, engine):
    for answer in ({"raised": "RuntimeError: no"}, None):
        answers = {**ran[0], f"{PLAIN.ragged.name}: {engine}": answer}
        answers = {at: value for at, value in answers.items() if value is not None}
        result = judge(PLAIN, answers, ran[1])
        assert result.status is Status.FAILED
        assert "RuntimeError: no" in result.why or "not run" in result.why


def test_nothing_answered_is_no_pass(tmp_path):
    assert judge(PLAIN, {}, tmp_path).status is Status.FAILED
    assert not equal([])


def test_a_second_copy_of_the_gradients_is_a_difference(ran):
    copy = 29_000 * 4 // 2  # a rank's share on ZeRO 2
    ran[0][f"{PLAIN.ragged.name}: ds_parity"]["peaks"] = [100_000, 200_000 + copy]  # once: some other thread's
    assert status_of(PLAIN, ran, "memory") is Status.RIGHT
    ran[0][f"{PLAIN.ragged.name}: ds_parity"]["peaks"] = [100_000 + copy, 200_000 + copy]
    assert status_of(PLAIN, ran, "memory") is Status.DIFFERS
    for engine in ("ds_parity", "deepspeed-loop"):
        ran[0][f"{PLAIN.ragged.name}: {engine}"]["peaks"] = []
    assert status_of(PLAIN, ran, "memory") is Status.FAILED


@pytest.mark.parametrize(("more", "status"), [(1_016, Status.RIGHT), (2_560 * 2, Status.DIFFERS)])
def test_the_messages_of_an_exchange_are_no_copy_of_small_gradients(ran, more, status):
    for engine, extra in (("ds_parity", more), ("deepspeed-loop", 0)):
        ran[0][f"{PLAIN.ragged.name}: {engine}"] |= {"peaks": [5_000 + extra] * 2, "parameters": 2_560}
    assert status_of(PLAIN, ran, "memory") is status


def test_a_known_fault_of_deepspeed_is_told_apart_from_a_difference(ran):
    faulty = Cell(replace(PLAIN.variant, faults={2: "fp16_growing_scale"}), 2)
    assert "mended" in next(f.detail for f in judge(faulty, *ran).findings if f.check == "deepspeed")
    write(ran[1], PLAIN.uniform, "deepspeed", [step(1), step(2, loss=0.75)])
    assert judge(faulty, *ran).status is Status.CORRECTED
    assert "tools/deepspeed_faults/fp16_growing_scale.py" in judge(faulty, *ran).why
    write(ran[1], PLAIN.ragged, "torch", [step(1), step(2, loss=0.75)])
    assert judge(faulty, *ran).status is Status.DIFFERS


def test_a_check_that_is_left_out_says_why(ran):
    without = Cell(replace(PLAIN.variant, left_out={"torch": "for a reason"}), 2)
    finding = next(f for f in judge(without, *ran).findings if f.check == "torch")
    assert (finding.status, finding.detail) == (Status.LEFT_OUT, "for a reason")


def test_what_was_not_run_fails_nothing_and_proves_nothing(ran, monkeypatch):
    monkeypatch.setitem(needed.EXTRAS, "ds_parity[peft]", ("no_such_package_of_ours",))
    absent = Cell(Variant("model", "far off", needs=("ds_parity[peft]",)), 2)
    result = judge(absent, *ran)
    assert (result.status, result.good) == (Status.NOT_RUN, True)
    assert "install ds_parity[peft]" in result.why
    assert equal([judge(PLAIN, *ran), result])
    assert not equal([result])
    assert "| far off | - | - | not run [1] | - |" in summary.markdown([result], "deepspeed 1.2.3")
    assert "1. not run: no_such_package_of_ours is missing" in summary.markdown([result], "deepspeed 1.2.3")


def test_refusals_are_good_only_where_the_matrix_expects_them(tmp_path):
    assert judge(Cell(SUMMED, 3), {}, tmp_path).status is Status.REFUSED
    assert judge(Cell(replace(SUMMED, refused=()), 3), {}, tmp_path).status is Status.DIFFERS
    assert judge(Cell(replace(PLAIN.variant, refused=(2,)), 2), {}, tmp_path).status is Status.DIFFERS


def test_an_engine_that_refuses_says_so(tmp_path):
    cell = Cell(replace(PLAIN.variant, refused=(2,)), 2)
    answers = {f"{cell.name}: refusal": {"raised": "ConfigError: no position to stand at"}}
    assert judge(cell, answers, tmp_path).status is Status.REFUSED
    answers = {f"{cell.name}: refusal": {"raised": "RuntimeError: something else"}}
    assert judge(cell, answers, tmp_path).status is Status.DIFFERS


@pytest.mark.parametrize(("refused", "status"), [((2,), Status.REFUSED), ((), Status.FAILED)])
def test_a_loop_may_be_refused_where_it_runs_if_the_matrix_says_so(tmp_path, refused, status):
    cell = Cell(Variant("loop", "twice", refused=refused), 2)
    calls = [f"{cell.name}: refusal", f"{cell.ragged.name}: ds_parity"]
    result = judge(cell, {key: {"raised": "WindowError: it came twice"} for key in calls}, tmp_path)
    assert result.status is status
    assert not refused or result.why == "refusal: it came twice"


CALLS = (MOVED_OFFLOADED.name,)


@pytest.mark.parametrize(
    ("calls", "here", "status"),
    [
        (CALLS, "0.18.4", Status.REFUSED),
        (CALLS, "0.19.0", Status.DIFFERS),
        (CALLS, None, Status.DIFFERS),
        ((), "0.18.4", Status.DIFFERS),
    ],
)
def test_a_call_may_be_refused_on_releases_that_can_t_do_it(ran, calls, here, status):
    cell = Cell(replace(PLAIN.variant, calls=calls), 2)
    answers = {**ran[0], f"{cell.ragged.name}: ds_parity": {"raised": "ConfigError: offload_states(): no"}}
    result = judge(cell, answers, ran[1], here and release(here))
    assert (result.status, result.why) == (status, "refusal: offload_states(): no")


@pytest.mark.parametrize(
    "variant",
    [
        replace(PLAIN.variant, calls=CALLS),
        replace(PLAIN.variant, patch={"zero_optimization": {"contiguous_gradients": False}}),
    ],
    ids=["a call", "a setting"],
)
def test_what_the_table_of_releases_refuses_must_be_refused(ran, variant):
    assert judge(Cell(variant, 2), *ran, release("0.18.4")).status is Status.DIFFERS
    assert judge(Cell(variant, 2), *ran, release("0.19.8")).status is Status.RIGHT


def test_a_refusal_that_the_matrix_does_not_expect_is_a_difference(ran):
    answers = {**ran[0], f"{PLAIN.ragged.name}: ds_parity": {"raised": "ConfigError: no such thing here"}}
    assert judge(PLAIN, answers, ran[1]).status is Status.DIFFERS


def test_tables_and_the_report_show_every_cell_and_every_reason(ran):
    refused = judge(Cell(SUMMED, 3), {}, ran[1])
    results = [judge(PLAIN, *ran), refused, judge(Cell(Variant("window", "lost <1>"), 3), {}, ran[1])]
    text = summary.markdown(results, "deepspeed 1.2.3")
    assert "| plain | - | - | right | - |" in text
    assert "| summed | - | - | - | refused [1] |" in text
    assert "3 cells: 1 right, 1 refused, 1 failed (deepspeed 1.2.3)." in text
    assert f"1. {refused.why}" in text
    page = ran[1] / "matrix.html"
    pages.write(results, {"deepspeed": "1.2.3"}, page)
    html = page.read_text()
    assert "FAIL" in html
    assert "lost &lt;1&gt;" in html
    assert "http" not in html.replace("http-equiv", "")
    assert json.dumps(refused.why)[1:20] in html.replace("&#34;", '"')


@pytest.fixture
def page(ran):
    refused, lost = Cell(SUMMED, 3), Cell(Variant("window", "lost"), 3)
    results = [judge(PLAIN, *ran), judge(refused, {}, ran[1]), judge(lost, {}, ran[1])]
    path = ran[1] / "matrix.html"
    pages.write(results, {"deepspeed": "1.2.3"}, path)
    return path.read_text()


class TestPage:
    def test_the_verdict_says_what_was_found_to_those_who_do_not_know_the_words(self, page):
        told = Page(page).text
        assert "FAIL: of 3 configurations, 1 is right, 1 is refused with the reason and 1 failed" in told
        for status in ("right", "corrected", "refused", "differs", "failed"):
            assert re.search(rf"{status}: \w+", told), status

    def test_what_failed_is_listed_before_the_table(self, page):
        told = Page(page).text
        assert told.index("window: lost on ZeRO 3: failed") < told.index("configuration ZeRO 0")

    def test_a_matrix_that_passes_lists_nothing(self, ran):
        path = ran[1] / "matrix.html"
        pages.write([judge(PLAIN, *ran)], {}, path)
        told = Page(path.read_text()).text
        assert "PASS: of 1 configuration, 1 is right" in told
        assert "What failed" not in told

    def test_it_is_as_wide_as_a_phone_and_its_table_scrolls_in_its_own_box(self, page):
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
        assert "prefers-color-scheme: dark" in page
        assert page.count("<table") == page.count('<div class="scroll"') == 1

    def test_it_loads_and_runs_nothing(self, page):
        found = Page(page)
        (policy,) = [meta["content"] for meta in found.named("meta") if "http-equiv" in meta]
        assert policy == "default-src 'none'; style-src 'unsafe-inline'"
        assert not found.named("script")
        assert not found.named("link")


BF16_ZERO0 = Cell(Variant("precision", "bf16", {"bf16": {"enabled": True}}), 0)


def parted(cell, folder):
    """The answers of a cell that is right, and the bare engines of which are not."""
    answers = {cell.probed.name: {**GOOD_PROBE, "seconds": 1.0}}
    for scenario, engines in ((cell.ragged, ("deepspeed-loop", "torch")), (cell.uniform, ("deepspeed",))):
        for engine in (*engines, "ds_parity"):
            steps = [step(1), step(2, loss=0.75 if engine.startswith("deepspeed") else 0.5)]
            write(folder, scenario, engine, steps)
            answers[f"{scenario.name}: {engine}"] = {"peaks": [100_000, 200_000], "parameters": 29_000, "seconds": 1.0}
    return answers, folder


@pytest.fixture
def ran_bf16(tmp_path):
    """A bf16 cell on ZeRO 0 that is right, and the bare engines of which are not."""
    return parted(BF16_ZERO0, tmp_path)


def test_what_a_release_is_known_to_get_wrong_is_corrected_where_torch_and_the_probe_agree(ran_bf16):
    assert judge(BF16_ZERO0, *ran_bf16, release("0.18.4")).status is Status.CORRECTED
    assert judge(BF16_ZERO0, *ran_bf16, release("0.19.8")).status is Status.DIFFERS
    assert judge(BF16_ZERO0, *ran_bf16).status is Status.DIFFERS
    write(ran_bf16[1], BF16_ZERO0.ragged, "torch", [step(1), step(2, loss=0.75)])
    assert judge(BF16_ZERO0, *ran_bf16, release("0.18.4")).status is Status.DIFFERS


@pytest.mark.parametrize("here", ["0.18.4", "0.19.8"])
def test_what_no_release_gets_right_excuses_no_difference_from_the_loop_that_corrects_it(tmp_path, here):
    cell = Cell(Variant("precision", "fp16", {"fp16": {"enabled": True}}), 0)
    result = judge(cell, *parted(cell, tmp_path), release(here))
    assert next(f.status for f in result.findings if f.check == "deepspeed-loop") is Status.DIFFERS


ALONE = {"torch": "overflows are no business of it", "probe": "the same"}


@pytest.mark.parametrize(
    ("left_out", "here", "status"),
    [
        ({}, "0.18.4", Status.CORRECTED),
        (ALONE, "0.18.4", Status.NOT_RUN),
        # A DeepSpeed of which nothing wrong is known judges alone, too.
        (ALONE, "0.19.8", Status.DIFFERS),
    ],
)
def test_where_neither_torch_nor_the_probe_judges_a_release_that_is_wrong_shows_nothing(
    tmp_path, left_out, here, status
):
    cell = Cell(Variant("precision", "bf16", {"bf16": {"enabled": True}}, left_out=left_out), 0)
    answers, folder = parted(cell, tmp_path)
    result = judge(cell, answers, folder, release(here))
    assert result.status is status
    assert status is not Status.NOT_RUN or result.why.startswith("deepspeed-loop: nothing can judge it here: DeepSpeed")
    # A wrong release may also need less memory, because it forgets to clear gradients.
    answers[f"{cell.ragged.name}: ds_parity"]["peaks"] = [200_000, 300_000]
    memory = next(f for f in judge(cell, answers, folder, release(here)).findings if f.check == "memory")
    assert memory.status is (Status.DIFFERS if here == "0.19.8" else Status.LEFT_OUT)


def test_a_bare_engine_that_raises_leaves_torch_and_the_probe_to_judge(ran_bf16):
    answers, folder = ran_bf16
    for at in (f"{BF16_ZERO0.ragged.name}: deepspeed-loop", f"{BF16_ZERO0.uniform.name}: deepspeed"):
        answers[at] = {"raised": "RuntimeError: a view is modified"}
    result = judge(BF16_ZERO0, answers, folder, release("0.18.4"))
    assert result.status is Status.CORRECTED
    assert "a view is modified" in result.why
    assert judge(BF16_ZERO0, answers, folder, release("0.19.8")).status is Status.FAILED


def test_memory_is_not_compared_with_a_bare_engine_that_never_clears_its_gradients(ran_bf16):
    answers, folder = ran_bf16
    answers[f"{BF16_ZERO0.ragged.name}: ds_parity"]["peaks"] = [200_000, 300_000]
    result = judge(BF16_ZERO0, answers, folder, release("0.18.4"))
    assert result.status is Status.CORRECTED
    assert next(f.status for f in result.findings if f.check == "memory") is Status.LEFT_OUT
