"""install(normalise=...) under real trainers: what is right stays as it is, what is wrong is refused by name."""

import tempfile

import pytest
import torch
import transformers

import ds_parity
from tests.frameworks.small import STEPS, WINDOWS, configuration, ended, model, on_two_ranks, recorded, sentences
from tests.frameworks.test_trainers import arguments, finished, reward, texts, tokenizer

pytestmark = [pytest.mark.hf, pytest.mark.ranks]


def by_trainer(stage, dtype, folder, **options):
    data = sentences(WINDOWS * STEPS * 4, ragged=True)
    given = arguments(transformers.TrainingArguments, True, stage, dtype, folder, **options)
    return recorded(transformers.Trainer)(model=model(), args=given, train_dataset=data)


def by_prompt(stage, dtype, folder, **options):
    """The same behind virtual tokens; each row has 12 labels."""
    import peft

    data = sentences(WINDOWS * STEPS * 4)
    given = arguments(transformers.TrainingArguments, True, stage, dtype, folder, **options)
    tuned = peft.get_peft_model(model(), peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    return recorded(transformers.Trainer)(model=tuned, args=given, train_dataset=data)


def by_sft(stage, dtype, folder, **options):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    given = arguments(SFTConfig, True, stage, dtype, folder, max_length=32, **options)
    data = Dataset.from_dict({"text": texts(WINDOWS * STEPS * 4, 20, 1)})
    return recorded(SFTTrainer)(model=model(), args=given, train_dataset=data, processing_class=tokenizer())


def by_grpo(stage, dtype, folder, **options):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = arguments(GRPOConfig, True, stage, dtype, folder, num_generations=4, max_completion_length=6, **options)
    data = Dataset.from_dict({"prompt": texts(WINDOWS * 4, 6, 5)})
    return recorded(GRPOTrainer)(
        model=model(), reward_funcs=[reward], args=given, train_dataset=data, processing_class=tokenizer()
    )


def by_dpo(stage, dtype, folder, **options):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    given = arguments(DPOConfig, True, stage, dtype, folder, **options)
    data = {name: texts(WINDOWS * STEPS * 4, 8, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
    return recorded(DPOTrainer)(
        model=model(),
        ref_model=model(1),
        args=given,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


MADE = {"Trainer": by_trainer, "prompt": by_prompt, "SFT": by_sft, "GRPO": by_grpo, "DPO": by_dpo}
RIGHT = [
    ("Trainer", "token", 2, "fp32", {}),
    ("Trainer", "token", 3, "bf16", {}),
    ("SFT", "token", 2, "fp32", {}),
    ("GRPO", "rollout", 2, "fp32", {"loss_type": "grpo"}),
    ("GRPO", "rollout", 2, "fp32", {"loss_type": "dr_grpo"}),
]
"""Trainers whose own division is that of the step."""


def trained(kind, normalise, stage, dtype, options):
    with ds_parity.install(normalise=normalise), tempfile.TemporaryDirectory() as folder:
        return finished(MADE[kind](stage, dtype, folder, **options))


def refused(kind, normalise, options=(), section=()):
    """What a trainer is told in its first step."""

    def run():
        with ds_parity.install(normalise=normalise), tempfile.TemporaryDirectory() as folder:
            given = dict(options)
            if section:
                given["section"] = dict(section)
            MADE[kind](2, "fp32", folder, **given).train()

    return ended(run)


def one_row_without_a_label():
    """Rows of which one has no label: one rank alone reads it."""

    def run():
        config = model().config
        config.num_labels = 2
        data = [{"input_ids": one["input_ids"], "labels": torch.tensor(at % 2)} for at, one in enumerate(sentences(48))]
        data[20]["labels"] = torch.tensor(-100)
        with ds_parity.install(normalise="rollout"), tempfile.TemporaryDirectory() as folder:
            given = arguments(transformers.TrainingArguments, True, 2, "fp32", folder)
            classifier = transformers.LlamaForSequenceClassification(config)
            classifier.accepts_loss_kwargs = False
            recorded(transformers.Trainer)(model=classifier, args=given, train_dataset=data).train()

    return ended(run)


def beside_deepspeeds_own():
    """A configuration without the keys, whose engine can't divide anything."""

    def run():
        with ds_parity.install(normalise="token"), tempfile.TemporaryDirectory() as folder:
            by_trainer(2, "fp32", folder, config=configuration(False, 2, "fp32")).train()

    return ended(run)


REFUSED = {
    "DPO": ({"normalise": "rollout"}, "DPOTrainer computes the loss"),
    "GRPO": ({"normalise": "rollout", "options": (("loss_type", "bnpo"),)}, "loss_type 'bnpo' is a mean over tokens"),
    "Trainer": ({"normalise": "token", "section": (("loss_weight", "token"),)}, "remove ds_parity.loss_weight"),
}
for kind, normalise, stage, dtype, options in RIGHT:
    for unit in (None, normalise):
        on_two_ranks.call(trained, kind=kind, normalise=unit, stage=stage, dtype=dtype, options=options)
for unit in (None, "token"):
    on_two_ranks.call(trained, kind="prompt", normalise=unit, stage=2, dtype="fp32", options={})
for kind, (given, _) in REFUSED.items():
    on_two_ranks.call(refused, kind=kind, **given)
on_two_ranks.call(beside_deepspeeds_own)
on_two_ranks.call(one_row_without_a_label)


@pytest.mark.parametrize(("kind", "normalise", "stage", "dtype", "options"), RIGHT)
def test_a_trainer_that_is_right_makes_the_same_steps_but_for_rounding(
    framework_ranks, kind, normalise, stage, dtype, options
):
    own, ours = (
        framework_ranks.of(trained, kind=kind, normalise=unit, stage=stage, dtype=dtype, options=options)
        for unit in (None, normalise)
    )
    assert len(own["steps"]) == len(ours["steps"]) == WINDOWS
    near = 1e-4 if dtype == "fp32" else 0.05
    assert [one["grad_norm"] for one in ours["steps"]] == pytest.approx(
        [one["grad_norm"] for one in own["steps"]], rel=near
    )
    assert [one["lr"] for one in ours["steps"]] == [one["lr"] for one in own["steps"]]
    assert ours["last"]["loss"] == pytest.approx(own["last"]["loss"], rel=near, abs=near)


def test_behind_virtual_tokens_the_first_label_of_a_row_is_counted(framework_ranks):
    """The Trainer divides by 11 labels of a row, and the loss is over 12."""
    own, ours = (
        framework_ranks.of(trained, kind="prompt", normalise=unit, stage=2, dtype="fp32", options={})["steps"][0]
        for unit in (None, "token")
    )
    assert ours["grad_norm"] == pytest.approx(own["grad_norm"] * 11 / 12, rel=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_can_not_repair_is_refused_on_every_rank(framework_ranks, kind):
    given, said = REFUSED[kind]
    errors = framework_ranks.of(refused, kind=kind, **given)
    assert len(errors) == 2
    assert all(said in error for error in errors), errors


def test_an_engine_that_is_deepspeeds_own_is_refused_and_not_left_as_it_is(framework_ranks):
    assert all("gradient_accumulation_passes" in error for error in framework_ranks.of(beside_deepspeeds_own))


def test_what_one_rank_refuses_the_others_are_told(framework_ranks):
    told, own = sorted(framework_ranks.of(one_row_without_a_label), reverse=True)
    assert own.startswith("ConfigError")
    assert "rows have the label -100" in own
    assert told.startswith("RankDesyncError")
    assert "rows have the label -100" in told
