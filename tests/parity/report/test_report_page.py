"""The page says first what was found, holds all that it shows, and can be harmed by nothing that it quotes."""

import json
import math
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from ds_parity.config import rewrite
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import Cause, Diagnosis, Fit
from ds_parity.parity.report import Configurations, Side, of_traces
from ds_parity.parity.report import page as page_module
from ds_parity.parity.report.condense import WHOLE
from ds_parity.parity.report.page import render
from ds_parity.parity.report.plots import Picture
from ds_parity.parity.verification.verify import LeftOut
from ds_parity.trace import Trace
from tests.parity.report.reported import EXACT, MADE, REASSOCIATED, Page, compared, contents, record, trace, weights

PICTURES = (Picture("curves", "what it shows", b"\x89PNG not really"),)
LIVE = (
    replace(PICTURES[0], charts=({"title": "a < b", "x": [1, 2], "series": [{"label": "</script>", "y": [1, None]}]},)),
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_passes": 12,
    "ds_parity": {"loss_weight": "token"},
    "zero_optimization": {"stage": 2},
}


def html(*comparisons, pictures=PICTURES, **others):
    held = contents(*comparisons, **others)
    return render(held, tuple(pictures for _ in held.compared))


def page(*comparisons, **others):
    return Page(html(*comparisons, **others))


def runs(text):
    """The scripts of a page that a browser runs, in its order."""
    return re.findall(r"<script>(.*?)</script>", text, re.DOTALL)


def configurations():
    rewritten = rewrite(CONFIG, 2)
    return Configurations(CONFIG, rewritten.config, rewritten.changes)


LATE = compared(trace(9), trace(9, {3: {"loss": 0.75}, 7: {"rollouts": 5}}))


class TestVerdict:
    def test_one_comparison_is_said_in_words_that_name_reference_closeness_and_steps(self):
        said = page(compared(trace(5), trace(5), against="deepspeed")).text
        assert "PASS: equal to DeepSpeed, bit for bit, in 5 of 5 steps" in said
        assert "First difference" not in said

    def test_equal_within_bounds_is_not_called_bit_for_bit(self):
        said = page(compared(trace(5), trace(5), REASSOCIATED)).text
        assert "PASS: equal to PyTorch without DeepSpeed, up to rounding, in 5 of 5 steps" in said
        assert "bit for bit, in" not in said

    def test_a_reference_that_is_a_file_is_named_by_it(self):
        assert (
            "equal to runs/a.jsonl, bit for bit, in 1 of 1 step "
            in page(compared(trace(1), trace(1), against="runs/a.jsonl")).text
        )

    def test_of_several_each_has_its_own_words(self):
        said = page(compared(trace(4), trace(4)), compared(trace(5), trace(5), against="deepspeed")).text
        assert "PASS: equal to its references in 2 of 2 comparisons and 9 of 9 steps" in said
        assert "ragged equal to PyTorch without DeepSpeed, bit for bit, in 4 of 4 steps" in said
        assert "ragged equal to DeepSpeed, bit for bit, in 5 of 5 steps" in said

    def test_a_difference_is_counted_and_named(self):
        said = page(LATE).text
        assert "FAIL: differs from PyTorch without DeepSpeed in 2 of 9 steps, first at step 3, in the loss" in said

    def test_of_many_steps_those_that_are_left_out_are_counted_too(self):
        changes = {step: {"loss": 0.75} for step in range(301, 2001, 2)}
        assert "in 850 of 2000 steps, first at step 301" in page(compared(trace(2000), trace(2000, changes))).text

    def test_of_several_comparisons_it_counts_those_that_differ_and_names_the_first(self):
        good, other = compared(trace(), trace(), against="deepspeed"), replace(LATE, scenario="uniform")
        said = page(good, other, LATE).text
        assert (
            "FAIL: 2 of 3 comparisons differ. The first of them, uniform, differs from PyTorch without DeepSpeed"
            in said
        )

    def test_a_bias_is_of_all_steps(self):
        biased = {step: {"loss": 0.5 + 5.5e-7} for step in range(1, 31)}
        said = page(compared(trace(30), trace(30, biased), REASSOCIATED)).text
        assert "FAIL: differs from PyTorch without DeepSpeed over all 30 steps together, in the mean loss" in said

    def test_a_missing_step_is_said(self):
        said = page(compared(trace(2), trace(3))).text
        assert "in 1 of 3 steps, first at step 3: step 3 is in the candidate only" in said

    def test_runs_that_cannot_be_compared_say_why(self):
        said = page(compared(trace(0), trace(0)), pictures=()).text
        assert "FAIL: not comparable with PyTorch without DeepSpeed: the reference has no steps" in said

    def test_a_metric_is_called_one(self):
        said = page(compared(trace(1), trace(1, {1: {"metrics": {"reward": 1.0}}}))).text
        assert "in 1 of 1 step, first at step 1, in the metric reward" in said

    def test_nothing_compared_is_a_failure(self):
        held = replace(contents(), compared=())
        assert "FAIL: nothing was compared" in Page(render(held, ())).text
        assert 'class="verdict bad"' in render(held, ())
        assert not held.equal

    def test_what_was_left_out_is_counted_and_its_reason_given(self):
        told = page(left_out=(LeftOut("uniform", "deepspeed", "12 passes on 5 ranks"),)).text
        assert "in 4 of 4 steps; 1 comparison was left out" in told
        assert "uniform left out, against DeepSpeed: 12 passes on 5 ranks" in told

    def test_the_title_of_the_page_is_the_verdict(self):
        assert "<title>ds-parity: FAIL: differs from PyTorch without DeepSpeed in 2 of 9 steps" in html(LATE)


class TestFirstDifference:
    def test_has_step_field_both_values_difference_bound_and_rule(self):
        told = page(LATE).text
        assert (
            "First difference: ragged against torch step 3 field loss reference 0.5 candidate 0.75 "
            "difference 0.5 bound 0 rule loss must be equal bit for bit"
        ) in told

    def test_shows_every_digit_so_that_one_ulp_is_seen(self):
        near = math.nextafter(0.5, 1)
        assert f"candidate {near!r} difference" in page(compared(trace(), trace(4, {2: {"loss": near}}))).text

    def test_a_bound_is_shown_as_a_number(self):
        told = page(compared(trace(), trace(4, {1: {"loss": 0.75}}), REASSOCIATED)).text
        assert "difference 0.5 bound 1.31e-06 rule loss is further off" in told

    def test_what_one_run_lacks_is_absent_and_has_no_size(self):
        told = page(compared(trace(), trace(4, {2: {"loss": None}}))).text
        assert "reference 0.5 candidate absent difference - bound 0 rule loss is in the reference only" in told

    def test_nan_is_shown_as_it_is(self):
        told = page(compared(trace(), trace(4, {2: {"loss": math.nan}}))).text
        assert "candidate nan difference nan bound 0 rule loss is NaN, which equals nothing, itself included" in told

    def test_a_step_that_is_missing_names_the_run_that_has_it(self):
        told = page(compared(trace(2), trace(3))).text
        assert "step 3 field step reference absent candidate 3 difference - bound - rule step 3 is in the cand" in told

    def test_each_later_comparison_that_differs_has_its_own_and_the_first_is_not_told_twice(self):
        told = page(LATE, replace(LATE, against="deepspeed")).text
        assert told.count("First difference in this comparison") == 1
        assert told.count("First difference: ") == 1

    def test_a_run_without_a_scenario_is_named_by_its_path(self):
        """Runs of users and of other trainers have none."""
        candidate = Side(trace(4, {2: {"loss": 0.75}}, scenario=None), "runs/b.jsonl")
        reference = Side(trace(4, scenario=None), "runs/a.jsonl")
        found = of_traces(compare(reference.trace, candidate.trace, EXACT), reference, candidate, made=MADE)
        told = Page(render(found, (PICTURES,))).text
        assert "First difference: runs/b.jsonl against runs/a.jsonl" in told
        assert "runs/b.jsonl: differs from runs/a.jsonl in 1 of 4 steps" in told
        assert "not recorded against" not in told


class TestOrder:
    def test_verdict_cause_first_difference_pictures_fields_steps_provenance_configuration(self):
        _, _, text = html(replace(LATE, diagnosis=Diagnosis((ALONE,))), configurations=configurations()).partition(
            "<body>"
        )
        wanted = [
            "FAIL: ",
            "Likely cause",
            "First difference:",
            "<img",
            "Differences by field",
            "Steps: ",
            "Provenance",
        ]
        wanted += ["Configuration</h2>"]
        places = [text.index(word) for word in wanted]
        assert places == sorted(places)

    def test_what_differs_comes_before_what_is_equal(self):
        good, bad = compared(trace(), trace(), against="deepspeed"), replace(LATE, against="deepspeed-loop")
        found = page(good, bad, good)
        titles = [row[:2] for row in found.table("comparison")[1:]]
        assert [title for title, _ in titles] == ["ragged"] * 3
        assert ["differs" in verdict for _, verdict in titles] == [True, False, False]
        text = html(good, bad, good)
        assert text.index('<h2>ragged: <span class="bad">differs') < text.index('<h2>ragged: <span class="good">equal')

    def test_pictures_stay_with_their_comparison(self):
        good, bad = compared(trace(), trace(), against="deepspeed"), LATE
        drawn = tuple((Picture("curves", f"of {name}", b""),) for name in ("the good one", "the bad one"))
        found = Page(render(contents(good, bad), drawn))
        assert [image["alt"].rpartition(": ")[2] for image in found.named("img")] == [
            "of the bad one",
            "of the good one",
        ]


ALONE = Cause("dp-mean-left-in", Fit.CONSTANT, "half the norm in all steps")
ALIKE = tuple(
    Cause(name, Fit.DIRECTION, "losses agree and norms do not")
    for name in ("mean-of-micro-batches", "last-backward-only", "half-broadcast")
)


class TestCauses:
    def test_one_that_stands_out_is_named_with_evidence_and_remedy(self):
        said = page(replace(LATE, diagnosis=Diagnosis((ALONE, *ALIKE)))).text
        assert "Likely cause: dp-mean-left-in" in said
        assert ALONE.evidence in said
        assert ALONE.remedy in said

    def test_those_that_the_traces_cannot_tell_apart_are_one_group_with_one_evidence(self):
        said = page(replace(LATE, diagnosis=Diagnosis(ALIKE))).text
        assert "Likely cause: one of 3 that these traces cannot tell apart" in said
        assert said.count("losses agree and norms do not") == 1
        assert all(cause.name in said and cause.remedy in said for cause in ALIKE)

    def test_those_that_are_equally_likely_are_one_group_each_with_its_own_evidence(self):
        equal = (ALONE, Cause("scheduler-per-pass", ALONE.fit, "the LR moves 3 times too fast"))
        said = page(replace(LATE, diagnosis=Diagnosis((*equal, *ALIKE)))).text
        likely, _, less = said.partition("Other causes that fit")
        assert "Likely causes: 2 that are equally likely; more than one can apply" in likely
        for cause in equal:
            assert f"{cause.name}: {cause.evidence}" in likely
            assert cause.remedy in likely
            assert cause.name not in less.partition("First difference")[0]
        assert "Possible cause: one of 3 that these traces cannot tell apart" in less

    def test_equal_likelihood_further_down_a_group_does_not_join_groups(self):
        """The first group is likelier as a whole: its leading cause stands above the other."""
        causes = (ALONE, replace(ALIKE[0], evidence=ALONE.evidence), Cause("base-lr", ALIKE[0].fit, "other"))
        said = page(replace(LATE, diagnosis=Diagnosis(causes))).text
        assert "Likely cause: one of 2 that these traces cannot tell apart" in said
        assert "Possible cause: base-lr" in said

    def test_there_are_no_percentages_and_no_table_of_causes(self):
        text = html(replace(LATE, diagnosis=Diagnosis((ALONE, *ALIKE))))
        assert not re.search(r"\b\d+ ?%", text.partition("<body>")[2])
        assert not [table for table in Page(text).tables if table[0][0] == "cause"]

    def test_other_causes_that_fit_stand_behind_the_likeliest(self):
        said = page(replace(LATE, diagnosis=Diagnosis((ALONE, *ALIKE)))).text
        places = [
            said.index(words)
            for words in ("Likely cause: dp-mean", "Other causes that fit", "one of 3 that these traces")
        ]
        assert places == sorted(places)

    def test_how_often_such_a_fit_was_right_stands_beside_it(self):
        said = page(replace(LATE, diagnosis=Diagnosis((ALONE,)))).text
        assert f"How sure: {ALONE.fit.words}; {ALONE.fit.measured}." in said

    def test_an_unknown_cause_comes_with_what_is_certain_and_what_would_tell(self):
        unknown = Diagnosis((), ("agree: loss",), ("clipping", "weights"), ("implicit-clip",), "ds-parity rewrite")
        said = page(replace(LATE, diagnosis=unknown)).text
        assert "Cause: unknown." in said
        assert "one of: clipping, weights." in said
        assert "Certain: agree: loss." in said
        assert "known faults that leave such a record: implicit-clip." in said
        assert "What would tell: ds-parity rewrite." in said
        assert "Likely cause" not in said

    def test_each_comparison_that_differs_has_its_own(self):
        said = page(
            replace(LATE, diagnosis=Diagnosis((ALONE,))), replace(LATE, against="deepspeed", diagnosis=Diagnosis(ALIKE))
        ).text
        assert said.count("Likely cause: ") == 2


class TestPhone:
    def test_the_page_is_as_wide_as_the_screen_and_knows_dark_ones(self):
        text = html(LATE)
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
        assert "prefers-color-scheme: dark" in text
        assert '<meta name="color-scheme" content="light dark">' in text

    def test_every_table_scrolls_in_a_box_of_its_own(self):
        text = html(LATE, LATE, configurations=configurations(), left_out=(LeftOut("uniform", "deepspeed", "no"),))
        assert text.count("<table") == len(re.findall(r'<div class="scroll"[^>]*><table', text)) > 5


class TestPictures:
    def test_are_inside_the_page_to_the_byte_and_described(self):
        (image,) = page().named("img")
        head, _, data = image["src"].partition(",")
        assert head == "data:image/png;base64"
        assert b64decode(data) == PICTURES[0].png
        assert image["alt"] == "ragged against torch: what it shows"

    def test_nothing_is_fetched_and_nothing_runs_but_what_the_package_brings(self):
        text = html(LATE, configurations=configurations(), pictures=LIVE)
        found = Page(text)
        assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in found.tags}
        assert all(source.startswith("data:") for source in found.attributes("src"))
        assert all(target.startswith("#") for target in found.attributes("href"))
        bare = re.sub('base64,[^"]*', "", text)
        for script in runs(text):
            bare = bare.replace(script, "")
            assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon|eval\(|new Function", script)
        assert not re.findall(r"https?:|url\(|@import|srcset|file:", bare)

    def test_the_page_allows_its_own_scripts_by_their_hashes_and_no_others(self):
        text = html(LATE, pictures=LIVE)
        (policy,) = [meta["content"] for meta in Page(text).named("meta") if "http-equiv" in meta]
        hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in runs(text)]
        assert len(hashes) == 2
        assert policy == (
            f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(hashes)}"
        )

    def test_without_plots_there_is_no_script(self):
        assert not Page(html()).named("script")

    def test_a_plot_has_its_values_beside_the_picture_that_stands_in_for_it(self):
        text = html(LATE, pictures=LIVE)
        (held,) = re.findall(r'<script type="application/json" class="values">(.*?)</script>', text, re.DOTALL)
        assert json.loads(held)["charts"] == [json.loads(json.dumps(chart)) for chart in LIVE[0].charts]
        assert "<" not in held
        assert len(Page(text).named("img")) == 1

    def test_the_library_is_whole_and_names_its_version_and_licence(self):
        folder = Path(page_module.__file__).parent / "uplot"
        library = (folder / "uPlot.iife.min.js").read_text()
        (version,) = re.findall(r"uPlot (\d+\.\d+\.\d+)", (folder / "README.md").read_text())
        assert f"(v{version})" in library.partition("\n")[0]
        assert sha256(library.encode()).hexdigest() in (folder / "README.md").read_text()
        assert "MIT" in (folder / "LICENSE").read_text()

    def test_links_lead_to_sections_that_are_there(self):
        found = page(LATE, compared(trace(), trace()))
        assert {f"#{one}" for one in found.attributes("id")} == set(found.attributes("href"))

    def test_without_steps_the_page_says_that_there_is_nothing_to_draw(self):
        told = page(compared(trace(0), trace(0)), pictures=()).text
        assert "There are no steps to draw." in told
        assert "the reference has no steps" in told


class TestSteps:
    def test_the_table_has_the_candidates_figures_and_marks_what_differs(self):
        table = page(LATE).table("step")
        assert table[0][:6] == ["step", "passes", "rollouts", "loss", "lr", "grad norm"]
        assert len(table) == 10
        assert table[3] == ["3", "7", "4", "0.75", "0.001", "2", "5.00e-01 loss", "DIFFERS"]
        assert table[4][-1] == "ok"
        assert html(LATE).count('<tr class="differs">') == 2

    def test_up_to_sixty_steps_are_shown_whole(self):
        assert len(page(compared(trace(WHOLE), trace(WHOLE))).table("step")) == 1 + WHOLE

    def test_of_many_equal_steps_the_first_and_last_are_shown_and_the_others_counted(self):
        table = page(compared(trace(1000), trace(1000))).table("step")
        assert [row[0] for row in table[1:]] == [
            *map(str, range(1, 11)), "980 steps left out between 10 and 991: all equal", *map(str, range(991, 1001)),
        ]  # fmt: skip

    def test_of_many_differing_steps_the_first_twenty_are_shown_with_the_step_before(self):
        changes = {step: {"loss": 0.75} for step in range(301, 1001, 2)}
        table = page(compared(trace(1000), trace(1000, changes))).table("step")
        assert [row[0] for row in table[11:]] == [
            "289 steps left out between 10 and 300: all equal",
            "300",
            *[
                word
                for step in range(301, 339, 2)
                for word in (str(step), f"1 step left out between {step} and {step + 2}: all equal")
            ],
            "339",
            "651 steps left out between 339 and 991: 325 of them differ",
            *map(str, range(991, 1001)),
        ]

    def test_missing_figures_are_dashes(self):
        bare = trace(1, {1: {"loss": None, "grad_norm": None}})
        assert page(compared(bare, bare)).table("step")[1][3:6] == ["-", "0.001", "-"]


class TestFields:
    def test_differences_are_counted_by_field_with_the_first_and_the_furthest(self):
        changes = {3: {"loss": 0.75}, 4: {"loss": 1.5, "rollouts": 6}, 5: {"loss": 0.5 + 1e-9}}
        table = page(compared(trace(9), trace(9, changes))).table("field")
        assert table[0] == [
            "field", "differences", "greatest difference", "first at step", "reference", "candidate", "bound", "rule",
        ]  # fmt: skip
        assert table[1] == ["loss", "3", "2", "3", "0.5", "0.75", "0", "loss must be equal bit for bit"]
        assert [row[:4] for row in table[2:]] == [["rollouts", "1", "2", "4"]]

    def test_nan_is_the_furthest(self):
        changes = {3: {"loss": 99.0}, 4: {"loss": math.nan}, 5: {"loss": 99.0}}
        assert page(compared(trace(), trace(6, changes))).table("field")[1][2] == "nan"

    def test_what_has_nothing_to_subtract_has_no_size(self):
        assert page(compared(trace(2), trace(4))).table("field")[1][:4] == ["step", "2", "-", "3"]

    def test_checksums_are_shown_whole(self):
        differing = compared(trace(), trace(4, {2: {"weights": weights("b")}}))
        assert page(differing).table("field")[1][4:6] == ["a" * 64, "b" * 64]


class TestProvenance:
    def test_names_versions_device_ranks_seed_scenario_and_date(self):
        told = page(facts={"ran on": "cpu, gloo"}).text
        for said in (
            "date 2031-05-06 07:08 UTC", "scenario ragged", "device cpu gloo", "ranks 2", "seed 17",
            "deepspeed 0.19.8", "torch 2.13.0", "ran on cpu, gloo",
        ):  # fmt: skip
            assert said in told

    def test_both_traces_stand_beside_each_other(self):
        table = page(compared(trace(engine="torch", ranks=1, seed=None), trace(), REASSOCIATED)).table("trace")
        reference, candidate = (dict(zip(table[0], row, strict=True)) for row in table[1:])
        assert reference["trace"] == "runs/a.jsonl"
        assert reference["as"] == "reference, reassociated tier (fp32)"
        assert (reference["engine"], reference["ranks"], reference["seed"]) == ("torch", "1", "none")
        assert (candidate["trace"], candidate["as"][:9]) == ("runs/b.jsonl", "candidate")
        assert (candidate["ranks"], candidate["seed"]) == ("2", "17")
        assert candidate["versions"] == "deepspeed 0.19.8, torch 2.13.0"
        assert candidate["configuration"] == "0123456789ab"

    def test_answers_that_differ_stand_side_by_side(self):
        other = trace(versions={"torch": "2.12.0"})
        assert "torch 2.13.0 / 2.12.0" in page(compared(other, trace())).text

    def test_nothing_but_the_date_changes_between_two_reports_of_the_same_traces(self):
        later = replace(contents(LATE), made=MADE + timedelta(days=400, hours=3))
        assert html(LATE) == html(LATE)
        assert render(later, (PICTURES,)).replace("2032-06-09 10:08 UTC", "2031-05-06 07:08 UTC") == html(LATE)


class TestConfiguration:
    def test_both_are_shown_with_every_change_and_its_reason(self):
        held = configurations()
        text = html(configurations=held)
        assert json.dumps(CONFIG, indent=2).replace('"', "&#34;") in text
        assert json.dumps(held.rewritten, indent=2).replace('"', "&#34;") in text
        table = Page(text).table("key")
        assert {row[0] for row in table[1:]} == {change.key for change in held.changes}
        assert len(table) - 1 == len(held.changes) > 3
        assert ["gradient_accumulation_steps", "(absent)", "6"] in [row[:3] for row in table]
        assert all(change.why in [row[3] for row in table] for change in held.changes)

    def test_traces_alone_have_none_and_the_page_says_why(self):
        assert "contains only a hash of its configuration" in page().text


class TestQuoting:
    EVIL = "<script>alert('1')</script>\"&"

    def evil(self):
        evil, metric = self.EVIL, {"metrics": {self.EVIL: 1.0}}
        header = {"scenario": evil, "engine": evil, "device": evil, "versions": {evil: evil}, "config_hash": evil}
        a = Trace(trace(**header).header, (record(1),))
        b = Trace(a.header, (record(1, **metric),))
        one = replace(compared(a, b, against=evil), scenario=evil)
        one = replace(one, reference=Side(a, evil), candidate=Side(b, evil))
        held = Configurations({evil: evil}, {evil: evil}, rewrite(CONFIG, 2).changes)
        others = {"facts": {evil: evil}, "left_out": (LeftOut(evil, evil, evil),), "configurations": held}
        return html(one, **others, pictures=(Picture("curves", evil, b""),))

    def test_names_paths_and_configurations_are_text_and_no_more(self):
        text = self.evil()
        assert not Page(text).named("script")
        assert "<script" not in text
        assert Page(text).text.count("<script>alert('1')</script>\"&") > 10

    def test_none_of_them_breaks_out_of_an_attribute(self):
        known = {
            "lang",
            "charset",
            "name",
            "content",
            "http-equiv",
            "class",
            "id",
            "href",
            "alt",
            "src",
            "colspan",
            "tabindex",
        }
        assert {name for _, attributes in Page(self.evil()).tags for name in attributes} <= known
