"""10,000 mutated configurations: accepted or refused by name, and what we rewrite bare DeepSpeed takes."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.config import mutated


@settings(max_examples=10_000, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(mutated.mutants())
def test_10000_of_hypothesis_are_accepted_or_refused_by_a_key_that_was_touched(made):
    mutated.outcome(made)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_we_rewrite_bare_deepspeed_takes_or_refuses_as_it_would_without_us(forks, ranks):
    """The world sizes are real: DeepSpeed asks its process group for the number of ranks."""
    told = forks.run("tests.hard.configurations:bare", ranks, 500, first=1_000_000 * ranks, count=10_000 // ranks)
    assert [one.how for one in told] == ["returned"] * ranks, told
    found = sum((Counter(one.value[0]) for one in told), Counter())
    print(f"\n{ranks} ranks: {dict(found.most_common())}")
    assert [ours for one in told for ours in one.value[1]] == []
    assert found["accepted"] > 2000
    assert found["refused by us"] > 2000
