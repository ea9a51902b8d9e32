"""install(normalise=...): what trainers divide a loss by, and what is refused; tests/frameworks trains them."""

from types import SimpleNamespace

import pytest
import torch

import ds_parity
from ds_parity.engine.trainers import divided_by
from ds_parity.errors import ConfigError

transformers = pytest.importorskip("transformers")


def kind(name, module):
    """A class of that name, as it stands in a library."""
    return type(name, (), {"compute_loss": None, "__module__": module})


def grpo(loss_type, **others):
    trainer = kind("GRPOTrainer", "trl.trainer.grpo_trainer")()
    trainer.loss_type, trainer.current_gradient_accumulation_steps = loss_type, 3
    trainer.accelerator = SimpleNamespace(num_processes=2)
    trainer.args = SimpleNamespace(steps_per_generation=6)
    vars(trainer).update(others)
    return trainer


def labelled(**others):
    trainer = kind("Trainer", "transformers.trainer")()
    usual = {
        "current_gradient_accumulation_steps": 3,
        "accelerator": SimpleNamespace(num_processes=2),
        "args": SimpleNamespace(average_tokens_across_devices=True),
        "loss_is_scaled_for_ga": None,
        "model_accepts_loss_kwargs": True,
        "compute_loss_func": None,
        "get_tp_size": lambda: 1,
    }
    vars(trainer).update(usual | others)
    return trainer


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, -100], [5, 6, -100, -100]])


class TestGRPO:
    @pytest.mark.parametrize(
        ("loss_type", "unit", "by"),
        [
            ("bnpo", "token", 5 * 3),
            ("dapo", "token", 40 / 2 * 3 / 6),
            ("cispo", "token", 40 / 2 * 3 / 6),
            ("grpo", "rollout", 2 * 3),
            ("dr_grpo", "rollout", 2 * 3),
        ],
    )
    def test_a_loss_times_what_it_was_divided_by_is_the_sum_over_its_units(self, loss_type, unit, by):
        inputs = {"completion_mask": MASK, "num_items_in_batch": torch.tensor(40)}
        divided = divided_by(grpo(loss_type), inputs, None, unit)
        assert (divided.by, divided.tokens) == (by, 5)
        assert divided.rollouts == (2 if unit == "rollout" else None), "where tokens weigh, the usual number counts"

    def test_tokens_of_tools_carry_no_loss(self):
        inputs = {"completion_mask": MASK, "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}
        assert divided_by(grpo("bnpo"), inputs, None, "token").tokens == 4

    @pytest.mark.parametrize(("loss_type", "unit"), [("bnpo", "rollout"), ("dapo", "rollout"), ("grpo", "token")])
    def test_a_mean_over_one_unit_is_made_none_over_another(self, loss_type, unit):
        inputs = {"completion_mask": MASK, "num_items_in_batch": torch.tensor(40)}
        with pytest.raises(ConfigError, match=f"loss_type '{loss_type}' is a mean over"):
            divided_by(grpo(loss_type), inputs, None, unit)

    @pytest.mark.parametrize("term", ["aux_loss_enabled", "_entropy_bonus_enabled"])
    def test_a_second_term_with_a_denominator_of_its_own_is_refused(self, term):
        with pytest.raises(ConfigError, match="one factor can't repair both"):
            divided_by(grpo("bnpo", **{term: True}), {"completion_mask": MASK}, None, "token")


class TestLabels:
    """What is not the first token of a row counts: 3 labels of 2 rows here."""

    def test_by_the_items_of_the_step_on_all_ranks(self):
        divided = divided_by(labelled(), {"labels": LABELS}, torch.tensor(30), "token")
        assert (divided.by, divided.rollouts, divided.tokens) == (30 / 2, None, 3)

    def test_by_the_items_of_the_step_on_this_rank(self):
        trainer = labelled(args=SimpleNamespace(average_tokens_across_devices=False))
        assert divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token").by == 30

    @pytest.mark.parametrize(
        ("kind", "tokens"), [("PROMPT_TUNING", 5), ("P_TUNING", 5), ("PREFIX_TUNING", 3), ("CARTRIDGE", 3), ("LORA", 3)]
    )
    def test_behind_virtual_tokens_the_first_label_of_a_row_is_one_of_them(self, kind, tokens):
        config = SimpleNamespace(is_prompt_learning=kind != "LORA", peft_type=SimpleNamespace(value=kind))
        trainer = labelled(model=SimpleNamespace(active_peft_config=config))
        assert divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token").tokens == tokens
        trainer = labelled(model=trainer.model, model_accepts_loss_kwargs=False)
        assert divided_by(trainer, {"labels": LABELS}, None, "token").by == tokens * 3

    @pytest.mark.parametrize(("kind", "function"), [("CPT", None), ("PROMPT_TUNING", lambda *_, **__: None)])
    def test_what_weighs_tokens_behind_virtual_ones_is_refused(self, kind, function):
        config = SimpleNamespace(is_prompt_learning=True, peft_type=SimpleNamespace(value=kind))
        trainer = labelled(
            model=SimpleNamespace(active_peft_config=config), compute_loss_func=function, loss_is_scaled_for_ga=True
        )
        with pytest.raises(ConfigError, match="peft puts virtual tokens in front of each row"):
            divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token")

    def test_a_function_beside_prompts_that_are_no_tokens_is_asked_as_without_them(self):
        config = SimpleNamespace(is_prompt_learning=True, peft_type=SimpleNamespace(value="PREFIX_TUNING"))
        trainer = labelled(
            model=SimpleNamespace(active_peft_config=config),
            compute_loss_func=lambda *_, **__: None,
            loss_is_scaled_for_ga=True,
        )
        assert divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token").tokens == 3

    def test_rows_that_the_loss_leaves_out_are_refused_where_rollouts_weigh(self):
        trainer = labelled(model_accepts_loss_kwargs=False)
        with pytest.raises(ConfigError, match="1 of 3 rows have the label -100"):
            divided_by(trainer, {"labels": torch.tensor([2, -100, 0])}, None, "rollout")
        assert divided_by(trainer, {"labels": torch.tensor([2.0, -100.0, 0.0])}, None, "rollout").rollouts == 3

    def test_by_its_own_tokens_where_the_model_is_not_told(self):
        trainer = labelled(model_accepts_loss_kwargs=False)
        assert divided_by(trainer, {"labels": LABELS}, None, "token").by == 3 * 3

    @pytest.mark.parametrize("averaged", [True, False])
    def test_by_its_own_tokens_where_the_trainer_multiplies_a_mean_by_the_ranks(self, averaged):
        """Trainer.compute_loss does so wherever it has counted items, also where the loss is no share of them."""
        trainer = labelled(
            model_accepts_loss_kwargs=False,
            compute_loss_func=lambda *_, **__: None,
            loss_is_scaled_for_ga=False,
            args=SimpleNamespace(average_tokens_across_devices=averaged),
        )
        divided = divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token")
        assert divided.by == 3 * 3 / (2 if averaged else 1)

    def test_a_function_that_nobody_has_told_of_is_refused(self):
        trainer = labelled(compute_loss_func=lambda *_, **__: None)
        with pytest.raises(ConfigError, match="compute_loss_func"):
            divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token")
        trainer.loss_is_scaled_for_ga = True
        assert divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token").by == 30 / 2

    def test_a_model_of_which_nobody_knows_whether_it_shifts_labels_is_refused(self):
        trainer = labelled(model_accepts_loss_kwargs=False, _loss_shifts_labels=False, model=torch.nn.Linear(1, 1))
        with pytest.raises(ConfigError, match="whether the loss of Linear shifts its labels"):
            divided_by(trainer, {"labels": LABELS}, None, "token")
        first_masked = LABELS.clone()
        first_masked[:, 0] = -100  # a loss that shifts never sees these
        assert divided_by(trainer, {"labels": first_masked}, None, "token").by == 3 * 3
        trainer.model.loss_type = "ForTokenClassification"
        assert divided_by(trainer, {"labels": LABELS}, None, "token").by == 5 * 3

    def test_a_model_that_may_ignore_the_count_is_told_what_to_set(self):
        """GPT-2, and peft, whose wrapper hides the model: `loss_type` and `accepts_loss_kwargs` are read off that."""
        loss = transformers.Trainer.compute_loss
        trainer = labelled(_loss_shifts_labels=False, model=torch.nn.Linear(1, 1), compute_loss=loss)
        with pytest.raises(ConfigError, match=r"whether Linear divides .* loss_type = 'ForCausalLM' .* get_base_model"):
            divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token")
        trainer._loss_shifts_labels = True  # what loss_type makes of it, which the Trainer reads when it is built
        assert divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token").by == 30 / 2

    @pytest.mark.parametrize(("name", "tokens"), [("GPT2LMHeadModel", 3), ("MyLlamaForCausalLM", 5)])
    @pytest.mark.parametrize("by_type", [True, False])
    def test_smoothed_labels_are_shifted_by_the_name_of_the_class(self, name, tokens, by_type):
        """The Trainer's count goes by `loss_type`, and its smoother by a list of names."""
        model = type(name, (torch.nn.Linear,), {})(1, 1)
        trainer = labelled(
            label_smoother=object(),
            model_accepts_loss_kwargs=False,
            _loss_shifts_labels=by_type,
            model=model,
            accelerator=SimpleNamespace(num_processes=2, unwrap_model=lambda it: it),
        )
        divided = divided_by(trainer, {"labels": LABELS}, None, "token")
        assert (divided.tokens, divided.by) == (tokens, tokens * 3)

    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize(("method", "tokens"), [("LoraConfig", 3), ("PrefixTuningConfig", 5)])
    def test_the_smoother_looks_one_further_than_prompt_learning_wraps(self, method, tokens, own):
        """It asks `base_model.model`, which is the model of LoRA, and a part of the model beside prefix tuning."""
        peft = pytest.importorskip("peft", reason="the extra peft is not installed")
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
        extra = {"num_virtual_tokens": 2} if method == "PrefixTuningConfig" else {"target_modules": ["q_proj"]}
        adapted = peft.get_peft_model(model, getattr(peft, method)(task_type="CAUSAL_LM", **extra))
        if own:
            adapted.__class__ = type("Mine", (type(adapted),), {"__module__": __name__})
        trainer = labelled(
            label_smoother=object(),
            model_accepts_loss_kwargs=False,
            model=adapted,
            accelerator=SimpleNamespace(num_processes=2, unwrap_model=lambda it: it),
        )
        assert divided_by(trainer, {"labels": LABELS}, None, "token").tokens == tokens

    def test_the_loss_of_sft_shifts_whatever_the_model_is(self):
        trainer = kind("SFTTrainer", "trl.trainer.sft_trainer")()
        vars(trainer).update(vars(labelled(_loss_shifts_labels=False, model=torch.nn.Linear(1, 1))))
        divided = divided_by(trainer, {"labels": LABELS}, torch.tensor(30), "token")
        assert (divided.tokens, divided.by) == (3, 30 / 2)
        trainer.model_accepts_loss_kwargs = False
        assert divided_by(trainer, {"labels": LABELS}, None, "token").by == 3 * 3

    def test_labels_that_are_shifted_already_are_taken_as_they_are(self):
        assert divided_by(labelled(), {"shift_labels": LABELS}, torch.tensor(30), "token").tokens == 5

    def test_a_class_is_a_mean_over_rollouts(self):
        trainer = labelled(model_accepts_loss_kwargs=False)
        divided = divided_by(trainer, {"labels": torch.tensor([0, 1, 1])}, None, "rollout")
        assert (divided.by, divided.rollouts) == (9, 3)

    def test_a_loss_that_is_said_to_be_divided_by_what_nobody_counted_is_refused(self):
        with pytest.raises(ConfigError, match="num_items_in_batch"):
            divided_by(labelled(loss_is_scaled_for_ga=True), {"labels": LABELS}, None, "token")

    def test_slices_of_sequences_are_refused(self):
        with pytest.raises(ConfigError, match="ranks share sequences"):
            divided_by(labelled(get_sp_size=lambda: 2), {"labels": LABELS}, torch.tensor(30), "token")

    def test_without_labels_nothing_can_be_counted(self):
        with pytest.raises(ConfigError, match="no labels"):
            divided_by(labelled(), {}, None, "token")


def test_async_grpo_averages_the_means_of_passes():
    """100 tokens with a mean of 2.0 and 900 with one of 0.5 make 0.65, and not 1.25."""
    trainer = kind("AsyncGRPOTrainer", "trl.experimental.async_grpo.async_grpo_trainer")()
    trainer.current_gradient_accumulation_steps, trainer.accelerator = 2, SimpleNamespace(num_processes=2)
    shares, sums, tokens = [], [], 0
    for count, mean in ((100, 2.0), (900, 0.5)):
        # Both ranks have half of the pass, and the loss of a rank is its sum over tokens of a rank, over 2 passes.
        own = mean * (count / 2) / (count / 2) / 2
        index = torch.cat([torch.arange(count // 2), torch.full((7,), -1)])[None]
        inputs = {"global_n_tokens": torch.tensor([float(count)]), "token_index": index}
        divided = divided_by(trainer, inputs, None, "token")
        shares.append(own)
        sums.append(own * divided.by)
        tokens += divided.tokens
    assert sum(shares) == 1.25
    assert sum(sums) / tokens == pytest.approx(0.65)


def test_a_class_that_computes_its_loss_itself_is_refused():
    class Own(kind("GRPOTrainer", "trl.trainer.grpo_trainer")):
        def _compute_loss(self):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"Own computes the loss, and it is not known what it divides by"):
        divided_by(Own(), {}, None, "token")


class TestInstall:
    def test_trainers_are_as_they_were_behind_it(self):
        own = transformers.Trainer.training_step
        with ds_parity.install(normalise="token"):
            assert transformers.Trainer.training_step is not own
            with ds_parity.install(normalise="token"):
                pass
            assert transformers.Trainer.training_step is not own
        assert transformers.Trainer.training_step is own

    def test_without_it_no_trainer_is_touched(self):
        own = transformers.Trainer.training_step
        with ds_parity.install():
            assert transformers.Trainer.training_step is own

    def test_another_unit_is_refused_before_anything_is_replaced(self):
        import deepspeed

        own = deepspeed.initialize
        with pytest.raises(ConfigError, match="normalise is 'tokens'"):
            ds_parity.install(normalise="tokens")
        assert deepspeed.initialize is own
        assert ds_parity.engine.install._OPEN == []

    def test_one_division_holds_for_all(self):
        with ds_parity.install(normalise="token"), pytest.raises(ConfigError, match="undo the outer one first"):
            ds_parity.install()

    def test_a_model_that_is_no_engine_of_ds_parity_is_refused(self):
        """DeepSpeed's own engine, whose configuration lacks the keys, would train with the trainer's division."""

        class Stub(transformers.Trainer):
            def __init__(self):
                pass

        with ds_parity.install(normalise="token"), pytest.raises(ConfigError, match="gradient_accumulation_passes"):
            Stub().training_step(torch.nn.Linear(1, 1), {})
