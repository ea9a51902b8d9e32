"""Files that a save removes: of ranks that it has not, and of nobody else."""

import pytest

from ds_parity.engine.internals.left_over import remove_left_over

WRITTEN = [
    *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
    *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)),
]


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
    ],
)
def test_a_file_of_a_rank_that_has_not_saved_is_removed(tmp_path, name, removed):
    for one in [*WRITTEN, name]:
        (tmp_path / one).touch()
    remove_left_over(tmp_path, WRITTEN)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*WRITTEN, *([] if removed else [name])])


def test_a_save_that_has_no_files_of_ranks_removes_nothing(tmp_path):
    (tmp_path / WRITTEN[0]).touch()
    remove_left_over(tmp_path, ["mp_rank_00_model_states.pt"])
    assert (tmp_path / WRITTEN[0]).exists()


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path):
    for one in [*WRITTEN, "zero_pp_rank_4_mp_rank_00_model_states.pt"]:
        (tmp_path / one).touch()
    for rank in (2, 3, 5):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").mkdir()
    with pytest.raises(OSError, match="zero_pp_rank_"):
        remove_left_over(tmp_path, WRITTEN)
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == sorted(WRITTEN)
