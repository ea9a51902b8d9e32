"""Hugging Face models keep packed rollouts apart by their positions, but only without a cache (not their default)."""

import pytest
import torch
import transformers

from ds_parity.collation import collate
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.rollouts import VOCAB, load_rollouts, shorten

HELD = shorten(load_rollouts()[:5], 60)
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FAMILIES = {"Llama": LLAMA, "Qwen2": LLAMA, "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4}}
TOKENS = {"bos_token_id": 256, "eos_token_id": 257, "vocab_size": VOCAB}


def model_of(family, attention):
    sized = getattr(transformers, f"{family}Config")(attn_implementation=attention, **FAMILIES[family], **TOKENS)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(sized).double().eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
class TestPackedRollouts:
    def test_have_the_gradient_of_padded_ones(self, family, attention):
        model, found = model_of(family, attention), []
        for layout in ("padded", "packed"):
            model.zero_grad()
            loss = PolicyGradient(model, "token")(**collate(HELD, layout=layout).inputs)
            loss.backward()
            found.append(torch.cat([loss.detach()[None], *[p.grad.flatten() for p in model.parameters()]]))
        assert (found[0] - found[1]).norm() < 1e-9 * found[0].norm()

    def test_see_each_other_where_the_model_keeps_a_cache(self, family, attention):
        """The trap of docs/own_model.md (transformers 5.23): when this fails, it is mended, and the warning can go."""
        model = model_of(family, attention)
        inputs = collate(HELD, layout="packed").inputs
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        assert model.config.use_cache
        apart, mixed = (model(ids, position_ids=positions, use_cache=cache).logits for cache in (False, True))
        assert torch.equal(mixed, model(ids, position_ids=positions).logits)
        first = len(HELD[0].tokens)
        assert torch.allclose(apart[:, :first], mixed[:, :first], rtol=0, atol=1e-12)
        assert (apart[:, first:] - mixed[:, first:]).abs().max() > 1e-3


def test_a_model_whose_text_is_a_configuration_of_its_own_keeps_them_apart_too():
    """Composite configurations (Llava, Mistral 3) have `use_cache` inside that of their text."""
    text = transformers.LlamaConfig(**LLAMA, **TOKENS)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=259)
    assert not hasattr(config, "use_cache")
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    losses = [PolicyGradient(model, "token")(**collate(HELD, layout=how).inputs) for how in ("padded", "packed")]
    assert torch.allclose(*losses, rtol=1e-9)
