"""A training function on whole windows in plain torch: its own loss is the reference, where it can be."""

import pytest

from ds_parity.errors import ConfigError
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import windows_of
from ds_parity.parity.subjects.references.alone import train_alone
from ds_parity.parity.verification.verify import Verification, scenarios
from tests.distributed import cells


def steps(train=None, config=None, objective="nll", **values):
    """What the reference `torch` records of a scenario, and the weights that it ends with."""
    train = train and f"tests.parity.training:{train}"
    values = {"windows": 3, "seed": 3, "shape": "overshoot", "short": 5, **cells.TINY, **values}
    lines = []
    wanted = Scenario(
        "whole", config or cells.config(2, loss_weight="token"), train=train, objective=objective, **values
    )
    model = train_alone(wanted, lambda record, _: lines.append(record))
    return lines, [parameter.detach() for parameter in model.parameters()]


def assert_alike(one, other, totals=True):
    """But for what a function computes in fp32."""
    (lines, weights), (others, their_weights) = one, other
    assert len(lines) == len(others) > 1
    for a, b in zip(lines, others, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
        same = ["step", "rollouts", "prompts", "tokens", "lr", "skipped", "passes", *(["total"] if totals else [])]
        assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]
    assert all(a.allclose(b, atol=1e-5) for a, b in zip(weights, their_weights, strict=True))


def test_a_mean_over_tokens_is_the_bundled_one():
    assert_alike(steps("nll"), steps())


def test_a_mean_over_rollouts_is_the_bundled_one():
    config = cells.config(2, loss_weight="rollout")
    assert_alike(steps("by_rollouts", config), steps(config=config))


def test_a_loss_that_is_divided_by_the_target_is_the_bundled_one():
    config = cells.config(2, loss_weight="target")
    assert_alike(steps("by_rollouts", config), steps(config=config))


def test_a_sum_over_tokens_is_the_bundled_one():
    config = cells.config(2, loss_weight="token", loss_reduction="sum")
    assert_alike(steps("summed", config), steps(config=config))


def test_progress_by_rollouts_moves_the_rate_as_it_does_in_the_bundled_one():
    config = cells.config(2, loss_weight="token", lr_progress="rollout")
    assert_alike(steps("nll", config), steps(config=config))


def test_a_window_without_loss_tokens_is_skipped():
    lines, _ = steps("nll", shape="hollow", short=0)
    assert [line.skipped for line in lines] == [False, True, False]
    assert lines[1].loss is None


def test_two_terms_are_divided_each_by_its_own_total():
    """Of coefficients 1 and 0 the step is that of the first term alone."""
    terms = {"a": {"weight": "token"}, "b": {"weight": "rollout", "coefficient": 0.0}}
    config = cells.config(2, terms=terms, lookahead="window")
    assert_alike(steps("two_terms", config), steps(), totals=False)
    both = cells.config(2, terms={**terms, "b": {"weight": "rollout", "coefficient": 0.5}}, lookahead="window")
    halves = steps(config=cells.config(2, loss_weight="rollout"))[0][0].loss / 2
    assert steps("two_terms", both)[0][0].loss == pytest.approx(steps()[0][0].loss + halves, rel=1e-5)


def test_another_loss_than_the_configuration_says_is_another_one_on_whole_windows():
    """Its micro-batches are weighed by tokens, and it is a mean over rollouts: so both sides ran it, and agreed."""
    ours, bundled = steps("by_rollouts")[0], steps()[0]
    assert ours[0].loss != pytest.approx(bundled[0].loss, rel=5e-5)
    assert ours[0].grad_norm != pytest.approx(bundled[0].grad_norm, rel=1e-3)


def test_a_function_that_needs_an_engine_is_told_what_there_is():
    with pytest.raises(ConfigError, match=r"reads_the_window' can't be run on whole windows .*'window'.*backward"):
        steps("reads_the_window")


def runs(against=(), train="training:nll", **section):
    config = cells.config(2, **section)
    wanted, left_out = scenarios(config, 2, against, train=train, **cells.TINY)
    return [(scenario.name, references) for scenario, references in wanted], {str(one) for one in left_out}


class TestWhatIsComparedWith:
    def test_a_training_function_runs_in_the_engine_driven_by_hand_unless_more_is_asked_for(self):
        wanted, left_out = runs()
        assert wanted == [("ragged", ("deepspeed-loop",))]
        assert any("torch: it judges the function's loss on whole windows" in one for one in left_out)
        assert runs(["torch"])[0] == [("ragged", ("torch",))]
        assert runs(["torch", "deepspeed-loop"])[0] == [("ragged", ("deepspeed-loop", "torch"))]

    @pytest.mark.parametrize("unit", ["pass", "weight", "divided"])
    def test_a_loss_that_a_whole_window_has_not_is_refused_with_the_reason(self, unit):
        section = {"loss_weight": unit, **({"across_ranks": "sum"} if unit == "divided" else {})}
        with pytest.raises(ConfigError, match=rf"nothing is left to compare: ragged against torch: .*{unit!r}"):
            runs(["torch"], **section)
        wanted, left_out = runs(["torch", "deepspeed-loop"], **section)
        assert wanted == [("ragged", ("deepspeed-loop",))]
        assert len(left_out) == 1

    def test_fixed_accumulation_takes_no_training_function(self):
        with pytest.raises(ConfigError, match="a training function calls an engine"):
            runs(["deepspeed"])

    def test_without_one_the_references_that_are_asked_for_are_run(self):
        assert runs(train=None)[0] == [("uniform", ("deepspeed",)), ("ragged", ("deepspeed-loop", "torch"))]
        assert runs(["torch"], train=None)[0] == [("ragged", ("torch",))]
        assert runs(["deepspeed"], train=None)[0] == [("uniform", ("deepspeed",))]

    def test_no_window_goes_beyond_a_target_where_that_is_an_error(self):
        wanted, _ = scenarios(cells.config(2, overshoot="error"), 2, **cells.TINY)
        for scenario, _ in wanted:
            windows = windows_of(scenario.batches(), scenario.settings)
            assert max(window.total for window in windows) == 12

    @pytest.mark.parametrize("last_window", ["drop", "error"])
    @pytest.mark.parametrize("section", [{}, {"overshoot": "reset"}, {"overshoot": "error"}, {"count": "prompt"}])
    def test_no_window_is_open_where_the_last_one_is_not_stepped_as_it_is(self, last_window, section):
        wanted, _ = scenarios(cells.config(2, last_window=last_window, **section), 2, **cells.TINY)
        for scenario, _ in wanted:
            windows = windows_of(scenario.batches(), scenario.settings)
            assert len(windows) >= (1 if "count" in section else scenario.windows - 1)
            assert not any(window.open for window in windows)

    def test_fixed_accumulation_counts_no_prompts(self):
        wanted, left_out = runs(train=None, count="prompt")
        assert wanted == [("ragged", ("deepspeed-loop", "torch"))]
        assert left_out == {"uniform against deepspeed: it steps by micro-batches, and here windows end by prompts"}

    def test_an_unknown_reference_is_refused(self):
        with pytest.raises(ConfigError, match=r"--against is 'hand': it must be one of deepspeed, deepspeed-loop, to"):
            runs(["hand"])


LOSS = ((1, "loss"), (1, "grad_norm"), (1, "weights"))


class TestWhatIsSaid:
    def sentence(self, train="training:nll", bare=False, apart=LOSS, steps=4, **equal):
        from types import SimpleNamespace

        scenario = Scenario("said", cells.config(2, loss_weight="token"), train=train)
        differences = tuple(SimpleNamespace(step=step, field=field) for step, field in apart)
        outcomes = tuple(
            SimpleNamespace(
                scenario=scenario,
                reference=name.replace("_", "-"),
                candidate=SimpleNamespace(steps=range(steps)),
                comparison=SimpleNamespace(
                    equal=alike,
                    proves_little=(),
                    differences=() if alike else differences,
                    rows=(SimpleNamespace(step=1), SimpleNamespace(step=2)),
                ),
            )
            for name, alike in equal.items()
        )
        return Verification(outcomes, (), "cpu", bare).sentence

    def test_where_both_sides_ran_a_function_only_the_engine_was_judged(self):
        said = self.sentence(deepspeed_loop=True)
        assert (
            said == "every step is equal; both sides ran training:nll, so only the engine was judged, and not its loss"
        )

    @pytest.mark.parametrize(("steps", "ran"), [(1, "1 step"), (3, "3 steps")])
    def test_a_function_that_ends_early_is_told_what_was_not_judged(self, steps, ran):
        said = self.sentence(deepspeed_loop=True, steps=steps)
        assert said.endswith(
            f"and not its loss. It took {ran}, and its micro-batches are those of 4 windows: what it left out was not "
            "judged"
        )

    @pytest.mark.parametrize("equal", [{"torch": True}, {"deepspeed_loop": True, "torch": True}])
    def test_where_it_ran_on_whole_windows_the_sentence_says_what_that_proves(self, equal):
        said = self.sentence(**equal)
        assert "training:nll takes the same steps on whole windows in plain torch, so its loss is divided as" in said
        assert "a constant factor of it is on both sides, and was not judged" in said

    def test_a_loss_that_is_not_what_the_configuration_says_is_named(self):
        named = (
            "the loss of training:nll is not the mean over the loss tokens of a micro-batch, as the configuration says"
        )
        assert self.sentence(deepspeed_loop=True, torch=False) == f"the engine steps right, and {named}"
        assert self.sentence(torch=False).endswith(named)
        assert self.sentence(deepspeed_loop=False, torch=False).endswith(named)
        assert self.sentence(torch=False, apart=((None, "loss, mean"),)).endswith(named)
        assert self.sentence(deepspeed_loop=False) == "the runs differ"

    @pytest.mark.parametrize("loop", [{"deepspeed_loop": True}, {"deepspeed_loop": False}, {}])
    def test_a_loss_that_agrees_in_the_first_step_is_not_called_wrong(self, loop):
        other = self.sentence(torch=False, apart=((3, "loss"), (3, "weights")), **loop)
        assert "before step 3, and has another loss from there on: it is another function that agrees" in other
        later = self.sentence(torch=False, apart=((3, "weights"),), **loop)
        assert "takes the same steps on whole windows in plain torch before step 3, with the same loss" in later
        clipped = self.sentence(torch=False, apart=((1, "grad_norm"), (1, "weights"), (2, "loss")), **loop)
        assert (
            "has the same loss in step 1 on whole windows in plain torch, and not the same gradient norm or w"
            in clipped
        )
        fewer = self.sentence(torch=False, apart=((2, "step"),), **loop)
        assert fewer.endswith("training:nll takes other steps on whole windows in plain torch, from step 2 on")
        for said in (later, clipped, fewer):
            assert "is not the mean" not in said
            assert said.startswith("the engine steps right, and" if loop.get("deepspeed_loop") else "the runs differ")

    def test_of_bare_deepspeed_the_loss_is_suspected_where_it_differs_first(self):
        differ = "the runs differ: this DeepSpeed, or"
        assert self.sentence(torch=False, bare=True) == f"{differ} the loss of training:nll, is wrong"
        assert self.sentence(torch=False, bare=True, apart=((2, "loss"),)) == f"{differ} training:nll, is wrong"

    def test_of_the_bundled_loop_nothing_more_is_said(self):
        assert self.sentence(None, deepspeed=True, torch=True) == "every step is equal"
        assert self.sentence(None, deepspeed=True, torch=False) == "the runs differ"


@pytest.mark.parametrize("train", [None, "nll"])
def test_the_reference_tells_where_the_weights_started(train, tmp_path):
    from ds_parity.parity.running.recording import Recorder
    from ds_parity.trace import read_trace

    train = train and f"tests.parity.training:{train}"
    values = {"windows": 2, "seed": 3, "shape": "overshoot", "short": 5, **cells.TINY}
    wanted = Scenario("starts", cells.config(2, loss_weight="token"), train=train, objective="nll", **values)
    with Recorder(tmp_path, wanted, "torch") as recorder:
        train_alone(wanted, recorder)
    assert read_trace(tmp_path / "starts" / "torch.jsonl").header.start is not None
