"""The Python of pages runs as it stands there, one block after the other as a reader would run them."""

import json
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import ds_parity
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from tests.distributed.sets import on_two_ranks
from tests.pages import blocks

pytestmark = pytest.mark.ranks

# In this order, because a page goes on with the engine of the one before.
READ = ("README", "training_loop", "planning", "own_model")


@on_two_ranks
def pages(folder):
    """By block: how many steps its engine has taken, and of how many rollouts."""
    rollouts = shorten(load_rollouts()[:320], 96)
    planned = ds_parity.plan(rollouts[:160], dp_world_size=dist.get_world_size(), target=64, max_tokens=512)
    device = get_accelerator().current_device_name()

    def stream():
        return [ds_parity.to_device(one, device) for one in ds_parity.micro_batches(planned, dist.get_rank())]

    place = Path(folder) / f"rank{dist.get_rank()}"
    place.mkdir(parents=True)
    config = configuration("training_loop")
    names = {"model": PolicyGradient(build_tiny(0)), "rollouts": rollouts}
    names |= {"MODEL": _pretrained(Path(folder) / "pretrained"), "sampled": _sampled}
    models = {name: PolicyGradient(build_tiny(0)) for name in ("actor", "critic")}
    names |= {
        name: ds_parity.initialize(model=one, model_parameters=one.parameters(), config=config)[0]
        for name, one in models.items()
    }
    short = shorten(load_rollouts()[:12], 32)
    names["own_rollouts"] = rollouts[dist.get_rank() :: dist.get_world_size()]
    names |= {"longest": rollouts[0], "shortest": short[0], "short_ones": short}
    names["compute_loss"] = lambda model, micro_batch: model(**micro_batch.inputs)
    counted = []
    with chdir(place):
        for page in READ:
            if blocks(page, "json"):
                Path("ds_config.json").write_text(json.dumps(configuration(page)))
            for code in blocks(page, "python"):
                names["stream"] = stream()
                exec(compile(code, page, "exec"), names)
                engine = names["critic" if "critic" in code else "engine"]
                counted.append((engine.global_steps, engine.global_samples))
        reward = engine.last_step.metrics["reward"]
    return {"steps": counted, "reward": reward}


def configuration(page):
    config = json.loads(blocks(page, "json")[0])
    config["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
    return config


def _pretrained(folder):
    """What `from_pretrained` takes, written by the first rank: a small random Llama, and a tokenizer of bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: number for number, symbol in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    if dist.get_rank() == 0:
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=1 + len(alphabet), bos_token_id=0, eos_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    return str(folder)


def _sampled(engine):
    """Two rounds of a window's rollouts each: 16 prompts, four answers of which one is right."""
    for number in range(2):
        yield [(f"{number}: {a} + {a}?", str(2 * a + more), float(not more)) for a in range(16) for more in range(4)]


def test_loops_take_the_steps_that_their_pages_say(two_ranks):
    """128 planned rollouts in windows of 64, and once more in the same engine; 320 as they are planned."""
    result = two_ranks.of(pages)
    readme, training_loop = [[2, 128], [4, 256]], [[2, 128], [4, 256], [2, 128]]
    own_model = [[2, 128]] * 2  # its last block builds a model only
    assert result["steps"] == [*readme, *training_loop, *[[9, 576]] * 4, *own_model]
    assert result["reward"] == 0.25
    assert [len(blocks(page, "python")) for page in READ] == [2, 3, 4, 2]
