"""What forked ranks do with mutated configurations: rewrite them, and give DeepSpeed what came out. Held in test_configurations.py."""

import copy
import random
from collections import Counter

import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig

from ds_parity.config import rewrite
from ds_parity.errors import ConfigError
from tests.config import mutated


def bare(rank, first, count):
    """Mutate `count` configurations of this rank, by their numbers from `first`.

    Returns:
        How many came to what, and the numbers of those that DeepSpeed takes as they are written and not as rewritten.
    """
    ranks, found, ours = dist.get_world_size(), Counter(), []
    for number in range(first + rank, first + count * ranks, ranks):
        made = mutated.mutate(random.Random(number))
        made.ranks = ranks
        if isinstance(mutated.outcome(made), ConfigError):
            found["refused by us"] += 1
            continue
        filled = mutated.filled_in(made.config)
        try:
            rewritten = rewrite(filled, ranks).config
        except ConfigError:  # it was "auto" that hid a contradiction
            found["refused by us, filled in"] += 1
            continue
        error = _refusal(rewritten)
        if error is None:
            found["accepted"] += 1
        elif _refusal(mutated.plain(filled, ranks)) is not None:
            found[f"refused by DeepSpeed, also without us: {error}"] += 1
        else:
            ours.append([number, error])
    return [found, ours]


def _refusal(config):
    # Their errors are of every kind: asserts, pydantic's, KeyError, TypeError.
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return type(error).__name__
    return None
