"""Rewriting a configuration, beside DeepSpeed reading one."""

from pathlib import Path

import pytest

from ds_parity.config import load_config, rewrite

PATH = Path(__file__).parent.parent / "ds_configs" / "zero2_bf16.json"


@pytest.mark.benchmark(group="configuration")
def test_rewrite(benchmark):
    assert benchmark(lambda: rewrite(load_config(PATH), 1)).changes


@pytest.mark.benchmark(group="configuration")
def test_deepspeed_reads_a_configuration(benchmark):
    from deepspeed.runtime.config import DeepSpeedConfig

    plain = rewrite(load_config(PATH), 1).config
    assert benchmark(lambda: DeepSpeedConfig(plain)).train_batch_size == 12
