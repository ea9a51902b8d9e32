"""What a trace's lines promise: floats come back bit for bit, and nothing unasked for is let in."""

import math
import struct
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_parity.errors import TraceError
from ds_parity.trace import SCHEMA, Header, Hypothesis, StepRecord, TraceWriter, Weights, read_trace
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.records import FieldName

STEP = {
    "step": 1,
    "passes": 2,
    "idle_passes": 0,
    "rollouts": 8,
    "prompts": 2,
    "tokens": 64,
    "total": 8.0,
    "loss": 0.5,
    "lr": (1e-3,),
    "grad_norm": 1.0,
}


def bits(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else struct.pack("<d", value)


@given(st.floats())
@example(math.nan)
@example(math.inf)
@example(-math.inf)
@example(-0.0)
@example(5e-324)
@example(1.7976931348623157e308)
def test_every_float_survives_json_bit_for_bit_wherever_it_stands(value):
    weights = Weights(checksum="0" * 64, norm=value, sketch=(value,))
    floats = {"total": value, "loss": value, "grad_norm": value, "loss_scale": value}
    record = StepRecord(**STEP | floats, weights=weights, metrics={"reward": value}).model_copy(update={"lr": (value,)})
    again = StepRecord.model_validate_json(record.model_dump_json())
    found = [again.total, again.loss, *again.lr, again.grad_norm, again.loss_scale, again.metrics["reward"]]
    assert {bits(item) for item in [*found, again.weights.norm, *again.weights.sketch]} == {bits(value)}


@given(st.integers(1, 2**63 - 1), st.lists(st.integers(0, 2**63 - 1), min_size=5, max_size=5), st.booleans())
def test_counts_and_flags_survive_json(step, counts, skipped):
    names = ("passes", "idle_passes", "rollouts", "prompts", "tokens")
    record = StepRecord(**STEP | dict(zip(names, counts, strict=True)) | {"step": step, "skipped": skipped})
    assert StepRecord.model_validate_json(record.model_dump_json()) == record


def test_a_header_survives_json_and_carries_the_schema_version():
    header = Header(
        scenario="s", seed=None, versions={"torch": "2.13.0"}, device="cpu", ranks=2, config_hash="ab", engine="torch"
    )
    assert header.schema_version == SCHEMA
    assert Header.model_validate_json(header.model_dump_json()) == header


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 0),
        ("passes", -1),
        ("tokens", 1.0),
        ("tokens", 2**63),
        ("rollouts", True),
        ("loss", "0.5"),
        ("loss", "nan"),
        ("lr", 1e-3),
        ("skipped", 1),
        ("grad_nrom", 1.0),
    ],
)
def test_a_wrong_value_or_an_unknown_key_is_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        StepRecord(**STEP | {key: value})


def test_what_a_foreign_trainer_records_is_named_by_fields_of_a_step():
    known = {"scenario": None, "seed": None, "versions": None, "device": None, "ranks": None, "config_hash": None}
    header = Header(**known, engine="other", records=("loss", "lr"))
    assert Header.model_validate_json(header.model_dump_json()) == header
    assert header.foreign
    with pytest.raises(ValidationError, match="records"):
        Header(**known, engine="other", records=("los",))


def test_every_field_of_a_step_can_be_recorded_and_all_but_its_number_can_be_unknown():
    names = {*get_args(FieldName)}
    assert names == StepRecord.model_fields.keys() - {"step", "hypotheses"}  # which nobody records but a reference
    record = StepRecord(**dict.fromkeys(names - {"metrics"}), step=1)
    assert StepRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("checksum", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64])
def test_a_checksum_that_is_no_sha256_is_refused(checksum):
    with pytest.raises(ValidationError, match="checksum"):
        Weights(checksum=checksum, norm=1.0)


def test_records_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        StepRecord(**STEP).step = 2


def test_the_nan_that_pythons_own_json_writes_is_read_too():
    line = StepRecord(**STEP | {"loss": math.nan}).model_dump_json().replace('"NaN"', "NaN")
    assert math.isnan(StepRecord.model_validate_json(line).loss)


@pytest.mark.parametrize(
    ("passes", "idle", "ranks", "micro_batches"),
    [(32, 0, 2, 64), (9, 6, 2, 12), (8, 0, 8, 64), (3, 0, 1, 3), (0, 0, 4, 0), (None, 0, 2, None), (3, None, 2, None)],
)
def test_passes_of_a_rank_and_micro_batches_of_all_ranks_have_two_names(passes, idle, ranks, micro_batches):
    """The key gradient_accumulation_passes counts the second: 64 on 2 ranks are 32 passes."""
    record = StepRecord(**STEP | {"passes": passes, "idle_passes": idle})
    assert record.micro_batches_on(ranks) == micro_batches


@pytest.mark.parametrize(("ranks", "says"), [(0, "ranks is 0"), (-2, "ranks is -2"), (1, "12 idle passes in 9 passes")])
def test_a_number_of_ranks_that_the_step_can_not_have_run_on_is_refused(ranks, says):
    with pytest.raises(TraceError, match=rf"^step 1: .*{says}.*Header.ranks"):
        StepRecord(**STEP | {"passes": 9, "idle_passes": 12}).micro_batches_on(ranks)


def test_a_line_that_was_written_before_there_was_a_name_for_micro_batches_is_read_and_written_alike():
    line = (
        '{"step":1,"passes":9,"idle_passes":6,"rollouts":12,"prompts":3,"tokens":64,"total":12.0,"loss":0.5,'
        '"lr":[0.001],"grad_norm":1.0,"loss_scale":null,"skipped":false,"weights":null,"metrics":{}}'
    )
    record = StepRecord.model_validate_json(line)
    assert record.micro_batches_on(2) == 12
    assert record.model_dump_json() == line


def test_hypotheses_of_a_step_are_read_as_written_also_piece_by_piece(tmp_path):
    """Lines with and without them in one trace: the key is only where there are some."""
    header = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="torch")
    found = {"last-pass-alone": Hypothesis(loss=None, grad_norm=0.5, along=0.25, apart=(1.5, -2.0))}
    plain = StepRecord(step=1, **dict.fromkeys({*get_args(FieldName)} - {"metrics"}))
    steps = (plain, plain.model_copy(update={"step": 2, "hypotheses": found}))
    with TraceWriter(tmp_path / "run.jsonl", header) as writer:
        for one in steps:
            writer.write(one)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert ["hypotheses" in line for line in lines] == [False, False, True]
    assert read_trace(tmp_path / "run.jsonl").steps == steps
    assert TraceFile.open(tmp_path / "run.jsonl").excerpt(1, 2).steps == steps
