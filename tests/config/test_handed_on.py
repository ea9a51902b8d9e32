"""What DeepSpeed hands on as it is: refused where it is used, and comments are not."""

import pytest

from ds_parity.config.handed_on import handed_on, refuse_handed_on
from ds_parity.errors import ConfigError

STEPPED = {"type": "StepLR", "params": {"step_size": 2}}


def adam(**params):
    return {"optimizer": {"type": "AdamW", "params": params}}


def zero(**keys):
    return {"zero_optimization": keys}


REFUSED = [
    (adam(lr="1e-3"), 'optimizer.params.lr = "1e-3"', "without quotes"),
    (adam(betas="[0.9, 0.95]"), "optimizer.params.betas", "without quotes"),
    (adam(betas=[0.9, "0.95"]), "optimizer.params.betas", "without quotes"),
    (adam(lr=None), "optimizer.params.lr = null", "or leave it out"),
    (adam(betas=None, weight_decay=None), "optimizer.params.weight_decay = null", "or leave it out"),
    (adam(betas=[None, 0.9]), "optimizer.params.betas = [null, 0.9]", "or leave it out"),
    (adam(lr=[None]), "optimizer.params.lr", "or leave it out"),
    *((adam(betas=it), "optimizer.params.betas", "[0.9, 0.999]") for it in (0.9, [0.9])),
    *((adam(lr=it), "optimizer.params.lr", "or leave it out") for it in ([], {}, float("nan"))),
    *((adam(**{key: True}), f"optimizer.params.{key} = true", "or leave it out") for key in ("lr", "eps", "momentum")),
    *((adam(**{key: [0.1]}), f"optimizer.params.{key} = [0.1]", "or leave it out") for key in ("lr", "weight_decay")),
    ({"optimizer": {"type": "AdamW", "params": [1e-3]}}, "optimizer.params = [0.001]", 'write "params": {...}'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": True}}}, "warmup_max_lr = true", "or leave it out"),
    *(
        (zero(stage=3, **{key: {"device": "nvme"}}), f"{key}.nvme_path is absent", "a folder on the NVMe")
        for key in ("offload_param", "offload_optimizer")
    ),
    (adam(eps="small"), 'optimizer.params.eps = "small"', "or leave it out"),
    ({"steps_per_print": "10"}, 'steps_per_print = "10"', "without quotes"),
    *(({"steps_per_print": it}, "steps_per_print", "or null") for it in (0, "ten", "", [10], "auto", {}, False)),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params is absent", "which may be {}"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}, "warmup_num_steps", "without quotes"),
    (
        {**zero(stage=1), "scheduler": STEPPED},
        "scheduler.type",
        "lr_scheduler=lambda optimizer: StepLR(optimizer, ...)",
    ),
    ({"bf16": {"enabled": True}, "scheduler": STEPPED}, 'scheduler.type = "StepLR"', "leave the section out"),
    (zero(reduce_bucket_size="5e8"), 'zero_optimization.reduce_bucket_size = "5e8"', "without quotes"),
    (zero(reduce_bucket_size="500,000,000"), "zero_optimization.reduce_bucket_size", "must be a whole number"),
    (zero(reduce_bucket_size="(5e8)"), "zero_optimization.reduce_bucket_size", "must be a whole number"),
    (zero(reduce_bucket_size="nan"), "zero_optimization.reduce_bucket_size", "must be a whole number"),
]


@pytest.mark.parametrize(("keys", "thing", "way_out"), REFUSED)
def test_what_would_end_in_an_error_of_others_is_refused_with_a_way_out(keys, thing, way_out):
    with pytest.raises(ConfigError) as caught:
        refuse_handed_on(keys, optimizer=True, scheduler=True)
    assert thing in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        zero(stage="2", reduce_bucket_size="500000000", allgather_bucket_size="500000000.0", sub_group_size=5e8),
        zero(stage="2.0", offload_optimizer=None),
        {"scheduler": STEPPED},
        {"steps_per_print": None, **adam(lr="auto", betas="auto")},
        {"steps_per_print": float("inf")},
        {**zero(stage="auto"), "scheduler": STEPPED},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "AdamW"}},
        {"scheduler": "auto", "optimizer": "auto", "zero_optimization": "auto"},
        {**adam(lr=1e-3, **{"//lr": "1e-4"}), **zero(stage=2, _comment="5.5")},
        {"scheduler": {"type": "WarmupLR", "params": {"_comment": "10"}}},
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}}},
        adam(betas=[0.9, 0.95], eps=[1e-30, 1e-3], adam_w_mode=True),
        zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/local"}, offload_optimizer={"device": "cpu"}),
        {"scheduler": {"type": None, "params": {"warmup_num_steps": "10"}}, "optimizer": {"params": {"lr": None}}},
    ],
)
def test_what_is_right_is_let_through_and_comments_are(keys):
    refuse_handed_on(keys, optimizer=True, scheduler=True)


def test_a_section_that_is_not_used_is_not_looked_at():
    keys = {**zero(stage=1), **adam(lr="1e-3"), "scheduler": STEPPED}
    refuse_handed_on(keys, optimizer=False, scheduler=False)
    for used in ("optimizer", "scheduler"):
        with pytest.raises(ConfigError, match=f"  {used}|{used}[.]"):
            refuse_handed_on(keys, optimizer=used == "optimizer", scheduler=used == "scheduler")


def test_numbers_in_a_tuple_are_those_of_a_list():
    for betas in ((0.9, 0.999), [0.9, 0.999]):
        config = {"optimizer": {"type": "AdamW", "params": {"betas": betas}}}
        assert not handed_on(config, optimizer=True, scheduler=False)
    config = {"optimizer": {"type": "AdamW", "params": {"betas": ((), ())}}}
    assert handed_on(config, optimizer=True, scheduler=False)
