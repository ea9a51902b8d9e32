"""10,000 mutated configurations: accepted or refused by name, and what we rewrite bare DeepSpeed takes."""

import copy
import random
from collections import Counter

import pytest
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import HealthCheck, given, settings

from ds_parity.config import rewrite
from ds_parity.errors import ConfigError
from tests.config import mutated


def bare(rank, first, count):
    """Mutate `count` configurations of this rank, by their numbers from `first`.

    Returns:
        How many came to what, and the numbers of those that DeepSpeed takes as they are written and not as rewritten.
    """
    ranks, counts, rewritten_alone = dist.get_world_size(), Counter(), []
    for number in range(first + rank, first + count * ranks, ranks):
        made = mutated.mutate(random.Random(number))
        made.ranks = ranks
        if isinstance(mutated.outcome(made), ConfigError):
            counts["refused by us"] += 1
            continue
        filled = mutated.filled_in(made.config)
        try:
            rewritten = rewrite(filled, ranks).config
        except ConfigError:  # it was "auto" that hid a contradiction
            counts["refused by us, filled in"] += 1
            continue
        error = _refusal(rewritten)
        if error is None:
            counts["accepted"] += 1
        elif _refusal(mutated.plain(filled, ranks)) is not None:
            counts[f"refused by DeepSpeed, also without us: {error}"] += 1
        else:
            rewritten_alone.append([number, error])
    return [counts, rewritten_alone]


def _refusal(config):
    # Their errors are of every kind: asserts, pydantic's, KeyError, TypeError.
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return type(error).__name__
    return None


@settings(max_examples=10_000, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(mutated.mutants())
def test_10000_of_hypothesis_are_accepted_or_refused_by_a_key_that_was_touched(made):
    mutated.outcome(made)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_we_rewrite_bare_deepspeed_takes_or_refuses_as_it_would_without_us(forks, ranks):
    """The world sizes are real: DeepSpeed asks its process group for the number of ranks."""
    outcomes = forks.run(bare, ranks, 500, first=1_000_000 * ranks, count=10_000 // ranks)
    assert [one.how for one in outcomes] == ["returned"] * ranks, outcomes
    counts = sum((Counter(one.value[0]) for one in outcomes), Counter())
    print(f"\n{ranks} ranks: {dict(counts.most_common())}")
    assert [rewritten_alone for one in outcomes for rewritten_alone in one.value[1]] == []
    assert counts["accepted"] > 2000
    assert counts["refused by us"] > 2000
