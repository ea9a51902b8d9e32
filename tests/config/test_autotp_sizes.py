"""AutoTP in a configuration: what DeepSpeed is told of the batch, and how many ranks have their own micro-batches."""

import pytest

from ds_parity.config import ABSENT, rewrite
from ds_parity.config.autotp import autotp_size, data_parallel_ranks
from ds_parity.config.releases import release
from ds_parity.config.versions import refused
from ds_parity.errors import ConfigError

# As LLaMA-Factory ships it (examples/deepspeed/ds_z2_autotp_config.json), filled in, and with the passes.
SHIPPED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 9,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "tensor_parallel": {"autotp_size": 2},
    "gradient_accumulation_passes": 9,
}


def test_deepspeed_computes_the_batch_itself_because_it_counts_the_ranks_in_two_ways():
    """By all ranks, and on ZeRO 3 once more by the data-parallel ones: no number is right for both."""
    result = rewrite({**SHIPPED, "train_batch_size": 9}, 1)
    assert "train_batch_size" not in result.config
    assert (result.config["train_micro_batch_size_per_gpu"], result.config["gradient_accumulation_steps"]) == (1, 9)
    (change,) = [one for one in result.changes if one.key == "train_batch_size"]
    assert (change.before, change.after) == (9, ABSENT)
    assert "AutoTP" in change.why


@pytest.mark.parametrize("batch", [9, 18, "auto"])
def test_a_batch_that_is_counted_in_either_way_is_taken(batch):
    """18: as accelerate and DeepSpeed count it, by all ranks."""
    assert "train_batch_size" not in rewrite({**SHIPPED, "train_batch_size": batch}, 1).config


def test_another_batch_is_refused():
    with pytest.raises(ConfigError, match="train_batch_size = 27"):
        rewrite({**SHIPPED, "train_batch_size": 27}, 1)


@pytest.mark.parametrize(("given", "told"), [({}, False), ({"vocab_parallel_lm_head": None}, False)])
def test_logits_are_those_of_the_whole_vocabulary_where_nothing_is_said(given, told):
    section = {"autotp_size": 2, **given}
    result = rewrite({**SHIPPED, "tensor_parallel": section}, 1)
    assert result.config["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": told}
    assert section == {"autotp_size": 2, **given}
    (change,) = [one for one in result.changes if one.key == "tensor_parallel.vocab_parallel_lm_head"]
    assert (change.before, change.after) == (given.get("vocab_parallel_lm_head", ABSENT), False)


@pytest.mark.parametrize("given", [True, False])
def test_logits_are_divided_or_not_as_is_said(given):
    section = {"autotp_size": 2, "vocab_parallel_lm_head": given}
    assert rewrite({**SHIPPED, "tensor_parallel": section}, 1).config["tensor_parallel"] == section


def test_without_autotp_nothing_is_said_of_logits():
    section = {"autotp_size": 1}
    assert rewrite({**SHIPPED, "tensor_parallel": section}, 1).config["tensor_parallel"] == section


def test_the_output_is_a_fixed_point():
    keys = {"gradient_accumulation_passes": 9}
    once = rewrite(SHIPPED, 1).config
    assert rewrite({**once, **keys}, 1).config == once


@pytest.mark.parametrize(("ranks", "apart"), [(2, 1), (4, 2), (6, 3)])
def test_ranks_of_a_group_have_one_micro_batch(ranks, apart):
    assert data_parallel_ranks(SHIPPED, ranks) == apart


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_do_not_divide_into_groups_are_refused_with_both_numbers(ranks):
    with pytest.raises(ConfigError, match=f"autotp_size = 2: {ranks} ranks can't be divided into groups of 2"):
        data_parallel_ranks(SHIPPED, ranks)


def test_a_size_in_quotes_is_read_as_deepspeed_reads_it():
    assert autotp_size({"tensor_parallel": {"autotp_size": "2"}}) == 2
    assert rewrite({**SHIPPED, "tensor_parallel": {"autotp_size": "2"}}, 1).config["gradient_accumulation_steps"]


@pytest.mark.parametrize("section", [None, "auto", {}, {"autotp_size": 0}, {"autotp_size": 1}, {"autotp_size": "auto"}])
def test_it_is_off_without_a_size_above_1(section):
    assert autotp_size({"tensor_parallel": section}) == 1
    assert data_parallel_ranks({"tensor_parallel": section}, 3) == 3


def test_releases_on_which_nobody_has_measured_it_are_refused():
    assert not list(refused(SHIPPED, release("0.19.8")))
    (fault,) = refused({**SHIPPED, "zero_optimization": {"stage": 0}}, release("0.19.5"))
    assert str(fault).startswith("tensor_parallel.autotp_size = 2: DeepSpeed 0.19.5 is wrong on AutoTP")
