"""`--cost config.json`: mixtures of experts are read by the width that a token enters, or refused."""

import json

import pytest

from ds_parity.cli.cost_option import cost_of
from ds_parity.errors import ConfigError
from ds_parity.planning import Cost

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "num_attention_heads": 4,
}


def of_width(width):
    return Cost.of_model(layers=4, hidden_size=64, intermediate_size=width, vocabulary=1000, heads=4)


@pytest.fixture
def read(tmp_path):
    def reader(**more):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**SIZES, **more}))
        return cost_of(str(path))

    return reader


@pytest.mark.parametrize(
    ("more", "width"),
    [
        ({}, 256),
        ({"num_experts": None, "num_experts_per_tok": None, "mlp_only_layers": []}, 256),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}, 512),  # Mixtral
        ({"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4}, 1024),  # GPT-OSS
        (
            {
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 100,
                "shared_expert_intermediate_size": 30,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            430,
        ),  # Qwen2 MoE
    ],
)
def test_experts_are_as_wide_as_all_that_a_token_enters(read, more, width):
    assert read(**more) == of_width(width)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", ["64", None, [64], {"of": 64}, True, 6.5, 0])
def test_a_size_that_is_no_number_is_named(read, name, value):
    with pytest.raises(ConfigError, match=r"is .*: it must be a whole number from 1"):
        read(**{name: value})


@pytest.mark.parametrize("inner", [None, 5, True, "x", []])
def test_sizes_that_are_not_in_text_config_are_read_beside_it(read, inner):
    assert read(text_config=inner) == of_width(256)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"num_experts": 8, "num_experts_per_tok": "2"}, "num_experts_per_tok = '2'"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (
            {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
            "n_routed_experts = 64",
        ),  # DeepSeek
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64}, "shared_intermediate"),
        ({"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}, "interleave_moe"),
    ],
)
def test_experts_whose_width_is_unclear_are_refused_with_the_way_out(read, more, named):
    with pytest.raises(ConfigError, match=rf"{named}.*PER_TOKEN,PER_SQUARE.*intermediate_size"):
        read(**more)
