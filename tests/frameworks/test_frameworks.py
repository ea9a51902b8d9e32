"""accelerate, transformers' Trainer and TRL step as they do without us, and are refused where they count otherwise."""

import pytest

from tests.frameworks.runs import CELLS, REFUSED, WEIGHED, name

pytestmark = [pytest.mark.hf, pytest.mark.ranks]


def pair(found, run, stage=2, dtype="fp32"):
    bare, ours = (found[name(run, ours, stage, dtype)] for ours in (False, True))
    assert (bare["engine"], ours["engine"]) == ("DeepSpeedEngine", "FrameworkEngine")
    return bare, ours


@pytest.mark.parametrize(("run", "stage", "dtype"), CELLS)
def test_uniform_windows_are_bit_identical_with_and_without_us(found, run, stage, dtype):
    """Losses of both ranks, LR, gradient norms, weights."""
    bare, ours = pair(found, run, stage, dtype)
    assert len(bare["steps"]) == 4
    if stage == 0:  # where DeepSpeed throws the norm away
        assert all(step.pop("grad_norm") is None for step in bare["steps"])
        assert all(step.pop("grad_norm") > 0 for step in ours["steps"])
    assert ours["steps"] == bare["steps"]
    assert ours["global_steps"] == bare["global_steps"] == ours["windows"]
    assert ours["open"] == 0
    assert ours["last"]["rollouts"] == 12
    assert ours["last"]["passes"] == 3


@pytest.mark.parametrize("run", sorted({run for run, *_ in CELLS} - {"accelerate", "accelerate, own scheduler"}))
def test_what_a_trainer_logs_is_the_same(found, run):
    bare, ours = pair(found, run)
    assert ours["logged"] == bare["logged"]
    assert len(ours["logged"]) == 4


def test_weights_move_in_every_step(found):
    """But for accelerate's first, whose warm-up starts at 0: else equality would prove little."""
    for run, stage, dtype in CELLS:
        checksums = [step["weights"] for step in pair(found, run, stage, dtype)[0]["steps"]]
        assert len(set(checksums)) >= 3, (run, stage, dtype)


def test_the_loss_of_the_last_step_is_that_of_its_passes_over_all_ranks(found):
    """A Trainer's losses are shares of the step's; accelerate's are means of micro-batches."""
    for run, passes in (("accelerate", 3), ("Trainer", 1), ("DPO", 1), ("GRPO", 1)):
        _, ours = pair(found, run)
        told = sum(sum(rank) for rank in ours["steps"][-1]["losses"]) / 2 / passes
        assert ours["last"]["loss"] == pytest.approx(told, rel=1e-6), run


def test_a_reference_model_is_deepspeeds_own_engine(found):
    bare, ours = pair(found, "DPO")
    assert ours["reference"] == bare["reference"] == "DeepSpeedEngine"


def test_the_configuration_that_is_shipped_for_hugging_face_trains_in_a_trainer(found):
    bare, ours = pair(found, "shipped", 3, "bf16")
    assert ours["steps"] == bare["steps"]
    assert ours["last"]["rollouts"] == 24


def test_an_lr_that_moves_by_rollouts_is_where_uniform_windows_have_it(found):
    bare, ours = pair(found, "by rollout")
    assert ours["steps"] == bare["steps"]


def test_an_epoch_that_ends_inside_a_window_is_bit_identical_in_a_trainer(found):
    """It divides by the tokens of the short window itself."""
    bare, ours = pair(found, "Trainer, cut")
    assert [len(step["losses"][0]) for step in ours["steps"]] == [3, 3, 1, 3]
    assert ours["steps"] == bare["steps"]


def test_the_short_window_of_an_accelerate_loop_is_normalised_by_what_it_holds(found):
    """Bare DeepSpeed divides its one pass by 3."""
    bare, ours = pair(found, "cut")
    assert [len(step["losses"][0]) for step in ours["steps"]] == [3, 3, 1] * 2
    assert ours["steps"][:2] == bare["steps"][:2]
    assert ours["steps"][2]["grad_norm"] == pytest.approx(3 * bare["steps"][2]["grad_norm"], rel=1e-5)


def test_a_short_window_is_told_of(found):
    said = found[name("cut", True, 2, "fp32")]["said"]
    assert len(said) == 2
    assert said[0].startswith(
        "window 2 is ended by its caller after 1 of 3 passes a rank, at 4 of the 12 rollouts that close it"
    )


@pytest.mark.parametrize("rule", ["drop", "error"])
def test_a_short_window_is_refused_where_it_may_not_step(found, rule):
    for error in found[f"cut, {rule}"]:
        assert error.startswith("WindowError: window 2 is ended by its caller after 1 of 3 passes")
        assert f"ds_parity.last_window is '{rule}'" in error


REFUSALS = {
    "accumulates less": ["ConfigError", "gradient_accumulation_steps = 2", "6 passes / 2 data-parallel ranks = 3"],
    "changed to less": [
        "WindowError",
        "(True) before pass 1 of window 0",
        "8 of the 12 rollouts",
        "accumulate 3 passes",
    ],
    "changed to more": [
        "WindowError",
        "(False) before pass 2 of window 0",
        "12 of the 12 rollouts",
        "accumulate 3 passes",
    ],
    "ranks differ": ["RankDesyncError", "rank 1 was told to end the window", "rank 0 was told to go on"],
    "ragged counts": [
        "WindowError",
        "(False) before pass 1 of window 0",
        "12 of the 12",
        "engine.backward(loss, rollouts",
    ],
    "uneven passes": ["ConfigError", "gradient_accumulation_passes = 5 on 2 data-parallel ranks", "multiple of 2"],
    "scheduler out of reach": ["ConfigError", "lr_progress is 'rollout'", "the framework steps its own"],
    "loss_weight": ["WindowError", "scale_wrt_gas=False", "loss_weight = 'token'", "remove ds_parity.loss_weight"],
    "loss_reduction": ["WindowError", "scale_wrt_gas=False", "loss_reduction = 'sum'"],
}


@pytest.mark.parametrize("how", REFUSALS)
def test_what_contradicts_the_counts_is_refused_on_every_rank(found, how):
    assert len(found[how]) == 2
    for error in found[how]:
        assert all(part in error for part in REFUSALS[how]), error


def test_every_refusal_is_looked_at():
    assert set(REFUSALS) == {*REFUSED, *WEIGHED}


def test_the_trace_of_a_trainer_holds_its_steps(found):
    traced = found["traced"]
    assert [step["rollouts"] for step in traced["trace"]] == [12] * 4
    for step, logged in zip(traced["trace"], traced["logged"], strict=True):
        assert step["loss"] == pytest.approx(logged["loss"], rel=1e-3)


def test_a_trainer_resumes_bit_for_bit(found):
    whole, rest = found["resumed"]
    assert len(whole["steps"]) == 4
    assert rest["steps"] == whole["steps"][2:]
    assert rest["windows"] == whole["windows"] == 4


def test_the_code_of_the_readme_trains(found):
    ran = found["readme"]
    assert ran["engines"] == ["FrameworkEngine"] * 2
    (trained, target), (looped, same) = ran["windows"]
    assert target == same
    assert trained >= 1
    assert looped >= 2
