"""A user's own tokenizer makes the tokens of rollouts, and transformers builds models from a configuration alone."""

import json
from importlib.util import find_spec

import pytest
import torch

from ds_parity.errors import ConfigError
from ds_parity.parity.data import hugging_face, tokenizing
from ds_parity.parity.data.rollouts import BOS, EOS, VOCAB, load_rollouts
from ds_parity.parity.data.tokenizing import BYTES, Tokens, refuse_unknown_tokenizer, tokens_of
from ds_parity.parity.running.policies import build_policy, refuse_unknown_model
from ds_parity.parity.running.scenario import Scenario
from tests.distributed import cells

pytest.importorskip("transformers")

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 300, "n_positions": 128}
TEXTS = ["Natalia sold clips to her friends", "How many clips did she sell? 48 + 24 = 72"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer as `save_pretrained` leaves it: byte-level pairs, an end, and a beginning that it puts in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture
def config(tmp_path):
    def write(values=None, name="config.json", **changed):
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else json.dumps({**GPT2, **changed}))
        return path

    return write


def rollout(path, tokens):
    lines = [{"prompt": "How many clips", "completion": "72 clips", "reward": reward} for reward in (0, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_rollouts(path, tokens)[1]


class TestTokens:
    def test_of_bytes_are_those_that_rollouts_always_had(self, tmp_path):
        made = rollout(tmp_path / "r.jsonl", tokens_of(None))
        assert made.tokens == (BOS, *b"How many clips72 clips", EOS)
        assert tokens_of(None) is BYTES
        assert BYTES.size == VOCAB

    def test_of_a_folder_begin_as_it_says_and_end_once_behind_the_completion(self, folder, tmp_path):
        from transformers import AutoTokenizer

        made = rollout(tmp_path / "r.jsonl", tokens_of(str(folder)))
        plain = AutoTokenizer.from_pretrained(folder)
        prompt, completion = (
            plain(text, add_special_tokens=False)["input_ids"] for text in ("How many clips", "72 clips")
        )
        assert made.tokens == (0, *prompt, *completion, 1)
        assert made.prompt_length == 1 + len(prompt)
        assert len(made.tokens) < len("How many clips72 clips")

    def test_of_a_file_are_those_of_the_folder_it_lies_in(self, folder, tmp_path):
        path = tmp_path / "r.jsonl"
        assert rollout(path, tokens_of(str(folder / "tokenizer.json"))) == rollout(path, tokens_of(str(folder)))

    def test_of_a_file_alone_have_no_end(self, folder, tmp_path):
        alone = tmp_path / "tokenizer.json"
        alone.write_bytes((folder / "tokenizer.json").read_bytes())
        whole, made = (rollout(tmp_path / "r.jsonl", tokens_of(str(path))) for path in (folder, alone))
        assert tokens_of(str(alone)).end is None
        assert made.tokens[made.prompt_length :] == whole.tokens[whole.prompt_length : -1]

    def test_of_the_bundled_rollouts_are_those_of_their_text(self, folder):
        made = load_rollouts(None, tokens_of(str(folder)))
        assert len(made) == 5276
        assert all(one.prompt_length and one.loss_tokens for one in made)
        assert max(max(one.tokens) for one in made) < tokens_of(str(folder)).size == 290

    @pytest.mark.parametrize("empty", ["prompt", "completion"])
    def test_that_a_text_has_none_of_are_refused_with_the_line(self, empty, tmp_path):
        def encode(text, is_prompt):
            return () if is_prompt == (empty == "prompt") else (5, 6)

        with pytest.raises(ConfigError, match=rf"r.jsonl:1: the tokenizer makes no tokens of the {empty} '"):
            rollout(tmp_path / "r.jsonl", Tokens(encode, None, 10))


class TestBadTokenizers:
    def test_that_is_not_there(self):
        with pytest.raises(ConfigError, match=r"tokenizer 'nowhere': there is no such file .* nothing is downloaded"):
            refuse_unknown_tokenizer("nowhere")
        with pytest.raises(ConfigError, match="there is no such file"):
            tokens_of("gpt2")

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\x00"])
    def test_that_cannot_be_read(self, content, tmp_path):
        for path in (tmp_path / "tokenizer.json", tmp_path):
            (tmp_path / "tokenizer.json").write_text(content)
            with pytest.raises(
                ConfigError, match=r"can't be read \(.*\); give a tokenizer.json, or a folder"
            ) as caught:
                tokens_of(str(path))
            assert "\n" not in str(caught.value)

    def test_without_transformers(self, folder, monkeypatch):
        monkeypatch.setattr(tokenizing, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="transformers is not installed"):
            refuse_unknown_tokenizer(str(folder))


class TestModelsOfTransformers:
    def test_are_the_same_for_a_seed_and_leave_the_generator_alone(self, config):
        name = f"hf:{config()}"
        before = torch.random.get_rng_state()
        one, same, other = (build_policy(name, seed).state_dict() for seed in (0, 0, 1))
        assert torch.equal(before, torch.random.get_rng_state())
        assert all(torch.equal(one[key], same[key]) for key in one)
        assert not all(torch.equal(one[key], other[key]) for key in one)

    def test_are_in_fp32_without_dropout_whatever_the_configuration_says(self, config):
        model = build_policy(f"hf:{config(resid_pdrop=0.5, dtype='bfloat16')}", 0)
        ids = torch.arange(12)[None]
        assert torch.equal(model(ids).logits, model(ids).logits)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    def test_are_read_from_a_folder_too(self, config):
        one, same = (build_policy(f"hf:{path}", 0).state_dict() for path in (config(), config().parent))
        assert all(torch.equal(one[key], same[key]) for key in one)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ("{", "can't be read"),
            ("[]", "no key model_type"),
            ('{"n_embd": 3}', "no key model_type"),
            ('{"model_type": 3}', "no key model_type"),
        ],
    )
    def test_that_are_none_are_refused_before_a_rank_starts(self, values, said, config):
        with pytest.raises(ConfigError, match=f"model hf:.*config.json: .*{said}"):
            refuse_unknown_model(f"hf:{config(values)}")

    @pytest.mark.parametrize("path", ["", "nowhere", "nowhere/config.json", "gpt2"])
    def test_that_are_not_there_are_refused(self, path):
        with pytest.raises(ConfigError, match=r"there is no such file; give the path of a config.json"):
            refuse_unknown_model(f"hf:{path}")

    @pytest.mark.parametrize(
        "changed", [{"model_type": "no_such"}, {"model_type": "vit"}, {"n_head": 5}, {"n_embd": "wide"}]
    )
    def test_that_cannot_be_built_are_one_sentence(self, changed, config):
        with pytest.raises(ConfigError, match=r"transformers can't build it \(") as caught:
            build_policy(f"hf:{config(**changed)}", 0)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600

    def test_without_transformers(self, config, monkeypatch):
        monkeypatch.setattr(hugging_face, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
        with pytest.raises(ConfigError, match="transformers is not installed"):
            refuse_unknown_model(f"hf:{config()}")


class TestInAScenario:
    def test_the_bundled_decoder_has_as_many_token_ids_as_the_tokenizer(self, folder):
        wanted = Scenario("own", cells.config(2), tokenizer=str(folder), **cells.TINY)
        batch = next(batch for row in wanted.batches() for batch in row if batch.rollouts)
        model = wanted.build()
        assert model.policy.embedding.num_embeddings == 290
        assert torch.isfinite(model(**batch.inputs))
        assert int(batch.inputs["input_ids"].max()) < 290

    def test_a_model_of_transformers_takes_its_rollouts(self, folder, config):
        wanted = Scenario("own", cells.config(2), model=f"hf:{config()}", tokenizer=str(folder), max_tokens=96)
        batch = next(batch for row in wanted.batches() for batch in row if batch.rollouts)
        assert torch.isfinite(wanted.build()(**batch.inputs))
        assert Scenario.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted
