"""Every bug class is a control or has a reason why it leaves no trace; what is asked for is what is run."""

import importlib

import pytest

from ds_parity.errors import ConfigError
from ds_parity.parity.diagnosis import Cause, Diagnosis, Fit
from ds_parity.parity.subjects.controls.known import WITHOUT_TRACE, known
from ds_parity.parity.verification import control_tables
from ds_parity.parity.verification.control_runs import ControlFinding, chosen, good, planned_runs
from ds_parity.parity.verification.control_scenarios import NAMES, scenario

BUGS = [
    "boundary-off-by-one",
    "last-backward-only",
    "last-backward-by-caller",
    "sticky-boundary",
    "late-boundary",
    "counter-drift",
    "equality-boundary",
    "local-count",
    "step-per-pass",
    "partial-window-leak",
    "sequences-as-prompts",
    "indivisible-batch",
    "mean-of-micro-batches",
    "gas-scaled-twice",
    "dp-mean-left-in",
    "divided-already",
    "sum-over-ranks",
    "weight-left-out",
    "term-by-another",
    "term-of-last-window",
    "sp-factor-by-stage",
    "running-total",
    "target-not-actual",
    "wrong-window",
    "half-broadcast",
    "mixed-weights",
    "unmasked-numerator",
    "aux-term-scaled-apart",
    "zero-denominator",
    "clip-at-wrong-scale",
    "implicit-clip",
    "idle-nan",
    "idle-detached",
    "idle-counted",
    "short-padding",
    "shared-padding",
    "pass-count-differs",
    "sp-double-count",
    "silent-truncation",
    "global-metadata",
    "scheduler-per-pass",
    "scheduler-budget-in-passes",
    "scheduler-per-dynamic-step",
    "scheduler-on-skipped-step",
    "scheduler-per-outer-step",
    "metrics-mean-of-ranks",
    "accuracy-of-means",
    "returned-loss-scaled",
    "nan-in-metric-reduce",
    "reset-gated-by-logging",
    "mid-window-checkpoint",
    "resume-resets-window",
    "resume-resets-schedule",
    "resume-loses-optimizer",
    "resume-repeats-data",
]


def test_every_bug_class_is_a_control_or_says_why_not():
    assert {*known(), *WITHOUT_TRACE} - {"late-boundary on ZeRO 1 and 2"} == set(BUGS)


@pytest.mark.parametrize("name", known())
def test_a_control_is_one_file_by_its_name_and_says_where_it_was_seen(name):
    control = known()[name]
    assert control.__module__.rsplit(".", 1)[1] == name.replace("-", "_")
    assert (importlib.import_module(control.__module__).__doc__ or "").startswith(f"{name}: ")
    assert control.seen
    assert control.scenario in NAMES
    assert control.stages


@pytest.mark.parametrize("name", NAMES)
def test_scenarios_take_zero_and_precision_from_the_configuration_and_hold_rollouts(name):
    given = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "X"},
    }
    made = scenario(name, given)
    assert made.config["zero_optimization"] == given["zero_optimization"]
    assert made.dtype == "bf16"
    assert made.config["optimizer"]["type"] == "SGD"
    assert sum(len(held) for row in made.layout() for held in row) >= 12


def test_a_hollow_scenario_has_one_window_without_loss_tokens():
    made = scenario("hollow", {})
    held = [rollout for row in made.layout() for cell in row for rollout in cell]
    assert [sum(r.loss_tokens for r in held[at : at + 12]) == 0 for at in range(0, 60, 12)] == [0, 1, 0, 0, 0]


def test_a_seldom_scenario_has_idle_passes_behind_its_second_window_alone():
    made = scenario("seldom", {})
    idle = [0] * 5
    consumed = 0
    for row in made.layout():
        idle[consumed // 12] += sum(not cell for cell in row)
        consumed += sum(map(len, row))
    assert consumed == 60
    assert idle[:2] == [0, 0]
    assert idle[2] > 0


def test_only_faults_of_the_stage_are_run_each_in_its_scenario_beside_the_clean_engines():
    on_two = planned_runs({"zero_optimization": {"stage": 2}})
    names = [engine for _, engine in on_two]
    assert "last-backward-only" in names
    assert "late-boundary" not in names
    assert names.count("torch") == names.count("clean") == names.count("ds_parity") == len({s.name for s, _ in on_two})
    assert {c.name for c in chosen(None, 3)} - {c.name for c in chosen(None, 2)} == {"sp-factor-by-stage"}


def test_an_unknown_control_or_scenario_is_refused_by_name():
    with pytest.raises(ConfigError, match="control 'nonsense': it must be one of boundary-off-by-one"):
        planned_runs({}, ["nonsense"])
    with pytest.raises(ConfigError, match="control scenario 'nonsense'"):
        scenario("nonsense", {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"ds_parity": {"lossweight": "token"}}, "lossweight"), ({"gradient_accumulation_passes": 0}, "passes = 0")],
)
def test_wrong_keys_of_ours_are_refused_though_controls_have_their_own(wrong, said):
    with pytest.raises(ConfigError, match=said):
        planned_runs({"gradient_accumulation_passes": 4, **wrong})


class TestVerdict:
    def test_a_missed_fault_and_a_false_alarm_both_fail(self, fault, clean, missed, alarm):
        assert good([fault, clean])
        assert not good([fault, missed, clean])
        assert not good([fault, clean, alarm])
        assert not good([clean])

    def test_is_told_in_words(self, fault, clean, missed, alarm):
        assert control_tables.summary([fault, clean, missed, alarm]).startswith(
            "1 of 2 faults caught, 1 named, 0 unknown and among those not excluded; 1 false alarms in 2 clean runs"
        )
        shown = control_tables.plain([missed])
        assert (shown[0]["caught"], shown[0]["clean"]) == (False, False)


@pytest.fixture
def fault():
    return ControlFinding(
        "idle-nan", "tokens", None, Diagnosis((Cause("zero-denominator", Fit.PATTERN, "x"),)), raised="KeyError: 1"
    )


@pytest.fixture
def clean():
    return ControlFinding("clean", "tokens", None)


@pytest.fixture
def missed():
    return ControlFinding("idle-counted", "tokens", None)


@pytest.fixture
def alarm():
    return ControlFinding("ds_parity", "tokens", None, raised="ValueError: no")
