"""TensorBoard's event files, written by torch's own SummaryWriter: tags are columns, in single precision."""

import math
import re
import struct
import sys

import pytest

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace import Precision
from ds_parity.trace.foreign import parse_maps, read_any

pytest.importorskip("tensorboard")

LOSSES = [2.0 / 3, 0.1, 1.0 / 7]


def single(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


@pytest.fixture
def write():
    from torch.utils.tensorboard import SummaryWriter

    def written(folder, losses=LOSSES, tag="train/loss", first=1, **options):
        with SummaryWriter(str(folder), **options) as writer:
            for step, loss in enumerate(losses, first):
                writer.add_scalar(tag, loss, step, new_style=step % 2 == 0)
        return next(folder.glob("*tfevents*" + options.get("filename_suffix", "")))

    return written


def refused(path, *maps):
    with pytest.raises(TraceError, match=re.escape(str(path))) as error:
        read_any(path, parse_maps(maps))
    return str(error.value)


def test_scalars_come_back_as_the_singles_that_were_written(tmp_path, write):
    file = write(tmp_path)
    for path in (file, tmp_path):
        trace = read_any(path)
        assert [record.loss for record in trace.steps] == [single(loss) for loss in LOSSES]
        assert [record.step for record in trace.steps] == [1, 2, 3]
        assert trace.header.engine == "tensorboard"
        assert trace.precision == {"loss": Precision(single=True)}
        assert trace.notes == ("by their names, loss is 'train/loss'",)


def test_a_renamed_event_file_is_known_by_its_content(tmp_path, write):
    file = write(tmp_path)
    renamed = file.rename(tmp_path / "run")
    assert len(read_any(renamed).steps) == 3


def test_a_loss_that_was_rounded_before_it_was_written_is_seen_in_its_single(tmp_path, write):
    write(tmp_path, [2.3456, 0.1234, 1.5])
    assert read_any(tmp_path).precision == {"loss": Precision(decimals=4, single=True)}


def test_every_tag_is_a_column_and_what_is_no_scalar_is_passed_over(tmp_path):
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", "words", 0)
        writer.add_histogram("weights", torch.arange(5.0), 0)
        writer.add_scalar("eval/loss", 9.0, 0)
        for step in (1, 2):
            writer.add_scalar("lm loss", 0.5, step)
            writer.add_scalar("learning-rate", 0.25, step)
        writer.add_scalar("train/train_loss", 9.0, 2)
        writer.add_scalar("lm loss", 0.5, 2)
    trace = read_any(tmp_path, parse_maps(["loss=lm loss"]))
    assert [(record.step, record.loss, record.lr) for record in trace.steps] == [(1, 0.5, (0.25,)), (2, 0.5, (0.25,))]
    assert "'lm loss'" in refused(tmp_path, "loss=words")


def test_the_files_of_a_run_are_put_together_and_what_a_restart_wrote_again_is_refused(tmp_path, write):
    write(tmp_path, filename_suffix=".a")
    write(tmp_path, [0.5, 0.25], "train/lr", filename_suffix=".b")
    assert [(record.loss, record.lr) for record in read_any(tmp_path).steps] == [
        (single(LOSSES[0]), (0.5,)),
        (single(LOSSES[1]), (0.25,)),
        (single(LOSSES[2]), None),
    ]
    write(tmp_path, [0.5, 0.25], filename_suffix=".c")
    assert "two values of loss" in refused(tmp_path)


def test_a_folder_of_runs_is_refused_with_its_runs(tmp_path, write):
    write(tmp_path / "one")
    write(tmp_path / "two")
    message = refused(tmp_path)
    assert str(tmp_path / "one") in message
    assert str(tmp_path / "two") in message


def test_nan_and_infinity_come_back(tmp_path, write):
    write(tmp_path, [math.nan, math.inf, -math.inf])
    first, *others = [record.loss for record in read_any(tmp_path).steps]
    assert math.isnan(first)
    assert others == [math.inf, -math.inf]


def test_step_0_is_refused_and_can_be_shifted(tmp_path, write):
    write(tmp_path, first=0)
    assert "write --map 'step=step+1'" in refused(tmp_path)
    assert [record.step for record in read_any(tmp_path, parse_maps(["step=step+1"])).steps] == [1, 2, 3]


def test_a_file_cut_inside_a_record_is_refused_and_one_cut_between_two_is_a_shorter_run(tmp_path, write):
    file = write(tmp_path)
    whole = file.read_bytes()
    read = []
    for end in range(100, len(whole)):
        file.write_bytes(whole[:end])
        try:
            read.append(len(read_any(file).steps))
        except TraceError as error:
            read.append(None)
            named = str(error)
            assert named.startswith(f"{file}: cut short")
    assert {1, 2} <= set(read)
    assert len(read) - read.count(None) <= 3


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path, write):
    file = write(tmp_path)
    whole = file.read_bytes()
    for at in range(0, len(whole), 5):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        assert refused(file)


def test_an_event_file_without_scalars_is_refused(tmp_path, write):
    write(tmp_path, [])
    assert "no row with a value" in refused(tmp_path)


def test_without_tensorboard_the_way_to_install_it_is_said(tmp_path, write, monkeypatch):
    write(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'ds_parity[foreign]'")):
        read_any(tmp_path)


def test_a_byte_that_flipped_is_no_file_that_was_cut(tmp_path, write):
    """In the length of a record it has the file end inside one, which its checksum denies."""
    file = write(tmp_path)
    whole = file.read_bytes()
    told = set()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        said = refused(file)
        assert "damaged" in said
        told.add("the checksum of its length does not fit" in said)
    assert told == {True, False}
