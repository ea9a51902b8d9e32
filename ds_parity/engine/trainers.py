"""The losses of transformers' Trainer and of TRL, divided by what their step really contains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ds_parity.engine.framework import Divided, FrameworkEngine
from ds_parity.engine.internals.replaced import replaced
from ds_parity.errors import ConfigError

UNITS = ("rollout", "token")
"""What a step may be a mean over."""
_BY_TOKENS = ("bnpo", "cispo", "dapo", "vespo")
_OF_GENERATION = ("cispo", "dapo", "vespo")
# Of peft's prompts, those that are no tokens.
_WITHOUT_TOKENS = ("PREFIX_TUNING", "CARTRIDGE")
_BY_ROLLOUTS = ("dr_grpo", "grpo", "luspo", "sapo")


class Normalising:
    """While it is in its place, every loss of a trainer enters its step undivided, and the engine divides it.

    Args:
        unit: what a step is a mean over, `rollout` or `token`.

    Raises:
        ConfigError: it is another one, or transformers is not installed.
    """

    def __init__(self, unit: str) -> None:
        if unit not in UNITS:
            raise ConfigError(
                f"normalise is {unit!r}: a step is a mean over one of {UNITS}; give one of these, or None"
            )
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"normalise is {unit!r}, but transformers is not installed: there is no Trainer whose loss could be "
                "divided; leave it out, or install the extra hf"
            ) from error
        self.unit = unit
        # The base of all trainers: those of TRL call it, too.
        self._trainer: Any = transformers.Trainer
        self._own = self._trainer.training_step
        self._ours = _noting(self._own, unit)

    def put_in(self) -> None:
        """Have trainers say what they divide by."""
        self._trainer.training_step = self._ours

    def take_back(self) -> None:
        """Undo it, unless somebody has wrapped it meanwhile."""
        if self._trainer.training_step is self._ours:
            self._trainer.training_step = self._own


def _noting(own: Callable[..., Any], unit: str) -> Callable[..., Any]:
    """Return `training_step` that tells the engine, before its backward, what the loss was divided by."""

    @functools.wraps(own)
    def training_step(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, FrameworkEngine):
            raise ConfigError(
                f"install(normalise={unit!r}): {type(trainer).__name__} trains a {type(model).__name__}, and no engine "
                "of ds_parity that could divide its loss; write gradient_accumulation_passes into its DeepSpeed "
                "configuration, or leave normalise out"
            )
        compute = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
            items = given.get("num_items_in_batch")
            # Before the loss is computed, because a Trainer takes labels out of its inputs.
            with model.telling():
                divided = divided_by(trainer, inputs, items, unit)
            loss = compute(model, inputs, *args, **given)
            model.undivide(divided)
            return loss

        with replaced(trainer, "compute_loss", compute_loss):
            return own(trainer, model, *args, **kwargs)

    return training_step


def divided_by(trainer: Any, inputs: Any, items: Any, unit: str) -> Divided:
    """Return what a trainer divides the loss of a micro-batch by, as it reaches `backward`.

    Args:
        trainer: transformers' own, or one of TRL.
        inputs: of the micro-batch, as they reach `compute_loss`.
        items: `num_items_in_batch`, as it reaches `compute_loss`.
        unit: what the step is to be a mean over, `rollout` or `token`.

    Raises:
        ConfigError: the loss is no mean over this unit, has another term with a denominator of its own, or is computed
            by a class of which it is not known what it divides by.
    """
    kind = _loss_of(trainer)
    known = {
        ("trl", "GRPOTrainer"): _grpo,
        ("trl", "AsyncGRPOTrainer"): _async_grpo,
        ("trl", "SFTTrainer"): _labels,
        ("transformers", "Trainer"): _labels,
    }
    rule = known.get((kind.__module__.split(".")[0], kind.__name__))
    if rule is None:
        raise ConfigError(
            f"install(normalise={unit!r}): {kind.__module__}.{kind.__name__} computes the loss, and it is not known "
            "what it divides by; leave normalise out, and divide by the step's total there, or train with one of "
            f"{', '.join(name for _, name in known)} itself"
        )
    routed = kind.__name__ == "Trainer" and _of_model(trainer, "output_router_logits")
    if routed or getattr(trainer, "aux_loss_enabled", False) or getattr(trainer, "_entropy_bonus_enabled", False):
        raise ConfigError(
            f"install(normalise={unit!r}): the loss has a router's term or an entropy bonus beside its own, with a "
            "denominator of its own, and one factor can't repair both; switch the term off, or leave normalise out"
        )
    found = rule(trainer, inputs, items, unit)
    # Rows that are packed are not the rollouts of a micro-batch; where tokens weigh, the usual number of these counts.
    return found if unit == "rollout" else replace(found, rollouts=None)


def _of_model(trainer: Any, name: str) -> bool:
    return bool(getattr(getattr(getattr(trainer, "model", None), "config", None), name, False))


def _loss_of(trainer: Any) -> type:
    """Return the class that computes the loss: the first one that says how."""
    names = ("compute_loss", "_compute_loss")
    return next(kind for kind in type(trainer).__mro__ if any(name in vars(kind) for name in names))


def _grpo(trainer: Any, inputs: Any, _: Any, unit: str) -> Divided:
    """TRL's `GRPOTrainer._compute_loss` (release 1.16.0, trl/trainer/grpo_trainer.py:3153-3181)."""
    kind, mask = trainer.loss_type, inputs["completion_mask"]
    mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    _refuse_other_unit(unit, "token" if kind in _BY_TOKENS else "rollout", f"loss_type {kind!r}")
    rows, tokens, gas = len(mask), int(mask.sum()), trainer.current_gradient_accumulation_steps
    if kind in _OF_GENERATION:
        generated = max(float(inputs["num_items_in_batch"]), 1.0) / trainer.accelerator.num_processes
        return Divided(unit, generated * gas / trainer.args.steps_per_generation, rows, tokens)
    if kind not in (*_BY_TOKENS, *_BY_ROLLOUTS):
        raise ConfigError(f"install(normalise={unit!r}): it is not known what loss_type {kind!r} divides by")
    return Divided(unit, (max(tokens, 1) if kind == "bnpo" else rows) * gas, rows, tokens)


def _async_grpo(trainer: Any, inputs: Any, _: Any, unit: str) -> Divided:
    """TRL's `AsyncGRPOTrainer.compute_loss` (release 1.16.0, async_grpo_trainer.py:1534-1544)."""
    _refuse_other_unit(unit, "token", "the loss of AsyncGRPOTrainer")
    own = max(float(inputs["global_n_tokens"][0]) / trainer.accelerator.num_processes, 1.0)
    tokens = int((inputs["token_index"] >= 0).sum())
    return Divided(unit, own * trainer.current_gradient_accumulation_steps, None, tokens)


def _labels(trainer: Any, inputs: Any, items: Any, unit: str) -> Divided:
    """`Trainer.compute_loss` and `training_step` of transformers (release 5.23.0, trainer.py:2082-2206)."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if labels is None:
        raise ConfigError(f"install(normalise={unit!r}): the micro-batch has no labels, by which its loss is divided")
    of = f"a loss over labels of {labels.ndim} dimensions"
    _refuse_other_unit(unit, "token" if labels.ndim > 1 else "rollout", of)
    if any(getattr(trainer, name, int)() > 1 for name in ("get_sp_size", "get_cp_size")):
        raise ConfigError(
            f"install(normalise={unit!r}): ranks share sequences, and labels of a slice are not those that the Trainer "
            "divides by; leave normalise out where sequences are shared"
        )
    # Behind virtual tokens the first label of a row is predicted, too.
    if labels.ndim > 1 and "shift_labels" not in inputs and _shifts(trainer) and not _has_virtual_tokens(trainer, unit):
        labels = labels[..., 1:]
    rows, tokens = len(labels), int(labels.ne(-100).sum())
    if labels.ndim == 1 and tokens < rows and not labels.is_floating_point():
        raise ConfigError(
            f"install(normalise={unit!r}): {rows - tokens} of {rows} rows have the label -100, and the loss is a mean "
            "over the others, where the step is one over all rollouts; leave such rows out of the data, or leave "
            "normalise out"
        )
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # older releases of transformers have none
    if scaled is None:
        _refuse_function(trainer, unit)
        scaled = items is not None and bool(trainer.model_accepts_loss_kwargs)
    # Wherever items are counted over ranks the loss is multiplied by these, also a mean of its own (compute_loss).
    ranks = trainer.accelerator.num_processes // getattr(trainer, "get_tp_size", lambda: 1)()
    times = ranks if trainer.args.average_tokens_across_devices and items is not None else 1
    if not scaled:
        _refuse_unknown_shift(trainer, inputs, labels, unit)
        return Divided(unit, max(tokens, 1) * trainer.current_gradient_accumulation_steps / times, rows, tokens)
    if items is None:
        raise ConfigError(
            f"install(normalise={unit!r}): the Trainer takes its loss for one that is divided by the step, but has not "
            "counted the step's items (num_items_in_batch); set loss_is_scaled_for_ga = False where the loss is a mean"
        )
    if _loss_of(trainer).__module__.startswith("transformers") and not getattr(trainer, "_loss_shifts_labels", True):
        raise ConfigError(
            f"install(normalise={unit!r}): it is not known whether {type(trainer.model).__name__} divides its loss by "
            "num_items_in_batch, and many that take **kwargs do not; before the Trainer is built, set loss_type = "
            "'ForCausalLM' on the model if it does and shifts its labels (GPT-2), accepts_loss_kwargs = False if it "
            "does not divide (with peft, on what get_base_model() returns), or leave normalise out"
        )
    return Divided(unit, float(items) / times, rows, tokens)


def _shifts(trainer: Any) -> bool:
    """Return whether the loss leaves out the first label of each row.

    The loss of SFTTrainer always does (TRL 1.16.0, trl/trainer/sft_trainer.py:1593-1618). A Trainer that smooths labels
    asks the class of the model, and counts by its `loss_type` (transformers 5.23.0, trainer.py:2173-2191 and 2331).
    """
    if not _knows_its_shift(trainer):
        return bool(getattr(trainer, "_loss_shifts_labels", True))
    if _loss_of(trainer).__name__ == "SFTTrainer":
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = trainer.accelerator.unwrap_model(trainer.model)
    # Beside prompt learning the Trainer looks one further than it should. It may be a class of the caller's.
    if any(kind.__module__.startswith("peft.") for kind in type(model).__mro__):
        model = getattr(model.base_model, "model", model.base_model)
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _has_virtual_tokens(trainer: Any, unit: str) -> bool:
    """Whether peft puts virtual tokens, with labels of -100, in front of every row (0.21.2, peft_model.py:2150-2167).

    Prefix tuning gives the model keys and values in their place. The Trainer counts its items without the first label.

    Raises:
        ConfigError: it is not known what the loss is divided by then.
    """
    config: Any = getattr(getattr(trainer, "model", None), "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return False
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind in _WITHOUT_TOKENS:
        return False
    if kind == "CPT" or getattr(trainer, "compute_loss_func", None) is not None:
        what = "a compute_loss_func" if kind != "CPT" else "a weight for each token (CPT)"
        raise ConfigError(
            f"install(normalise={unit!r}): peft puts virtual tokens in front of each row, and with {what} it is not "
            "known over what the loss is a mean; leave normalise out"
        )
    return True


def _knows_its_shift(trainer: Any) -> bool:
    """Whether the trainer computes the loss of labels itself, and not its model or a function of the caller's."""
    if getattr(trainer, "compute_loss_func", None) is not None:
        return False
    return _loss_of(trainer).__name__ == "SFTTrainer" or getattr(trainer, "label_smoother", None) is not None


def _refuse_function(trainer: Any, unit: str) -> None:
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            f"install(normalise={unit!r}): compute_loss_func computes the loss, and it is not known what it divides "
            "by; set trainer.loss_is_scaled_for_ga to True where it divides by num_items_in_batch, and to False where "
            "it returns the mean of its micro-batch, or leave normalise out"
        )


def _refuse_unknown_shift(trainer: Any, inputs: Any, labels: Any, unit: str) -> None:
    """Raise ConfigError where the first label of a row may be one that the model's loss never sees."""
    if labels.ndim == 1 or "shift_labels" in inputs or _knows_its_shift(trainer) or _shifts(trainer):
        return
    from transformers.loss.loss_utils import LOSS_MAPPING

    model, by_function = trainer.model, trainer.compute_loss_func is not None
    of_model = getattr(model, "loss_type", None) in LOSS_MAPPING or _of_model(trainer, "is_encoder_decoder")
    if (of_model and not by_function) or not bool(labels[..., :1].ne(-100).any()):
        return
    whose = "compute_loss_func" if by_function else f"the loss of {type(model).__name__}"
    typed = (
        "set the model's loss_type before the Trainer is built ('ForCausalLM' where it shifts them, "
        "'ForTokenClassification' where it does not), "
    )
    raise ConfigError(
        f"install(normalise={unit!r}): it is not known whether {whose} shifts its labels, and so over how many tokens "
        f"it is a mean; {'' if by_function else typed}give labels that begin with -100, or leave normalise out"
    )


def _refuse_other_unit(wanted: str, own: str, what: str) -> None:
    if wanted != own:
        raise ConfigError(
            f"install(normalise={wanted!r}): {what} is a mean over {own}s, which no factor makes one over {wanted}s; "
            f"give normalise={own!r}, or choose another loss"
        )
