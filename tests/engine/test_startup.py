"""How a process was started: what DeepSpeed would not notice, or on some ranks alone."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ds_parity import ConfigError
from ds_parity.engine.startup import refuse_local_rank

NONE_OF_ITS_OWN = [None, SimpleNamespace(), SimpleNamespace(local_rank=-1), SimpleNamespace(local_rank=2)]


@pytest.mark.parametrize("args", NONE_OF_ITS_OWN)
def test_a_local_rank_of_the_launcher_is_taken(args, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    refuse_local_rank(args)


@pytest.mark.parametrize("local_rank", [0, "2", True])
def test_another_local_rank_is_refused_before_the_others_wait_for_it(local_rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="and LOCAL_RANK is 2: both say"):
        refuse_local_rank(SimpleNamespace(local_rank=local_rank))


BUILDS = """
import torch
import ds_parity

model = torch.nn.Linear(2, 1)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_passes": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
try:
    ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
except ds_parity.ConfigError as error:
    print("refused:", error)
else:
    print("built")
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), [([], "built"), (["-O"], "refused: Python runs without assertions")])
def test_python_without_assertions_is_refused(options, said):
    """DeepSpeed's own are what keeps it from wrong steps."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **alone, "MASTER_PORT": "0"}
    environment.pop("PYTHONOPTIMIZE", None)
    command = [sys.executable, *options, "-c", BUILDS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert any(line.startswith(said) for line in ended.stdout.splitlines()), ended.stdout + ended.stderr
