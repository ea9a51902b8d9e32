"""Configurations with mistakes: accepted, and then a fixed point, or a ConfigError that names a key."""

import pytest
from hypothesis import HealthCheck, given, settings

from ds_parity.config import Rewrite, load_config, rewrite
from tests.config import mutated


@pytest.mark.parametrize("path", mutated.CORPUS, ids=lambda path: path.stem)
def test_configurations_that_people_write_are_accepted_on_any_number_of_ranks(path):
    for ranks in mutated.RANKS:
        made = mutated.Mutated(load_config(path), ranks)
        assert isinstance(mutated.outcome(made), Rewrite)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(mutated.mutants())
def test_a_mutated_configuration_is_accepted_or_refused_by_a_key_that_was_touched(made):
    mutated.outcome(made)


def test_a_batch_beyond_the_largest_count_that_the_rounding_up_made_is_a_fixed_point():
    made = {"gradient_accumulation_passes": 2**31 - 1, "train_micro_batch_size_per_gpu": 1}
    first = rewrite(made, 1024).config
    assert first["train_batch_size"] == 2**31
    assert rewrite({**first, "gradient_accumulation_passes": 2**31 - 1}, 1024).config == first
