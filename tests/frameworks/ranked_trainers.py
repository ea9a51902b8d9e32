"""transformers' Trainer and TRL's on two ranks; asserted in test_frameworks.py."""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import ds_parity
from ds_parity.trace import read_trace
from tests.frameworks.small import (
    STEPS,
    VOCAB,
    WINDOWS,
    Trace,
    configuration,
    ended,
    fresh_state,
    installed,
    model,
    sentences,
)

SHIPPED = Path(__file__).parents[2] / "ds_configs" / "huggingface_zero3_bf16_offload.json"


def arguments(kind, ours, stage, dtype, folder, steps=STEPS, optimizer=False, section=None, config=None, **options):
    """Training arguments; `optimizer`: DeepSpeed's own, which hands the Trainer's scheduler to DeepSpeed, too."""
    fresh_state()
    config = config or {**configuration(ours, stage, dtype, **(section or {})), "gradient_clipping": "auto"}
    if optimizer:
        names = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": {**dict.fromkeys(names, "auto"), "torch_adam": True}}
    told = {
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
    return kind(**{**told, **options})


def recorded(kind):
    """A trainer that keeps the loss of every micro-batch, whatever it computes it by."""

    class Recorded(kind):
        def __init__(self, *args, **kwargs):
            self.trace = Trace()
            super().__init__(*args, **kwargs)
            self.add_callback(Steps(self))

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.trace.loss(loss)
            return loss

    return Recorded


class Steps(transformers.TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.trace.step(self.trainer.model_wrapped, self.trainer.optimizer)


def finished(trainer):
    trainer.train()
    logged = [
        {name: entry[name] for name in ("loss", "learning_rate", "grad_norm")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {**trainer.trace.result(trainer.model_wrapped), "logged": logged}


def with_trainer(ours, stage, dtype, count=None, **options):
    """transformers' Trainer over labels of any length: it divides by the tokens of the step itself."""
    with installed(ours), tempfile.TemporaryDirectory() as folder:
        data = sentences(count or WINDOWS * STEPS * 4, ragged=True)
        given = arguments(transformers.TrainingArguments, ours, stage, dtype, folder, **options)
        return finished(recorded(transformers.Trainer)(model=model(), args=given, train_dataset=data))


def with_shipped(ours):
    """The ready configuration for Hugging Face, as it is: ZeRO 3, bf16, everything offloaded."""
    config = json.loads(SHIPPED.read_text())
    if not ours:
        del config["gradient_accumulation_passes"]
    steps = 6
    return with_trainer(ours, 3, "bf16", config=config, steps=steps, count=WINDOWS * steps * 4)


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


def with_dpo(ours, stage, dtype, **options):
    """TRL's DPOTrainer with a reference model, which is an engine without an optimizer."""
    with installed(ours), tempfile.TemporaryDirectory() as folder:
        count = WINDOWS * STEPS * 4
        columns = {name: texts(count, 8, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
        given = arguments(DPOConfig, ours, stage, dtype, folder, **options)
        trainer = recorded(DPOTrainer)(
            model=model(),
            ref_model=model(1),
            args=given,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
        )
        return {**finished(trainer), "reference": type(trainer.ref_model).__name__}


def with_grpo(ours, stage, dtype, **options):
    """TRL's GRPOTrainer: it samples completions, and makes its steps of them."""
    with installed(ours), tempfile.TemporaryDirectory() as folder:
        given = arguments(GRPOConfig, ours, stage, dtype, folder, num_generations=4, max_completion_length=6, **options)
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


def refused_by_trainer(**section):
    """A Trainer that divides the loss, and keys that would have it weighed."""
    return ended(lambda: with_trainer(True, 2, "fp32", section=section))


def traced():
    """The trace that a Trainer leaves with the key of that name."""
    with tempfile.TemporaryDirectory() as folder:
        told = [folder]
        dist.broadcast_object_list(told)
        path = f"{told[0]}/trace.jsonl"
        found = with_trainer(True, 2, "fp32", section={"trace": path})
        dist.barrier()
        steps = [
            {"step": one.step, "loss": one.loss, "lr": one.lr, "rollouts": one.rollouts}
            for one in read_trace(path).steps
        ]
        return {**found, "trace": steps}


def resumed():
    """A Trainer that saves after two steps, and one that goes on from there."""
    with ds_parity.install(), tempfile.TemporaryDirectory() as folder:
        told = [folder]
        dist.broadcast_object_list(told)
        data = sentences(WINDOWS * STEPS * 4, ragged=True)
        found = []
        for resume in (None, f"{told[0]}/checkpoint-2"):
            options = {"save_strategy": "steps", "save_steps": 2}
            given = arguments(transformers.TrainingArguments, True, 2, "fp32", told[0], **options)
            trainer = recorded(transformers.Trainer)(model=model(), args=given, train_dataset=data)
            trainer.train(resume_from_checkpoint=resume)
            found.append(trainer.trace.result(trainer.model_wrapped))
        dist.barrier()
        return found
