"""Checkpoints that are loaded at any moment: a run goes on bit for bit, or as the oracle does, or is refused."""

import pytest
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

RULES = {
    "carry": {"overshoot": "carry"},
    "reset": {"overshoot": "reset"},
    "target": {"loss_weight": "target"},
}


def stands(engine):
    """Where an engine is, beside its weights."""
    last, window = engine.last_step, engine.window
    return [
        *(last.rollouts, last.step, list(last.lr), engine.global_samples, engine.micro_steps),
        *(window.index, window.rollouts, window.closes_at - window.opened_at),
    ]


def _loss(engine, index):
    return engine(*(one.to(engine.device) for one in sample(dist.get_rank(), index, 2)))


@play.right(CELLS, RULES, bound=0.0)
def a_run_goes_on_from_any_moment(case):
    """The same engine inside a window, and new ones at once and between a backward and its step."""
    adam = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
    extended = {**config(case.cell, 7, section=RULES[case.variant]), "optimizer": adam}
    first = engine_of(extended)

    def run(engine, indices):
        for index in indices:
            engine.backward(_loss(engine, index), rollouts=2)
            engine.step()
        return engine

    run(first, range(5))
    start = 5
    while first.window.passes:
        run(first, [start])
        start += 1
    first.save_checkpoint(case.folder, "saved")
    rest = range(start, start + 6)
    right = weights_of(run(first, rest))
    stood, apart, got = stands(first), [], []

    owing = engine_of(extended)
    run(owing, range(30, 33))
    owing.backward(_loss(owing, 99), rollouts=2)
    for engine in (run(first, [60]), engine_of(extended), owing):
        engine.load_checkpoint(case.folder)
        apart.append(distance(weights_of(run(engine, rest)), right))
        got.append(stands(engine))
    return Found(max(apart), got, [stood] * 3)


def load(watched, weights):
    """Give the oracle the weights of an earlier moment."""
    named = dict(watched.oracle.model.named_parameters())
    for name, value in weights.items():
        named[name].data.copy_(value)


@play.right([Cell(0), Cell(2), Cell(3)])
def a_checkpoint_is_loaded_inside_passes(case):
    """In the fourth pass, behind which the loop goes on; the window that was open is gone."""
    watched = Watched(case.cell)
    watched.passes(range(2))
    watched.engine.save_checkpoint(case.folder, "saved")
    stream = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(10, 18)]
    for number, batch in enumerate(watched.engine.passes(stream, lookahead=3)):
        if number == 3:
            watched.engine.load_checkpoint(case.folder)
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    for index in range(13, 18):
        watched.noted(index)
    return watched.found()


@play.right([one for one in CELLS if one.stage < 3])
def the_module_alone_is_loaded(case):
    """Weights go back by two steps, counts stay, and the next windows go on from there."""
    watched = Watched(case.cell, target=4)
    watched.passes(range(2))
    watched.engine.save_checkpoint(case.folder, "saved")
    kept = watched.oracle_weights()
    watched.passes(range(2, 4))
    watched.engine.load_checkpoint(case.folder, load_module_only=True)
    load(watched, kept)
    back = watched.apart()
    watched.passes(range(10, 12))
    found = watched.found()
    return Found(max(back, found.apart), found.got, found.right)


@play.refused([Cell(3), Cell(3, offload=True)], "CheckpointError: ")
def the_module_alone_is_not_there(case):
    """DeepSpeed loads nothing of it on ZeRO 3."""
    watched = Watched(case.cell, target=4)
    watched.passes(range(2))
    watched.engine.save_checkpoint(case.folder, "saved")
    watched.engine.load_checkpoint(case.folder, load_module_only=True)


@play.right(STAGES, ["saved", "loaded"])
def a_parameter_is_frozen_for_a_while(case):
    """When a checkpoint is saved, or loaded: ZeRO 2 and 3 refuse that, and load it once the parameter trains."""
    watched = Watched(case.cell, target=4)
    frozen = watched.engine.module.head.bias
    watched.passes(range(2))
    frozen.requires_grad_(case.variant != "saved")
    watched.engine.save_checkpoint(case.folder, "saved")
    kept = watched.oracle_weights()
    frozen.requires_grad_(True)
    watched.passes(range(2, 4))
    frozen.requires_grad_(case.variant != "loaded")
    if case.variant == "loaded" and case.cell.stage > 1:
        with pytest.raises(ds_parity.CheckpointError, match=r"head\.bias is frozen"):
            watched.engine.load_checkpoint(case.folder)
        frozen.requires_grad_(True)
    watched.engine.load_checkpoint(case.folder)
    frozen.requires_grad_(True)
    load(watched, kept)
    back = watched.apart()
    watched.passes(range(10, 12))
    return Found(max(back, watched.apart()))


@play.right(CELLS)
def the_optimizers_state_is_left_out(case):
    """Another engine, of other weights and some steps, takes weights and counts over."""
    watched = Watched(case.cell, target=4)
    watched.passes(range(2))
    watched.engine.save_checkpoint(case.folder, "saved")
    watched.engine = engine_of(config(case.cell, 4), Net(seed=5))
    for index in range(20, 23):
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
    watched.engine.load_checkpoint(case.folder, load_optimizer_states=False)
    watched.passes(range(2, 4))
    return watched.found()


@play.right(STAGES)
def there_is_nothing_to_load(case):
    """DeepSpeed's answer is handed on, or an error is raised; the open window stays as it was."""
    watched = Watched(case.cell)
    watched.passes(range(3))
    said = []
    for options in ({}, {"tag": "none"}):
        try:
            said.append(watched.engine.load_checkpoint(f"{case.folder}-none", **options)[0])
        except (ds_parity.DsParityError, FileNotFoundError):
            said.append(None)
    stood = [watched.engine.window.passes, watched.engine.window.rollouts]
    watched.passes([3])
    return watched.found([said, stood], [[None, None], [1, 4]])


@play.refused([Cell(0), Cell(2)], {"window": "CheckpointError: ", "step": "CheckpointError: "})
def an_open_window_is_saved(case):
    """Inside a window, and between the backward of its boundary and the step."""
    watched = Watched(case.cell)
    watched.passes(range(3))
    if case.variant == "step":
        watched.engine.backward(watched.loss(3), rollouts=2)
    watched.engine.save_checkpoint(case.folder, "saved")


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_goes_on_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_what_would_be_lost(outcomes, case):
    outcomes.assert_refused(case)
