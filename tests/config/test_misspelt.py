"""Keys that DeepSpeed ignores in silence, because they are spelt almost like one of its own."""

import json
import logging
import subprocess
import sys

import pytest

from ds_parity.config import known_keys, load_config, misspelt, refuse_misspelt
from ds_parity.errors import ConfigError
from ds_parity.parity.running import launch
from tests.commands import ds_parity
from tests.config.mutated import CORPUS
from tools import deepspeed_keys


def suggested(config):
    """The path of each key that is taken for a misspelling, with what is suggested in its place."""
    return {fault.key: fault.way_out.split('"')[1] for fault in misspelt(config)}


@pytest.mark.parametrize(
    ("config", "path", "meant"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        ({"optimizer": {"type": "AdmaW"}}, "optimizer.type", "AdamW"),
        ({"optimizer": {"type": "sgd"}}, "optimizer.type", "SGD"),
        ({"optimizer": {"tpye": "Adam"}}, "optimizer.tpye", "type"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type", "WarmupLR"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"gradient-clipping": 1.0}, "gradient-clipping", "gradient_clipping"),
        ({"BF16": {"enabled": True}}, "BF16", "bf16"),
        ({"bf16": {"enable": True}}, "bf16.enable", "enabled"),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com", "overlap_comm"),
        (
            {"zero_optimization": {"offload_optimizer": {"pinmemory": True}}},
            "zero_optimization.offload_optimizer.pinmemory",
            "pin_memory",
        ),
        ({"train_micro_batch_size": 4}, "train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ({"data_types": {"grad_accum_type": "fp32"}}, "data_types.grad_accum_type", "grad_accum_dtype"),
    ],
)
def test_a_near_miss_is_named_with_its_path_and_what_was_meant(config, path, meant):
    assert suggested(config) == {path: meant}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_configurations_that_people_publish_raise_no_false_alarm(path):
    assert suggested(load_config(path)) == {}


@pytest.mark.parametrize(
    "config",
    [
        {"_optimizer": {}, "//fp16": "off", "#bf16": 1, "comment": "any text"},
        {"zero_optimization": {"stage": "auto", "stage3_max_live_parameters": "auto"}, "train_batch_size": "auto"},
        {"optimizer": {"type": "adamw"}, "scheduler": {"type": "OneCycleLR"}},
        {"optimizer": {"type": "OneBitAdam"}},
        {"optimizer": {"type": "MyOwnOptimizer"}, "scheduler": None, "fp16": True, "my_section": {"stagee": 1}},
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1}}},  # torch refuses this one itself
        {"sequence_parallel_size": 2, "data_parallel_size": 2, "gradient_accumulation_passes": 4, "ds_parity": {}},
        {8: 1, None: 2},
    ],
)
def test_what_is_no_misspelling_is_left_alone(config):
    assert suggested(config) == {}


def test_a_key_that_only_the_installed_deepspeed_knows_is_no_misspelling(tmp_path, monkeypatch):
    """As a newer version may have it."""
    (tmp_path / "deepspeed" / "runtime").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    (tmp_path / "deepspeed" / "runtime" / "constants.py").write_text('CLIP = "gradient_clippings"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom ds_parity.config import misspelt\n"
    code += "print([f.key for f in misspelt({'gradient_clippings': 1, 'gradient_cliping': 1})])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['gradient_cliping']"


def test_the_table_is_that_of_the_installed_deepspeed():
    """Made anew with `python -m tools.deepspeed_keys > ds_parity/config/known_keys.py` for another version."""
    made = {path: frozenset(names) for path, names in deepspeed_keys.table().items()}
    assert made == known_keys.KEYS
    assert deepspeed_keys.optimizers() <= known_keys.OPTIMIZERS
    assert deepspeed_keys.schedulers() <= known_keys.SCHEDULERS


def test_all_of_them_are_refused_in_one_message():
    with pytest.raises(ConfigError) as caught:
        refuse_misspelt({"zero_optimisation": {"stage": 3}, "optimizer": {"type": "AdmaW"}})
    message = str(caught.value)
    assert "2 faults" in message
    assert (
        'zero_optimisation = {"stage": 3}: DeepSpeed ignores it in silence; did you mean "zero_optimization"?'
        in message
    )
    assert 'optimizer.type = "AdmaW"' in message


class TestCommands:
    @pytest.mark.parametrize("command", ["rewrite", "verify", "probe", "controls"])
    def test_refuse_with_exit_code_2(self, command, tmp_path, monkeypatch):
        path = tmp_path / "misspelt.json"
        keys = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_passes": 4,
            "zero_optimisation": {"stage": 3},
        }
        path.write_text(json.dumps(keys))
        arguments = [command, str(path), *(["--out", str(tmp_path)] if command != "rewrite" else [])]
        monkeypatch.delattr(launch, "_command")  # no rank may be started for it
        ran = ds_parity(*arguments)
        assert ran.returncode == 2
        assert 'did you mean "zero_optimization"?' in ran.stderr
        assert ran.stdout == ""


class TestInitialize:
    @pytest.fixture
    def told(self, monkeypatch):
        from ds_parity.engine import initialize

        monkeypatch.setattr(initialize, "_SAID", set())
        return initialize

    def test_warns_once_and_goes_on(self, told, caplog):
        config = {"train_batch_size": 1, "zero_optimisation": {"stage": 3}}
        with caplog.at_level(logging.WARNING, "ds_parity"):
            assert told.extended_config({"config": config}) is None
            assert told.extended_config({"config": config}) is None
        assert [record.getMessage() for record in caplog.records] == [
            'the DeepSpeed configuration: zero_optimisation = {"stage": 3}: DeepSpeed ignores it in silence; did you '
            'mean "zero_optimization"?'
        ]

    def test_says_nothing_on_other_ranks(self, told, caplog, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        with caplog.at_level(logging.WARNING, "ds_parity"):
            told.extended_config({"config": {"train_batch_size": 1, "zero_optimisation": {"stage": 3}}})
        assert caplog.records == []
