"""The pictures show both runs, how far they lie apart and what they may: read from what is drawn, not from pixels."""

import math
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from ds_parity.parity.comparison.bounds import EPS, C
from ds_parity.parity.report.plots import pictures
from ds_parity.parity.report.series import line, read_run
from ds_parity.parity.report.thinning import MOST, thinned
from ds_parity.trace import Trace
from tests.parity.report.reported import EXACT, REASSOCIATED, compared, record, trace, weights

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


@pytest.fixture
def draw(monkeypatch):
    """Draws a comparison, and returns the figures by name; what they look like is left to those who ask for it."""
    taken = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **options: taken.append(figure))

    def drawn(*arguments, **options):
        taken.clear()
        made = pictures(compared(*arguments, **options))
        return {picture.name: figure for picture, figure in zip(made, taken, strict=True)}

    return drawn


def panel(figure, word):
    """The panel whose axis or title speaks of something."""
    return next(axes for axes in figure.axes if word in axes.get_ylabel() + axes.get_title(loc="left"))


def lines(axes, label):
    return [line for line in axes.lines if str(line.get_label()).startswith(label)]


def only(axes, label):
    (found,) = lines(axes, label)
    return found


def said(axes):
    return [text.get_text() for text in axes.texts]


def ticks(axes):
    """Labels of the vertical axis by height."""
    return {tick.get_text(): height for tick, height in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}


def texts(figure):
    """All that is written in a picture; an axis also holds ticks beyond its ends, which are not drawn."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in hidden
    ]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


class TestCurves:
    def test_runs_that_are_alike_lie_over_each_other_and_are_both_seen(self, draw):
        losses = {step: {"loss": 1.0 / step} for step in range(1, 5)}
        axes = panel(draw(trace(4, losses), trace(4, losses))["curves"], "loss")
        below, above = only(axes, "reference"), only(axes, "candidate")
        for line_ in (below, above):
            assert list(line_.get_xdata()) == [1, 2, 3, 4]
            assert list(line_.get_ydata()) == [1, 1 / 2, 1 / 3, 1 / 4]
        assert axes.lines.index(below) < axes.lines.index(above)
        assert below.get_linewidth() > 2 * above.get_linewidth()
        assert below.get_markersize() > 2 * above.get_markersize()
        assert (below.get_linestyle(), above.get_linestyle()) == ("-", "--")

    @pytest.mark.parametrize("name", ["loss", "gradient norm", "learning rate"])
    def test_each_quantity_has_a_panel_with_its_name_and_steps_below_the_last(self, draw, name):
        figure = draw(trace(), trace())["curves"]
        assert len(lines(panel(figure, name), "candidate")) == 1
        assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "optimizer step"]

    def test_every_group_that_has_a_learning_rate_of_its_own_is_drawn(self, draw):
        groups = {step: {"lr": (1e-3, 1e-4, 1e-3)} for step in (1, 2)}
        axes = panel(draw(trace(2, groups), trace(2, groups))["curves"], "learning rate")
        assert [set(line_.get_ydata()) for line_ in lines(axes, "candidate")] == [{1e-3}, {1e-4}]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
    def test_what_has_no_place_on_an_axis_is_marked_at_its_edge_and_breaks_the_line(self, draw, value):
        figure = draw(trace(), trace(4, {2: {"loss": value}}))["curves"]
        axes = panel(figure, "loss")
        assert list(only(axes, "candidate: NaN or infinite").get_xdata()) == [2]
        assert np.isnan(lines(axes, "candidate")[0].get_ydata()).tolist() == [False, True, False, False]
        assert "candidate: NaN or infinite" in legend(figure)
        assert not lines(axes, "reference: NaN")

    def test_what_neither_run_has_is_said_and_not_left_as_an_empty_frame(self, draw):
        bare = trace(3, {step: {"loss": None} for step in (1, 2, 3)})
        figures = draw(bare, bare)
        assert said(panel(figures["curves"], "loss")) == ["neither run has it"]
        assert "differences" not in figures
        assert not said(panel(figures["curves"], "gradient norm"))

    def test_a_run_that_lacks_a_figure_does_not_hide_the_other_runs(self, draw):
        axes = panel(draw(trace(3, {step: {"grad_norm": None} for step in (1, 2, 3)}), trace(3))["curves"], "gradient")
        assert not lines(axes, "reference")
        assert list(only(axes, "candidate").get_ydata()) == [2.0] * 3

    def test_steps_that_either_run_skipped_are_marked(self, draw):
        skipped = {"skipped": True, "grad_norm": None}
        figure = draw(trace(5, {2: skipped}), trace(5, {2: skipped, 4: skipped}))["curves"]
        assert [list(only(axes, "skipped step").get_xdata()) for axes in figure.axes] == [[2, 4]] * 3

    def test_the_first_difference_is_a_line_through_all_panels(self, draw):
        for figure in draw(trace(6), trace(6, {3: {"loss": 0.75}, 5: {"loss": 0.75}})).values():
            assert [list(only(axes, "first difference").get_xdata()) for axes in figure.axes] == [[3, 3]] * len(
                figure.axes
            )
            assert legend(figure)[-1] == "first difference: step 3"

    def test_equal_runs_have_no_line_of_a_first_difference(self, draw):
        for figure in draw(trace(), trace()).values():
            assert not any(lines(axes, "first difference") for axes in figure.axes)


class TestAxisOfSteps:
    def test_one_step_has_one_tick_and_a_mark(self, draw):
        for figure in draw(trace(1), trace(1)).values():
            figure.canvas.draw()
            labels = [text.get_text() for text in texts(figure) if text in figure.axes[-1].get_xticklabels()]
            assert labels == ["1"]
        assert only(panel(draw(trace(1), trace(1))["curves"], "loss"), "candidate").get_marker() == "o"

    def test_late_steps_are_written_out_and_not_as_an_offset(self, draw):
        axes = draw(trace(5, first=4_000_000), trace(5, first=4_000_000))["curves"].axes[-1]
        axes.figure.canvas.draw()
        assert axes.xaxis.get_offset_text().get_text() == ""
        assert "4000002" in [text.get_text() for text in axes.get_xticklabels()]

    def test_steps_beyond_what_floats_tell_apart_can_be_drawn(self, draw, recwarn):
        other = trace(2, {2**62: {"loss": 0.75}}, first=2**62)
        assert len(draw(trace(2, first=2**62), other)) == 3
        assert not recwarn.list

    def test_the_longer_trace_sets_the_axis(self, draw):
        axes = panel(draw(trace(3), trace(9))["windows"], "rollouts")
        assert axes.get_xlim()[1] > 9
        assert np.isfinite(only(axes, "reference").get_ydata()).sum() == 3
        assert np.isfinite(only(axes, "candidate").get_ydata()).sum() == 9

    @pytest.mark.parametrize("steps", [5, 1000])
    def test_a_run_that_begins_later_is_drawn_where_its_steps_are(self, draw, steps):
        axes = panel(draw(trace(steps), trace(steps, first=4))["curves"], "loss")
        candidate = lines(axes, "candidate")[0]
        known = candidate.get_xdata()[np.isfinite(candidate.get_ydata())]
        assert (known[0], known[-1]) == pytest.approx((4, steps + 3), abs=4 if steps > 5 else 0)

    @pytest.mark.parametrize("swap", [False, True])
    def test_steps_that_another_trainer_does_not_log_are_drawn_of_the_run_that_has_them(self, draw, swap):
        whole = trace(9)
        logged = tuple(one for one in whole.steps if one.step in (3, 5, 7))
        sparse = Trace(whole.header.model_copy(update={"records": ("loss",)}), logged)
        pair = (sparse, whole) if swap else (whole, sparse)
        axes = panel(draw(*pair, tier=REASSOCIATED)["curves"], "loss")
        drawn = only(axes, "candidate" if swap else "reference")
        assert drawn.get_xdata()[np.isfinite(drawn.get_ydata())].tolist() == [*range(1, 10)]


class TestWindows:
    def test_counts_of_both_runs_stand_over_zero(self, draw):
        figure = draw(trace(2), trace(2, {2: {"passes": 9, "idle_passes": 3, "rollouts": 5}}))["windows"]
        assert {axes.get_ylabel(): list(only(axes, "candidate").get_ydata()) for axes in figure.axes} == {
            "rollouts\nin a step": [4, 5],
            "passes\nin a step": [7, 9],
            "idle passes\nin a step": [1, 3],
        }
        assert all(axes.get_ylim()[0] <= 0 for axes in figure.axes)

    def test_what_is_not_compared_says_so(self, draw):
        figure = draw(trace(2, engine="torch", ranks=1), trace(2), tier=REASSOCIATED)["windows"]
        assert [axes.get_title(loc="right") for axes in figure.axes] == ["", "not compared", "not compared"]


class TestDifferences:
    def test_runs_that_are_equal_have_no_axes_that_repeat_each_other(self, draw):
        for tier in (EXACT, REASSOCIATED):
            assert draw(trace(), trace(), tier=tier).keys() == {"curves", "windows"}

    def test_only_what_differs_has_axes_and_the_caption_names_the_rest(self, draw):
        changes = {3: {"grad_norm": 2.5}}
        assert [axes.get_title(loc="left") for axes in draw(trace(), trace(4, changes))["differences"].axes] == [
            "gradient norm"
        ]
        caption = next(it.caption for it in pictures(compared(trace(), trace(4, changes))) if it.name == "differences")
        assert caption.endswith("; no difference in: loss, weights, learning rate")

    def test_a_difference_that_is_allowed_is_drawn_too(self, draw):
        figure = draw(trace(), trace(4, {3: {"loss": 0.5 + 1e-8}}), tier=REASSOCIATED)["differences"]
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss"]

    @pytest.mark.parametrize(
        ("changes", "panels"),
        [
            ({"loss": 0.75, "grad_norm": 3.0}, 2),
            ({"loss": 0.75, "grad_norm": 3.0, "lr": (1e-2,)}, 3),
            ({"loss": 0.75, "grad_norm": 3.0, "lr": (1e-2,), "weights": weights("b", 11.0)}, 4),
        ],
    )
    def test_the_lowest_panel_of_each_column_names_the_axis_of_steps(self, draw, changes, panels):
        axes = draw(trace(), trace(4, {2: changes}))["differences"].axes
        assert len(axes) == panels
        assert sum(one.get_xlabel() == "optimizer step" for one in axes) == 2

    def test_a_difference_stands_at_its_logarithm_and_the_others_at_0(self, draw):
        axes = panel(draw(trace(4), trace(4, {3: {"loss": 0.5 + 5e-5}}))["differences"], "loss")
        heights = ticks(axes)
        over = only(axes, "differs")
        assert list(over.get_xdata()) == [3]
        assert over.get_ydata()[0] == pytest.approx(heights["1e-04"], abs=1e-6)
        assert set(only(axes, "within its bound").get_ydata()) == {heights["0"]}
        assert heights["0"] < min(height for label, height in heights.items() if label != "0")

    def test_the_bound_is_that_of_the_comparison_and_grows_with_the_references_rollouts(self, draw):
        axes = panel(draw(trace(3), trace(3, {1: {"loss": 0.5 + 1e-8}}), tier=REASSOCIATED)["differences"], "loss")
        drawn = 10 ** only(axes, "bound").get_ydata()
        assert drawn == pytest.approx([C["fp32"]["loss"] * EPS["fp32"] * math.sqrt(terms) for terms in (4, 8, 12)])

    def test_a_difference_within_its_bound_is_told_from_one_over_it_by_its_mark(self, draw):
        changes = {1: {"loss": 0.5 + 1e-8}, 2: {"loss": 0.5 + 1e-3}}
        axes = panel(draw(trace(2), trace(2, changes), tier=REASSOCIATED)["differences"], "loss")
        within, over = only(axes, "within its bound"), only(axes, "differs")
        assert (list(within.get_xdata()), list(over.get_xdata())) == ([1], [2])
        assert within.get_marker() != over.get_marker()
        bound = only(axes, "bound").get_ydata()
        assert within.get_ydata()[0] < bound[0] < bound[1] < over.get_ydata()[0]

    @pytest.mark.parametrize(
        "change", [{"loss": math.nan}, {"loss": math.inf}, {"loss": None}], ids=["NaN", "infinite", "absent"]
    )
    def test_what_has_no_logarithm_is_marked_on_a_line_of_its_own(self, draw, change):
        axes = panel(draw(trace(), trace(4, {2: change}))["differences"], "loss")
        marks = only(axes, "differs: NaN, infinite or in one run only")
        assert list(marks.get_xdata()) == [2]
        assert set(marks.get_ydata()) == {ticks(axes)["NaN, inf,\nabsent"]}
        assert axes.get_ylim()[1] > marks.get_ydata()[0]

    def test_steps_that_one_run_lacks_are_marked_in_every_panel(self, draw):
        figure = draw(trace(2), trace(4))["differences"]
        for axes in figure.axes:
            assert list(only(axes, "differs: NaN, infinite or in one run only").get_xdata()) == [3, 4]
        figure = draw(trace(4), trace(2))["differences"]
        for axes in figure.axes:
            assert list(only(axes, "differs: NaN, infinite or in one run only").get_xdata()) == [3, 4]

    def test_weights_that_differ_by_no_more_than_their_checksum_are_not_called_equal(self, draw):
        axes = panel(draw(trace(), trace(4, {2: {"weights": weights("b")}}))["differences"], "weights")
        assert list(only(axes, "differs").get_xdata()) == [2]
        assert set(only(axes, "differs").get_ydata()) == {ticks(axes)["0"]}

    def test_one_step_has_a_bound_that_is_seen(self, draw):
        axes = panel(draw(trace(1), trace(1, {1: {"loss": 0.5 + 1e-8}}), tier=REASSOCIATED)["differences"], "loss")
        left, right = only(axes, "bound").get_xdata()
        assert right > left


class TestManySteps:
    def test_a_spike_of_one_step_is_kept(self, draw):
        figures = draw(trace(1000), trace(1000, {777: {"loss": 9.0}, 778: {"loss": -9.0}}))
        axes = panel(figures["curves"], "loss")
        low, high = [line_ for line_ in axes.lines if line_.get_linestyle() == "--"]
        assert (np.nanmin(low.get_ydata()), np.nanmax(high.get_ydata())) == (-9.0, 9.0)
        assert high.get_xdata()[np.nanargmax(high.get_ydata())] == pytest.approx(777, abs=4)
        assert list(only(panel(figures["differences"], "loss"), "differs").get_xdata()) == [777, 778]

    def test_both_bands_stand_for_the_same_steps_and_the_legend_says_how_many(self, draw):
        changes = {step: {"loss": math.sin(step)} for step in range(1, 1001)}
        figure = draw(trace(1000, changes), trace(1000, changes))["curves"]
        axes = panel(figure, "loss")
        low, high = [line_ for line_ in axes.lines if line_.get_linestyle() == "--"]
        band = axes.collections[0].get_paths()[0].vertices
        assert {(x, y) for x, y in zip(high.get_xdata(), high.get_ydata(), strict=True)} <= set(map(tuple, band))
        assert {(x, y) for x, y in zip(low.get_xdata(), low.get_ydata(), strict=True)} <= set(map(tuple, band))
        assert legend(figure) == [
            "reference: least and greatest of 4 steps", "candidate: least and greatest of 4 steps",
        ]  # fmt: skip

    def test_nan_among_many_steps_is_kept(self, draw):
        axes = panel(draw(trace(1000), trace(1000, {501: {"loss": math.nan}}))["curves"], "loss")
        assert list(only(axes, "candidate: NaN or infinite").get_xdata()) == [501]

    def test_values_without_neighbours_are_marked_since_a_line_would_not_show_them(self, draw):
        rare = {step: {"grad_norm": None} for step in range(1, 1001) if step % 20}
        axes = panel(draw(trace(1000, rare), trace(1000, rare))["curves"], "gradient norm")
        marks = [line_ for line_ in axes.lines if line_.get_marker() == "o"]
        assert {len(line_.get_xdata()) for line_ in marks} == {50}
        assert {to_hex(line_.get_color()) for line_ in marks} == {"#e69f00", "#0072b2"}

    def test_no_line_has_more_points_than_can_be_seen(self, draw):
        noisy = {step: {"loss": math.sin(step * step)} for step in range(1, 5001)}
        for figure in draw(trace(5000, noisy), trace(5000), tier=EXACT).values():
            assert max(len(line_.get_xdata()) for axes in figure.axes for line_ in axes.lines) <= MOST


class TestThinning:
    def test_extremes_ends_and_breaks_survive(self):
        values = np.sin(np.arange(50_000.0))
        values[[0, -1, 12_345, 23_456, 34_567]] = 0.1, 0.2, 7.0, -7.0, np.nan
        kept = thinned(values)
        assert len(kept) <= MOST
        assert {0, 49_999, 12_345, 23_456, 34_567} <= set(kept.tolist())
        assert kept.tolist() == sorted(set(kept.tolist()))

    def test_few_points_are_all_kept(self):
        assert thinned(np.zeros(MOST)).tolist() == list(range(MOST))

    def test_points_of_a_stretch_come_to_its_least_and_greatest(self):
        steps = range(1, 1001)
        drawn = line(steps, [float(step) for step in steps], (1, 1000))
        assert drawn.stretch == 4
        assert (drawn.low[0], drawn.high[0], drawn.x[0]) == (1.0, 4.0, 2.5)
        assert (drawn.low[-1], drawn.high[-1]) == (997.0, 1000.0)

    def test_very_many_steps_without_a_place_on_the_axis_are_marked_from_the_first_to_the_last(self):
        odd = line(range(1, 50_001), [math.nan] * 50_000, (1, 50_000)).odd
        assert len(odd.drawn) <= MOST
        assert (odd.drawn[0], odd.drawn[-1]) == (1, 50_000)
        assert (odd.count, str(odd)) == (50_000, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 49988 more")

    def test_groups_that_are_all_alike_are_one_line_and_more_than_eight_are_not_drawn(self):
        many = Trace(trace().header, (record(1, lr=(1.0, 1.0)), record(2, lr=(1.0, 1.0))))
        assert len(read_run(many, ["lr"], (1, 2)).lines["lr"]) == 1
        assert (
            len(read_run(Trace(many.header, (record(1, lr=tuple(map(float, range(99)))),)), ["lr"], (1, 1)).lines["lr"])
            == 8
        )


CASES = {
    "equal": (trace(8), trace(8)),
    "differs": (trace(8), trace(8, {step: {"loss": 0.5 * step, "grad_norm": 3.0} for step in range(3, 9)})),
    "NaN": (trace(9), trace(9, {3: {"loss": math.nan, "grad_norm": None}, 5: {"lr": (math.inf,), "skipped": True}})),
    "one": (trace(1), trace(1)),
    "many": (trace(1000), trace(999, {7: {"loss": 1e-9}})),
    "long names": (trace(2, engine="x" * 200), trace(2)),
}


@pytest.mark.parametrize("case", CASES)
class TestEveryPicture:
    def test_is_a_png_with_a_caption(self, case):
        made = pictures(compared(*CASES[case]))
        alike = case in ("equal", "one", "long names")
        assert [picture.name for picture in made] == ["curves", *([] if alike else ["differences"]), "windows"]
        assert all(picture.png.startswith(b"\x89PNG") and picture.caption for picture in made)

    def test_holds_its_texts_apart_in_colours_that_the_colour_blind_tell_apart(self, draw, case):
        for figure in draw(*CASES[case], against="x" * 300 if case == "long names" else "torch").values():
            figure.canvas.draw()
            renderer = figure.canvas.get_renderer()
            found = texts(figure)
            boxes = [text.get_window_extent(renderer) for text in found]
            for text, box in zip(found, boxes, strict=True):
                inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
                assert inside, text.get_text()
            shrunk = [(box.x0 + 1, box.x1 - 1, box.y0 + 1, box.y1 - 1) for box in boxes]
            for (one, a), (other, b) in combinations(zip(found, shrunk, strict=True), 2):
                apart = a[1] < b[0] or b[1] < a[0] or a[3] < b[2] or b[3] < a[2]
                assert apart, (one.get_text(), other.get_text())
            labelled = [line_ for axes in figure.axes for line_ in axes.lines if line_.get_label()[0] != "_"]
            colours = {to_hex(line_.get_color()) for line_ in labelled if line_.get_label() != "skipped step"}
            assert colours <= OKABE_ITO


def test_traces_without_steps_have_no_pictures():
    assert pictures(compared(trace(0), trace(0))) == ()


def test_a_name_that_is_a_formula_or_has_letters_that_the_font_lacks_is_shown_as_text(draw, recwarn):
    figure = draw(trace(2), trace(2), against="$\\frac{$ 日本\n\x1b")["curves"]
    figure.canvas.draw()
    assert figure.get_suptitle() == "ragged against $\\frac{$ ????"
    assert not recwarn.list


def test_pictures_are_the_same_every_time_and_whatever_the_users_style():
    once = [picture.png for picture in pictures(compared(trace(), trace()))]
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "text.usetex": True, "savefig.dpi": 20}):
        assert [picture.png for picture in pictures(compared(trace(), trace()))] == once
        assert matplotlib.rcParams["font.size"] == 30
