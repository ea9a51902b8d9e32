"""transformers' Trainer and TRL under install(), with what people add to them: each step is that of DeepSpeed alone."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import ds_parity
from tests.frameworks.small import STEPS, WINDOWS, model, recorded, sentences
from tests.frameworks.test_trainers import arguments, reward, texts, tokenizer
from tests.hard.unforeseen.cells import Cell, Found, distance, weights_of
from tests.hard.unforeseen.scenarios import Scenarios

pytest.importorskip("accelerate", reason="takes the extra hf: make test-hf")
peft = pytest.importorskip("peft", reason="takes the extra hf: make test-hf")
trl = pytest.importorskip("trl", reason="takes the extra hf: make test-hf")
datasets = pytest.importorskip("datasets", reason="takes the extra hf: make test-hf")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(2400)]
play = Scenarios()
DATA = WINDOWS * STEPS * 4
SOME = (Cell(1), Cell(2), Cell(3))


def named():
    """A model that is known by where it is kept: TRL loads a reference from there."""
    path = Path(tempfile.gettempdir()) / f"reference-of-{os.getppid()}"
    if dist.get_rank() == 0 and not path.exists():
        model().save_pretrained(path)
    dist.barrier()
    return transformers.LlamaForCausalLM.from_pretrained(path)


class Told(transformers.TrainerCallback):
    """Does something at the end of each step."""

    def __init__(self, action):
        self.action = action

    def on_step_end(self, args, state, control, **_):
        self.action(args, state, control)


def adapted(net):
    chosen = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    return peft.get_peft_model(net, chosen)


def partly_frozen(net):
    for parameter in net.model.layers[0].parameters():
        parameter.requires_grad_(False)
    return net


def by_hand(trainer):
    """An optimizer of two groups with rates of their own."""
    named = dict(trainer.model.named_parameters())
    flat = [one for name, one in named.items() if "norm" in name]
    rest = [one for name, one in named.items() if "norm" not in name]
    groups = [{"params": flat, "lr": 3e-3, "weight_decay": 0.0}, {"params": rest, "lr": 1e-2}]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def summed(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own, over what the step contains."""
    logits = outputs["logits"][:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1),
                                             ignore_index=-100, reduction="sum")  # fmt: skip
    return loss / num_items_in_batch


ADDED = {
    "nothing": {},
    "an evaluation behind each step": {"eval_strategy": "steps", "eval_steps": 1},
    "the best of its checkpoints": {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "learning_rate": 3.0,
    },
    "weights alone in its checkpoints": {"save_strategy": "steps", "save_steps": 1, "save_only_model": True},
    "no clipping": {"max_grad_norm": 0.0},
    "recomputation": {"gradient_checkpointing": True},
    "noise": {"neftune_noise_alpha": 5.0},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "one pass a step": {"gradient_accumulation_steps": 1},
    "epochs that end short": {"count": 28, "num_train_epochs": 3, "max_steps": -1},
    "data that does not divide": {"count": DATA - 5, "num_train_epochs": 2, "max_steps": -1},
    "data that is dropped": {"count": DATA - 5, "num_train_epochs": 2, "max_steps": -1, "dataloader_drop_last": True},
    "plain descent": {"optim": "sgd", "learning_rate": 0.5},
    "adafactor": {"optim": "adafactor"},
    "a plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
    "a warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "workers": {"dataloader_num_workers": 1},
    "groups by length": {"train_sampling_strategy": "group_by_length"},
    "tokens of its own rank": {"average_tokens_across_devices": False},
    "bf16": {"dtype": "bf16"},
}  # fmt: skip
CHANGED = {"adapters": adapted, "frozen layers": partly_frozen}


def trainer_of(case, wrapped, kind=transformers.Trainer, *, made=model, section=None, dtype="fp32", **options):
    count = options.pop("count", DATA)
    steps = options.pop("gradient_accumulation_steps", STEPS)
    more = {name: options.pop(name) for name in ("callbacks", "compute_loss_func", "optimizers") if name in options}
    section = {"passes": 2 * steps, **(section or {})} if wrapped else {}
    given = arguments(
        transformers.TrainingArguments, wrapped, case.cell.stage, dtype, shared(case, wrapped), steps,
        section=section, **options,
    )  # fmt: skip
    data = sentences(count, ragged=True)
    return recorded(kind)(model=made(), args=given, train_dataset=data, eval_dataset=data[:6], **more)


def shared(case, wrapped):
    """A folder of both ranks, empty."""
    path = f"{case.folder}/{'ours' if wrapped else 'bare'}"
    dist.barrier()
    return path


def sides(case, run, normalise=None):
    """What a run comes to under install() and without: steps, what is logged, weights."""
    left = {}
    for wrapped in (False, True):
        with ds_parity.install(normalise=normalise) if wrapped else contextlib.nullcontext():
            trainer = run(wrapped)
            names = ("loss", "learning_rate", "grad_norm", "eval_loss", "train_loss")
            logged = [{name: one[name] for name in names if name in one} for one in trainer.state.log_history]
            steps = trainer.trace.steps
            if case.cell.stage == 0:  # DeepSpeed throws the norm away there
                for one in (*steps, *logged):
                    one.pop("grad_norm", None)
            kind = type(trainer.model_wrapped).__name__
            left[wrapped] = ([steps, logged, trainer.state.global_step], weights_of(trainer.model_wrapped), kind)
    assert (left[False][2], left[True][2]) == ("DeepSpeedEngine", "FrameworkEngine")
    moved = {one["weights"] for one in left[False][0][0]}
    assert len(moved) > 1 or len(left[False][0][0]) == 1, "weights that stand still prove nothing"
    got, right = left[True][0], left[False][0]
    if normalise:  # it rounds otherwise
        got, right = [len(got[0]), got[2]], [len(right[0]), right[2]]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(case.folder, ignore_errors=True)
    return Found(distance(left[True][1], left[False][1]), got, right)


def ended(trainer, **how):
    trainer.train(**how)
    return trainer


@play.right((Cell(0),), [one for one in ADDED if one != "tokens of its own rank"], bound=0.0)
def a_trainer_of_one_stage_less_with(case):
    """All but one: there DeepSpeed divides a gradient twice (tools/deepspeed_faults/divided_twice_zero0.py)."""
    return a_trainer_with(case)


@play.right(SOME, ADDED, bound=0.0)
def a_trainer_with(case):
    """Options of TrainingArguments."""
    return sides(case, lambda wrapped: ended(trainer_of(case, wrapped, **ADDED[case.variant])))


@play.right(SOME, CHANGED, bound=0.0)
def a_trainer_of(case):
    """Models of which a part is trained."""
    return sides(case, lambda wrapped: ended(trainer_of(case, wrapped, made=lambda: CHANGED[case.variant](model()))))


@play.right(SOME, bound=0.0)
def a_trainer_has_a_loss_of_the_users(case):
    return sides(case, lambda wrapped: ended(trainer_of(case, wrapped, compute_loss_func=summed)))


@play.right(SOME, bound=0.0)
def a_trainer_has_an_optimizer_of_the_users(case):
    def run(wrapped):
        trainer = trainer_of(case, wrapped, lr_scheduler_type="constant")
        trainer.optimizer = by_hand(trainer)
        return ended(trainer)

    return sides(case, run)


@play.right(SOME, ("once", "twice", "behind an epoch"), bound=0.0)
def a_trainer_goes_on(case):
    """From a checkpoint in the middle of an epoch; another Trainer, which goes on from its own once more."""
    epochs = {"count": 28, "num_train_epochs": 3, "max_steps": -1} if case.variant == "behind an epoch" else {}
    saves = {"save_strategy": "steps", "save_steps": 1, **epochs}

    def run(wrapped):
        ended(trainer_of(case, wrapped, **saves))
        path = f"{case.folder}/{'ours' if wrapped else 'bare'}/checkpoint-3"
        trainer = ended(trainer_of(case, wrapped, **saves), resume_from_checkpoint=path)
        if case.variant == "twice":
            path = path.replace("-3", "-2")
            trainer = ended(trainer_of(case, wrapped, **saves), resume_from_checkpoint=path)
        return trainer

    return sides(case, run)


@play.right(SOME, ("stopped", "asked inside", "saved inside"), bound=0.0)
def a_trainer_is_used_otherwise(case):
    def run(wrapped):
        if case.variant == "stopped":

            def stop(_, state, control):
                control.should_training_stop = state.global_step == 2

            return ended(trainer_of(case, wrapped, callbacks=[Told(stop)]))
        trainer = trainer_of(case, wrapped)
        if case.variant == "asked inside":
            trainer.add_callback(Told(lambda *_: (trainer.evaluate(sentences(3)), trainer.predict(sentences(5)))))
        if case.variant == "saved inside":
            trainer.add_callback(Told(lambda *_: trainer.save_model(f"{trainer.args.output_dir}/saved")))
        return ended(trainer)

    return sides(case, run)


@play.right(SOME, ("rollouts", "caller"), bound=0.0)
def the_caller_ends_windows(case):
    """step() ends them, whatever they contain."""
    section = {"boundary": case.variant} if case.variant == "caller" else {}
    given = {"count": 28, "num_train_epochs": 2, "max_steps": -1, "section": section}
    return sides(case, lambda wrapped: ended(trainer_of(case, wrapped, **given)))


def prompts(case, kind, wrapped, **options):
    section = {"passes": 2 * STEPS} if wrapped else {}
    return arguments(kind, wrapped, case.cell.stage, "fp32", shared(case, wrapped), STEPS, section=section, **options)


def kept(data, case):
    """Data that all ranks read from one folder."""
    path = f"{case.folder}/data"
    if dist.get_rank() == 0:
        data.save_to_disk(path)
    dist.barrier()
    return datasets.load_from_disk(path)


GROUP = {"num_generations": 4, "max_completion_length": 6}
ONLINE = {
    "twice over each rollout": {"num_iterations": 2},
    "a distance to its reference": {"beta": 0.1},
    "a reference that moves": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "one generation for two steps": {"steps_per_generation": 6},
    "a loss by tokens": {"loss_type": "dapo"},
    "masked truncation": {"mask_truncated_completions": True},
    "adapters": {"beta": 0.1},
}


@play.right((Cell(2), Cell(3)), ONLINE, bound=0.0)
def grpo_with(case):
    def run(wrapped):
        given = prompts(case, trl.GRPOConfig, wrapped, **GROUP, **ONLINE[case.variant])
        more = {}
        if case.variant == "adapters":
            more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        data = datasets.Dataset.from_dict({"prompt": texts(WINDOWS * 4, 6, 5)})
        return ended(
            recorded(trl.GRPOTrainer)(
                model=named(), reward_funcs=[reward], args=given, train_dataset=data, processing_class=tokenizer(),
                **more,
            )
        )  # fmt: skip

    return sides(case, run)


# TRL's RewardTrainer raises on ZeRO 3 without install() too (an IndexError while it is built).
@play.right((Cell(2),), ("Reward",), bound=0.0)
@play.right((Cell(2), Cell(3)), ("RLOO", "DPO, references first", "DPO, adapters", "SFT, packed", "KTO"), bound=0.0)
def trl_trains_by(case):
    def run(wrapped):
        name = case.variant.split(",")[0]
        kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
        more, options = {}, {}
        if name == "RLOO":
            data, options = {"prompt": texts(WINDOWS * 4, 6, 5)}, GROUP
            more["reward_funcs"] = [reward]
        elif name in ("DPO", "Reward", "KTO"):
            data = {one: texts(DATA, 8, seed) for seed, one in enumerate(("prompt", "chosen", "rejected"))}
            if name == "KTO":
                data = {
                    "prompt": data["prompt"],
                    "completion": data["chosen"],
                    "label": [i % 3 > 0 for i in range(DATA)],
                }
            if case.variant == "DPO, references first":
                options = {"precompute_ref_log_probs": True}
            if case.variant == "DPO, adapters":
                more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        else:
            data, options = {"text": texts(2 * DATA, 20, 1)}, {"max_length": 16, "packing": True}
        given = prompts(case, config, wrapped, **options)
        net = named()
        if name == "Reward":
            torch.manual_seed(0)
            net = transformers.LlamaForSequenceClassification(
                transformers.LlamaConfig(**{**net.config.to_dict(), "num_labels": 1})
            )
        data = datasets.Dataset.from_dict(data)
        if case.variant == "DPO, references first":  # ranks write what belongs to it beside it
            data = kept(data, case)
        return ended(recorded(kind)(
            model=net, args=given, train_dataset=data, processing_class=tokenizer(), **more
        ))  # fmt: skip

    return sides(case, run)


NORMALISED = {
    name: ADDED[name]
    for name in ("an evaluation behind each step", "recomputation", "smoothed labels", "epochs that end short",
                 "data that does not divide", "one pass a step", "no clipping", "groups by length")
}  # fmt: skip


@play.right(SOME, (*NORMALISED, "adapters", "a resume", "a loss of the user's"), bound=1e-6)
def a_normalised_trainer_with(case):
    """The Trainer that is right by default, and the same divided by the engine."""

    def run(wrapped):
        # Plain descent: Adam makes steps of a rate's size of gradients that are rounding alone.
        options = {"optim": "sgd", "learning_rate": 0.5, **NORMALISED.get(case.variant, {})}
        if case.variant == "adapters":
            options["made"] = lambda: adapted(model())
        if case.variant == "a loss of the user's":
            options["compute_loss_func"] = summed
        if case.variant == "a resume":
            options |= {"save_strategy": "steps", "save_steps": 1}
        trainer = trainer_of(case, wrapped, **options)
        trainer.loss_is_scaled_for_ga = (
            True if case.variant == "a loss of the user's" else trainer.loss_is_scaled_for_ga
        )
        trainer.train()
        if case.variant == "a resume":
            path = f"{trainer.args.output_dir}/checkpoint-2"
            trainer = ended(trainer_of(case, wrapped, **options), resume_from_checkpoint=path)
        return trainer

    return sides(case, run, normalise="token")


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_step_is_that_of_deepspeed_alone(outcomes, case):
    outcomes.assert_right(case)
