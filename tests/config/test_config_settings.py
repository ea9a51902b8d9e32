"""The extra keys are read strictly, and a message names the path, the value, the rule and the way out."""

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_parity.config import Settings, parse, rewrite
from ds_parity.config.settings import SECTION_FIELDS, key_path
from ds_parity.errors import ConfigError

# Every top-level key that DeepSpeed 0.19.8 reads, refuses by name, or that Hugging Face and Megatron put beside them.
DEEPSPEED_KEYS = [
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "bfloat16",
    "bfloat16_immediate_grad_update",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "eigenvalue",
    "elasticity",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "fp32_allreduce",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "graph_harvesting",
    "hybrid_engine",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "nebula",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "progressive_layer_drop",
    "quantize_training",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "sparse_attention",
    "sparse_gradients",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
]


def config(**keys):
    return {"gradient_accumulation_passes": 4, "train_micro_batch_size_per_gpu": 2, **keys}


def message(keys):
    with pytest.raises(ConfigError) as caught:
        parse(keys)
    return str(caught.value)


def test_without_passes_there_are_no_settings():
    assert parse({"train_batch_size": 8}) is None


def test_the_defaults_are_those_of_the_contract():
    settings = parse(config())
    assert settings.model_dump() == {
        "gradient_accumulation_passes": 4,
        "train_micro_batch_size_per_gpu": 2,
        "boundary": "rollouts",
        "across_ranks": None,
        "terms": None,
        "count": "rollout",
        "overshoot": "carry",
        "loss_reduction": "mean",
        "loss_weight": "rollout",
        "lr_progress": "optimizer_step",
        "last_window": "step",
        "lookahead": 0,
        "exchange_timeout": 600,
        "trace": None,
    }
    assert settings.target == 8


def test_every_key_of_the_section_is_read():
    section = {
        "boundary": "rollouts",
        "across_ranks": "sum",
        "count": "prompt",
        "overshoot": "reset",
        "loss_weight": "divided",
        "lr_progress": "rollout",
        "last_window": "drop",
        "lookahead": 3,
        "exchange_timeout": 0.5,
        "trace": "run.jsonl",
    }
    # Losses that are divided already are not reduced, and the caller's window has no surplus.
    assert set(section) == set(SECTION_FIELDS) - {"loss_reduction", "terms"}
    assert parse(config(ds_parity={"loss_reduction": "sum"})).loss_reduction == "sum"
    assert parse(config(ds_parity=section)).model_dump(include=set(section)) == section


CALLER = {"train_micro_batch_size_per_gpu": 2, "ds_parity": {"boundary": "caller"}}


def test_where_the_caller_ends_windows_passes_may_be_left_out():
    settings = parse(CALLER)
    assert (settings.by_caller, settings.passes, settings.target) == (True, 0, 0)
    assert parse({**CALLER, "gradient_accumulation_passes": 4}).target == 8
    assert rewrite(CALLER, 2).config["gradient_accumulation_steps"] == 1
    assert rewrite(CALLER, 2).config["train_batch_size"] == 4
    assert rewrite({**CALLER, "gradient_accumulation_passes": 8}, 2).config["gradient_accumulation_steps"] == 4


def test_a_term_may_be_divided_by_a_nominal_target():
    terms = {"policy": {"weight": "token"}, "kl": {"weight": "target"}}
    extended = {**CALLER, "gradient_accumulation_passes": 5, "ds_parity": {"boundary": "caller", "terms": terms}}
    assert parse(extended).terms["kl"].weight == "target"
    without = {**CALLER, "ds_parity": {"boundary": "caller", "terms": terms}}
    assert "a weight of target needs a nominal target" in message(without)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"overshoot": "carry"}, ["ds_parity.overshoot", "no meaning with ds_parity.boundary caller"]),
        (
            {"lr_progress": "rollout"},
            ["ds_parity.lr_progress", "needs a nominal target", "gradient_accumulation_passes"],
        ),
        ({"loss_weight": "target"}, ["ds_parity.loss_weight", "needs a nominal target"]),
        ({"loss_weight": "divided"}, ["ds_parity.across_ranks", "must be said"]),
        ({"across_ranks": "sum"}, ["ds_parity.across_ranks", "loss_weight divided alone"]),
        ({"across_ranks": "avg"}, ["ds_parity.across_ranks", '"sum", "mean"']),
        ({"loss_weight": "divided", "across_ranks": "sum", "loss_reduction": "sum"}, ["ds_parity.loss_reduction"]),
    ],
)
def test_what_means_nothing_where_the_caller_ends_windows_is_refused(section, words):
    text = message({**CALLER, "ds_parity": {"boundary": "caller", **section}})
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"gradient_accumulation_steps": 4},
            [
                "contradicts ds_parity.boundary",
                "Accelerator steps by it, keep it, and add gradient_accumulation_passes: 8",
            ],
        ),
        ({"train_batch_size": 12}, ["train_batch_size", "is not 2 a micro-batch x 2 ranks = 4"]),
    ],
)
def test_deepspeeds_own_accumulation_does_not_contradict_the_callers_windows(keys, words):
    with pytest.raises(ConfigError) as caught:
        rewrite({**CALLER, **keys}, 2)
    for word in words:
        assert word in str(caught.value)


def test_steps_of_a_framework_are_kept_with_the_passes_that_the_message_names():
    keys = {"gradient_accumulation_steps": 4, "gradient_accumulation_passes": 8}
    assert rewrite({**CALLER, **keys}, 2).config["gradient_accumulation_steps"] == 4


def test_every_field_has_a_description_for_its_page():
    assert all(field.description for field in Settings.model_fields.values())
    assert key_path("overshoot") == "ds_parity.overshoot"
    assert key_path("gradient_accumulation_passes") == "gradient_accumulation_passes"


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        parse(config()).lookahead = 2


@pytest.mark.parametrize(
    "value", [True, False, 8.0, 2.5, "8", 0, -1, None, [8], {}, float("nan"), 2**31, pytest.param(10**5000, id="huge")]
)
@pytest.mark.parametrize("key", ["gradient_accumulation_passes", "train_micro_batch_size_per_gpu"])
def test_a_count_is_a_whole_number_of_at_least_1_and_nothing_else(key, value):
    text = message(config(**{key: value}))
    assert text.count(key) >= 1
    assert "whole number" in text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"overshot": "carry"}, ['ds_parity.overshot = "carry"', 'did you mean "overshoot"?']),
        ({"zzz": 1}, ["ds_parity.zzz = 1", 'choose from "boundary", "count", "overshoot"']),
        ({"overshoot": "cary"}, ['ds_parity.overshoot = "cary"', '"carry", "reset", "error"', 'did you mean "carry"?']),
        ({"count": "tokens"}, ['ds_parity.count = "tokens"', '"rollout", "prompt"']),
        ({"loss_weight": None}, ["ds_parity.loss_weight = null", 'must be one of "rollout"']),
        ({"loss_weight": ["token"]}, ['ds_parity.loss_weight = ["token"]']),
        ({"lookahead": True}, ["ds_parity.lookahead = true", "whole number from 0", "default, 0"]),
        ({"lookahead": -1}, ["ds_parity.lookahead = -1"]),
        ({"lookahead": 8.0}, ["ds_parity.lookahead = 8.0", "write 8 without the decimal point"]),
        ({"lookahead": "8"}, ['ds_parity.lookahead = "8"', "write 8 without the quotes"]),
        ({"lookahead": 4097}, ["ds_parity.lookahead = 4097", "whole number from 0 to 4096", "write 4096 or less"]),
        ({"lookahead": 10**9}, ["ds_parity.lookahead = 1000000000", "whole number from 0 to 4096"]),
        ({"exchange_timeout": 1e99}, ["ds_parity.exchange_timeout = 1e+99", "at most 31536000 (a year)"]),
        ({"exchange_timeout": 31536001}, ["ds_parity.exchange_timeout = 31536001", "write 31536000 or less"]),
        ({"exchange_timeout": 1e-9}, ["ds_parity.exchange_timeout = 1e-09", "at least 0.001"]),
        ({"exchange_timeout": 0}, ["ds_parity.exchange_timeout = 0", "greater than 0"]),
        ({"exchange_timeout": True}, ["ds_parity.exchange_timeout = true"]),
        ({"exchange_timeout": float("inf")}, ["ds_parity.exchange_timeout = Infinity", "finite"]),
        ({"exchange_timeout": float("nan")}, ["ds_parity.exchange_timeout = NaN"]),
        pytest.param({"exchange_timeout": 10**5000}, ["ds_parity.exchange_timeout = (int)"], id="huge"),
        ({"trace": 1}, ["ds_parity.trace = 1", "path of a file, without a NUL byte, or null"]),
        ({"trace": "a\0b.jsonl"}, ["ds_parity.trace = ", "without a NUL byte"]),
        ({"trace": "\0"}, ["without a NUL byte"]),
        ({"trace": ""}, ['ds_parity.trace = ""']),
        ({"gradient_accumulation_passes": 4}, ["ds_parity.gradient_accumulation_passes", "belongs at the top level"]),
        ([1], ["ds_parity = [1]", "must be an object"]),
        (None, ["ds_parity = null", "must be an object"]),
        ({7: 1}, ["ds_parity.7 = 1", "is not a key"]),
    ],
)
def test_a_fault_in_the_section_names_path_value_rule_and_way_out(section, words):
    text = message(config(ds_parity=section))
    for word in words:
        assert word in text


def test_all_faults_come_in_one_message_a_line_each():
    text = message(config(gradient_accumulation_passes=True, ds_parity={"overshot": 1, "count": "x", "trace": 5}))
    head, *lines = text.splitlines()
    assert "4 faults" in head
    assert [line.split(" = ")[0].strip() for line in lines] == [
        "ds_parity.overshot",
        "gradient_accumulation_passes",
        "ds_parity.count",
        "ds_parity.trace",
    ]


def test_auto_passes_are_refused_since_nothing_fills_them_in():
    text = message(config(gradient_accumulation_passes="auto"))
    assert 'gradient_accumulation_passes = "auto": nothing can fill it in' in text


def test_a_section_without_passes_is_refused():
    text = message({"train_batch_size": 8, "ds_parity": {"count": "prompt"}})
    assert 'ds_parity = {"count": "prompt"}: has no effect without gradient_accumulation_passes' in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gradient_accumulation_pases", "gradient_accumulation_passes"),
        ("gradient_acumulation_passes", "gradient_accumulation_passes"),
        ("gradient_accumulation_pass", "gradient_accumulation_passes"),
        ("Gradient-Accumulation-Passes", "gradient_accumulation_passes"),
        ("ds_parrity", "ds_parity"),
        ("ds-parity", "ds_parity"),
        ("dsparity", "ds_parity"),
        ("DS_PARITY", "ds_parity"),
    ],
)
def test_a_near_miss_at_the_top_level_is_refused_with_a_suggestion(key, meant):
    for keys in ({key: 1}, config(**{key: 1})):
        text = message(keys)
        assert f"{key} = 1" in text
        assert f'did you mean "{meant}"?' in text


@pytest.mark.parametrize("key", [*DEEPSPEED_KEYS, "gradient_accumulation_stps", "my_own_key", 7])
def test_a_key_of_deepspeed_is_no_near_miss(key):
    assert parse({key: 1}) is None
    assert parse({**config(), key: 1, "train_micro_batch_size_per_gpu": 2}) is not None


def test_the_list_of_deepspeed_keys_holds_every_top_level_key_of_its_constants():
    from deepspeed.runtime import constants

    near = {value for value in vars(constants).values() if isinstance(value, str) and "gradient_accum" in value}
    assert {value for value in near if "\n" not in value} <= set(DEEPSPEED_KEYS)


def test_a_key_of_the_section_at_the_top_level_is_refused_with_its_place():
    assert 'move it into the section: "ds_parity": {"lookahead": ...}' in message(config(lookahead=2))


def test_the_micro_batch_size_follows_from_the_train_batch_size():
    assert parse({"gradient_accumulation_passes": 4, "train_batch_size": 12}).train_micro_batch_size_per_gpu == 3


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train_batch_size": 9}, ["train_batch_size = 9", "9 / 4 = 2.25", "write train_batch_size: 8"]),
        ({"train_batch_size": 3}, ["3 / 4 = 0.75", "write train_batch_size: 4"]),
        ({}, ["train_micro_batch_size_per_gpu is absent", 'add for example "train_micro_batch_size_per_gpu": 1']),
        ({"train_batch_size": "auto"}, ["train_micro_batch_size_per_gpu is absent"]),
        ({"train_batch_size": True}, ["train_micro_batch_size_per_gpu is absent"]),
        ({"train_micro_batch_size_per_gpu": None}, ["train_micro_batch_size_per_gpu = null"]),
    ],
)
def test_a_micro_batch_size_that_nothing_gives_is_refused(keys, words):
    text = message({"gradient_accumulation_passes": 4, **keys})
    for word in words:
        assert word in text


def test_an_auto_micro_batch_size_is_read_and_its_target_refused():
    settings = parse(config(train_micro_batch_size_per_gpu="auto"))
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        _ = settings.target


@pytest.mark.parametrize("value", [None, 3, [], "text"])
def test_what_is_no_mapping_is_refused(value):
    assert "must be an object" in message(value)


def test_the_fingerprint_has_24_bits_and_sees_everything_but_the_trace():
    plain = parse(config()).fingerprint
    assert 0 <= plain < 2**24
    assert parse(config(ds_parity={"trace": "a.jsonl"})).fingerprint == plain
    assert parse(config(ds_parity={"exchange_timeout": 600})).fingerprint == plain
    others = [{"count": "prompt"}, {"overshoot": "reset"}, {"lookahead": 1}, {"exchange_timeout": 601}]
    assert len({plain, *(parse(config(ds_parity=section)).fingerprint for section in others)}) == 5


def test_the_fingerprint_is_the_same_in_another_process():
    keys = config(ds_parity={"loss_weight": "token"})
    code = f"from ds_parity.config import parse; print(parse({keys!r}).fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == parse(keys).fingerprint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*SECTION_FIELDS, "x"]), JSON, max_size=4), JSON, JSON, JSON)
def test_any_values_give_settings_or_a_config_error(section, passes, micro, batch):
    keys = {
        "gradient_accumulation_passes": passes,
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": batch,
        "ds_parity": section,
    }
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(keys), Settings)
