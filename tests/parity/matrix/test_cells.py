"""The cells of the matrix: what is in it, and that each cell holds what its name says. No ranks are started."""

import configparser
from pathlib import Path

import pytest

from ds_parity.parity.matrix import needed
from ds_parity.parity.matrix.cell_runs import calls_of
from ds_parity.parity.matrix.cells import CHECKS, Cell, cells, merged
from ds_parity.parity.matrix.known_faults import FAULTS
from ds_parity.parity.matrix.variant import STAGES, Variant
from ds_parity.parity.matrix.variants import VARIANTS
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.subjects.oracle import windows_of

ALL = cells()
# What engine/ refuses can only be seen with an engine.
BY_THE_ENGINE = {
    "scheduler": ("client's ReduceLROnPlateau, by rollout",),
    "loop": ("a module used twice, checkpointed with reentry",),
    "born partitioned": ("zero.Init, other stages",),
    "experts": ("DeepSpeed's MoE, ep_size 1", "DeepSpeed's MoE, ep_size 2"),
    "AutoTP": ("2 ranks of one model, bf16", "2 groups of 2 ranks, bf16, AdamW (torch_adam)"),
    "offload_states": ("fp32", "bf16, fp32 accumulation"),
}


def by_name(name, stage):
    return next(cell for cell in ALL if cell.variant.name == name and cell.stage == stage)


def factors(cell):
    return [w.expected / w.total for w in windows_of(cell.ragged.batches(), cell.ragged.settings)]


def test_every_cell_has_a_name_of_its_own_and_a_stage_that_exists():
    assert len({cell.name for cell in ALL}) == len(ALL) > 200
    assert {cell.stage for cell in ALL} == set(STAGES)
    assert all(cell.name.replace("-", "").replace(".", "").isalnum() for cell in ALL)


def test_the_quick_subset_holds_every_stage_of_a_few_rows_of_most_groups():
    quick = cells(quick=True)
    assert {cell.stage for cell in quick} == set(STAGES)
    assert len({cell.variant.group for cell in quick}) >= 6
    assert len(quick) < len(ALL) / 3


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.name)
def test_a_cell_is_refused_where_the_matrix_says_so_and_can_be_laid_out_elsewhere(cell):
    by_the_engine = cell.variant.name in BY_THE_ENGINE.get(cell.variant.group, ())
    expected = cell.stage in cell.variant.refused and not by_the_engine
    assert (cell.refusal is not None) == expected
    if cell.refusal is None:
        assert len(cell.ragged.layout()) > 1
        if "deepspeed" in cell.checks():
            assert len(cell.uniform.layout()) > 1


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_a_variant_names_exists(variant):
    assert set(variant.left_out) <= set(CHECKS)
    assert all(len(reason) > 5 for reason in variant.left_out.values())
    assert set(variant.faults.values()) <= set(FAULTS)
    assert set(variant.refused) | set(variant.faults) <= set(variant.stages)
    for name in ("model", "setup", "train", "context", "built", "between"):
        if name in variant.fields:
            assert resolve(variant.fields[name])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_fault_has_its_script(fault, pytestconfig):
    assert (pytestconfig.rootpath / fault.script).exists()


def test_windows_are_corrected_by_a_fifth_and_by_five_and_beyond():
    assert min(factors(by_name("corrected by 0.1", 1))) <= 0.2
    assert max(factors(by_name("corrected by 3 to 8", 1))) >= 5


@pytest.mark.parametrize("name", ["fp32", "bf16", "overlap_comm, fp32", "frozen parameters", "4 ranks"])
def test_the_ragged_windows_of_a_cell_need_a_correction(name):
    assert any(factor != 1 for factor in factors(by_name(name, 2)))


def test_windows_of_one_pass_and_of_forty():
    one = windows_of(
        by_name("one pass on each rank", 2).ragged.batches(), by_name("one pass on each rank", 2).ragged.settings
    )
    forty = by_name("40 passes on each rank", 2).ragged
    assert {window.last - window.first for window in one} == {0}
    assert {window.last - window.first for window in windows_of(forty.batches(), forty.settings)} == {39}


def test_the_probe_keeps_a_setup_that_freezes_and_no_other():
    assert by_name("frozen parameters", 1).probed.setup.endswith(":frozen")
    assert by_name("reentrant checkpointing", 1).probed.setup.endswith(":adapters")
    assert by_name("client's torch SGD", 1).probed.setup is None


def test_a_row_whose_packages_are_missing_is_not_run_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(needed.EXTRAS, "ds_parity[peft]", ("json", "no_such_package_of_ours"))
    monkeypatch.setitem(needed.EXTRAS, "ds_parity[hf]", ("json",))
    absent = Cell(Variant("model", "far off", needs=("ds_parity[peft]",)), 2)
    assert absent.not_run == "no_such_package_of_ours is missing: install ds_parity[peft]"
    assert calls_of(absent, Path("nowhere")) == ()
    assert Cell(Variant("model", "here", needs=("ds_parity[hf]",)), 2).not_run is None


def test_a_row_whose_compiler_is_missing_is_not_run(monkeypatch):
    monkeypatch.setattr(needed, "_has_compiler", lambda: False)
    assert "C++ compiler can't be found here" in Cell(Variant("compile", "x", needs=(needed.COMPILER,)), 2).not_run


def test_the_extras_that_rows_need_exist(pytestconfig):
    known = configparser.ConfigParser()
    known.read(pytestconfig.rootpath / "setup.cfg")
    asked = {name for variant in VARIANTS for name in variant.needs if name.startswith("ds_parity[")}
    assert "ds_parity[peft]" in asked
    assert asked <= set(needed.EXTRAS)
    assert {name.removeprefix("ds_parity[").removesuffix("]") for name in asked} <= {*known["options.extras_require"]}


def test_a_patch_is_merged_section_by_section_and_none_removes():
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": {"lr": 1}}, "x": 1}
    patch = {"zero_optimization": {"overlap_comm": True}, "optimizer": {"type": "Adam"}, "x": None}
    assert merged(config, patch) == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "Adam"},
    }
    assert config["x"] == 1


def test_cells_of_a_variant_differ_in_their_stage_only():
    first, second = (Cell(VARIANTS[0], stage).ragged.config for stage in (1, 2))
    assert {**first, "zero_optimization": 0} == {**second, "zero_optimization": 0}
