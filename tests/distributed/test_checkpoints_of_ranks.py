"""All ranks save and load one checkpoint: what would be a mixture, or a part, is refused on every rank."""

import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_four_ranks, on_one_rank, on_two_ranks

pytestmark = pytest.mark.ranks
OPTIONS = ("load_optimizer_states", "load_lr_scheduler_states", "load_module_strict", "load_module_only")


def _trained(stage, seed, **keywords):
    engine = build(config(stage, passes=4, optimizer="AdamW", exchange_timeout=60), **keywords)
    for number in range(2):
        one_pass(engine, seed + number)
    return engine


def _trains(engine):
    for number in range(2):
        one_pass(engine, 7 + number)
    return engine.last_step.step


@on_two_ranks
def mixtures(folder):
    """By stage and what differs between ranks: what loading ends in; then whether a whole checkpoint goes on."""
    results, second = {}, bool(dist.get_rank())
    for stage in STAGES:
        path = f"{folder}/{stage}"
        one, other = _trained(stage, 1), _trained(stage, 5)
        one.save_checkpoint(path, tag="a")
        other.save_checkpoint(path, tag="b")
        # Two folders of one tag, as where hosts do not share it: each rank has that of another run.
        for engine, name in ((one, "own-0"), (other, "own-1")):
            engine.save_checkpoint(f"{path}/{name}", tag="a")
        dist.barrier()
        if second:
            shutil.copytree(f"{path}/own-1/a", f"{path}/lacking-1/b")
            Path(f"{path}/lacking-0").mkdir()
        dist.barrier()
        own, lacks, loading = f"{path}/own-{int(second)}", f"{path}/lacking-{int(second)}", _trained(stage, 9)
        calls = {
            "tag": (path, {"tag": "b" if second else "a"}),
            "latest": (path, {"tag": "a"} if second else {}),
            "folder": (lacks, {"tag": "b"}),
            # Its folder can't be looked for on the second rank, as where that may not look into it.
            "unread": (f"{path}/{'x' * 300}" if second else path, {"tag": "a"}),
            **{name: (path, {"tag": "a", name: second}) for name in OPTIONS},
            "save": (own, {"tag": "a"}),
        }
        for name, (where, options) in calls.items():
            said = refusal(partial(loading.load_checkpoint, where, **options))
            results[f"{name} {stage}"] = from_all(said)
        loading.load_checkpoint(path, **({"tag": "b"} if second else {}))
        results[f"then {stage}"] = from_all(_trains(loading))
    return results


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["tag", "latest", *OPTIONS])
def test_ranks_that_ask_for_different_loads_are_refused_before_them(two_ranks, stage, name):
    differs = "tag (rank 0 has 'a'; rank 1 has 'b')" if name == "tag" else "tag (rank 0 has 'b'; rank 1 has 'a')"
    differs = differs if name in ("tag", "latest") else f"{name} (rank 0 has False; rank 1 has True)"
    for said in two_ranks.of(mixtures)[f"{name} {stage}"]:
        assert said.startswith("RankDesyncError: load_checkpoint(")
        assert f"ranks differ in {differs}" in said
        assert "Nothing was loaded" in said


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_find_different_saves_under_one_tag_are_refused(two_ranks, stage):
    first, second = two_ranks.of(mixtures)[f"save {stage}"]
    assert first.startswith("RankDesyncError: load_checkpoint(")
    assert "ranks differ in checkpoint (rank 0 has " in first
    assert "start a new engine" in first
    assert second.partition("ranks differ")[2] == first.partition("ranks differ")[2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_that_one_rank_does_not_find_is_an_error_on_every_rank(two_ranks, stage):
    for said in two_ranks.of(mixtures)[f"folder {stage}"]:
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert "rank 0 finds no folder of the tag 'b' there, and rank 1 finds one. Nothing was loaded" in said


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_that_one_rank_cannot_look_into_is_an_error_on_every_rank(two_ranks, stage):
    for said in two_ranks.of(mixtures)[f"unread {stage}"]:
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert "can't be read on rank 1 (OSError: [Errno 36] File name too long" in said
        assert "Nothing was loaded" in said


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_checkpoint_is_loaded_however_ranks_name_it(two_ranks, stage):
    assert two_ranks.of(mixtures)[f"then {stage}"] == [2, 2]


@on_two_ranks
def exchanged(folder):
    """By stage: what loading ends in where each rank has the other's file of the optimizer."""
    results = {}
    for stage in STAGES[1:]:
        path = f"{folder}/exchanged-{stage}"
        _trained(stage, 1).save_checkpoint(path, tag="a")
        dist.barrier()
        if dist.get_rank() == 0:
            first, second = sorted(Path(path, "a").glob("*optim_states.pt"))
            beside = first.rename(f"{path}/beside")
            second.rename(first)
            beside.rename(second)
        dist.barrier()
        loading = _trained(stage, 9)
        results[f"{stage}"] = from_all(refusal(partial(loading.load_checkpoint, path)))
    return results


@pytest.mark.parametrize("stage", STAGES[1:])
def test_files_of_two_ranks_that_were_exchanged_are_refused(two_ranks, stage):
    for said in two_ranks.of(exchanged)[f"{stage}"]:
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert "rank_0_mp_rank_00_optim_states.pt was saved as " in said


class _Layer(torch.nn.Module):
    """As many numbers in one weight, of one name, in another shape."""

    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(shape))


def _partly_frozen():
    """An engine on ZeRO 3 over a model with a frozen weight whose parts are as long on no other number of ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1))
    model[0].bias.requires_grad_(False)
    keys = config(3, passes=4, optimizer="AdamW", exchange_timeout=60)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


@on_two_ranks
def partly_frozen(folder):
    _partly_frozen().save_checkpoint(f"{folder}/frozen", tag="a")


@on_one_rank.after(saved=partly_frozen)
@on_four_ranks.after(saved=partly_frozen)
def partly_frozen_elsewhere(folder, saved):
    """What the load on another number of ranks ends in."""
    engine = _partly_frozen()
    return from_all(refusal(lambda: engine.load_checkpoint(f"{saved}/frozen")))


def test_parts_of_frozen_weights_say_that_other_ranks_saved_them(one_rank, four_ranks):
    for launched in (one_rank, four_ranks):
        for said in launched.of(partly_frozen_elsewhere):
            assert said.startswith("CheckpointError")
            assert "ds_to_universal" in said
            assert "parameter groups" not in said


@on_two_ranks
def shapes(folder):
    """By stage and precision: what a load ends in where the weight has another shape of as many numbers."""

    def engine(stage, dtype, shape):
        model, keys = _Layer(shape), config(stage, dtype, passes=4, exchange_timeout=60)
        return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]

    results = {}
    for stage in STAGES:
        for dtype in ("fp32", "bf16"):
            path = f"{folder}/shapes-{stage}-{dtype}"
            engine(stage, dtype, (8, 3)).save_checkpoint(path, tag="a")
            answers = [refusal(partial(engine(stage, dtype, it).load_checkpoint, path)) for it in ((8, 3), (12, 2))]
            results[f"{stage} {dtype}"] = from_all(answers)
    return results


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_of_another_shape_are_refused(two_ranks, stage, dtype):
    for same, other in two_ranks.of(shapes)[f"{stage} {dtype}"]:
        assert same == "nothing was raised"
        assert other.startswith("CheckpointError: ")
        assert "another model" in other


def _raises_in_the_load(engine, path, raises):
    """Let a load raise in DeepSpeed, on one rank; where ranks wait for each other inside (ZeRO 3), behind that."""

    def own(src, dst):
        if raises:
            raise ds_parity.WindowError("only here")
        dst.load_state_dict(src, strict=bool(src))

    if engine.zero_optimization_stage() < 3:
        return refusal(partial(engine.load_checkpoint, path, tag="a", custom_load_fn=own))
    bare = engine.__wrapped__
    load = bare.load_checkpoint
    bare.load_checkpoint = lambda *args, **options: (load(*args, **options), own({}, engine.module))[0]
    said = refusal(partial(engine.load_checkpoint, path, tag="a"))
    del bare.load_checkpoint
    return said


@on_two_ranks
def raised_in_loads(folder):
    """By stage: what a load ends in that raises on the second rank alone; then whether the next one goes on."""
    results = {}
    for stage in STAGES:
        path, engine = f"{folder}/{stage}", _trained(stage, 1)
        engine.save_checkpoint(path, tag="a")
        results[f"raises {stage}"] = from_all(_raises_in_the_load(engine, path, bool(dist.get_rank())))
        engine.load_checkpoint(path, tag="a")
        results[f"then {stage}"] = from_all(_trains(engine))
        if dist.get_rank():  # as a trace that can't be opened again
            engine._self_driver.on_resume.append(_raises_behind)
        results[f"behind {stage}"] = from_all(refusal(partial(engine.load_checkpoint, path, tag="a")))
        results[f"then refused {stage}"] = from_all(refusal(lambda: one_pass(engine, 9)))  # noqa: B023
    return results


def _raises_behind(step):
    raise ds_parity.WindowError("only here")


@pytest.mark.parametrize("stage", STAGES)
def test_a_load_that_raises_on_one_rank_is_told_to_the_others(two_ranks, stage):
    first, second = two_ranks.of(raised_in_loads)[f"raises {stage}"]
    assert first.startswith("RankDesyncError: ")
    assert "rank 1 has raised WindowError: only here" in first
    assert second == "WindowError: only here"
    assert two_ranks.of(raised_in_loads)[f"then {stage}"] == [2, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_what_raises_on_one_rank_behind_its_load_is_told_to_the_others(two_ranks, stage):
    result = two_ranks.of(raised_in_loads)
    first, second = result[f"behind {stage}"]
    assert first.startswith("RankDesyncError: ")
    assert "rank 1 has raised WindowError: only here" in first
    assert second == "WindowError: only here"
    for said in result[f"then refused {stage}"]:
        assert said.startswith("CheckpointError: ")


@on_two_ranks
def parts(folder):
    """By stage and what differs between ranks that save: what it ends in, what `latest` names, and what is there."""
    results, second = {}, bool(dist.get_rank())
    for stage in STAGES:
        path, engine = f"{folder}/{stage}", _trained(stage, 1)
        engine.save_checkpoint(path, tag="whole")
        calls = {
            "tag": {"tag": f"x{int(second)}"},
            "save_latest": {"tag": "y", "save_latest": second},
            "exclude_frozen_parameters": {"tag": "y", "exclude_frozen_parameters": second},
        }
        for name, options in calls.items():
            said = refusal(partial(engine.save_checkpoint, path, **options))
            results[f"{name} {stage}"] = from_all(said)
        dist.barrier()
        found = sorted(one.name for one in Path(path).iterdir() if one.is_dir())
        results[f"then {stage}"] = from_all([found, Path(path, "latest").read_text(), _trains(engine)])
    return results


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["tag", "save_latest", "exclude_frozen_parameters"])
def test_ranks_that_save_different_checkpoints_are_refused_before_anything_is_written(two_ranks, stage, name):
    for said in two_ranks.of(parts)[f"{name} {stage}"]:
        assert said.startswith(f"RankDesyncError: save_checkpoint(): ranks differ in {name} (rank 0 has ")
        assert "Nothing was written" in said
    assert two_ranks.of(parts)[f"then {stage}"] == [[["whole"], "whole", 2]] * 2


# By stage: the rank that can't write, and its file.
UNWRITTEN = {
    0: (0, "mp_rank_00_model_states.pt"),
    1: (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    2: (1, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    3: (1, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
}


class _Odd(int):
    """A value of the caller's own that raises where it is compared."""

    def __eq__(self, other):
        raise ds_parity.WindowError("can't be compared")

    __hash__ = int.__hash__


@contextmanager
def _no_state(of, *, raises=True):
    if raises:
        of.state_dict = partial(_out_of_memory, of)
    yield
    if raises:
        del of.state_dict


def _out_of_memory(*_, **__):
    raise RuntimeError("out of memory")


@on_two_ranks
def unwritten(folder):
    """By stage and what one rank can't write, because a folder or file lies in its place: what saving ends in."""
    results = {}
    for stage, (_, name) in UNWRITTEN.items():
        path, engine = Path(folder, str(stage)), _trained(stage, 1)
        engine.save_checkpoint(path, tag="whole")
        if dist.get_rank() == 0:
            Path(path, "broken", name).mkdir(parents=True)
            Path(path, "file").touch()
            Path(f"{path}-latest", "latest.new").mkdir(parents=True)
        dist.barrier()
        places = {"file": path, "folder": path / "file", "latest": f"{path}-latest"}
        for what, place in places.items():
            own = place if what != "folder" or dist.get_rank() == UNWRITTEN[stage][0] else path
            results[f"{what} {stage}"] = from_all(refusal(partial(engine.save_checkpoint, own, tag="broken")))
            latest = Path(place, "latest")
            results[f"{what} {stage}, then"] = from_all(latest.is_file() and latest.read_text())
        with _no_state(engine.__wrapped__.optimizer, raises=dist.get_rank() == UNWRITTEN[stage][0]):
            results[f"state {stage}"] = from_all(refusal(partial(engine.save_checkpoint, path, tag="stateless")))
        results[f"state {stage}, then"] = from_all(Path(path, "latest").read_text())
        results[f"empty {stage}"] = from_all(refusal(partial(engine.save_checkpoint, path, tag="")))
        odd = {"own": 1, "global_steps": _Odd()} if dist.get_rank() else {}
        results[f"odd {stage}"] = from_all(refusal(partial(engine.save_checkpoint, path, "odd", odd)))
        trains = _trains(engine)
        engine.save_checkpoint(path, tag="later")
        results[f"then {stage}"] = from_all([trains, Path(path, "latest").read_text()])
        with _no_state(engine.module):
            results[f"kept {stage}"] = from_all(refusal(partial(engine.save_checkpoint, path, tag="later")))
        names = from_all(sorted(file.name for file in Path(path, "later").iterdir()))
        loaded = refusal(partial(engine.load_checkpoint, path, tag="later"))
        results[f"kept {stage}, then"] = [[*names], from_all(loaded)]
        with _no_state(engine.__wrapped__.optimizer, raises=dist.get_rank() == UNWRITTEN[stage][0]):
            over = refusal(partial(engine.save_checkpoint, path, tag="later"))
        left = sorted(file.name for file in Path(path, "later").glob("*_optim_states.pt"))
        results[f"over {stage}"] = from_all([over, left])
    return results


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_save_that_fails_leaves_no_states_of_an_earlier_one_beside_its_own(two_ranks, stage):
    """A conversion would take a part of the weights from each, without an error on ZeRO 3."""
    for said, left in two_ranks.of(unwritten)[f"over {stage}"]:
        assert said.startswith("CheckpointError: save_checkpoint(")
        assert left == ["zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_that_has_written_nothing_leaves_the_earlier_one_of_its_tag(two_ranks, stage):
    result = two_ranks.of(unwritten)
    for said in result[f"kept {stage}"]:
        assert said.startswith("CheckpointError: save_checkpoint(")
    names, loaded = result[f"kept {stage}, then"]
    assert loaded == ["nothing was raised"] * 2
    assert not [name for name in names[0] + names[1] if name.endswith(".earlier")]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["file", "folder", "latest"])
def test_a_rank_that_cannot_write_is_named_on_every_rank_and_latest_stays(two_ranks, stage, what):
    result, rank = two_ranks.of(unwritten), 0 if what == "latest" else UNWRITTEN[stage][0]
    for said in result[f"{what} {stage}"]:
        assert said.startswith("CheckpointError: save_checkpoint(")
        assert f"rank {rank} could not write {'the file latest' if what == 'latest' else 'its files'} (" in said
    assert result[f"{what} {stage}, then"] == ["whole" if what == "file" else False] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_state_cannot_be_made_is_named_on_every_rank(two_ranks, stage):
    result, rank = two_ranks.of(unwritten), UNWRITTEN[stage][0]
    for said in result[f"state {stage}"]:
        assert said.startswith("CheckpointError: save_checkpoint(")
        assert f"rank {rank} could not write its files (RuntimeError: out of memory)" in said
    assert result[f"state {stage}, then"] == ["whole"] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_tag_is_refused_on_every_rank(two_ranks, stage):
    for said in two_ranks.of(unwritten)[f"empty {stage}"]:
        assert said.startswith("CheckpointError: save_checkpoint(")
        assert "rank 0 gives an empty tag" in said


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_state_that_raises_on_one_rank_is_told_to_the_other(two_ranks, stage):
    first, second = two_ranks.of(unwritten)[f"odd {stage}"]
    assert first.startswith("RankDesyncError: ")
    assert "rank 1 has raised WindowError: can't be compared" in first
    assert second == "WindowError: can't be compared"


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_and_saves_again_behind_a_save_that_failed(two_ranks, stage):
    assert two_ranks.of(unwritten)[f"then {stage}"] == [[2, "later"]] * 2
