"""What two ranks do in test_frameworks.py: real frameworks on small models with random weights, nothing downloaded."""

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DummyOptim, DummyScheduler
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import ds_parity
from ds_parity.parity import weights
from ds_parity.trace import read_trace

ROOT = Path(__file__).parents[2]
README, SHIPPED = ROOT / "README.md", ROOT / "ds_configs" / "huggingface_zero3_bf16_offload.json"
WINDOWS = 4
STEPS = 3  # passes a rank in a window
VOCAB = 64


def model(seed=0):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def configuration(ours, stage, dtype, *, passes=2 * STEPS, **section):
    """A Hugging Face configuration, `auto` where the frameworks fill in; `ours`: with the extra keys."""
    plain = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    return {**plain, "gradient_accumulation_passes": passes, "ds_parity": section} if ours else plain


@contextlib.contextmanager
def installed(ours):
    """Ours installed, or DeepSpeed's own."""
    with ds_parity.install() if ours else contextlib.nullcontext():
        yield


def fresh_state():
    """Accelerate's state, which would be that of the run before; it takes the launcher's ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return PartialState(backend=get_accelerator().communication_backend_name())


class Trace:
    """What every step came to, on all ranks, bit for bit."""

    def __init__(self):
        self.steps = []
        self._losses = []

    def loss(self, loss):
        self._losses.append(float(loss))

    def step(self, engine, optimizer):
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, self._losses)
        self._losses = []
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        weighed = weights.summary(weights.vector(engine.module)).checksum
        norm = engine.get_global_grad_norm()
        self.steps.append(
            {"losses": told, "lr": rates, "grad_norm": None if norm is None else float(norm), "weights": weighed}
        )

    def result(self, engine):
        ours = isinstance(engine, ds_parity.ParityEngine)
        window = engine.window if ours else None
        last = engine.last_step if ours else None
        return {
            "engine": type(engine).__name__,
            "steps": self.steps,
            "global_steps": engine.global_steps,
            "windows": window.index if ours else None,
            "open": window.passes if ours else None,
            "last": {"loss": last.loss, "rollouts": last.rollouts, "passes": last.passes} if ours else None,
        }


# Accelerate.


def sentences(count, *, ragged=False):
    """Token ids, some of them not trained on where they are `ragged`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (count, 12), generator=generator)
    labels = ids.clone()
    if ragged:
        for row, length in enumerate(torch.randint(3, 13, (count,), generator=generator).tolist()):
            labels[row, length:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def accelerator_for(config, steps=STEPS, dtype="fp32"):
    fresh_state()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=steps,
        mixed_precision="bf16" if dtype == "bf16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())],
    )


def prepared(accelerator, config, data, *, own_scheduler=False):
    net = model()
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    if own_scheduler:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": rates}
        optimizer = DummyOptim(net.parameters(), lr=1e-2)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=3)
    return accelerator.prepare(net, optimizer, loader, scheduler)


def loop(accelerator, trace, net, optimizer, loader, scheduler, epochs=2, **counts):
    """The loop of accelerate's documentation."""
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                trace.loss(loss)
                accelerator.backward(loss, **counts)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                trace.step(net, optimizer)


def with_accelerate(ours, stage, dtype, own_scheduler=False, extra=0, epochs=2, **section):
    """Accelerate's own loop; `extra`: micro-batches a rank that fill no window at the end of an epoch."""
    with installed(ours):
        config = configuration(ours, stage, dtype, **section)
        accelerator = accelerator_for(config, dtype=dtype)
        data = sentences((WINDOWS // 2 * STEPS + extra) * 4)
        parts = prepared(
            accelerator, accelerator.state.deepspeed_plugin.deepspeed_config, data, own_scheduler=own_scheduler
        )
        trace = Trace()
        loop(accelerator, trace, *parts, epochs=epochs)
        return trace.result(parts[0])


# transformers' Trainer, and TRL's.


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


# What can't be reconciled. Each returns what every rank ended in.


def ended(run):
    """The errors of all ranks: one that did not end would hang here."""
    try:
        run()
        own = "nothing was raised"
    except ds_parity.DsParityError as error:
        own = f"{type(error).__name__}: {error}"
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def refused(how):
    """An accelerate loop whose boundary, counts or keys do not fit."""
    steps, section, own_scheduler, counts = STEPS, {}, False, {}
    if how == "accumulates less":
        steps = 2
    if how == "scheduler out of reach":
        section, own_scheduler = {"lr_progress": "rollout"}, True
    if how == "ragged counts":
        counts = {"rollouts": 3}
    if how == "uneven passes":
        section = {"passes": 5}

    def run():
        with ds_parity.install():
            config = configuration(True, 2, "fp32", **section)
            accelerator = accelerator_for(config, steps)
            filled = accelerator.state.deepspeed_plugin.deepspeed_config
            parts = prepared(accelerator, filled, sentences(WINDOWS * STEPS * 4), own_scheduler=own_scheduler)
            if how == "changed to less":
                accelerator.gradient_accumulation_steps = 2
            if how == "changed to more":
                accelerator.gradient_accumulation_steps = 4
            if how == "ranks differ":
                accelerator.gradient_accumulation_steps = STEPS - dist.get_rank()
            loop(accelerator, Trace(), *parts, **counts)

    return ended(run)


def refused_by_trainer(**section):
    """A Trainer that divides the loss, and keys that would have it weighed."""
    return ended(lambda: with_trainer(True, 2, "fp32", section=section))


def cut_short(ours, last_window="step"):
    """Two epochs of accelerate that each end after one pass of a window; what ours says of it."""
    said, logger = [], logging.getLogger("ds_parity")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        section = {"last_window": last_window} if ours else {}
        return {**with_accelerate(ours, 2, "fp32", extra=1, **section), "said": said}
    finally:
        logger.removeHandler(handler)


def cut_short_refused(last_window):
    return ended(lambda: cut_short(True, last_window))


# Beside the steps themselves.


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


def blocks(language):
    section = README.read_text().split("### Frameworks")[1].split("\n### ")[0].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@contextlib.contextmanager
def inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def readme():
    """The code of the README's section on frameworks, run as it stands there."""
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        Path("ds_config.json").write_text(blocks("json")[0])
        passes = json.loads(blocks("json")[0])["gradient_accumulation_passes"]
        told, found = [], []
        trainer_block, accelerate_block, own_block = blocks("python")
        # On a machine without a GPU these two must be told so; everything else is the README's.
        host = {
            "use_cpu": get_accelerator().device_name() == "cpu",
            "accelerator_config": {"use_configured_state": True},
        }
        names = {
            "Trainer": recorded(transformers.Trainer),
            "TrainingArguments": functools.partial(
                transformers.TrainingArguments, report_to=[], save_strategy="no", **host
            ),
            "Accelerator": Accelerator,
            "DeepSpeedPlugin": DeepSpeedPlugin,
            "data": sentences(4 * passes),
        }
        for block in (trainer_block, accelerate_block + own_block):
            fresh_state()
            net = model()
            own = {
                "model": net,
                "optimizer": torch.optim.AdamW(net.parameters()),
                "loader": torch.utils.data.DataLoader(names["data"], batch_size=2),
                "stream": stream(passes // 2),
            }
            own["scheduler"] = torch.optim.lr_scheduler.ConstantLR(own["optimizer"])
            space = {**names, **own}
            exec(compile(block, "README.md", "exec"), space)
            engine = space["trainer"].model_wrapped if "trainer" in space else space["model"]
            told.append(type(engine).__name__)
            found.append([engine.window.index, engine.window.target])
            if "installation" in space:
                space["installation"].uninstall()
        return {"engines": told, "windows": found}


class Batch:
    """A micro-batch of one rank, of as many rollouts as it says."""

    def __init__(self, rollouts):
        self.rollouts, self.prompts, self.tokens = rollouts, 0, 12 * rollouts
        rows = sentences(max(1, rollouts))
        self.inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def stream(passes):
    return [Batch(1 + (number + dist.get_rank()) % 3) for number in range(passes)]
