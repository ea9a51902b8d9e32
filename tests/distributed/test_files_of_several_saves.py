"""A folder with files of several saves, and states that would go to other parameters, are refused on every rank."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import build, from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks

pytestmark = pytest.mark.ranks
CELLS = {
    "1 fp32": (1, {}),
    "1 bf16 summed in fp32": (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "2 fp32": (2, {}),
    "2 bf16": (2, {"bf16": {"enabled": True}}),
    "3 fp32": (3, {}),
}
NAMED_OFTEN, NAMED_SELDOM = ("1 bf16 summed in fp32", "2 fp32", "3 fp32"), ("0 fp32", "1 fp32", "2 bf16")
STALE = ("none", "the first rank's optimizer", "the last rank's optimizer", "the optimizer's files", "the model's file")


def _trained(cell, windows, **keywords):
    stage, more = CELLS[cell]
    engine = build({**config(stage, passes=4, optimizer="AdamW", exchange_timeout=60), **more}, **keywords)
    _goes_on(engine, windows)
    return engine


def _goes_on(engine, windows):
    kind = next(engine.module.parameters()).dtype
    for number in range(2 * windows):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(engine.device, kind)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()


def _is_stale(file, which):
    if "optim_states" not in file:
        return which == "the model's file"
    own = {
        "the first rank's optimizer": "rank_0",
        "the last rank's optimizer": "rank_1",
        "the optimizer's files": "rank_",
    }
    return which in own and own[which] in file


def stale_files_in(cells, folder):
    """By cell and what is left of an earlier save under the tag: what a load ends in; then with weights alone."""
    results = {}
    for cell in cells:
        path = Path(folder) / cell.replace(" ", "-")
        engine = _trained(cell, 1)
        engine.save_checkpoint(str(path), tag="best")
        if dist.get_rank() == 0:
            shutil.copytree(path / "best", path / "before")
        dist.barrier()
        _goes_on(engine, 1)
        engine.save_checkpoint(str(path), tag="best")
        for which in STALE:
            if dist.get_rank() == 0:
                mixed = path / which.replace(" ", "-") / "best"
                shutil.copytree(path / "best", mixed)
                for file in (path / "before").iterdir():
                    if _is_stale(file.name, which):
                        shutil.copy(file, mixed)
            dist.barrier()
            where, loading = str(path / which.replace(" ", "-")), _trained(cell, 1)
            results[f"{cell} {which}"] = from_all(refusal(lambda: loading.load_checkpoint(where, tag="best")))  # noqa: B023
            alone = _trained(cell, 1)
            said = refusal(lambda: alone.load_checkpoint(where, tag="best", load_optimizer_states=False))  # noqa: B023
            results[f"{cell} {which}, weights alone"] = from_all(said)
    return results


OFTEN, SELDOM = ("1 bf16 summed in fp32", "2 fp32", "3 fp32"), ("1 fp32", "2 bf16")


@on_two_ranks
def stale_files(folder):
    return stale_files_in(OFTEN, folder)


@at_length_on_two_ranks
def stale_files_at_length(folder):
    return stale_files_in(SELDOM, folder)


MARKED = by_length(OFTEN, SELDOM, "two_ranks")


@pytest.fixture
def of_cell(request, cell):
    """What loads of a cell have ended in."""
    return either(request, stale_files, stale_files_at_length, seldom=cell in SELDOM)


@pytest.mark.parametrize("which", STALE[1:])
@pytest.mark.parametrize("cell", MARKED)
def test_files_of_two_saves_are_refused_on_every_rank(of_cell, cell, which):
    answers = of_cell[f"{cell} {which}"]
    assert all(
        said.startswith(("CheckpointError: load_checkpoint(", "RankDesyncError: load_checkpoint(")) for said in answers
    )
    assert all("ave" in said and "start a new engine" in said for said in answers)
    assert len(set(answers)) == 1


@pytest.mark.parametrize("cell", MARKED)
def test_one_save_is_loaded_and_so_are_its_weights_alone_beside_an_optimizer_of_before(of_cell, cell):
    for which in ("none", "none, weights alone", *(f"{one}, weights alone" for one in STALE[1:4])):
        if cell.startswith("3") and which != "none":
            continue  # ZeRO 3 has the weights in the optimizer's files
        assert set(of_cell[f"{cell} {which}"]) == {"nothing was raised"}, which


class Named(torch.nn.Module):
    """Weights under given names, in their order, with the sizes that these names have."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(len(names))
        for name in names:
            size = 2 if name.startswith("extra") else 4
            setattr(self, name, torch.nn.Parameter(torch.randn(size)))

    def forward(self, x):
        return sum((one * x[: len(one)]).sum() for one in self.parameters()) ** 2


def _named(cell, names):
    stage, more = CELLS.get(cell, (0, {}))
    made = {**config(stage, passes=2, optimizer="AdamW", exchange_timeout=60), **more}
    model = Named(names)
    return ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=made)[0]


def _window(engine):
    kind = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(4, device=engine.device, dtype=kind)), rollouts=1, tokens=1)
    engine.step()


OTHERS = {
    "in another order": ("b", "a", "c"),
    "with one more in front": ("extra", "a", "b", "c"),
    "with one more in the middle": ("a", "extra", "b", "c"),
    "renamed in their places": ("d", "e", "f"),
    "one renamed": ("a", "e", "c"),
    "the same": ("a", "b", "c"),
}


@on_two_ranks
def not_strict(folder):
    return not_strict_in(NAMED_OFTEN, folder)


@at_length_on_two_ranks
def not_strict_of_others(folder):
    return not_strict_in(NAMED_SELDOM, folder)


def not_strict_in(cells, folder):
    """By cell, names and what switches the check of names off: what loading ends in."""
    results = {}
    for cell in cells:
        path = f"{folder}/{cell.replace(' ', '-')}"
        engine = _named(cell, ("a", "b", "c"))
        _window(engine)
        engine.save_checkpoint(path, tag="a")
        for (what, names), custom in product(OTHERS.items(), (False, True)):
            other = _named(cell, names)
            options = {"custom_load_fn": lambda src, dst: None} if custom else {"load_module_strict": False}
            said = refusal(lambda: other.load_checkpoint(path, tag="a", **options))  # noqa: B023  # called here
            results[f"{cell} {what} {custom}"] = from_all(said)
    return results


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("cell", by_length(NAMED_OFTEN, NAMED_SELDOM, "two_ranks"))
def test_states_go_to_no_other_parameter_where_names_need_not_be_all_there(request, cell, what, custom):
    found = either(request, not_strict, not_strict_of_others, seldom=cell in NAMED_SELDOM)
    answers = found[f"{cell} {what} {custom}"]
    if what in ("renamed in their places", "one renamed", "the same"):
        assert set(answers) == {"nothing was raised"}
    else:
        assert not any(said == "nothing was raised" for said in answers)
        if what == "in another order":
            assert all(
                said.startswith("CheckpointError: the checkpoint's parameter groups are not") for said in answers
            )


@on_two_ranks
def tags(folder):
    """By tag: what a save ends in, and what lies beside the folder of all checkpoints then."""
    engine, found = _trained("2 fp32", 1), {}
    for tag in (" blank", "blank\n", "", ".", "..", "../beside", f"{folder}/beside", "in/side", "fine tag"):
        said = refusal(lambda: engine.save_checkpoint(f"{folder}/all", tag=tag))  # noqa: B023  # called here
        found[tag.replace(str(folder), "ROOT")] = from_all(said)
    return {**found, "lies beside": [one.name for one in Path(folder).iterdir()]}


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (" blank", "begins or ends with blanks"),
        ("blank\n", "begins or ends with blanks"),
        ("", "an empty tag"),
        (".", "an empty tag"),
        ("..", "a tag that leads out of that folder"),
        ("../beside", "a tag that leads out of that folder"),
        ("ROOT/beside", "a tag that leads out of that folder"),
        ("in/side", "nothing was raised"),
        ("fine tag", "nothing was raised"),
    ],
)
def test_a_tag_names_a_folder_below_that_of_all_checkpoints(two_ranks, tag, says):
    found = two_ranks.of(tags)
    for said in found[tag]:
        assert says in said
        assert says == said or said.startswith("CheckpointError: save_checkpoint(")
    assert "beside" not in found["lies beside"]


def _left_over(folder):
    """Copies of the last rank's files, as a run of four ranks would have left them, and the names of all files."""
    if dist.get_rank() == 0:
        for file in list(folder.glob("*zero_pp_rank_1_*")):
            for rank in (2, 3):
                shutil.copy(file, folder / file.name.replace("rank_1_", f"rank_{rank}_", 1))
    dist.barrier()


def _ranks_with_files(folder):
    return sorted({file.name.split("zero_pp_rank_")[1][0] for file in folder.glob("*zero_pp_rank_*")})


@at_length_on_two_ranks
def files_of_more_ranks(folder):
    """By cell: of which ranks there are files, before and behind a save, and what a universal load ends in.

    Then what one ends in of files that nobody has removed.
    """
    results = {}
    for cell in CELLS:
        path = Path(folder) / cell.replace(" ", "-")
        engine = _trained(cell, 1)
        engine.save_checkpoint(str(path), tag="global_step1")
        _left_over(path / "global_step1")
        (path / "global_step1" / "notes_states.pt").write_text("mine")
        before = _ranks_with_files(path / "global_step1")
        engine.save_checkpoint(str(path), tag="global_step1")
        dist.barrier()
        found = {"before": before, "behind": _ranks_with_files(path / "global_step1")}
        found["mine"] = (path / "global_step1" / "notes_states.pt").exists()
        if cell.startswith("3"):
            found["right"] = _converted_and_loaded(path, cell, engine)
            _left_over(path / "global_step1")
            shutil.rmtree(path / "universal", ignore_errors=True)
            dist.barrier()
            found["wrong"] = _converted_and_loaded(path, cell, engine)
        results[cell] = found
    return from_all(results)


def _converted_and_loaded(path, cell, saved):
    """What a load ends in of what is converted, and whether each weight is that of the engine that saved."""
    said = converted(str(path), 1)
    assert said in (None, "nothing was raised"), said
    stage, more = CELLS[cell]
    made = {**config(stage, passes=4, optimizer="AdamW", exchange_timeout=60), **more}
    engine = build({**made, "checkpoint": {"load_universal": True}})
    _goes_on(engine, 1)
    said = from_all(refusal(lambda: engine.load_checkpoint(str(path), tag="universal")))
    return said, all(map(torch.equal, _whole_weights(saved), _whole_weights(engine)))


def _whole_weights(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return [one.detach().clone() for one in engine.module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_files_of_ranks_that_a_save_has_not_are_removed(two_ranks_at_length, cell):
    for results in two_ranks_at_length.of(files_of_more_ranks):
        found = results[cell]
        assert found["before"] == ["0", "1", "2", "3"]
        assert found["behind"] == ["0", "1"]
        assert found["mine"]


@pytest.mark.slow
def test_what_was_converted_with_files_of_more_ranks_is_refused(two_ranks_at_length):
    for results in two_ranks_at_length.of(files_of_more_ranks):
        said, equal = results["3 fp32"]["right"]
        assert said == ["nothing was raised"] * 2
        assert equal
        said, _ = results["3 fp32"]["wrong"]
        assert all("has the files of 4 ranks, and 2 have saved it" in one for one in said), said
