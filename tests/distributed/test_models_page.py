"""The Python of docs/models.md runs as it stands there: LoRA, zero.Init and from_pretrained on ZeRO 3."""

import json
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_parity
from ds_parity.parity.data.rollouts import VOCAB, load_rollouts, shorten
from ds_parity.parity.matrix.model_setups import born
from tests.distributed.cells import config
from tests.distributed.sets import at_length_on_two_ranks
from tests.pages import blocks

pytest.importorskip("peft")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAIN = """
for micro_batch in engine.passes(stream):
    engine.backward(engine(**micro_batch.inputs))
    engine.step()
"""


@at_length_on_two_ranks
def models_page(folder):
    """By block: the steps and rollouts of its engine, and how many parameters it trains."""
    rollouts = shorten(load_rollouts()[:48], 48)
    planned = ds_parity.plan(rollouts, dp_world_size=dist.get_world_size(), target=16, max_tokens=256)
    device = get_accelerator().current_device_name()
    place = Path(folder) / f"rank{dist.get_rank()}"
    place.mkdir(parents=True)
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=None, **SIZES))
    llama.save_pretrained(Path(folder) / "pretrained", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    names = {"MODEL": str(Path(folder) / "pretrained"), "build": born}
    found = []
    try:
        with chdir(place):
            Path("ds_config.json").write_text(json.dumps(config(3, passes=16, optimizer="AdamW", loss_weight="token")))
            for code in blocks("models", "python"):
                stream = ds_parity.micro_batches(planned, dist.get_rank())
                names["stream"] = [ds_parity.to_device(one, device) for one in stream]
                exec(compile(code, "models", "exec"), names)
                if "engine.passes" not in code:
                    exec(TRAIN, names)
                engine, model = names["engine"], names["model"]
                trained = sum(one.requires_grad for one in model.parameters())
                found.append([engine.global_steps, engine.global_samples, trained])
                engine.destroy()
    finally:
        names.pop("kept", None)
        unset_hf_deepspeed_config()
    return {"found": found}


def test_every_block_of_the_page_trains_as_it_says(two_ranks_at_length):
    """48 rollouts in windows of 16 are 3 steps; LoRA trains two matrices of each of the 14 layers that it adapts."""
    found = two_ranks_at_length.of(models_page)["found"]
    assert [one[:2] for one in found] == [[3, 48]] * 3
    assert found[0][2] == 2 * 14
    assert len(blocks("models", "python")) == 3
