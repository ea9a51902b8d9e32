"""Values are read as the DeepSpeed that is installed reads them, and a key that is repeated is no secret."""

import json
import math

import pytest
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from ds_parity.config import ABSENT
from ds_parity.values import Repeated, object_of, real, repeated, switch, whole

VALUES = [
    *(True, False, 0, 1, 2, 3, 4, -1, 0.0, 1.0, 1.5, 3.0, 1e400, None, [], {}),
    *("true", "TRUE", " true", "yes", "on", "y", "t", "off", "no", "false", "maybe", ""),
    *("0", "1", "2", "3", "03", "+3", " 3 ", "3.0", "3e0", "-1", "1_0"),
]


def read(model, field, value):
    try:
        return getattr(model(**{field: value}), field)
    except ValidationError:
        return None


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_switch_is_what_deepspeed_takes_it_for(value):
    assert switch("fp16.enabled", value) is read(DeepSpeedFP16Config, "enabled", value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_stage_is_the_number_that_deepspeed_takes_it_for(value):
    stage = whole(value)
    assert (stage if stage in range(4) else None) == read(DeepSpeedZeroConfig, "stage", value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_loss_scale_is_the_number_that_deepspeed_takes_it_for(value):
    scale = real(value)
    taken = scale if scale is not None and math.isfinite(scale) and scale >= 0 else None
    assert taken == read(DeepSpeedFP16Config, "loss_scale", value)


@pytest.mark.parametrize("path", ["prescale_gradients", "torch_autocast.enabled", "optimizer.params.torch_adam"])
def test_where_deepspeed_has_no_model_each_text_is_on(path):
    assert switch(path, "false") is True
    assert switch(path, 0) is False


def test_auto_and_what_is_absent_are_neither():
    assert (switch("fp16.enabled", "auto"), switch("prescale_gradients", "auto"), whole("auto")) == (None, None, None)
    assert (switch("fp16.enabled", ABSENT), whole(ABSENT)) == (None, None)


def test_keys_that_are_given_more_than_once_are_found_at_any_depth():
    text = '{"a": 1, "b": [{"c": 1, "d": 2, "c": 1}], "a": 2, "e": {"f": 0}}'
    tree = json.loads(text, object_pairs_hook=object_of)
    assert list(repeated(tree)) == [("a", 2), ("b.0.c", 1)]
    assert (tree.twice, tree.ambiguous) == (("a",), ("a",))
    assert (tree["b"][0].twice, tree["b"][0].ambiguous) == (("c",), ())
    assert not isinstance(tree["e"], Repeated)
