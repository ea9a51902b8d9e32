"""What TRL's trainer trains: a small Llama with random weights, that samples its own completions. Nothing is loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from tools.migrations.common import Found, Watch

VOCAB, PROMPT, LONGEST = 16, 4, 32
ROWS, GROUP = 2, 4
"""Completions of a micro-batch, and of a prompt."""
WORDS = ["[PAD]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(3, VOCAB))]
Trainer = type[GRPOTrainer]


def model() -> nn.Module:
    """Return the policy; it ends a completion after a dozen tokens, more or less."""
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
    torch.manual_seed(0)
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def tokenizer() -> Any:
    """Return a tokenizer with a word for each token."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="w3"
    )


def prompts(count: int) -> list[str]:
    """Return prompts of one length, so that nothing is padded on the left."""
    ids = torch.randint(3, VOCAB, (count, PROMPT), generator=torch.Generator().manual_seed(1))
    return [" ".join(WORDS[number] for number in row) for row in ids.tolist()]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the number of the last word of each completion, 0 for none."""
    return [float(text.split()[-1].strip("w[]PADEOSB") or 0) if text.split() else 0.0 for text in completions]


def on_deepspeed(config: Found, steps: int, gas: int, probe: bool) -> Found:
    """Let accelerate start DeepSpeed in this process anew, and return the arguments of every trainer.

    Args:
        config: of DeepSpeed; the framework fills in its batch.
        steps: optimizer steps.
        gas: micro-batches of a rank in a step.
        probe: train by plain SGD, without clipping.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend=get_accelerator().communication_backend_name())
    return {
        "output_dir": tempfile.mkdtemp(),
        "deepspeed": config,
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": gas,
        "max_steps": steps,
        "optim": "sgd" if probe else "adamw_torch",
        "learning_rate": 0.1 if probe else 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0 if probe else 1.0,
        "bf16": False,
        "use_cpu": get_accelerator().device_name() == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }


def trainer_of(
    kind: Trainer, config: Found, loss: str, steps: int, gas: int, per_generation: int, probe: bool
) -> GRPOTrainer:
    """Return TRL's trainer on DeepSpeed.

    Args:
        kind: the trainer.
        config: of DeepSpeed; the framework fills in its batch.
        loss: TRL's `loss_type`.
        steps: optimizer steps.
        gas: micro-batches of a rank in a step.
        per_generation: micro-batches of a rank that are generated together.
        probe: train by plain SGD, without clipping.
    """
    given = GRPOConfig(
        **on_deepspeed(config, steps, gas, probe),
        loss_type=loss,
        steps_per_generation=per_generation,
        num_generations=GROUP,
        max_completion_length=LONGEST,
    )
    return kind(
        model=model(),
        reward_funcs=[reward],
        args=given,
        train_dataset=Dataset.from_dict({"prompt": prompts(64)}),
        processing_class=tokenizer(),
    )


def watched(kind: Trainer, probe: bool, trace: Path | None = None, config: Found | None = None) -> Trainer:
    """Return the trainer with a watch over its engine, `trainer.watch`."""

    def made(**given: Any) -> Any:
        trainer = kind(**given)
        own, trainer.watch = trainer._compute_loss, None

        # On the trainer and not in a class of its own: it is TRL's class that computes the loss.
        def compute_loss(model: Any, inputs: Found) -> Tensor:
            if trainer.watch is None:
                probing = {"mean": mean, "twin": _policy()} if probe else {}
                trainer.watch = Watch(model, trace=trace, config=config, **probing)
            loss: Tensor = own(model, inputs)
            tokens = int(inputs["completion_mask"].sum())
            batch = SimpleNamespace(inputs=dict(inputs), tokens=tokens, rollouts=ROWS, idle=False)
            with torch.no_grad():
                trainer.watch.ran(batch, mean(model.module, batch))
            return loss

        trainer._compute_loss = compute_loss
        trainer.add_callback(Stepped(trainer))
        return trainer

    return made  # type: ignore[return-value]


class Stepped(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells a trainer's watch of each step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hear of a step."""
        self._trainer.watch.stepped()


def _policy() -> nn.Module:
    return model()


def mean(policy: nn.Module, batch: Any) -> Tensor:
    """Return the mean over a micro-batch's tokens of the clipped loss, at TRL's bounds of 0.2."""
    given, mask = batch.inputs, batch.inputs["completion_mask"]
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    seen = torch.cat([given["prompt_mask"], mask], 1)
    kept = mask.shape[1]
    logits = policy(input_ids=ids, attention_mask=seen).logits[:, -kept - 1 : -1].float()
    logp = logits.log_softmax(-1).gather(-1, given["completion_ids"].unsqueeze(-1)).squeeze(-1)
    old = given.get("old_per_token_logps")
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    advantages = given["advantages"][:, None]
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (losses * mask).sum() / mask.sum()


def ended(trainer: Any) -> list[Found]:
    """Train, and return what was seen of the engine's steps."""
    dist.barrier()
    trainer.train()
    steps: list[Found] = trainer.watch.close()
    trainer.watch.engine.destroy()
    return steps
