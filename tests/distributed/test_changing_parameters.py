"""Parameters that are frozen or unfrozen on the way, and ranks that use different ones: right, or refused."""

from itertools import pairwise, product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import CELLS, KINDS, extended, weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Pair(torch.nn.Module):
    """Two weights, of one row of four and of so many rows; the rows of one weight get the same gradients."""

    def __init__(self, rows=1):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, number, bias=False) for number in (1, rows))
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, x, *numbers):
        return sum((self.first, self.second)[number](x).float().sum() for number in numbers)


def engine_of(stage, kind="fp32", frozen=False, lr=1.0, rows=1, **keys):
    """An engine over a Pair, in windows of two passes of one rollout on each rank."""
    model = Pair(rows)
    model.second.weight.requires_grad_(not frozen)
    config = {**extended(stage, kind), "gradient_accumulation_passes": 4, **keys}
    client = torch.optim.SGD(model.parameters(), lr=lr)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), optimizer=client, config=config)[0]


def ones(engine):
    dtype = next(engine.module.parameters()).dtype
    return torch.ones(1, 4, device=get_accelerator().current_device_name(), dtype=dtype)


def one_pass(engine, *numbers, factor=1.0):
    engine.backward(factor * engine(ones(engine), *numbers))
    engine.step()


def moved(engine):
    """How far the first element of each weight has moved down."""
    return [-values[0] for values in weights(engine)]


# Ranks that use different parameters.


def own_adapter(engine):
    for _ in range(2):
        one_pass(engine, dist.get_rank(), factor=1 + 2 * dist.get_rank())


def in_turn(engine):
    for number in range(2):
        one_pass(engine, (number + dist.get_rank()) % 2, factor=1 + 2 * dist.get_rank())


def both_in_the_end(engine):
    """Rank 1 leaves the second out of its first pass alone: over the window all use both."""
    one_pass(engine, *(0,) if dist.get_rank() else (0, 1))
    one_pass(engine, 0, 1)


def left_out_by_the_last(engine):
    """On all ranks alike."""
    one_pass(engine, 0, 1)
    one_pass(engine, 0)


def in_another_order(engine):
    """Both in every pass: a rank's own one last, and the other one times 0."""
    for _ in range(2):
        own = dist.get_rank()
        loss = 0.0 * engine(ones(engine), 1 - own) + (1 + 2 * own) * engine(ones(engine), own)
        engine.backward(loss)
        engine.step()


USES = {use.__name__: use for use in (own_adapter, in_turn, both_in_the_end, left_out_by_the_last, in_another_order)}
RIGHT = {
    "own_adapter": [0.5, 1.5],
    "in_turn": [1.0, 1.0],
    "both_in_the_end": [1.0, 0.75],
    "left_out_by_the_last": [1.0, 0.5],
    "in_another_order": [0.5, 1.5],
}


def refused(stage, kind, use):
    """Whether DeepSpeed is wrong in this cell (tools/deepspeed_faults/), so that it must be refused."""
    if use == "left_out_by_the_last":
        return (stage, kind) == (1, "overlap")
    # Hooks reduce what a pass uses: on ZeRO 2 each, on ZeRO 1 the last.
    return stage == 2 or (stage == 1 and kind == "overlap" and use != "both_in_the_end")


# Where ranks differ, ZeRO 3 gathers other weights in its forward, and ZeRO 2 reduces buckets of other sizes: gloo ends
# a process, as it does in bare DeepSpeed.
USED_CELLS = [
    (*cell, use)
    for cell, use in product(CELLS, USES)
    if use == "left_out_by_the_last" or (cell[0] < 3 and not (cell[0] == 2 and use == "both_in_the_end"))
]


@at_length_on_two_ranks
def ranks_that_use_other_parameters(folder):
    """By cell and use: what ranks are answered, and how far the weights have moved."""
    results = {}
    for stage, kind, use in USED_CELLS:
        engine = engine_of(stage, kind)
        said = from_all(refusal(lambda use=use, engine=engine: USES[use](engine)))
        results[f"{stage} {kind} {use}"] = [said, moved(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "kind", "use"), USED_CELLS)
def test_ranks_may_use_other_parameters_where_that_is_right_and_are_refused_before_the_step_elsewhere(
    two_ranks_at_length, stage, kind, use
):
    said, moves = two_ranks_at_length.of(ranks_that_use_other_parameters)[f"{stage} {kind} {use}"]
    if refused(stage, kind, use):
        of = (
            "WindowError: 1 parameters got"
            if kind == "overlap" and stage == 1 and use in ("in_turn", "left_out_by_the_last")
            else "RankDesync"
        )
        assert all(one.startswith(of) for one in said), said
        assert moves == [0, 0]
    else:
        assert said == ["nothing was raised"] * 2
        assert moves == pytest.approx(RIGHT[use], abs=1e-6)


class Around(torch.nn.Module):
    """What has a Pair, because DeepSpeed wants a module around a leaf."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x, *numbers):
        # DeepSpeed gathers a leaf for its backward where a gradient of its output flows back to an input.
        return self.pair(x.requires_grad_(), *numbers)


ZERO_3 = [kind for stage, kind in CELLS if stage == 3]


@at_length_on_two_ranks
def single_passes_on_zero_3(folder):
    """By kind and whether the Pair is a leaf: what ranks are answered, and how far the weights have moved.

    One pass a window: DeepSpeed itself notices other modules in the forward after them, which comes after the step.
    """
    results = {}
    for kind, leaf in product(ZERO_3, (False, True)):
        model = Around()
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [Pair])
        config = {**extended(3, kind), "gradient_accumulation_passes": 2}
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "config": config}
        engine = ds_parity.initialize(model=model, model_parameters=model.parameters(), **given)[0]
        own, factor = dist.get_rank(), 1 + 2 * dist.get_rank()
        said = from_all(refusal(lambda engine=engine, own=own, factor=factor: one_pass(engine, own, factor=factor)))
        results[f"{kind} {leaf}"] = [said, moved(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize(("kind", "leaf"), list(product(ZERO_3, (False, True))))
def test_zero_3_steps_no_window_in_which_ranks_used_other_parameters_that_are_no_leaf(two_ranks_at_length, kind, leaf):
    said, moves = two_ranks_at_length.of(single_passes_on_zero_3)[f"{kind} {leaf}"]
    if leaf:
        assert said == ["nothing was raised"] * 2
        assert moves == pytest.approx(RIGHT["own_adapter"], abs=1e-6)
    else:
        assert all(one.startswith("RankDesyncError: ") and "leaf_module" in one for one in said), said
        assert moves == [0, 0]


# ZeRO 0 and 1 reduce once a window, and fill zeros in for what a rank has not used.
ANY_CELLS = [cell for cell in CELLS if cell[0] < 2 and cell != (1, "overlap")]


def streams(engine):
    """Streams of 6 and 2 micro-batches of one rollout; both ranks use the second weight in every third pass."""
    numbers = range(6 - 4 * dist.get_rank())
    stream = [ds_parity.MicroBatch(inputs={"numbers": (0, 1) if n % 3 == 0 else (0,)}, rollouts=1) for n in numbers]
    for micro_batch in engine.passes(stream):
        engine.backward(engine(ones(engine), *micro_batch.inputs["numbers"]))
        engine.step()


@at_length_on_two_ranks
def ranks_that_use_parameters_of_other_sizes(folder):
    """By cell and use, clipped and not: how far the weights have moved, as each rank has them."""
    results = {}
    for (stage, kind), clip in product(ANY_CELLS, (0.0, 1.0)):
        for name, use in {**USES, "streams": streams}.items():
            engine = engine_of(stage, kind, rows=3, gradient_clipping=clip)
            use(engine)
            results[f"{stage} {kind} {name} {clip}"] = from_all(moved(engine))
            engine.destroy()
    return results


def clipped(moves, to=1.0):
    """The step of gradients of 4 and of 12 equal elements, which is clipped."""
    norm = (4 * moves[0] ** 2 + 12 * moves[1] ** 2) ** 0.5
    return [move * min(1, to / norm) for move in moves]


# Streams: two windows of 4 rollouts, the second of rank 0's alone; the second weight is used by 2 and 1 of them.
STREAMS = [[1, 0.5], [1, 0.25]]


@pytest.mark.parametrize("use", [*USES, "streams"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("stage", "kind"), ANY_CELLS)
def test_zero_0_and_1_are_right_where_ranks_use_parameters_of_other_sizes(two_ranks_at_length, stage, kind, clip, use):
    steps = STREAMS if use == "streams" else [RIGHT[use]]
    right = [sum(each) for each in zip(*(clipped(step) if clip else step for step in steps), strict=True)]
    moves = two_ranks_at_length.of(ranks_that_use_parameters_of_other_sizes)[f"{stage} {kind} {use} {clip}"]
    assert moves[0] == moves[1]
    # bf16 keeps 8 bits of each weight; clipping multiplies by 1 / (norm + 1e-6).
    assert moves[0] == pytest.approx(right, abs=1e-5, rel=2**-7 if "bf16" in KINDS[kind] else 0)


# Parameters that are frozen and unfrozen.


def frozen_for_windows(engine):
    """Trained, frozen for two windows, trained again: how far the second moves in each."""
    places = [0.0]
    for trained in (True, False, False, True):
        engine.module.second.weight.requires_grad_(trained)
        for _ in range(2):
            one_pass(engine, 0, 1)
        places.append(moved(engine)[1])
    return [after - before for before, after in pairwise(places)]


def frozen_inside(engine):
    one_pass(engine, 0, 1)
    engine.module.second.weight.requires_grad_(False)
    one_pass(engine, 0, 1)


def frozen_before_the_step(engine):
    one_pass(engine, 0, 1)
    engine.backward(engine(ones(engine), 0, 1))
    engine.module.second.weight.requires_grad_(False)
    engine.step()


def unfrozen_later(engine):
    for trained in (False, True):
        engine.module.second.weight.requires_grad_(trained)
        for _ in range(2):
            one_pass(engine, 0, 1)


@at_length_on_two_ranks
def parameters_frozen_on_the_way(folder):
    """By cell: how far a frozen weight moves, and what is answered where that can't be right."""
    results = {}
    for stage, kind in CELLS:
        engine = engine_of(stage, kind)
        cell = {"frozen for windows": frozen_for_windows(engine)}
        engine.destroy()
        for play in (frozen_inside, frozen_before_the_step):
            engine = engine_of(stage, kind)
            cell[play.__name__] = from_all(refusal(lambda engine=engine, play=play: play(engine)))
            engine.destroy()
        engine = engine_of(stage, kind, frozen=True)
        cell["unfrozen later"] = [from_all(refusal(lambda engine=engine: unfrozen_later(engine))), moved(engine)]
        engine.destroy()
        results[f"{stage} {kind}"] = cell
    return results


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_a_parameter_stands_still_in_windows_for_which_it_is_frozen(two_ranks_at_length, stage, kind):
    moves = two_ranks_at_length.of(parameters_frozen_on_the_way)[f"{stage} {kind}"]["frozen for windows"]
    assert moves == pytest.approx([1, 0, 0, 1], abs=1e-6)


@pytest.mark.parametrize("play", [frozen_inside, frozen_before_the_step])
@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_what_is_trained_does_not_change_inside_a_window(two_ranks_at_length, stage, kind, play):
    for said in two_ranks_at_length.of(parameters_frozen_on_the_way)[f"{stage} {kind}"][play.__name__]:
        assert said.startswith("WindowError: requires_grad of second.weight changed inside window 0"), said


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_what_the_optimizer_holds_nothing_for_is_not_trained_in_silence(two_ranks_at_length, stage, kind):
    said, moves = two_ranks_at_length.of(parameters_frozen_on_the_way)[f"{stage} {kind}"]["unfrozen later"]
    # torch's own optimizer has it in its groups; so has the wrapper of ZeRO 0 in bf16 up to 0.19.0, and trains it.
    if stage == 0 and (kind == "fp32" or before(release("0.19.1"))):
        assert said == ["nothing was raised"] * 2
        assert moves == pytest.approx([2, 1], abs=1e-6)
    else:
        assert all(
            one.startswith("WindowError: second.weight: trained now, but the optimizer of ZeRO stage") for one in said
        ), said


# Windows that are thrown away.


def behind_dropped_windows(engine):
    """Three windows, each behind a dropped one that used both: how far the second moves in each.

    It is used by the last pass alone, by none, and frozen.
    """
    places = [0.0]
    for numbers, trained in (((0, 1), True), ((0,), True), ((0,), False)):
        one_pass(engine, 0, 1, factor=8.0)
        engine.finish()
        engine.module.second.weight.requires_grad_(trained)
        one_pass(engine, 0)
        one_pass(engine, *numbers)
        places.append(moved(engine)[1])
    return [after - before for before, after in pairwise(places)]


@at_length_on_two_ranks
def parameters_of_dropped_windows(folder):
    results = {}
    for stage, kind in CELLS:
        engine = engine_of(stage, kind, ds_parity={"last_window": "drop"})
        results[f"{stage} {kind}"] = behind_dropped_windows(engine)
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_the_gradient_of_a_dropped_window_is_in_no_later_one(two_ranks_at_length, stage, kind):
    """Nor is that of a parameter which the later window uses late, or not at all, or which is frozen by then."""
    moves = two_ranks_at_length.of(parameters_of_dropped_windows)[f"{stage} {kind}"]
    assert moves == pytest.approx([0.5, 0, 0], abs=1e-6)


# Leaf modules whose gradients DeepSpeed reduces too early, or never.


class Leaf(torch.nn.Module):
    """A weight that is given something and returns something, as a leaf module may."""

    def __init__(self, returned):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 4))
        self.returned = returned

    def forward(self, x):
        return self.returned(torch.nn.functional.linear(x, self.weight))


class AroundLeaf(torch.nn.Module):
    """What calls a Leaf, with an input that requires a gradient or with none."""

    def __init__(self, requires, call, returned, taken):
        super().__init__()
        self.leaf = Leaf(returned)
        self.requires, self.call, self.taken = requires, call, taken

    def forward(self, x):
        return self.taken(self.call(self.leaf, x.requires_grad_(self.requires))).sum()


LEAVES = {
    "tensor": (True, lambda leaf, x: leaf(x), lambda y: y, lambda y: y),
    "tuple": (True, lambda leaf, x: leaf(x), lambda y: (y, None), lambda y: y[0]),
    "no gradient": (False, lambda leaf, x: leaf(x), lambda y: y, lambda y: y),
    "by name": (True, lambda leaf, x: leaf(x=x), lambda y: y, lambda y: y),
    "dict": (True, lambda leaf, x: leaf(x), lambda y: {"y": y}, lambda y: y["y"]),
    "beside": (True, lambda leaf, x: leaf(x), lambda y: (y, [2 * y]), lambda y: y[1][0]),
}
SAID_OF_LEAVES = {
    "no gradient": "WindowError: leaf module leaf (Leaf) is given no tensor that requires a gradient by position",
    "by name": "WindowError: leaf module leaf (Leaf) is given no tensor that requires a gradient by position",
    "dict": "WindowError: leaf module leaf (Leaf) returns a dict in which torch does not see",
    "beside": "WindowError: leaf.weight: DeepSpeed has not reduced its gradient",
}
LEAF_CELLS = [*product(("fp32", "bf16", "offload"), LEAVES)]


@at_length_on_two_ranks
def leaves_of_zero_3(folder):
    """By cell: what all ranks are answered in a pass, and how far the weight has moved; without a gradient, too."""
    results = {}
    for kind, name in LEAF_CELLS:
        model = AroundLeaf(*LEAVES[name])
        deepspeed.utils.set_z3_leaf_modules(model, [Leaf])
        config = {**extended(3, kind), "gradient_accumulation_passes": 2}
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "config": config}
        engine = ds_parity.initialize(model=model, model_parameters=model.parameters(), **given)[0]
        with torch.no_grad():
            engine(ones(engine))
        said = from_all(refusal(lambda engine=engine: one_pass(engine)))
        results[f"{kind} {name}"] = [said, moved(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize(("kind", "name"), LEAF_CELLS)
def test_a_leaf_module_loses_no_gradient_in_silence(two_ranks_at_length, kind, name):
    """Where none of its inputs needs a gradient, and where its outputs are in a dict or beside the loss."""
    said, moves = two_ranks_at_length.of(leaves_of_zero_3)[f"{kind} {name}"]
    if name in SAID_OF_LEAVES:
        assert all(one.startswith(SAID_OF_LEAVES[name]) and "make it no leaf" in one for one in said), said
        assert moves == [0]
    else:
        assert (said, moves) == (["nothing was raised"] * 2, [1])


@at_length_on_two_ranks
def module_alone(folder):
    """By stage: what load_checkpoint(load_module_only=True) is answered with, and the weights after it."""
    results = {}
    for stage in STAGES:
        engine = engine_of(stage)
        for _ in range(2):
            one_pass(engine, 0, 1)
        engine.save_checkpoint(f"{folder}/{stage}", tag="saved")
        for _ in range(2):
            one_pass(engine, 0, 1)
        said = from_all(
            refusal(lambda e=engine, s=stage: e.load_checkpoint(f"{folder}/{s}", tag="saved", load_module_only=True))
        )
        results[f"{stage}"] = [said, moved(engine)]
        engine.destroy()
    return results


@at_length_on_two_ranks
def weights_alone(folder):
    """By stage and precision: an older tag's weights, loaded without the optimizer's states, and those after a step."""
    results = {}
    with fp16_allowed():
        for stage, precision in product(STAGES, HALVES):
            saved, again = (_of_value(stage, precision, value) for value in (5.0, 1.0))
            path = f"{folder}/{stage}-{precision}"
            saved.save_checkpoint(path, tag="saved")
            later = _of_value(stage, precision, 3.0)
            later.save_checkpoint(path, tag="later")  # of which `latest` is the name now
            dist.barrier()
            again.load_checkpoint(path, tag="saved", load_optimizer_states=False)
            found = [weights(again)]
            for group in again.optimizer.param_groups:
                group["lr"] = 0.0
            again.backward(
                again(torch.ones(1, 4, device=again.device, dtype=HALVES[precision])).float().sum(), rollouts=1
            )
            again.step()
            results[f"{stage} {precision}"] = [*found, weights(again), again.last_step.step]
            saved.destroy()
            later.destroy()
            again.destroy()
    return results


def _of_value(stage, precision, value):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    config = {**extended(stage, "fp32"), "gradient_accumulation_passes": 2, precision: {"enabled": True}}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 1.0
    client = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"model": model, "model_parameters": model.parameters(), "optimizer": client}
    return ds_parity.initialize(config=config, **given)[0]


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_loaded_alone_are_those_that_the_next_step_begins_with(two_ranks_at_length, stage, precision):
    loaded, stepped, steps = two_ranks_at_length.of(weights_alone)[f"{stage} {precision}"]
    assert loaded == stepped == [[5.0] * 4]
    assert steps == 1  # a checkpoint of no step, and the one behind it


@pytest.mark.parametrize("stage", STAGES)
def test_the_module_alone_is_loaded_or_refused(two_ranks_at_length, stage):
    said, moves = two_ranks_at_length.of(module_alone)[f"{stage}"]
    if stage == 3:
        assert all("DeepSpeed loads nothing there" in one and "load_optimizer_states=False" in one for one in said)
    else:
        assert said == ["nothing was raised"] * 2
        assert moves == pytest.approx([1, 1], abs=1e-6)


# Windows in which one rank alone has run a pass, and nothing weighs anything.

IDLE = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "offloaded": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "fp32-sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
IDLE["offloaded fp32-sums"] = {**IDLE["offloaded"], **IDLE["fp32-sums"]}


@at_length_on_two_ranks
def frozen_behind_an_idle_window(folder):
    """By kind, on ZeRO 1: how far each weight moves where the first is frozen behind a window of one idle pass."""
    found = {}
    for kind, keys in IDLE.items():
        section = {"boundary": "caller", "loss_weight": "token", "exchange_timeout": 30.0}
        switches = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        plain = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
        model = Pair(rows=3)
        client = torch.optim.SGD(model.parameters(), lr=1.0)
        config = {**plain, **switches, **keys, "ds_parity": section}
        engine, *_ = ds_parity.initialize(model=model, optimizer=client, config=config)
        if dist.get_rank():
            engine.idle(engine(ones(engine), 0, 1))
        engine.step()
        model.first.weight.requires_grad_(False)
        for _ in range(1 + dist.get_rank()):
            engine.backward(engine(ones(engine), 0, 1), rollouts=1, tokens=2)
        engine.step()
        found[kind] = from_all([moved(engine), engine.global_steps])
    return found


@pytest.mark.parametrize("kind", IDLE)
def test_an_idle_pass_of_one_rank_leaves_nothing_for_the_next_window(two_ranks_at_length, kind):
    assert two_ranks_at_length.of(frozen_behind_an_idle_window)[kind] == [[[0.0, 1.0], 1]] * 2
