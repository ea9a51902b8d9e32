"""Stopping at a boundary, and going on from a checkpoint: trace, `latest`, look-ahead; asserted in test_resuming.py."""

import logging
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.ranked import _from_all, build, forward, one_pass
from tests.distributed.ranked_passes import Batch, run

TASKS = ["stopped", "traces", "traces_that_end_early", "latest", "looked_ahead"]


def stopped(folder):
    """Rank 1, which soon runs dry, asks in its third pass."""
    found = {}
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
            told = [before, engine.stopping, windows[-1], engine.last_step.rollouts, engine.micro_steps]
            found[f"{stage} {ahead}"] = {"told": _from_all(told), "again": _from_all(run(engine, [Batch()])[0])}
    return found


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
    again = build(config(2, passes=4, trace=paths["resumed"]))
    untouched = _read(paths["resumed"]) == stood
    again.load_checkpoint(folder)
    cut = _read(paths["resumed"])
    _windows(again, 2, 4)
    texts = {name: _read(path) for name, path in paths.items()}
    fresh = build(config(2, passes=4, trace=paths["resumed"]))
    _windows(fresh, 0, 1)
    return {"untouched": untouched, "stood": stood, "cut": cut, **texts, "fresh": _read(paths["resumed"])}


def traces_that_end_early(folder):
    """A trace whose disk was full from step 2 on, a checkpoint of step 3."""
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder) / "trace.jsonl"
    first = build(config(2, passes=4, trace=str(path)))
    _windows(first, 0, 3)
    first.save_checkpoint(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_parity").addHandler(handler)
    again = build(config(2, passes=4, trace=str(path)))
    again.load_checkpoint(folder)
    logging.getLogger("ds_parity").removeHandler(handler)
    _windows(again, 3, 4)
    return {"kept": _read(f"{path}.before-4"), "new": _read(path), "said": said}


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
    return {"seen": _from_all([*seen, (Path(folder) / "latest").read_text()]), "files": files}


def looked_ahead(folder):
    """Windows of 3 passes, 2 known ahead, weighed by tokens: whole, where a chunk reaches into the second; and resumed."""
    found = {}
    for stage in (0, 2):
        extended = config(stage, passes=6, loss_weight="token")
        batches = [Batch(n, 1, 0, 1 + n * 7 % 5) for n in range(9)]
        whole = build(extended)
        run(whole, batches, lookahead=2)
        for saved in (1, 2):
            first = build(extended)
            run(first, batches[: 3 * saved], lookahead=2, finish=False)
            first.save_checkpoint(f"{folder}/{stage}-{saved}")
            again = build(extended)
            again.load_checkpoint(f"{folder}/{stage}-{saved}")
            run(again, batches[3 * saved :], lookahead=2)
            equal = torch.equal(weights.vector(whole.module), weights.vector(again.module))
            found[f"{stage} {saved}"] = equal and again.window.index == 3
    return found


def _windows(engine, start, end):
    """Windows of two passes."""
    for index in islice(range(100), 2 * start, 2 * end):
        one_pass(engine, index, rollouts=1)


def _read(path):
    dist.barrier()  # the first rank writes
    text = Path(path).read_text()
    dist.barrier()
    return text
