"""Line 1 of a trace: what a run was, and with which versions and configuration it was made."""

import json
from importlib.metadata import version

import pytest

from ds_parity.trace import read_header
from ds_parity.trace.heading import header


def line(**changed):
    given = {"config": {"a": 1, "b": {"c": True}}, "engine": "ds_parity", "ranks": 2, "device": "cpu gloo", "seed": 3}
    return header("toy", **given | changed)


def test_a_header_says_what_it_was_given_and_the_versions_that_are_installed():
    made = line()
    assert (made.scenario, made.seed, made.ranks, made.device, made.engine) == ("toy", 3, 2, "cpu gloo", "ds_parity")
    assert made.versions == {name: version(name) for name in ("ds_parity", "deepspeed", "torch")}


def test_the_hash_depends_on_what_the_configuration_holds_and_not_on_the_order_of_its_keys():
    assert line(config={"b": {"c": True}, "a": 1}).config_hash == line().config_hash
    assert line(config={"a": 1, "b": {"c": False}}).config_hash != line().config_hash


def test_two_runs_that_write_their_traces_elsewhere_have_one_hash():
    sections = [{"ds_parity": {"loss_weight": "token", "trace": path}} for path in ("a.jsonl", "b.jsonl")]
    assert line(config=sections[0]).config_hash == line(config=sections[1]).config_hash
    other = {"ds_parity": {"loss_weight": "rollout", "trace": "a.jsonl"}}
    assert line(config=other).config_hash != line(config=sections[0]).config_hash


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, None),
        ({"fp16": {"enabled": "true"}}, "fp16"),
        ({"bf16": {"enabled": 0}, "bfloat16": {"enabled": True}}, "fp32"),
        ({"torch_autocast": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "nonsense"}}, None),
    ],
)
def test_a_header_says_what_the_run_computes_in(config, dtype):
    assert line(config=config).dtype == dtype


def test_a_header_says_the_stage_and_the_optimizer_and_neither_where_it_is_not_told():
    told = line(config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}})
    assert (told.stage, told.optimizer) == (3, "AdamW")
    assert (line(config={}).stage, line(config={}).optimizer) == (0, None)


@pytest.mark.parametrize(
    ("section", "stage"),
    [
        (True, 1),
        (False, 0),
        (None, 0),
        ("auto", None),
        ({"stage": "auto"}, None),
        ({"stage": True}, 1),
        ({"stage": "3"}, 3),
        ({}, 0),
    ],
)
def test_a_header_says_no_stage_that_a_framework_is_to_fill_in(section, stage):
    assert line(config={"zero_optimization": section}).stage == stage


def test_a_header_of_an_older_release_is_read(tmp_path):
    told = json.loads(line().model_dump_json())
    for name in ("dtype", "stage", "optimizer", "start"):
        del told[name]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(told) + "\n")
    assert read_header(path) == line().model_copy(update={"dtype": None, "stage": None})
