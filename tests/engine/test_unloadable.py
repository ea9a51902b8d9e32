"""What DeepSpeed raises where it loads a checkpoint, and what is said of it."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.unloadable import explained
from ds_parity.errors import CheckpointError

STAGES = (0, 1, 2, 3)


def driver(stage=0, mpu=None, scheduler=None, universal=False):
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: stage, load_universal_checkpoint=lambda: universal, mpu=mpu, module=None,
        lr_scheduler=scheduler,
    )  # fmt: skip
    return SimpleNamespace(engine=engine, ranks=2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "saved").mkdir()
    return tmp_path


def said(folder, error, **given):
    """What an error becomes while the checkpoint `saved` of a folder is loaded."""
    kinds = (CheckpointError, type(error))
    with pytest.raises(kinds) as found, explained(driver(**given), str(folder), "saved"):
        raise error
    return found.value


NOTHING = TypeError("'NoneType' object is not subscriptable")


def test_a_checkpoint_of_zero_0_without_a_state_names_the_releases_that_write_none(folder):
    error = said(folder, NOTHING)
    assert isinstance(error, CheckpointError)
    assert "before 0.18.5 writes none in bf16 on ZeRO 0. Load it with load_optimizer_states=False" in str(error)


MODEL, PART_OF_MODEL = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
STATES = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("files", "stage", "error", "name"),
    [
        ([MODEL, STATES], 0, NOTHING, "1 or 2"),
        ([MODEL, STATES], 3, AssertionError(), "1 or 2"),
        ([MODEL], 1, FileNotFoundError(STATES), "0, or its saving broke off before the optimizer's files"),
        ([MODEL], 3, AssertionError(), "0, or its saving broke off before the optimizer's files"),
        ([PART_OF_MODEL, STATES], 0, AssertionError(), "3"),
        ([PART_OF_MODEL, STATES], 2, AssertionError(), "3"),
    ],
)
def test_a_checkpoint_of_another_stage_names_the_stage(folder, files, stage, error, name):
    for file in files:
        (folder / "saved" / file).touch()
    found = said(folder, error, stage=stage)
    assert isinstance(found, CheckpointError)
    assert f"on ZeRO stage {stage}: the checkpoint was saved on stage {name}, and" in str(found)


@pytest.mark.parametrize(("files", "stage"), [([MODEL, STATES], 1), ([MODEL, STATES], 2), ([PART_OF_MODEL, STATES], 3)])
def test_a_checkpoint_of_its_own_stage_is_one_of_other_ranks(folder, files, stage):
    for file in files:
        (folder / "saved" / file).touch()
    assert "If another number of ranks saved it, convert it" in str(said(folder, AssertionError(), stage=stage))


@pytest.mark.parametrize(("files", "stage"), [([], 0), ([], 2), ([STATES], 2), ([STATES], 3)])
def test_a_checkpoint_without_a_model_was_broken_off(folder, files, stage):
    for file in files:
        (folder / "saved" / file).touch()
    found = str(said(folder, AssertionError(), stage=stage))
    assert "the checkpoint is not whole: there is no *model_states.pt in 'saved' (a bare AssertionError)" in found
    assert "load the one before it" in found


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        pickle.UnpicklingError("Weights only load failed"),
        EOFError("Ran out of input"),
        OSError(22, "Invalid argument"),
        RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ],
)
def test_a_file_that_cannot_be_read_was_broken_off(folder, stage, error):
    (folder / "saved" / MODEL).touch()
    found = said(folder, error, stage=stage)
    assert isinstance(found, CheckpointError)
    assert f"a file of it can't be read ({type(error).__name__}: {error})" in str(found)


@pytest.mark.parametrize(
    ("file", "wanted", "precision"),
    [
        (STATES, "zero_pp_rank_0_mp_rank_00_optim_states.pt", True),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", STATES, True),
        (STATES, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", False),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt", False),
    ],
)
def test_a_file_of_another_precision_is_told_from_one_that_is_lost(folder, file, wanted, precision):
    for name in (MODEL, file):
        (folder / "saved" / name).touch()
    lost = FileNotFoundError(2, "No such file or directory", str(folder / "saved" / wanted))
    found = said(folder, lost, stage=2)
    assert ("was saved in another precision" in str(found)) is precision
    assert (f"the checkpoint is not whole: {wanted} is not there" in str(found)) is not precision


@pytest.mark.parametrize(("stage", "files"), [(0, [MODEL]), (1, [MODEL, STATES]), (2, [MODEL, STATES])])
def test_a_missing_file_of_an_expert_is_no_matter_of_precision(folder, stage, files):
    for name in files:
        (folder / "saved" / name).touch()
    wanted = "layer_0_expert_3_mp_rank_00_model_states.pt"
    lost = FileNotFoundError(2, "No such file or directory", str(folder / "saved" / wanted))
    assert f"the checkpoint is not whole: {wanted} is not there" in str(said(folder, lost, stage=stage))


def test_a_missing_file_that_is_none_of_a_checkpoints_is_left_as_it_is(folder):
    for name in (MODEL, STATES):
        (folder / "saved" / name).touch()
    for name in ("offloaded_tensors/rank0", "vocab.json"):
        lost = FileNotFoundError(2, "No such file or directory", str(folder / name))
        assert said(folder, lost, stage=2) is lost


@pytest.mark.parametrize("tag", ["none", None])
def test_a_tag_that_does_not_exist_is_named_with_those_that_do(folder, tag):
    (folder / "latest").write_text("none")
    refused = pytest.raises(CheckpointError, match=r"the tag is 'none'.* no such folder;.*\(saved\)")
    with refused as found, explained(driver(1), str(folder), tag):
        raise AssertionError
    assert ("by the file latest" in str(found.value)) is (tag is None)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tag", ["none", None])
def test_a_tag_of_no_universal_checkpoint_is_named_before_stages(folder, tag, stage):
    (folder / "latest").write_text("saved")
    (folder / "latest_universal").write_text("none")
    with pytest.raises(CheckpointError) as found, explained(driver(stage, universal=True), str(folder), tag):
        raise AssertionError
    by = " (by the file latest_universal)" if tag is None else ""
    assert str(found.value).startswith(f"load_checkpoint({str(folder)!r}): the tag is 'none'{by}, and there is no such")
    assert "ZeRO stage" not in str(found.value)


def test_a_folder_that_is_no_universal_checkpoint_names_the_stage(folder):
    with pytest.raises(CheckpointError) as found, explained(driver(2, universal=True), str(folder), "saved"):
        raise AssertionError
    assert "on ZeRO stage 2, with load_universal: DeepSpeed refused it" in str(found.value)


def test_a_file_of_another_rank_of_an_mpu_names_the_mpu(folder):
    error = said(folder, IndexError("list index out of range"), stage=2, mpu="an mpu")
    assert isinstance(error, CheckpointError)
    assert "set engine.mpu to None while a checkpoint is saved" in str(error)


@pytest.mark.parametrize("error", [IndexError("list index out of range"), TypeError("unhashable"), OSError("disk")])
def test_any_other_error_is_left_as_it_is(folder, error):
    assert said(folder, error) is error


def of_a_state_dict(**sizes):
    """What torch raises where a state dict is of other names or sizes."""
    try:
        torch.nn.Linear(2, 3).load_state_dict({name: torch.zeros(size) for name, size in sizes.items()})
    except RuntimeError as error:
        return error
    raise AssertionError


def test_a_checkpoint_of_another_model_is_said_to_be_one(folder):
    error = said(folder, of_a_state_dict(weight=(3, 5), bias=(3,)))
    assert isinstance(error, CheckpointError)
    assert "is of another model than this engine's (Error(s) in loading state_dict for Linear: size mism" in str(error)
    assert "exclude_frozen_parameters" not in str(error)
    assert str(error).endswith("Loading ends half way, so start a new engine")


def test_a_checkpoint_without_frozen_parameters_names_the_argument_that_loads_it(folder):
    error = said(folder, of_a_state_dict(weight=(3, 2)))
    assert "saved with exclude_frozen_parameters=True, load it with load_module_strict=False" in str(error)


def test_a_universal_checkpoint_without_a_file_of_a_parameter_names_it(folder):
    missing = FileNotFoundError(2, "No such file", str(folder / "zero" / "b.weight" / "exp_avg_sq.pt"))
    error = said(folder, missing, stage=3, universal=True)
    assert isinstance(error, CheckpointError)
    assert "the universal checkpoint has no b.weight/exp_avg_sq.pt" in str(error)
    assert "no universal checkpoint (" not in str(error)


def test_a_file_of_zero_bytes_cannot_be_read(folder):
    file = folder / "saved" / MODEL
    file.write_bytes(bytes(2000))
    with pytest.raises(KeyError) as found:
        torch.load(file, weights_only=False)
    error = said(folder, found.value)
    assert isinstance(error, CheckpointError)
    assert "the checkpoint is not whole: a file of it can't be read (KeyError" in str(error)


class _Renamed:
    """A class of which a client state has a value."""


def _reads(path):
    """What reads a file as DeepSpeed's checkpoint engine does."""
    reader = {"__name__": "deepspeed.runtime.checkpoint_engine"}
    exec("def load(torch, path): torch.load(path, weights_only=False)", reader)
    reader["load"](torch, path)


def _told(folder, read):
    with pytest.raises(Exception) as found, explained(driver(), str(folder), "saved"):  # noqa: PT011
        read()
    return found.value


def test_whatever_the_reader_raises_over_a_damaged_file_is_said_in_words(folder):
    path = folder / "saved" / MODEL
    path.mkdir()
    error = _told(folder, lambda: _reads(path))
    assert isinstance(error, CheckpointError)
    assert "can't be read (IsADirectoryError" in str(error)


def test_a_class_that_is_gone_is_no_damage_and_others_files_are_their_own(folder, monkeypatch):
    path = folder / "saved" / MODEL
    torch.save({"own": _Renamed()}, path)
    monkeypatch.delattr(f"{__name__}._Renamed")
    assert isinstance(_told(folder, lambda: _reads(path)), AttributeError)
    other = folder / "not_there.pt"
    assert isinstance(_told(folder, lambda: torch.load(other)), FileNotFoundError)


OF_PARTS = RuntimeError("The size of tensor a (5) must match the size of tensor b (3) at non-singleton dimension 0")


@pytest.mark.parametrize(
    ("saved_by", "says"), [(2, "2 data-parallel ranks saved the checkpoint, and 1 load it"), (1, "")]
)
def test_parts_of_another_length_are_those_of_other_ranks_or_of_other_groups(folder, saved_by, says):
    for rank in range(saved_by):
        (folder / "saved" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    driving = driver(stage=3)
    driving.engine.optimizer = SimpleNamespace(dp_process_group=None)
    with pytest.raises(CheckpointError) as found, explained(driving, str(folder), "saved"):
        raise OF_PARTS
    message = str(found.value)
    assert (says or "the parameter groups of the checkpoint are not this engine's") in message
    assert ("ds_to_universal" in message) is bool(says)


@pytest.mark.parametrize("of_experts", [True, False])
def test_a_file_of_experts_that_is_not_there_may_be_of_another_ep_size(folder, of_experts):
    (folder / "saved" / MODEL).touch()
    name = "expp_rank_1_mp_rank_00_optim_states.pt" if of_experts else "mp_rank_01_model_states.pt"
    lost = FileNotFoundError(2, "No such file", str(folder / "saved" / name))
    message = str(said(folder, lost))
    assert f"{name} is not there" in message
    assert ("another ep_size" in message) is of_experts
