"""The rewrite: a plain DeepSpeed configuration that agrees with the passes, and a reason for every change."""

import contextlib
import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_parity.config import ABSENT, Change, Rewrite, load_config, rewrite
from ds_parity.errors import ConfigError
from tests.distributed import cells

DS_CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
EXTRA = ("gradient_accumulation_passes", "ds_parity")


def config(**keys):
    return {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_passes": 8, "gradient_clipping": 1.0, **keys}


def message(keys, ranks=2):
    with pytest.raises(ConfigError) as caught:
        rewrite(keys, ranks)
    return str(caught.value)


def test_the_triple_is_written_and_the_extra_keys_are_removed():
    result = rewrite(config(ds_parity={"count": "prompt"}), 2)
    assert result.config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
    }
    assert result.settings.target == 16
    assert [(change.key, change.before, change.after) for change in result.changes] == [
        ("gradient_accumulation_passes", 8, ABSENT),
        ("ds_parity", {"count": "prompt"}, ABSENT),
        ("gradient_accumulation_steps", ABSENT, 4),
        ("train_batch_size", ABSENT, 16),
    ]
    assert all(change.why for change in result.changes)


def test_absent_prints_as_a_word_and_survives_a_copy():
    change = copy.deepcopy(Change("key", ABSENT, 1, "why"))
    assert change.before is ABSENT
    assert "before=(absent)" in repr(change)
    assert f"{change.before}" == "(absent)"


def test_passes_that_do_not_divide_by_the_ranks_work_and_show_the_arithmetic():
    result = rewrite(config(gradient_accumulation_passes=10), 4)
    assert (result.config["gradient_accumulation_steps"], result.config["train_batch_size"]) == (3, 24)
    why = {change.key: change.why for change in result.changes}["gradient_accumulation_steps"]
    assert "10 passes / 4 data-parallel ranks = 2.5, rounded up to 3 passes a rank" in why
    assert "the window still closes at 20 rollouts" in why


def test_the_target_follows_the_passes_whatever_the_number_of_ranks():
    assert {rewrite(config(), ranks).settings.target for ranks in (1, 2, 3, 8, 64)} == {16}


@pytest.mark.parametrize("given_batch", [20, 24, "auto", None])
def test_a_batch_size_that_is_the_target_or_what_deepspeed_is_told_is_accepted(given_batch):
    result = rewrite(config(gradient_accumulation_passes=10, train_batch_size=given_batch), 4)
    assert result.config["train_batch_size"] == 24


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train_batch_size": 15}, ["train_batch_size = 15", "= 8 x 2 = 16 rollouts", "write 16"]),
        ({"train_batch_size": True}, ["train_batch_size = true", "whole number"]),
        ({"train_batch_size": 16.0}, ["train_batch_size = 16.0", "whole number"]),
        ({"train_batch_size": 0}, ["train_batch_size = 0"]),
        ({"gradient_accumulation_steps": 8}, ["gradient_accumulation_steps = 8", "8 passes / 2", "= 4", "write 4"]),
        (
            {"gradient_accumulation_steps": 1},
            ["= 1", 'with accelerate, which writes 1 for a missing key, write "auto"'],
        ),
        ({"gradient_accumulation_steps": "4"}, ['gradient_accumulation_steps = "4"', "whole number"]),
        ({"gradient_accumulation_steps": -4}, ["gradient_accumulation_steps = -4"]),
    ],
)
def test_a_batch_size_that_contradicts_the_passes_is_refused_with_the_arithmetic(keys, words):
    text = message(config(**keys))
    for word in words:
        assert word in text


CURRICULUM = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}}}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gradient_accumulation_passes": 5}, "5 passes / 2 data-parallel ranks = 2.5, rounded up to 3 passes a rank"),
        ({"gradient_accumulation_passes": ABSENT, "ds_parity": {"boundary": "caller"}}, "told of one pass a rank"),
    ],
)
def test_a_curriculum_that_would_not_move_once_a_step_is_refused(keys, said):
    own = {key: value for key, value in config(data_efficiency=CURRICULUM, **keys).items() if value is not ABSENT}
    told = message(own)
    assert "data_efficiency.data_sampling.curriculum_learning.enabled = true: its difficulty moves once for" in told
    assert said in told
    whole = {**own, "gradient_accumulation_passes": 6}
    assert rewrite(whole, 2).config["data_efficiency"] == CURRICULUM
    off = {**CURRICULUM, "data_sampling": {**CURRICULUM["data_sampling"], "enabled": False}}
    assert rewrite({**own, "data_efficiency": off}, 2).config["data_efficiency"] == off


def test_an_auto_micro_batch_size_leaves_the_triple_to_whoever_fills_it_in():
    keys = config(train_micro_batch_size_per_gpu="auto", train_batch_size="auto", gradient_accumulation_steps="auto")
    result = rewrite(keys, 2)
    triple = {"train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"}
    assert {key: result.config[key] for key in triple} == dict.fromkeys(triple, "auto")
    kept = {change.key: change.why for change in result.changes if change.before == change.after == "auto"}
    assert set(kept) == triple
    assert "what fills that in settles the batch" in kept["train_batch_size"]


def test_beside_an_auto_micro_batch_size_what_can_be_checked_is_checked():
    keys = config(train_micro_batch_size_per_gpu="auto", train_batch_size=15, gradient_accumulation_steps=3)
    text = message(keys)
    assert "no micro-batch size fits: 15 / 8 passes" in text
    assert "gradient_accumulation_steps = 3" in text
    keys |= {"train_batch_size": 24, "gradient_accumulation_steps": 4}
    assert rewrite(keys, 2).config["train_batch_size"] == 24


def test_a_micro_batch_size_worked_out_from_the_batch_size_is_written_out():
    result = rewrite({"gradient_accumulation_passes": 4, "train_batch_size": 12}, 2)
    change = next(change for change in result.changes if change.key == "train_micro_batch_size_per_gpu")
    assert (change.before, change.after) == (ABSENT, 3)
    assert "12 / 4 = 3" in change.why


def test_a_missing_gradient_clipping_is_written_as_1_with_the_reason():
    keys = config()
    del keys["gradient_clipping"]
    result = rewrite(keys, 1)
    change = next(change for change in result.changes if change.key == "gradient_clipping")
    assert (change.before, change.after) == (ABSENT, 1.0)
    assert "0.19.0" in change.why
    assert "0.0 for no clipping" in change.why


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 3, "auto"])
def test_a_given_gradient_clipping_is_left(value):
    assert rewrite(config(gradient_clipping=value), 1).config["gradient_clipping"] is value


def test_unmanaged_accumulation_becomes_managed_with_the_reason():
    result = rewrite(config(managed_gradient_accumulation=False), 1)
    change = result.changes[-1]
    assert (change.key, change.before, change.after) == ("managed_gradient_accumulation", False, True)
    assert "set_gradient_accumulation_boundary" in change.why


REFUSED = [
    (
        {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor = 2.0",
        "stage 1 or 2",
    ),
    (
        {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor = 2.0: DeepSpeed does not support it on ZeRO stage 2 with reduce_scatter",
        "reduce_scatter to false",
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_scatter": "auto"}, "prescale_gradients": True},
        "prescale_gradients = true: DeepSpeed does not support it on ZeRO stage 2 with reduce_scatter",
        "reduce_scatter to false",
    ),
    (
        {"zero_optimization": {"stage": 3}, "prescale_gradients": True, "gradient_allreduce_op": "mean"},
        "prescale_gradients = true: DeepSpeed does not support it on ZeRO stage 3 with reduce_scatter",
        "reduce_scatter to false",
    ),
    (
        {"zero_optimization": False, "fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        'data_types.grad_accum_dtype = "fp32": DeepSpeed has no fp16',
        "stage to 1",
    ),
    (
        {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
            "torch_autocast": {"enabled": True, "dtype": "float16"},
        },
        "zero_optimization.compute_grad_norm = false",
        "bfloat16",
    ),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        'data_types.grad_accum_dtype = "fp32"',
        "stage to 1",
    ),
    (
        {"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "float32"}},
        'data_types.grad_accum_dtype = "float32"',
        "stage to 1",
    ),
    ({"optimizer": {"type": "AdamW", "params": {"lr": -1e-3}}}, "optimizer.params.lr", "give a rate of 0 or more"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "remove it"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile = true", "set it to false"),
    ({"elasticity": {"enabled": True}}, "elasticity.enabled = true", "remove the section"),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled = true", "remove the section"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled = true", "set it to false"),
    ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size = -1", "how many ranks share a model"),
    ({"tensor_parallel": {"autotp_size": 1.5}}, "tensor_parallel.autotp_size = 1.5", "how many ranks share a model"),
    ({"sequence_parallel_size": 0}, "sequence_parallel_size = 0", "how many ranks share a sequence"),
    ({"sequence_parallel_size": 1.5}, "sequence_parallel_size = 1.5", "how many ranks share a sequence"),
    (
        {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
        "zero_optimization.elastic_checkpoint = true",
        "universal checkpoints",
    ),
    (
        {"zero_optimization": {"stage": 3}, "checkpoint": {"writer": {}}},
        "can't load what it saves",
        "leave the section",
    ),
    (
        {"zero_optimization": {"stage": 1}, "checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
        'checkpoint.writer = {"type": "python", "data_parallel": "replica"}: on ZeRO stages 1 to 3',
        "leave the section out",
    ),
    ({"checkpoint": {"writer": {"type": "python"}}}, "without data_parallel DeepSpeed builds no engine", "replica"),
    ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "SUM"}, 'gradient_allreduce_op = "sum"', '"mean"'),
    ({"optimizer": {"type": "OneBitAdam"}}, 'optimizer.type = "OneBitAdam"', "AdamW"),
    ({"optimizer": {"type": "ZeroOneAdam"}}, 'optimizer.type = "ZeroOneAdam"', "AdamW"),
    ({"optimizer": {"type": "onebitlamb"}}, 'optimizer.type = "onebitlamb"', "use AdamW"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled = true: bf16.enabled is true", "to false"),
]


@pytest.mark.parametrize(("keys", "thing", "way_out"), REFUSED)
def test_an_option_that_would_go_wrong_is_refused_with_a_way_out(keys, thing, way_out):
    text = message(config(**keys))
    assert thing in text
    assert way_out in text


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization": {"stage": 1}, "gradient_predivide_factor": 2.0, "prescale_gradients": True},
        {"zero_optimization": {"stage": 2, "reduce_scatter": False}, "gradient_predivide_factor": 2.0},
        {"zero_optimization": {"stage": 2}, "prescale_gradients": True, "gradient_allreduce_op": "sum"},
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}, "prescale_gradients": True},
        {"fp16": {"enabled": True}},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "torch_autocast": {"enabled": False}},
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
        {"zero_optimization": True, "fp16": {"enabled": True}},
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {"enabled": False}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": None}},
        {"zero_optimization": {"stage": 2, "zenflow": None}, "gradient_allreduce_op": "sum"},
        {"compile": {"deepcompile": False}, "elasticity": {}, "sequence_parallel_size": 2},
        {"zero_optimization": "auto", "fp16": "auto", "bf16": {"enabled": "auto"}, "compile": "auto"},
        {"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": True}, "gradient_predivide_factor": "auto"},
        {"optimizer": {"type": "auto", "params": {"lr": "auto"}}, "sequence_parallel_size": "auto"},
        {"gradient_allreduce_op": "auto", "managed_gradient_accumulation": "auto", "elasticity": {"enabled": "auto"}},
        {"zero_optimization": {"stage": 2}, "checkpoint": {"writer": None, "use_node_local_storage": True}},
        {"zero_optimization": {"stage": "auto"}, "checkpoint": {"writer": {"type": "python"}}},
        {"checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}}},
        {"zero_optimization": {"stage": "2", "overlap_comm": "on"}, "fp16": {"enabled": "true"}},
        {"zero_optimization": {"stage": True}, "bf16": {"enabled": 1}, "compile": {"deepcompile": "off"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": None, "offload_param": None}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "500000000", "allgather_bucket_size": 5e8}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 2}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "AdamW"}},
    ],
)
def test_what_is_right_or_not_known_yet_passes_through_untouched(keys):
    result = rewrite(config(**keys), 2).config
    assert {key: result[key] for key in keys} == keys


def test_comments_in_sections_are_left_out_because_deepspeed_refuses_them():
    given = config(
        _comment="it ignores these",
        zero_optimization={"stage": 1, "_comment": 1, "offload_optimizer": {"device": "cpu", "//pin": True}},
        optimizer={"type": "AdamW", "comment": "a name", "params": {"lr": 1e-3, "#eps": 1e-8}},
        unknown={"_kept": 1},
    )
    before = copy.deepcopy(given)
    found = rewrite(given, 2)
    assert given == before
    assert found.config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert found.config["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3}}
    assert (found.config["_comment"], found.config["unknown"]) == ("it ignores these", {"_kept": 1})
    taken = {one.key for one in found.changes if "a comment" in one.why}
    assert taken == {
        "zero_optimization._comment", "zero_optimization.offload_optimizer.//pin", "optimizer.comment",
        "optimizer.params.#eps",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "thing"),
    [
        ({"zero_optimization": 3}, "zero_optimization = 3: must be an object"),
        ({"zero_optimization": [2]}, "zero_optimization = [2]: must be an object"),
        ({"zero_optimization": None}, "zero_optimization = null: must be an object"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage = "two": must be 0, 1, 2 or 3'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"zero_optimization": {"stage": "4"}}, 'zero_optimization.stage = "4": must be 0, 1, 2 or 3'),
        ({"fp16": True}, "fp16 = true: must be an object"),
        ({"fp16": {"enabled": "maybe"}}, 'fp16.enabled = "maybe": must be true or false'),
        ({"fp16": {"enabled": 2}}, "fp16.enabled = 2: must be true or false"),
        # DeepSpeed takes these as they are, and each text is on.
        ({"prescale_gradients": "false"}, 'prescale_gradients = "false": must be true or false'),
        ({"torch_autocast": {"enabled": "false"}}, 'torch_autocast.enabled = "false": must be true or false'),
        ({"compile": []}, "compile = []: must be an object"),
        ({"optimizer": "AdamW"}, 'optimizer = "AdamW": must be an object'),
        ({"optimizer": {"type": 1}}, "optimizer.type = 1: must be a name"),
        ({"data_types": "fp32"}, 'data_types = "fp32": must be an object'),
        ({"gradient_predivide_factor": "2"}, 'gradient_predivide_factor = "2": must be a finite number'),
        ({"sequence_parallel_size": None}, "sequence_parallel_size = null"),
        ({"gradient_clipping": None}, "gradient_clipping = null: must be a finite number"),
        ({"gradient_clipping": True}, "gradient_clipping = true"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1: must be 0 or greater"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping = NaN"),
        ({"gradient_clipping": 10**400}, "gradient_clipping = 1000"),
        ({"managed_gradient_accumulation": "no"}, 'managed_gradient_accumulation = "no": must be true or false'),
    ],
)
def test_a_wrongly_typed_option_is_refused_by_name(keys, thing):
    assert thing in message(config(**keys))


@pytest.mark.parametrize("value", [0, None, False])
@pytest.mark.parametrize(
    "keys",
    [
        lambda value: {"prescale_gradients": value},
        lambda value: {"sparse_gradients": value},
        lambda value: {"torch_autocast": {"enabled": value}},
        lambda value: {"managed_gradient_accumulation": value},
    ],
)
def test_beside_its_models_deepspeed_takes_what_is_empty_for_off(keys, value):
    rewrite(config(**keys(value)), 2)


def test_all_refusals_come_in_one_message():
    text = message(config(train_batch_size=3, optimizer={"type": "Muon"}, compile=1, elasticity={"enabled": True}))
    assert "4 faults" in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2", None])
def test_the_number_of_ranks_is_a_whole_number_of_at_least_1(ranks):
    assert "dp_world_size = " in message(config(), ranks)


def test_a_configuration_without_passes_is_refused():
    assert "gradient_accumulation_passes is absent" in message({"train_batch_size": 8})


counts = st.integers(1, 500)


@given(counts, counts, counts)
def test_the_triple_is_consistent_and_tells_deepspeed_less_than_one_pass_a_rank_too_many(passes, micro, ranks):
    result = rewrite(config(gradient_accumulation_passes=passes, train_micro_batch_size_per_gpu=micro), ranks).config
    batch, steps = result["train_batch_size"], result["gradient_accumulation_steps"]
    assert batch == result["train_micro_batch_size_per_gpu"] * steps * ranks
    assert 0 <= steps * ranks - passes < ranks


sections = st.fixed_dictionaries({}, optional={"overshoot": st.sampled_from(["carry", "reset"]), "lookahead": counts})
autos = st.sampled_from(["auto", None])
configs = st.fixed_dictionaries(
    {"gradient_accumulation_passes": counts, "train_micro_batch_size_per_gpu": counts | st.just("auto")},
    optional={
        "ds_parity": sections,
        "train_batch_size": autos,
        "gradient_accumulation_steps": autos,
        "gradient_clipping": st.floats(0, 10) | st.just("auto"),
        "managed_gradient_accumulation": st.booleans(),
        "zero_optimization": st.fixed_dictionaries({}, optional={"stage": st.integers(0, 3) | st.just("auto")}),
        "wall_clock_breakdown": st.booleans(),
    },
)


@given(configs, counts)
def test_rewriting_the_output_changes_nothing_and_the_input_is_not_touched(keys, ranks):
    before = copy.deepcopy(keys)
    first = rewrite(keys, ranks)
    assert keys == before
    again = rewrite({**first.config, **{key: keys[key] for key in EXTRA if key in keys}}, ranks)
    assert again.config == first.config
    assert again.settings == first.settings
    assert {change.key for change in again.changes if change.before != change.after} <= set(EXTRA)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["auto", "sum", "fp32", "OneBitAdam", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["stage", "enabled", "type", "deepcompile", "zenflow", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
KEYS = [
    "zero_optimization",
    "fp16",
    "bf16",
    "bfloat16",
    "compile",
    "optimizer",
    "data_types",
    "elasticity",
    "autotuning",
    "hybrid_engine",
    "sequence_parallel_size",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "gradient_clipping",
    "managed_gradient_accumulation",
    "train_batch_size",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_passes",
    "ds_parity",
    "gradient_accumulation_pases",
]


@settings(max_examples=300)
@given(st.sampled_from(DS_CONFIGS), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), JSON | counts)
def test_any_mutated_configuration_gives_a_rewrite_or_a_config_error(path, mutation, ranks):
    with contextlib.suppress(ConfigError):
        assert isinstance(rewrite({**load_config(path), **mutation}, ranks), Rewrite)


def test_there_is_a_ready_configuration_for_every_stage_and_precision():
    names = {path.stem for path in DS_CONFIGS}
    assert {f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16")} <= names


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_a_ready_configuration_is_accepted_by_bare_deepspeed_once_rewritten(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    result = rewrite(cells.filled_in(path), 2)
    # DeepSpeed checks the batch against the ranks that it sees, and here is one.
    alone = rewrite({**cells.filled_in(path), "train_batch_size": None, "gradient_accumulation_steps": None}, 1).config
    theirs = DeepSpeedConfig(json.loads(json.dumps(alone)))
    assert theirs.gradient_accumulation_steps == 2 * result.config["gradient_accumulation_steps"]
    assert theirs.train_batch_size == result.settings.target
    assert theirs.gradient_clipping == result.config["gradient_clipping"]
    assert f"zero{theirs.zero_optimization_stage}_" in path.stem
    precision = {"bf16": theirs.bfloat16_config.enabled, "fp16": theirs.float16_config.enabled}
    assert all(on == (f"_{name}" in path.stem and "autocast" not in path.stem) for name, on in precision.items())


def test_auto_is_left_to_whoever_fills_it_in():
    """The Hugging Face configuration passes with its "auto" values in place."""
    result = rewrite(load_config(next(path for path in DS_CONFIGS if "huggingface" in path.stem)), 2)
    assert result.config["train_batch_size"] == "auto"
    assert result.config["optimizer"]["params"]["lr"] == "auto"
