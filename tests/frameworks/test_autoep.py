"""DeepSpeed's AutoEP puts the experts of a model of transformers on different ranks: steps are those without it."""

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import groups
from transformers.utils import output_capturing

import ds_parity
from ds_parity.all_weights import every_weight
from tests.frameworks.small import from_all, on_two_ranks

pytestmark = [pytest.mark.hf, pytest.mark.ranks]
VOCAB, CLIP, STEPS = 32, 0.2, 3


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32}
    made = transformers.MixtralConfig(vocab_size=VOCAB, **sizes, **heads, **experts)
    return transformers.MixtralForCausalLM(made)


def trained(stage, keys):
    """The norm of each step, this rank's copy of what all ranks have, and every weight."""
    model = mixtral()
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 4,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    engine = ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=made)[0]
    norms = []
    for number in range(2 * STEPS):
        drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
        ids = torch.randint(VOCAB, (2, 8), generator=drawn).to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss, rollouts=1)
        engine.step()
        if engine.window.passes == 0:
            norms.append(engine.last_step.grad_norm)
    own = model.model.embed_tokens.weight.detach().flatten().tolist()
    # Without AutoEP all experts of a layer are in one parameter, too.
    every = [one.values.double().tolist() for one in every_weight(model)]
    engine.destroy()
    groups.mpu = None
    return norms, own, [value for one in every for value in one]


@on_two_ranks
def autoep(folder):
    """By stage: with AutoEP, and without."""
    # transformers 5.23 asks its registry by a class alone, and AutoEP (0.19.8) with a default, too.
    registry = output_capturing._CanRecordRegistry
    kept = registry.get
    registry.get = lambda self, module, default=None: dict.get(self, str(module.__class__), default) or {}
    parted = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
    try:
        return {str(stage): from_all([trained(stage, parted), trained(stage, {})]) for stage in (0, 1, 2)}
    finally:
        registry.get = kept


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_experts_on_different_ranks_are_clipped_by_one_norm(framework_ranks, stage):
    (first, alone), (second, _) = framework_ranks.of(autoep)[stage]
    assert first[:2] == second[:2]
    assert min(first[0]) > CLIP
    assert first[0] == pytest.approx(alone[0], rel=1e-6)
    assert first[1] == pytest.approx(alone[1], abs=1e-7)
    assert sorted(first[2]) == pytest.approx(sorted(alone[2]), abs=1e-6)
