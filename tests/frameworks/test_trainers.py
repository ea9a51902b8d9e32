"""transformers' Trainer and TRL's step as they do without ds_parity, and are refused where they would be weighed."""

import json
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_parity
from ds_parity.trace import read_trace
from tests.frameworks.small import (
    STEPS,
    VOCAB,
    WINDOWS,
    assert_same_windows,
    configuration,
    ended,
    fresh_state,
    installed,
    model,
    on_two_ranks,
    pair,
    recorded,
    register,
    sentences,
)

pytestmark = [pytest.mark.hf, pytest.mark.ranks]

SHIPPED = Path(__file__).parents[2] / "ds_configs" / "huggingface_zero3_bf16_offload.json"


def arguments(kind, wrapped, stage, dtype, folder, steps=STEPS, optimizer=False, section=None, config=None, **options):
    """Training arguments; `optimizer`: DeepSpeed's own, which hands the Trainer's scheduler to DeepSpeed, too."""
    fresh_state()
    config = config or {**configuration(wrapped, stage, dtype, **(section or {})), "gradient_clipping": "auto"}
    if optimizer:
        names = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": {**dict.fromkeys(names, "auto"), "torch_adam": True}}
    usual = {
        "output_dir": folder,
        "deepspeed": config,
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": steps,
        "max_steps": WINDOWS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "bf16": dtype == "bf16",
        "use_cpu": get_accelerator().device_name() == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    return kind(**{**usual, **options})


def finished(trainer):
    trainer.train()
    logged = [
        {name: entry[name] for name in ("loss", "learning_rate", "grad_norm")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {**trainer.trace.result(trainer.model_wrapped), "logged": logged}


def with_trainer(wrapped, stage, dtype, count=None, **options):
    """transformers' Trainer over labels of any length: it divides by the tokens of the step itself."""
    with installed(wrapped), tempfile.TemporaryDirectory() as folder:
        data = sentences(count or WINDOWS * STEPS * 4, ragged=True)
        given = arguments(transformers.TrainingArguments, wrapped, stage, dtype, folder, **options)
        return finished(recorded(transformers.Trainer)(model=model(), args=given, train_dataset=data))


def tokenizer():
    """A word a token, and a template for chats, made here."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="w3"
    )


WORDS = ["[PAD]", "[BOS]", "[EOS]", *[f"w{number}" for number in range(3, VOCAB)]]


def texts(count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, length, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in sizes]


def with_dpo(wrapped, stage, dtype, **options):
    """TRL's DPOTrainer with a reference model, which is an engine without an optimizer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with installed(wrapped), tempfile.TemporaryDirectory() as folder:
        count = WINDOWS * STEPS * 4
        columns = {name: texts(count, 8, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
        given = arguments(DPOConfig, wrapped, stage, dtype, folder, **options)
        trainer = recorded(DPOTrainer)(
            model=model(),
            ref_model=model(1),
            args=given,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
        )
        return {**finished(trainer), "reference": type(trainer.ref_model).__name__}


def with_grpo(wrapped, stage, dtype, **options):
    """TRL's GRPOTrainer: it samples completions, and makes its steps of them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with installed(wrapped), tempfile.TemporaryDirectory() as folder:
        given = arguments(
            GRPOConfig, wrapped, stage, dtype, folder, num_generations=4, max_completion_length=6, **options
        )
        trainer = recorded(GRPOTrainer)(
            model=model(),
            reward_funcs=[reward],
            args=given,
            train_dataset=Dataset.from_dict({"prompt": texts(WINDOWS * 4, 6, 5)}),
            processing_class=tokenizer(),
        )
        return finished(trainer)


def reward(completions, **kwargs):
    """The share of even words: a number that differs from completion to completion."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w") / 6 for text in completions]


TRAINERS = {
    "Trainer": (with_trainer, {}),
    "Trainer, DeepSpeed's optimizer": (with_trainer, {"optimizer": True}),
    "DPO": (with_dpo, {}),
    "GRPO": (with_grpo, {}),
}
CELLS = [*product(TRAINERS, (2, 3), ("fp32", "bf16"))]
# The last window of an epoch has one pass of three.
CUT = {"stage": 2, "dtype": "fp32", "count": 28}
for run, stage, dtype in CELLS:
    register(TRAINERS[run][0], stage=stage, dtype=dtype, **TRAINERS[run][1])
register(with_trainer, **CUT)


def trained(framework_ranks, run, stage=2, dtype="fp32"):
    function, options = TRAINERS[run]
    return pair(framework_ranks, function, stage=stage, dtype=dtype, **options)


@pytest.mark.parametrize(("run", "stage", "dtype"), CELLS)
def test_uniform_windows_are_bit_identical_with_and_without_us(framework_ranks, run, stage, dtype):
    """Losses of both ranks, LR, gradient norms, weights."""
    bare, wrapped = trained(framework_ranks, run, stage, dtype)
    assert_same_windows(bare, wrapped, stage)


@pytest.mark.parametrize("run", sorted(TRAINERS))
def test_what_a_trainer_logs_is_the_same(framework_ranks, run):
    bare, wrapped = trained(framework_ranks, run)
    assert wrapped["logged"] == bare["logged"]
    assert len(wrapped["logged"]) == 4


def test_weights_move_in_every_step(framework_ranks):
    """Else equality would prove little."""
    for run, stage, dtype in CELLS:
        bare, _ = trained(framework_ranks, run, stage, dtype)
        assert len({step["weights"] for step in bare["steps"]}) >= 3, (run, stage, dtype)


def test_the_loss_of_the_last_step_is_that_of_its_passes_over_all_ranks(framework_ranks):
    """A trainer's losses are shares of the step's."""
    for run in ("Trainer", "DPO", "GRPO"):
        _, wrapped = trained(framework_ranks, run)
        mean = sum(sum(rank) for rank in wrapped["steps"][-1]["losses"]) / 2
        assert wrapped["last"]["loss"] == pytest.approx(mean, rel=1e-6), run


def test_a_reference_model_is_deepspeeds_own_engine(framework_ranks):
    bare, wrapped = trained(framework_ranks, "DPO")
    assert wrapped["reference"] == bare["reference"] == "DeepSpeedEngine"


def test_an_epoch_that_ends_inside_a_window_is_bit_identical_in_a_trainer(framework_ranks):
    """It divides by the tokens of the short window itself."""
    bare, wrapped = pair(framework_ranks, with_trainer, **CUT)
    assert [len(step["losses"][0]) for step in wrapped["steps"]] == [3, 3, 1, 3]
    assert wrapped["steps"] == bare["steps"]


def with_shipped(wrapped):
    """The ready configuration for Hugging Face, as it is: ZeRO 3, bf16, everything offloaded."""
    config = json.loads(SHIPPED.read_text())
    if not wrapped:
        del config["gradient_accumulation_passes"]
    steps = 6
    return with_trainer(wrapped, 3, "bf16", config=config, steps=steps, count=WINDOWS * steps * 4)


register(with_shipped)


def test_the_configuration_that_is_shipped_for_hugging_face_trains_in_a_trainer(framework_ranks):
    bare, wrapped = pair(framework_ranks, with_shipped)
    assert wrapped["steps"] == bare["steps"]
    assert wrapped["last"]["rollouts"] == 24


def refused_by_trainer(**section):
    """A Trainer that divides the loss, and keys that would have it weighed."""
    return ended(lambda: with_trainer(True, 2, "fp32", section=section))


WEIGHED = {"loss_weight": "token", "loss_reduction": "sum"}
REFUSALS = {
    "loss_weight": ["WindowError", "scale_wrt_gas=False", "loss_weight = 'token'", "remove ds_parity.loss_weight"],
    "loss_reduction": ["WindowError", "scale_wrt_gas=False", "loss_reduction = 'sum'"],
}
for key, value in WEIGHED.items():
    on_two_ranks.call(refused_by_trainer, **{key: value})


@pytest.mark.parametrize("how", REFUSALS)
def test_what_contradicts_the_counts_is_refused_on_every_rank(framework_ranks, how):
    errors = framework_ranks.of(refused_by_trainer, **{how: WEIGHED[how]})
    assert len(errors) == 2
    for error in errors:
        assert all(part in error for part in REFUSALS[how]), error


def test_every_refusal_is_looked_at():
    assert set(REFUSALS) == {*WEIGHED}


def traced():
    """The trace that a Trainer leaves with the key of that name."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        path = f"{shared[0]}/trace.jsonl"
        result = with_trainer(True, 2, "fp32", section={"trace": path})
        dist.barrier()
        steps = [
            {"step": one.step, "loss": one.loss, "lr": one.lr, "rollouts": one.rollouts}
            for one in read_trace(path).steps
        ]
        dist.barrier()  # rank 0 removes the folder
        return {**result, "trace": steps}


on_two_ranks.call(traced)


def test_the_trace_of_a_trainer_holds_its_steps(framework_ranks):
    result = framework_ranks.of(traced)
    assert [step["rollouts"] for step in result["trace"]] == [12] * 4
    for step, logged in zip(result["trace"], result["logged"], strict=True):
        assert step["loss"] == pytest.approx(logged["loss"], rel=1e-3)


def resumed():
    """A Trainer that saves after two steps, and one that goes on from there."""
    with ds_parity.install(), tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        data = sentences(WINDOWS * STEPS * 4, ragged=True)
        results = []
        for resume in (None, f"{shared[0]}/checkpoint-2"):
            options = {"save_strategy": "steps", "save_steps": 2}
            given = arguments(transformers.TrainingArguments, True, 2, "fp32", shared[0], **options)
            trainer = recorded(transformers.Trainer)(model=model(), args=given, train_dataset=data)
            trainer.train(resume_from_checkpoint=resume)
            results.append(trainer.trace.result(trainer.model_wrapped))
        dist.barrier()
        return results


on_two_ranks.call(resumed)


def test_a_trainer_resumes_bit_for_bit(framework_ranks):
    whole, rest = framework_ranks.of(resumed)
    assert len(whole["steps"]) == 4
    assert rest["steps"] == whole["steps"][2:]
    assert rest["windows"] == whole["windows"] == 4
