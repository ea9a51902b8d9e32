"""A scenario is the same run on every rank and in every process, and refuses what can't be one."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from torch import nn

from ds_parity.config import rewrite
from ds_parity.errors import ConfigError
from ds_parity.losses import PolicyGradient
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.shapes import leveled, streamed
from ds_parity.parity.subjects.oracle import windows_of
from ds_parity.parity.verification.verify import scenarios
from ds_parity.planning.rollout import Rollout
from tests.distributed import cells


def scenario(shape="ragged", config=None, **values):
    return Scenario("test", config or cells.config(2), shape=shape, **{**cells.TINY, **values})


def flat(layout):
    return [rollout for row in layout for held in row for rollout in held]


def test_a_scenario_travels_as_json_and_comes_back_the_same():
    sent = scenario("overshoot", ranks=3, windows=2, seed=7, drive="passes", short=1, rollouts="mine", objective="nll")
    assert Scenario.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    assert Scenario.from_json(json.loads(json.dumps(scenario().to_json()))) != sent


@pytest.mark.parametrize("shape", ["uniform", "ragged", "overshoot"])
def test_equal_scenarios_have_equal_layouts_and_another_seed_has_another(shape):
    assert scenario(shape, seed=3).layout() == scenario(shape, seed=3).layout()
    assert scenario(shape, seed=3).layout() != scenario(shape, seed=4).layout()


def test_ragged_windows_hold_the_same_rollouts_on_any_number_of_ranks():
    held = []
    for ranks in (1, 2, 4):
        wanted = scenario(ranks=ranks)
        layout = wanted.layout()
        windows = windows_of(wanted.batches(), wanted.settings)
        held.append([flat(layout[w.first : w.last + 1]) for w in windows])
    assert held[0] == held[1] == held[2]
    assert [len(window) for window in held[0]] == [12] * 4


def test_overshooting_windows_go_beyond_the_target():
    wanted = scenario("overshoot", seed=3)
    closed = windows_of(wanted.batches(), wanted.settings)
    assert any(w.total > w.expected for w in closed)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uniform_windows_have_one_rollout_on_every_rank_in_every_pass(ranks):
    wanted = scenario("uniform", ranks=ranks, windows=2)
    layout = wanted.layout()
    assert {len(held) for row in layout for held in row} == {1}
    assert [w.last - w.first + 1 for w in windows_of(wanted.batches(), wanted.settings)] == [12 // ranks] * 2


@pytest.mark.parametrize("micro", [1, 2])
def test_a_uniform_window_has_as_many_passes_as_deepspeed_accumulates(micro):
    """Otherwise the reference `deepspeed`, which decides by itself, steps somewhere else."""
    config = {**cells.config(0, passes=6), "train_micro_batch_size_per_gpu": micro}
    wanted = scenario("uniform", config, windows=1)
    assert len(wanted.layout()) == rewrite(config, 2).config["gradient_accumulation_steps"]


def test_uniform_windows_are_refused_with_the_arithmetic_where_ranks_do_not_divide_the_target():
    with pytest.raises(
        ConfigError, match=r"12 passes on 5 ranks leave a remainder of 2; choose another number of ranks"
    ):
        scenario("uniform", ranks=5).layout()


def test_uniform_windows_weighed_by_tokens_hold_equally_many_in_every_micro_batch():
    wanted = scenario("uniform", cells.config(0, loss_weight="token"), max_tokens=None)
    assert {batch.tokens for row in wanted.batches() for batch in row} == {64}


def test_leveled_keeps_the_rollouts_that_have_enough_loss_tokens_and_cuts_them_to_that_many():
    rollouts = [
        Rollout(name, tuple(range(length)), prompt_length=3) for name, length in zip("abcd", (9, 7, 8, 3), strict=True)
    ]
    kept = leveled(rollouts, 5)
    assert [(rollout.prompt_id, rollout.tokens, rollout.loss_tokens) for rollout in kept] == [
        ("a", tuple(range(8)), 5),
        ("c", tuple(range(8)), 5),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_streamed_keeps_each_ranks_order_and_is_idle_only_at_the_end(ranks):
    layout = scenario("overshoot", ranks=ranks, seed=4).layout()
    stream = streamed(layout, ranks)
    assert any(not held for row in layout for held in row), "the layout should have gaps to close"
    for rank in range(ranks):
        held = [row[rank] for row in stream]
        busy = [one for one in held if one]
        assert busy == [row[rank] for row in layout if row[rank]]
        assert held == busy + [()] * (len(held) - len(busy))
    assert all(any(row) for row in stream)


def test_a_scenario_driven_by_passes_is_laid_out_as_streams():
    by_loop, by_passes = (scenario("overshoot", seed=4, drive=drive).layout() for drive in ("loop", "passes"))
    assert by_passes == streamed(by_loop, 2) != by_loop


@pytest.mark.parametrize("shape", ["ragged", "overshoot"])
@pytest.mark.parametrize("short", [1, 5, 11])
def test_short_takes_that_many_rollouts_off_the_end_and_leaves_the_last_window_open(shape, short):
    wanted = scenario(shape, short=short)
    assert Counter(flat(wanted.layout())) == Counter(flat(scenario(shape).layout())[: 4 * 12 - short])
    assert [w.open for w in windows_of(wanted.batches(), wanted.settings)] == [False] * 3 + [True]
    assert not any(w.open for w in windows_of(scenario(shape).batches(), wanted.settings))


def test_rollouts_that_close_no_window_are_refused_where_the_last_one_is_dropped():
    wanted = replace(scenario("ragged", short=11), config=cells.config(2, last_window="drop"), windows=1)
    with pytest.raises(ConfigError, match=r"close none of 12 rollouts, and ds_parity.last_window is 'drop'"):
        wanted.layout()
    assert len(windows_of(replace(wanted, windows=3).batches(), wanted.settings)) == 2


CALLER = {**cells.config(1, passes=12), "ds_parity": {"boundary": "caller"}}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_an_uneven_scenario_run_other_numbers_of_backwards_and_one_none_in_the_second_window(ranks):
    loop, drawn = (scenario("overshoot", CALLER, seed=3, drive=drive, ranks=ranks) for drive in ("loop", "uneven"))
    layout = drawn.layout()
    assert Counter(flat(layout)) == Counter(flat(loop.layout()))
    assert all(any(row) for row in layout)
    cut = [layout[w.first : w.last + 1] for w in windows_of(drawn.batches(), drawn.settings)]
    runs = [[sum(map(bool, column)) for column in zip(*window, strict=True)] for window in cut]
    assert [window[0] == 0 for window in runs[:3]] == [False, ranks > 1, False]
    assert ranks == 1 or any(len(set(window)) > 1 for window in runs[:1] + runs[2:])
    # What the first micro-batches weigh stands for the first window, so that it has no gaps before them.
    assert all(cell for cell, number in zip(layout[0], runs[0], strict=True) if number)


def test_without_a_target_a_scenario_has_windows_of_eight_passes():
    bare = {key: value for key, value in CALLER.items() if key != "gradient_accumulation_passes"}
    assert (
        scenario("uniform", bare).layout() == scenario("uniform", {**bare, "gradient_accumulation_passes": 8}).layout()
    )


@pytest.mark.parametrize("drive", ["announced", "uneven"])
def test_a_loop_that_ends_windows_needs_the_key_that_says_so(drive):
    with pytest.raises(ConfigError, match=f"drive is '{drive}'.*set ds_parity.boundary to 'caller'"):
        scenario(drive=drive)


def test_a_training_function_that_ends_windows_is_refused():
    with pytest.raises(ConfigError, match=r"a training function with ds_parity.boundary 'caller'"):
        scenario(config=CALLER, train="mine:train")


def test_micro_batches_bring_weights_where_they_are_weighed_by_them_alone():
    own = scenario("overshoot", cells.config(1, loss_weight="weight"))
    weights = [one.weight for row in own.batches() for one in row]
    assert len(set(weights)) > 3
    assert weights == [one.tokens % 8 / 4 for row in own.batches() for one in row]
    assert not any(one.weight for row in scenario("overshoot").batches() for one in row)


def test_a_scenario_without_the_key_is_refused():
    bare = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=r"'test'.*no gradient_accumulation_passes.*add the key"):
        _ = scenario(config=bare).settings


@pytest.mark.parametrize("weight", cells.WEIGHTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_build_puts_the_loss_of_the_configuration_on_the_model(weight, reduction):
    wanted = scenario(config=cells.config(0, loss_weight=weight, loss_reduction=reduction), objective="nll")
    model = wanted.build()
    assert isinstance(model, PolicyGradient)
    assert (model.loss_weight, model.loss_reduction, model.objective) == (weight, reduction, "nll")
    assert isinstance(model.policy, nn.Module)
    assert model(**wanted.batches()[-1][-1].inputs).shape == ()


def test_a_model_that_is_no_module_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"model 'builtins:str' returned str: it must return a torch nn\.Module"):
        scenario(model="builtins:str").build()


def test_a_switch_in_quotes_is_the_one_that_deepspeed_takes_it_for():
    off = {**cells.config(1), "bf16": {"enabled": "false"}}
    assert scenario(config=off).storage == "fp32"
    assert scenario(config={**off, "fp16": {"enabled": "true"}}).storage == "fp16"


@pytest.mark.parametrize(("section", "dtype"), [("bf16", "bf16"), ("fp16", "fp16"), ("neither", "fp32")])
def test_the_type_is_that_of_the_section_which_is_enabled(section, dtype):
    assert scenario(config={**cells.config(1), section: {"enabled": True}}).dtype == dtype


@pytest.mark.parametrize(
    ("section", "left_out"),
    [
        ({}, []),
        ({"loss_weight": "weight"}, ["each brings its own"]),
        ({"loss_weight": "divided", "across_ranks": "sum"}, ["the caller has divided already"]),
    ],
)
def test_verify_takes_a_caller_without_a_target_and_leaves_out_what_bare_deepspeed_cannot_do(section, left_out):
    config = {**CALLER, "ds_parity": {"boundary": "caller", **section}}
    del config["gradient_accumulation_passes"]
    runs, reasons = scenarios(config, 2, windows=3, **cells.TINY)
    assert [one.name for one, _ in runs] == (["ragged"] if left_out else ["uniform", "ragged"])
    assert all(one.layout() for one, _ in runs)
    assert [reason.why[-len(said) :] for reason, said in zip(reasons, left_out, strict=True)] == left_out


TERMS = {"policy": {"weight": "token"}, "own": {"weight": "weight"}}


@pytest.mark.parametrize("section", [{"terms": TERMS}, {"loss_weight": "weight"}])
def test_a_sum_of_losses_with_weights_of_their_own_is_refused(section):
    config = cells.config(0, **section)
    config["ds_parity"]["loss_reduction"] = "sum"
    with pytest.raises(ConfigError, match="micro-batches bring their own weights"):
        Scenario("sums", config)


def test_terms_of_several_units_need_a_loop_that_knows_their_totals():
    config = cells.config(0, terms=TERMS)
    with pytest.raises(ConfigError, match=r"ds_parity\.lookahead to 'window'"):
        Scenario("unknown", config, drive="passes")
    Scenario("known", cells.config(0, terms=TERMS, lookahead="window"), drive="passes")


def test_what_verify_runs_writes_nothing_that_the_configuration_names():
    """A trace or a monitor of the user's own run would be overwritten, or show the harness's steps."""
    config = {**cells.config(2, trace="run.jsonl", loss_weight="token"), "csv_monitor": {"enabled": True}}
    for scenario, _ in scenarios(config, 2)[0]:
        assert scenario.config["ds_parity"] == {"loss_weight": "token"}
        assert "csv_monitor" not in scenario.config
    assert config["ds_parity"]["trace"] == "run.jsonl"


DIVIDED = {
    "tensor_parallel": {"autotp_size": 2},
    "gradient_accumulation_passes": 4,
    "train_micro_batch_size_per_gpu": 1,
}


def test_ranks_that_share_a_model_are_processes_of_their_own():
    model = "ds_parity.parity.matrix.engine_setups:llama"
    scenario = Scenario("divided", DIVIDED, ranks=2, model=model)
    assert (scenario.sharing, scenario.processes) == (2, 4)
    assert Scenario("whole", {**DIVIDED, "tensor_parallel": {}}, ranks=2).processes == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "with the bundled decoder, which AutoTP has no plan for"),
        ({"model": "own:model", "sequence_parallel": 2}, "and sequence_parallel 2"),
    ],
)
def test_what_autotp_can_not_divide_is_refused_before_a_rank_is_started(fields, says):
    with pytest.raises(ConfigError, match=says):
        Scenario("divided", DIVIDED, **fields)
