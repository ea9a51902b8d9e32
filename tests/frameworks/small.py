"""What the frameworks train: a small model with random weights, its data, and what every step came to. Nothing is downloaded."""

import contextlib
import os

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.parity.running import weights

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


def sentences(count, *, ragged=False):
    """Token ids, some of them not trained on where they are `ragged`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (count, 12), generator=generator)
    labels = ids.clone()
    if ragged:
        for row, length in enumerate(torch.randint(3, 13, (count,), generator=generator).tolist()):
            labels[row, length:] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


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
