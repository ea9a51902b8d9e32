"""Ranks stop together between windows, and a run that goes on from what they leave is as one that never stopped."""

import time
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import Batch, build, forward, from_all, listen, one_pass, run_stream
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def stopped(folder):
    """Rank 1, which soon runs out of data, asks in its third pass."""
    results = {}
    for stage in STAGES:
        for ahead in (0, 3):
            engine, windows = build(config(stage, passes=4)), []
            before = engine.stopping
            stream = [Batch(n) for n in range(3 if dist.get_rank() else 20)]
            for handed, batch in enumerate(engine.passes(stream, lookahead=ahead), start=1):
                engine.backward(forward(engine, batch.seed))
                if dist.get_rank() and handed == 3:
                    engine.stop()
                engine.step()
                windows.append((engine.window.index, engine.window.passes))
            stood = [before, engine.stopping, windows[-1], engine.last_step.rollouts, engine.micro_steps]
            results[f"{stage} {ahead}"] = {
                "stood": from_all(stood),
                "again": from_all(run_stream(engine, [Batch()])[0]),
            }
    return results


class TestAStopThatOneRankAsksFor:
    def test_comes_on_all_ranks_at_the_boundary_after_the_next_exchange(self, two_ranks, stage):
        """Windows of 2, 3, 4, 4 passes. Without look-ahead the fourth pass says so, with three the seventh to ninth."""
        for ahead, passes, windows in (("0", 5, 2), ("3", 9, 3)):
            result = two_ranks.of(stopped)[f"{stage} {ahead}"]
            assert result["stood"] == [[False, True, [windows, 0], 4, passes]] * 2

    def test_holds_for_the_passes_after_it_too(self, two_ranks, stage):
        assert [two_ranks.of(stopped)[f"{stage} {ahead}"]["again"] for ahead in "03"] == [[0, 0]] * 2


@on_two_ranks
def traces(folder):
    """Four windows at once; and two, a checkpoint, another window and a half-written line, then a resumed run."""
    Path(folder).mkdir(exist_ok=True)
    paths = {name: f"{folder}/{name}.jsonl" for name in ("whole", "resumed")}
    whole, first = (build(config(2, passes=4, trace=path)) for path in paths.values())
    _windows(whole, 0, 4)
    _windows(first, 0, 2)
    first.save_checkpoint(folder)
    _windows(first, 2, 3)
    if dist.get_rank() == 0:
        with Path(paths["resumed"]).open("a") as file:
            file.write('{"step":4,"pas')
    stood = _read(paths["resumed"])
    del first  # as if its process had been killed: while it lived, no other engine could have its trace
    again = build(config(2, passes=4, trace=paths["resumed"]))
    untouched = _read(paths["resumed"]) == stood
    again.load_checkpoint(folder)
    cut = _read(paths["resumed"])
    _windows(again, 2, 4)
    texts = {name: _read(path) for name, path in paths.items()}
    again.finish()
    fresh = build(config(2, passes=4, trace=paths["resumed"]))
    _windows(fresh, 0, 1)
    return {"untouched": untouched, "stood": stood, "cut": cut, **texts, "fresh": _read(paths["resumed"])}


@on_two_ranks
def traces_that_end_early(folder):
    """A trace whose disk was full from step 2 on, a checkpoint of step 3."""
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder) / "trace.jsonl"
    first = build(config(2, passes=4, trace=str(path)))
    _windows(first, 0, 3)
    first.save_checkpoint(folder)
    first.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    said, stop_listening = listen()
    again = build(config(2, passes=4, trace=str(path)))
    again.load_checkpoint(folder)
    stop_listening()
    _windows(again, 3, 4)
    result = {"kept": _read(f"{path}.before-4"), "new": _read(path), "said": said.getvalue()}
    if dist.get_rank() == 0:
        path.unlink()
    dist.barrier()
    again.load_checkpoint(folder)
    _windows(again, 3, 4)
    return {**result, "anew": _read(path)}


def _windows(engine, start, end):
    """Windows of two passes."""
    for index in islice(range(100), 2 * start, 2 * end):
        one_pass(engine, index, rollouts=1)


def _read(path):
    dist.barrier()  # the first rank writes
    text = Path(path).read_text()
    dist.barrier()
    return text


class TestATraceThatIsGoneOnWith:
    def test_is_that_of_a_run_that_was_never_stopped(self, two_ranks):
        result = two_ranks.of(traces)
        resumed, whole = (result[name].splitlines() for name in ("resumed", "whole"))
        assert len(whole) == 5
        assert resumed[1:] == whole[1:]
        assert resumed[0] == result["stood"].splitlines()[0]

    def test_is_left_alone_until_a_checkpoint_is_loaded_and_then_cut_back_to_its_step(self, two_ranks):
        result = two_ranks.of(traces)
        assert result["untouched"]
        assert result["stood"].count("\n") == 4
        assert result["stood"].startswith(result["cut"])
        assert result["cut"].count("\n") == 3

    def test_is_overwritten_by_a_run_that_loads_none(self, two_ranks):
        result = two_ranks.of(traces)
        assert result["fresh"].splitlines() == result["resumed"].splitlines()[:2]

    def test_is_kept_beside_a_new_one_where_it_ended_before_the_checkpoint(self, two_ranks):
        result = two_ranks.of(traces_that_end_early)
        assert [line[:9] for line in result["kept"].splitlines()[1:]] == ['{"step":1']
        assert [line[:9] for line in result["new"].splitlines()[1:]] == ['{"step":4']
        assert "ends before step 3" in result["said"].splitlines()[0]

    def test_begins_anew_where_the_file_is_gone(self, two_ranks):
        result = two_ranks.of(traces_that_end_early)
        assert result["anew"] == result["new"]


@on_two_ranks
def latest(folder):
    """What `latest` names while the last rank, which is slow, has not begun with its file; then afterwards."""
    engine, seen = build(config(1, passes=4, optimizer="AdamW")), []
    _windows(engine, 0, 1)
    engine.save_checkpoint(folder, tag="one")
    save = engine.checkpoint_engine.save

    def late(state_dict, path):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.5)
            seen.append((Path(folder) / "latest").read_text())
        save(state_dict, path)

    engine.checkpoint_engine.save = late
    engine.save_checkpoint(folder, tag="two")
    seen.append((Path(folder) / "latest").read_text())
    engine.save_checkpoint(folder, tag="three", save_latest=False)
    files = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
    return {"seen": from_all([*seen, (Path(folder) / "latest").read_text()]), "files": files}


def test_latest_names_a_checkpoint_when_all_ranks_have_written_it_and_only_where_it_is_to(two_ranks):
    result = two_ranks.of(latest)
    assert result["seen"] == [["two", "two"], ["one", "two", "two", "two"]]
    assert "latest.new" not in result["files"]


@on_two_ranks
def looked_ahead(folder):
    """Windows of 3 passes, 2 of them known ahead, weighed by tokens: without a break, and resumed after 1 and 2."""
    results = {}
    for stage in (0, 2):
        extended = config(stage, passes=6, loss_weight="token")
        batches = [Batch(n, 1, 0, 1 + n * 7 % 5) for n in range(9)]
        whole = build(extended)
        run_stream(whole, batches, lookahead=2)
        for saved in (1, 2):
            first = build(extended)
            run_stream(first, batches[: 3 * saved], lookahead=2, finish=False)
            first.save_checkpoint(f"{folder}/{stage}-{saved}")
            again = build(extended)
            again.load_checkpoint(f"{folder}/{stage}-{saved}")
            run_stream(again, batches[3 * saved :], lookahead=2)
            equal = torch.equal(weights.vector(whole.module), weights.vector(again.module))
            results[f"{stage} {saved}"] = equal and again.window.index == 3
    return results


@pytest.mark.parametrize("saved", ["1", "2"])
@pytest.mark.parametrize("stage", ["0", "2"])
def test_windows_longer_than_the_look_ahead_go_on_bit_for_bit(two_ranks, stage, saved):
    """How many passes happened to be known of a window may not enter its gradient: a resumed run knows others."""
    assert two_ranks.of(looked_ahead)[f"{stage} {saved}"]
