"""What the frameworks train: a small model with random weights, its data, and what every step came to.

Nothing is downloaded. accelerate and TRL come with the extra hf alone, so they are imported where ranks use them.
"""

import contextlib
import os

import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.parity.running import weights
from tests.rank_sets import RankSet

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
# One start for all modules here: the imports of the frameworks alone take longer than what they do.
on_two_ranks = RankSet(2, timeout=900, patience=120, environment=OFFLINE)
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


def configuration(wrapped, stage, dtype, *, passes=2 * STEPS, **section):
    """A Hugging Face configuration, `auto` where the frameworks fill in; `wrapped`: with the extra keys."""
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
    return {**plain, "gradient_accumulation_passes": passes, "ds_parity": section} if wrapped else plain


@contextlib.contextmanager
def installed(wrapped):
    """ds_parity installed, or DeepSpeed alone."""
    with ds_parity.install() if wrapped else contextlib.nullcontext():
        yield


def fresh_state():
    """Accelerate's state, which would be that of the run before; it takes the launcher's ranks."""
    from accelerate.state import AcceleratorState, PartialState

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
        losses = from_all(self._losses)
        self._losses = []
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        weighed = weights.summary(weights.vector(engine.module)).checksum
        norm = engine.get_global_grad_norm()
        self.steps.append(
            {"losses": losses, "lr": rates, "grad_norm": None if norm is None else float(norm), "weights": weighed}
        )

    def result(self, engine):
        wrapped = isinstance(engine, ds_parity.ParityEngine)
        window = engine.window if wrapped else None
        last = engine.last_step if wrapped else None
        return {
            "engine": type(engine).__name__,
            "steps": self.steps,
            "global_steps": engine.global_steps,
            "windows": window.index if wrapped else None,
            "open": window.passes if wrapped else None,
            "last": {"loss": last.loss, "rollouts": last.rollouts, "passes": last.passes} if wrapped else None,
        }


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
    return from_all(own)


def from_all(value):
    """The values of all ranks, in a list on every rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def register(function, **arguments):
    """Register a run without ds_parity and one with it."""
    for wrapped in (False, True):
        on_two_ranks.call(function, wrapped=wrapped, **arguments)


def pair(framework_ranks, function, **arguments):
    """What the run without ds_parity returned, and the one with it."""
    bare, wrapped = (framework_ranks.of(function, wrapped=one, **arguments) for one in (False, True))
    assert (bare["engine"], wrapped["engine"]) == ("DeepSpeedEngine", "FrameworkEngine")
    return bare, wrapped


def assert_same_windows(bare, wrapped, stage):
    """Four windows of three passes over 12 rollouts, the same with ds_parity and without."""
    assert len(bare["steps"]) == 4
    if stage == 0:  # where DeepSpeed throws the norm away
        assert all(step.pop("grad_norm") is None for step in bare["steps"])
        assert all(step.pop("grad_norm") > 0 for step in wrapped["steps"])
    assert wrapped["steps"] == bare["steps"]
    assert wrapped["global_steps"] == bare["global_steps"] == wrapped["windows"]
    assert wrapped["open"] == 0
    assert wrapped["last"]["rollouts"] == 12
    assert wrapped["last"]["passes"] == 3
