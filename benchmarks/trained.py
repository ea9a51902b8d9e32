"""transformers' Trainer under `ds_parity.install()`, whose own loop hands each window's time to others in between."""

import tempfile
import time

import transformers
from deepspeed.accelerator import get_accelerator
from torch.utils.data import SequentialSampler

import ds_parity
from benchmarks.accelerated import begin_anew
from ds_parity.collation import collate
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import build


class _Between(transformers.TrainerCallback):
    """Stops the clock at each step's end, lets others run, and starts it again."""

    def __init__(self, run_others):
        self.run_others, self.seconds, self.begun, self.window = run_others, [], 0.0, 0

    def on_train_begin(self, args, state, control, **_):
        self._others()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.begun)
        self.window += 1
        if self.window < args.max_steps:
            self._others()

    def _others(self):
        self.run_others(self.window)
        self.begun = time.perf_counter()


class _InOrder(transformers.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)


def windows(config, rows, rollouts, count, ranks, run_others):
    """Train `count` windows of padded micro-batches; return the seconds of each.

    Args:
        config: the extended configuration.
        rows: rollouts in a micro-batch.
        rollouts: at least `count` windows of them.
        count: of windows.
        ranks: that train.
        run_others: called before each window with its number.
    """
    target = config["gradient_accumulation_passes"]
    begin_anew()
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    given = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        # Here a pass is a micro-batch of `rows` rollouts.
        deepspeed={**config, **sizes, "gradient_accumulation_passes": target // rows},
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=target // ranks // rows,
        max_steps=count,
        learning_rate=config["optimizer"]["params"]["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=config["gradient_clipping"],
        bf16=False,
        use_cpu=get_accelerator().device_name() == "cpu",
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    between = _Between(run_others)
    with ds_parity.install():
        trainer = _InOrder(
            model=PolicyGradient(build(0)),
            args=given,
            train_dataset=rollouts[: count * target],
            data_collator=lambda batch: collate(batch, layout="padded").inputs,
            callbacks=[between],
        )
        trainer.train()
    return between.seconds
