"""What ranks tell each other before a load, also where one of them may not look."""

from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine import loading
from ds_parity.errors import CheckpointError, RankDesyncError

ENGINE = SimpleNamespace(load_universal_checkpoint=lambda: False)
OPTIONS = {"load_optimizer_states": True, "custom_load_fn": None}


def asks(folder, tag="a", engine=ENGINE, **options):
    return loading.asked(engine, folder, tag, {**OPTIONS, **options})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long").touch()
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


UNIVERSAL = SimpleNamespace(load_universal_checkpoint=lambda: True, module=torch.nn.Linear(2, 2))


@pytest.fixture
def universal(folder, tmp_path):
    for name in ("weight", "bias"):
        of_one = tmp_path / "a" / "zero" / name
        of_one.mkdir(parents=True)
        for file in ("fp32", "exp_avg", "exp_avg_sq", "step"):
            (of_one / f"{file}.pt").touch()
    return tmp_path / "a" / "zero"


def asks_for_universal(folder):
    return loading.asked(UNIVERSAL, folder, "a", OPTIONS, UNIVERSAL.module.parameters())


@pytest.mark.parametrize("lost", ["weight/fp32.pt", "bias/exp_avg_sq.pt", "bias"])
def test_every_rank_is_told_what_a_universal_checkpoint_lacks_on_one(folder, universal, lost):
    whole = asks_for_universal(folder)
    (universal / lost).rename(universal.parent / "aside")
    with pytest.raises(CheckpointError, match=rf"on rank 1: .* has no zero/{lost}, .*Nothing was loaded"):
        loading.refuse_unlike_loads(folder, [whole, asks_for_universal(folder)])


@pytest.mark.parametrize("lost", ["weight/step.pt", "weight/exp_avg.pt weight/exp_avg_sq.pt"])
def test_a_universal_checkpoint_of_what_has_no_moments_is_whole(folder, universal, lost):
    for file in lost.split():
        (universal / file).unlink()
    loading.refuse_unlike_loads(folder, [asks_for_universal(folder)])


def test_a_folder_that_is_no_universal_checkpoint_is_left_to_the_load(folder):
    loading.refuse_unlike_loads(folder, [asks_for_universal(folder)])
