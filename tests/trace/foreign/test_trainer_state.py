"""transformers' own file: its steps, its mean losses, and none of its evaluations and summaries."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.errors import TraceError
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.trace import Header, Precision, StepRecord, Trace, TraceWriter, read_trace
from ds_parity.trace.foreign import parse_maps, read_any

# Made by TRAINING below with transformers 5.23.0, torch 2.13.0, accelerate 1.15.0 on a CPU.
DATA = Path(__file__).parent / "data"
STEPS = [
    {"loss": 0.1234 * step, "grad_norm": 1 / step, "learning_rate": 1e-4 / step, "step": step} for step in (5, 10, 15)
]
EVALUATION = {"eval_loss": 9.0, "eval_runtime": 1.0, "epoch": 1.0, "step": 10}
SUMMARY = {"train_runtime": 9.0, "train_loss": 9.0, "total_flos": 0.0, "epoch": 1.0, "step": 15}


def saved(path, history, **state):
    """As transformers itself saves it."""
    transformers = pytest.importorskip("transformers")
    path.mkdir(parents=True, exist_ok=True)
    transformers.TrainerState(log_history=history, **state).save_to_json(str(path / "trainer_state.json"))
    return path / "trainer_state.json"


def test_entries_with_a_loss_are_steps_and_nothing_else_is(tmp_path):
    trace = read_any(saved(tmp_path, [*STEPS[:2], EVALUATION, STEPS[2], SUMMARY], logging_steps=5))
    assert [(record.step, record.loss, record.grad_norm, record.lr) for record in trace.steps] == [
        (it["step"], it["loss"], it["grad_norm"], (it["learning_rate"],)) for it in STEPS
    ]
    assert (trace.header.engine, trace.header.records) == ("transformers", ("loss", "lr", "grad_norm"))
    assert (trace.mean_loss, trace.every) == (True, 5)


def test_the_folder_of_a_checkpoint_stands_for_the_file(tmp_path):
    path = saved(tmp_path / "checkpoint-15", STEPS)
    assert read_any(path.parent) == read_any(path)


def test_the_file_may_be_a_single_line(tmp_path):
    path = saved(tmp_path, STEPS)
    whole = read_any(path)
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert read_any(path) == whole


def test_a_loss_rounded_to_four_decimals_is_told_and_figures_in_full_are_not_widened(tmp_path):
    history = [{**it, "loss": round(1 / (it["step"] + 2), 4)} for it in STEPS]
    assert read_any(saved(tmp_path, history)).precision == {"loss": Precision(decimals=4)}


def test_nan_and_infinity_come_back(tmp_path):
    history = [{**STEPS[0], "loss": math.nan, "grad_norm": math.inf}]
    (record,) = read_any(saved(tmp_path, history)).steps
    assert math.isnan(record.loss)
    assert record.grad_norm == math.inf


def test_what_was_added_to_its_log_can_be_mapped(tmp_path):
    history = [{**it, "nll": 7.0} for it in STEPS]
    assert read_any(saved(tmp_path, history), parse_maps(["loss=nll"])).steps[0].loss == 7.0


@pytest.mark.parametrize(
    ("history", "words"),
    [([], "none of the 0 entries"), ([EVALUATION, SUMMARY], "none of the 2 entries"), ("x", "must be a list")],
)
def test_a_history_without_a_step_is_refused(tmp_path, history, words):
    path = saved(tmp_path, history)
    with pytest.raises(TraceError, match=f"trainer_state.json: .*{words}"):
        read_any(path)


def test_an_entry_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"entry 4: .*no object"):
        read_any(saved(tmp_path, [*STEPS, 3]))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = saved(tmp_path, STEPS)
    whole = path.read_bytes().rstrip()
    for end in range(1, len(whole), 37):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match=r"trainer_state\.json"):
            read_any(path)


def test_a_log_that_a_restart_wrote_twice_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"entry 4: the step has two values of loss \('loss'\)"):
        read_any(saved(tmp_path, [*STEPS, {**STEPS[1], "loss": 7.0}]))


TRAINING = """
import sys, torch
from transformers import Trainer, TrainingArguments, TrainerCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def forward(self, x, labels):
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}

every, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
data = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(48)]
arguments = TrainingArguments(
    folder, max_steps=12, per_device_train_batch_size=4, logging_steps=every, learning_rate=0.01, report_to=[], seed=0,
    use_cpu=True, disable_tqdm=True, save_strategy="no", data_seed=0, dataloader_pin_memory=False,
)
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
trainer.state.save_to_json(f"{folder}/trainer_state.json")
"""


def as_ours(path, trace):
    """A run that logged every step, as a trace of ours."""
    header = Header(scenario="s", seed=0, versions={}, device="cpu", ranks=1, config_hash="0", engine="ds_parity")
    counts = {"passes": 1, "idle_passes": 0, "rollouts": 4, "prompts": 4, "tokens": 4, "total": 4.0}
    with TraceWriter(path, header) as writer:
        for one in trace.steps:
            writer.write(StepRecord(step=one.step, loss=one.loss, lr=one.lr, grad_norm=one.grad_norm, **counts))
    return read_trace(path)


def trained(folder, every):
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", TRAINING, str(every), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


def held(tmp_path, every_step, every_fifth):
    ours, fifth = as_ours(tmp_path / "ours", read_any(every_step)), read_any(every_fifth)
    assert [record.step for record in fifth.steps] == [5, 10]
    assert compare(ours, fifth, Tier.REASSOCIATED).equal
    assert not compare(ours, Trace(fifth.header, fifth.steps), Tier.REASSOCIATED).equal


def test_a_real_run_that_logged_every_fifth_step_equals_itself_logging_every_step(tmp_path):
    held(tmp_path, DATA / "every_step", DATA / "every_fifth")


@pytest.mark.slow
def test_so_does_one_that_is_run_here(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer takes accelerate, of the extra hf")
    held(tmp_path, trained(tmp_path / "1", 1), trained(tmp_path / "5", 5))
