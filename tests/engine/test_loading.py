"""What ranks tell each other before a load, also where one of them may not look."""

import io
import zipfile
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine import loading
from ds_parity.errors import CheckpointError, RankDesyncError

ENGINE = SimpleNamespace(load_universal_checkpoint=lambda: False, zero_optimization_stage=lambda: 1, optimizer=None)
OPTIONS = {"load_optimizer_states": True, "load_module_only": False, "custom_load_fn": None}


def _archive():
    written = io.BytesIO()
    torch.save({"a": torch.zeros(9)}, written)
    return written.getvalue()


WHOLE = _archive()
MODEL, STATES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def asks(folder, tag="a", engine=ENGINE, **options):
    return loading.asked(engine, folder, tag, {**OPTIONS, **options})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / MODEL).write_bytes(WHOLE)
    return str(tmp_path)


# A tag whose folder can't be looked for, as where its rights or a shared folder are lost.
UNREADABLE = {"too long": ("x" * 300, "File name too long"), "no tag": (None, "can't decode byte")}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_is_told_who_cannot_read(folder, tmp_path, name, ranks):
    tag, said = UNREADABLE[name]
    (tmp_path / "latest").write_bytes(b"\xff\xfe\xff")
    gathered = [asks(folder)] * (2 - ranks) + [asks(folder, tag)] * ranks
    with pytest.raises(CheckpointError) as found:
        loading.refuse_unlike_loads(folder, gathered)
    assert f"can't be read on rank {2 - ranks} (" in str(found.value)
    assert said in str(found.value)
    assert "Nothing was loaded" in str(found.value)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(116, "Stale file handle")])
def test_a_folder_that_may_not_be_looked_into_is_told_and_not_raised(folder, monkeypatch, error):
    def refuses(_):
        raise error

    monkeypatch.setattr("pathlib.Path.is_dir", refuses)
    with pytest.raises(CheckpointError, match=f"on rank 0 .*{error.strerror}"):
        loading.refuse_unlike_loads(folder, [asks(folder)])


def test_a_folder_that_is_no_path_is_told_and_not_raised():
    with pytest.raises(CheckpointError, match=r"on rank 0 \(TypeError"):
        loading.refuse_unlike_loads(None, [asks(None)])


def test_ranks_that_ask_alike_and_find_it_load(folder):
    loading.refuse_unlike_loads(folder, [asks(folder)] * 2)


def test_ranks_that_ask_for_different_tags_are_out_of_step(folder):
    with pytest.raises(RankDesyncError, match="ranks differ in tag"):
        loading.refuse_unlike_loads(folder, [asks(folder), asks(folder, "b")])


UNIVERSAL = SimpleNamespace(
    load_universal_checkpoint=lambda: True, zero_optimization_stage=lambda: 1, module=torch.nn.Linear(2, 2)
)


@pytest.fixture
def universal(folder, tmp_path):
    for name in ("weight", "bias"):
        of_one = tmp_path / "a" / "zero" / name
        of_one.mkdir(parents=True)
        for file in ("fp32", "exp_avg", "exp_avg_sq", "step"):
            (of_one / f"{file}.pt").write_bytes(WHOLE)
    return tmp_path / "a" / "zero"


def asks_for_universal(folder):
    return loading.asked(UNIVERSAL, folder, "a", OPTIONS, UNIVERSAL.module.parameters())


@pytest.mark.parametrize("lost", ["weight/fp32.pt", "bias/exp_avg_sq.pt", "bias"])
def test_every_rank_is_told_what_a_universal_checkpoint_lacks_on_one(folder, universal, lost):
    whole = asks_for_universal(folder)
    (universal / lost).rename(universal.parent / "aside")
    with pytest.raises(CheckpointError, match=rf"on rank 1: .* has no zero/{lost}, .*Nothing was loaded; convert"):
        loading.refuse_unlike_loads(folder, [whole, asks_for_universal(folder)])


@pytest.mark.parametrize("lost", ["weight/step.pt", "weight/exp_avg.pt weight/exp_avg_sq.pt"])
def test_a_universal_checkpoint_of_what_has_no_moments_is_whole(folder, universal, lost):
    for file in lost.split():
        (universal / file).unlink()
    loading.refuse_unlike_loads(folder, [asks_for_universal(folder)])


def test_a_folder_that_is_no_universal_checkpoint_is_left_to_the_load(folder):
    loading.refuse_unlike_loads(folder, [asks_for_universal(folder)])


DAMAGED = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "cut short": (lambda path: path.write_bytes(WHOLE[: len(WHOLE) // 2]), "has no end"),
    "zeros": (lambda path: path.write_bytes(bytes(len(WHOLE))), "has zeros at its beginning"),
    "folder": (lambda path: path.mkdir(), "can't be opened .IsADirectoryError"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "can't be opened .FileNotFoundError"),
    "link to itself": (lambda path: path.symlink_to(path), "can't be opened .OSError"),
}


@pytest.fixture
def saved(folder, tmp_path):
    (tmp_path / "a" / STATES).write_bytes(WHOLE)
    return tmp_path / "a"


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("name", [MODEL, STATES])
def test_every_rank_is_told_of_a_file_that_cannot_be_opened_on_one(folder, saved, name, how):
    whole = asks(folder)
    (saved / name).unlink()
    damage, said = DAMAGED[how]
    damage(saved / name)
    with pytest.raises(CheckpointError, match=rf"on rank 1: .* is not whole: {name} {said}.*Nothing was loaded"):
        loading.refuse_unlike_loads(folder, [whole, asks(folder)])


@pytest.mark.parametrize(("stage", "refused"), [(1, False), (3, True)])
@pytest.mark.parametrize("asked", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_weights_alone_need_the_optimizers_files_on_zero_3_alone(folder, saved, stage, refused, asked):
    (saved / STATES).write_bytes(b"")
    engine = SimpleNamespace(load_universal_checkpoint=lambda: False, zero_optimization_stage=lambda: stage)
    if refused:
        with pytest.raises(CheckpointError, match="is empty"):
            loading.refuse_unlike_loads(folder, [asks(folder, engine=engine, **asked)])
    else:
        loading.refuse_unlike_loads(folder, [asks(folder, engine=engine, **asked)])


@pytest.mark.parametrize("zip_format", [True, False])
def test_files_of_both_formats_of_torch_and_files_of_others_are_whole(folder, saved, zip_format):
    torch.save({"a": torch.zeros(9)}, saved / MODEL, _use_new_zipfile_serialization=zip_format)
    for name in ("of_the_user.pt", "my_own_states.pt"):
        (saved / name).write_bytes(b"")
    loading.refuse_unlike_loads(folder, [asks(folder)])


def test_what_pythons_reader_of_archives_does_not_know_is_left_to_torchs(folder, saved):
    at = WHOLE.rfind(b"PK\x01\x02")
    (saved / MODEL).write_bytes(WHOLE[: at + 6] + b"\xff" + WHOLE[at + 7 :])  # the release that reads it
    with pytest.raises(NotImplementedError):
        zipfile.ZipFile(saved / MODEL)
    loading.refuse_unlike_loads(folder, [asks(folder)])


def test_a_folder_without_files_of_the_model_is_told_before_anything_is_loaded(folder, saved):
    (saved / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"not whole: there is no \*model_states.pt, .*Nothing was loaded"):
        loading.refuse_unlike_loads(folder, [asks(folder)])


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_rank_looks_at_the_files_that_it_loads_where_hosts_share_no_folder(folder, saved, monkeypatch, kind):
    for name in (MODEL, STATES):
        (saved / name).unlink()
    own = [saved / f"zero_pp_rank_1_mp_rank_00_{one}_states.pt" for one in ("model", "optim")]
    for path in own:
        path.write_bytes(WHOLE[:50] if kind in path.name else WHOLE)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    with pytest.raises(CheckpointError, match=rf"zero_pp_rank_1_mp_rank_00_{kind}_states.pt has no end"):
        loading.refuse_unlike_loads(folder, [asks(folder)])
