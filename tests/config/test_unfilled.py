"""What is still "auto" where an engine is built."""

import pytest

from ds_parity.config.unfilled import refuse_unfilled
from ds_parity.errors import ConfigError

AUTO = {
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
}


def test_each_value_that_nothing_has_filled_in_is_named():
    with pytest.raises(ConfigError) as refused:
        refuse_unfilled(AUTO, optimizer=True, scheduler=True)
    lines = str(refused.value).splitlines()
    paths = ("gradient_clipping", "zero_optimization.stage", "bf16.enabled", "fp16.enabled", "optimizer.params.lr")
    for path in (*paths, "scheduler.params.warmup_num_steps"):
        assert sum(f'{path} = "auto": "auto" is filled in by the Trainer' in line for line in lines) == 1, lines
    assert "reduce_bucket_size" not in str(refused.value)


def test_sections_that_nobody_reads_may_hold_it():
    sections = {key: AUTO[key] for key in ("optimizer", "scheduler")}
    refuse_unfilled(sections, optimizer=False, scheduler=False)
    refuse_unfilled({"optimizer": None, "bf16": True}, optimizer=True, scheduler=True)
