"""Files that a save removes: of ranks that it has not, and of nobody else."""

import errno
import os
import tempfile
import time
from types import SimpleNamespace

import psutil
import pytest

from ds_parity.engine.internals.left_over import Withdrawn, changed_at, remove_left_over

WRITTEN = [
    *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
    *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)),
]


def removed_from(folder, names):
    return remove_left_over(folder, changed_at(folder, names))


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", True),
        ("zero_pp_rank_12_mp_rank_00_model_states.pt", True),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", True),  # of a run in fp32, and this one is in bf16
        ("bf16_zero_pp_rank_0_mp_rank_00_model_states.pt", True),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", False),
        ("zero_pp_rank_2_mp_rank_01_model_states.pt", False),  # of ranks with another part of the model
        ("mp_rank_01_model_states.pt", False),
        ("layer_0_expert_2_mp_rank_00_model_states.pt", False),
        ("expp_rank_2_mp_rank_00_optim_states.pt", False),
        ("my_zero_pp_rank_2_mp_rank_00_model_states.pt", False),
        ("zero_pp_rank_2_mp_rank_00_model_states.pt.bak", False),
        (".zero_pp_rank_2_mp_rank_00_optim_states.pt.earlier", True),  # put aside by a save that was killed
        (".my.earlier", False),
    ],
)
def test_a_file_of_a_rank_that_has_not_saved_is_removed(tmp_path, name, removed):
    for one in [*WRITTEN, name]:
        (tmp_path / one).touch()
    removed_from(tmp_path, WRITTEN)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*WRITTEN, *([] if removed else [name])])


WHOLE = ["mp_rank_00_model_states.pt"]
SUMMED = [*WHOLE, "zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.mark.parametrize(
    ("written", "names"),
    [
        (WRITTEN, WHOLE),
        (WHOLE, WRITTEN),
        (WHOLE, ["zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
        (SUMMED, ["zero_pp_rank_0_mp_rank_00_model_states.pt"]),
        (SUMMED, ["expp_rank_1_mp_rank_00_optim_states.pt"]),
        ([*WHOLE, "expp_rank_0_mp_rank_00_optim_states.pt"], ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
    ],
)
class TestFilesOfAnotherStage:
    """A ZeRO stage that writes files of other kinds under a tag."""

    def test_those_of_an_earlier_run_are_removed(self, tmp_path, written, names):
        for one in [*written, *names]:
            (tmp_path / one).touch()
        for one in names:
            os.utime(tmp_path / one, (0, 0))
        assert removed_from(tmp_path, written) == []
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written)

    def test_those_that_another_engine_may_have_saved_are_told(self, tmp_path, written, names):
        for one in [*written, *names]:
            (tmp_path / one).touch()
        assert removed_from(tmp_path, written) == sorted(names)
        assert removed_from(tmp_path, written) == sorted(names)
        assert len(list(tmp_path.iterdir())) == len([*written, *names])

    def test_those_of_an_earlier_save_of_this_process_are_removed(self, tmp_path, written, names):
        first = [*(WHOLE if "optim" in names[0] else []), *names]
        for one in first:
            (tmp_path / one).touch()
        removed_from(tmp_path, first)
        for one in written:
            (tmp_path / one).touch()
        assert removed_from(tmp_path, written) == []
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written)

    def test_those_that_another_engine_has_saved_over_ours_are_told(self, tmp_path, written, names):
        first = [*(WHOLE if "optim" in names[0] else []), *names]
        for one in first:
            (tmp_path / one).touch()
        removed_from(tmp_path, first)
        for one in [*written, *names]:
            (tmp_path / one).touch()
            os.utime(tmp_path / one, (2**32, 2**32))
        assert removed_from(tmp_path, written) == sorted(names)
        assert len(list(tmp_path.iterdir())) == len({*written, *names})

    def test_those_of_another_part_of_the_model_stay(self, tmp_path, written, names):
        others = [one.replace("mp_rank_00", "mp_rank_01") for one in names]
        for one in [*written, *others]:
            (tmp_path / one).touch()
            os.utime(tmp_path / one, (0, 0))
        assert removed_from(tmp_path, written) == []
        assert len(list(tmp_path.iterdir())) == len([*written, *others])


def test_what_belongs_to_another_engine_s_files_stays_with_them(tmp_path):
    """Of ZeRO 1 in bf16, beside ZeRO 3 in fp32: the model's file of the one, and so its optimizer's file."""
    written = [f"zero_pp_rank_0_mp_rank_00_{what}_states.pt" for what in ("model", "optim")]
    theirs = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", *WHOLE]
    for one in [*written, *theirs]:
        (tmp_path / one).touch()
    assert removed_from(tmp_path, written) == theirs
    assert len(list(tmp_path.iterdir())) == 4


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path):
    for one in [*WRITTEN, "zero_pp_rank_4_mp_rank_00_model_states.pt"]:
        (tmp_path / one).touch()
    for rank in (2, 3, 5):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").mkdir()
    with pytest.raises(OSError, match="zero_pp_rank_"):
        removed_from(tmp_path, WRITTEN)
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == sorted(WRITTEN)


def test_where_no_file_can_be_made_the_clock_is_the_host_s(tmp_path, monkeypatch):
    """As with a quota of files."""
    old = ["zero_pp_rank_7_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    for one in [*SUMMED, *old]:
        (tmp_path / one).touch()
        os.utime(tmp_path / one, (0, 0))
    names = changed_at(tmp_path, SUMMED)

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert remove_left_over(tmp_path, names) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(SUMMED)


def test_no_file_of_the_save_is_asked_for_when_it_was_changed(tmp_path, monkeypatch):
    """Each rank says it of its own files: at 1,000 ranks, all of all would be a million questions."""
    for one in WRITTEN:
        (tmp_path / one).touch()
    written = changed_at(tmp_path, WRITTEN)
    asked = []
    stat = type(tmp_path).stat
    monkeypatch.setattr(type(tmp_path), "stat", lambda path, **how: asked.append(path.name) or stat(path, **how))
    remove_left_over(tmp_path, written)
    assert not {*asked} & {*WRITTEN}


def test_a_file_that_is_still_to_be_written_was_changed_at_no_time(tmp_path):
    (tmp_path / WHOLE[0]).touch()
    changed = changed_at(tmp_path, [*WHOLE, *WRITTEN])
    assert changed[WHOLE[0]] > 0
    assert {changed[name] for name in WRITTEN} == {0}


def test_files_of_an_earlier_process_are_removed_by_one_that_was_forked_behind_the_import(tmp_path):
    for one in [*WRITTEN, *WHOLE]:
        (tmp_path / one).touch()
        os.utime(tmp_path / one, (psutil.Process().create_time() + 0.01,) * 2)  # this process had begun
    child = os.fork()
    if not child:
        os._exit(int(removed_from(tmp_path, WRITTEN) != []))
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(WRITTEN)


@pytest.mark.parametrize("behind", [3600, -3600])
def test_the_age_of_files_goes_by_the_clock_of_their_file_system(tmp_path, monkeypatch, behind):
    """A file server's clock is another one's than the host's, by which a process knows when it began."""
    began = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: began + behind)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + behind)
    fresh, old = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    for one in [*WHOLE, fresh, old]:
        (tmp_path / one).touch()
    os.utime(tmp_path / old, (began - 10,) * 2)
    assert removed_from(tmp_path, WHOLE) == [fresh]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*WHOLE, fresh])


@pytest.mark.parametrize("ends", ["put_back", "remove"])
def test_what_a_killed_save_has_put_aside_is_not_put_back_by_the_next_one(tmp_path, ends):
    """Another rank had written its file by then."""
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(dp_process_group=1), _get_zero_ckpt_name=lambda folder, tag: f"{folder}/{tag}/{name}"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("earlier")
    Withdrawn(engine, (str(tmp_path), "a"))
    assert not (tmp_path / "a" / name).exists()
    getattr(Withdrawn(engine, (str(tmp_path), "a")), ends)()
    assert not (tmp_path / "a" / name).exists()
    left = [file.name for file in (tmp_path / "a").iterdir()]
    assert not [one for one in left if one.startswith("zero_pp") or one.endswith("optim_states.pt")]
    assert (left == []) == (ends == "remove")
