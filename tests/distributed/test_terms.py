"""Several loss terms, each with a denominator of its own: steps as an oracle in fp64 says, or refused everywhere."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, perceptron, refusal
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import RATE, extended, sample, weights

pytestmark = pytest.mark.ranks

# Rollouts, tokens and whether the third term is there, by window, rank and backward. Each window has six rollouts.
WINDOWS = (
    (((2, 5, True), (1, 9, True)), ((1, 2, True), (2, 30, True))),
    (((1, 11, True), (3, 1, False)), ((1, 4, True), (1, 7, False))),
    (((3, 2, False), (1, 3, True)), ((1, 8, True), (1, 1, True))),
)
TERMS = {
    "policy": {"weight": "token"},
    "kl": {"weight": "rollout", "coefficient": 0.25},
    "router": {"weight": "pass", "coefficient": -0.5},
    "own": {"weight": "weight", "coefficient": 2.0},
}
COEFFICIENTS = {name: term.get("coefficient", 1.0) for name, term in TERMS.items()}
TOTALS = ("expect", "window", "caller")


def engine_of(stage, kind="fp32", terms=TERMS, passes=6, **section):
    config = {**extended(stage, kind), "gradient_accumulation_passes": passes, "ds_parity": {"terms": terms, **section}}
    model = perceptron()
    client = torch.optim.SGD(model.parameters(), lr=RATE)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), optimizer=client, config=config)[0]


def losses_of(call, seed, there, dtype):
    out = call(sample(seed, dtype)).float() if dtype != torch.float64 else call(sample(seed, dtype).cpu())
    losses = {"policy": out.pow(2).mean(), "kl": out.mean(), "router": out.abs().mean(), "own": out.sin().mean()}
    return losses if there else {name: loss for name, loss in losses.items() if name != "router"}


def own(rank):
    """Of one rank, window by window: seed, rollouts, tokens, whether the router's term is there, and a weight."""
    return [
        [(100 * w + 10 * n + rank, *one, 0.5 + n + rank) for n, one in enumerate(ranks[rank])]
        for w, ranks in enumerate(WINDOWS)
    ]


def weights_of(rollouts, tokens, there, weight):
    return {"policy": tokens, "kl": rollouts, "router": int(there), "own": weight}


def promise(engine, window):
    """Say what this rank's window will contain; of the router's term, in how many passes it is."""
    rollouts, tokens = (sum(one[place] for one in window) for place in (1, 2))
    there, weight = sum(one[3] for one in window), sum(one[4] for one in window)
    engine.expect(rollouts=rollouts, tokens=tokens, passes=len(window), weight={"router": there, "own": weight})


def train(engine, known):
    dtype = next(engine.module.parameters()).dtype
    windows = own(dist.get_rank())
    if known == "window":
        stream = [
            ds_parity.MicroBatch(
                inputs={"seed": seed, "there": there},
                rollouts=rollouts,
                tokens=tokens,
                weight={"own": weight} if there else {"own": weight, "router": 0},
            )
            for window in windows
            for seed, rollouts, tokens, there, weight in window
        ]
        for one in engine.passes(stream):
            engine.backward(losses_of(engine, one.inputs["seed"], one.inputs["there"], dtype))
            engine.step()
        return
    for window in windows:
        promise(engine, window)
        for seed, rollouts, tokens, there, weight in window:
            losses = losses_of(engine, seed, there, dtype)
            engine.backward(losses, rollouts=rollouts, tokens=tokens, weight={"own": weight})
            if known == "expect":
                engine.step()
        if known == "caller":
            engine.step()


def oracle():
    """The steps in float64 on one process, and the last window's terms."""
    model = perceptron().double()
    for window in zip(*(own(rank) for rank in range(2)), strict=True):
        parts = [one for rank in window for one in rank]
        total = {name: sum(weights_of(*one[1:])[name] for one in parts) for name in TERMS}
        means = dict.fromkeys(TERMS, 0.0)
        for seed, *counted in parts:
            for name, loss in losses_of(model, seed, counted[2], torch.float64).items():
                means[name] = means[name] + weights_of(*counted)[name] * loss / total[name]
        step = sum(COEFFICIENTS[name] * mean for name, mean in means.items())
        gradients = torch.autograd.grad(step, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    values = {name: float(mean) for name, mean in means.items()}
    return [p.detach().flatten().tolist() for p in model.parameters()], values, float(step)


def late(engine):
    """What is refused before anything is counted leaves the way out open; finish() needs no totals."""
    said = refusal(lambda: backward(engine, *TERMS, weight={"own": 1.0}))
    engine.finish()
    engine.expect(rollouts=3, tokens=5, passes=1, weight={"own": 1.0})
    losses = losses_of(engine, 1 + dist.get_rank(), True, torch.float32)
    engine.backward(losses, rollouts=3, tokens=5, weight={"own": 1.0})
    engine.finish()
    return [from_all(said), engine.last_step.step, engine.last_step.rollouts]


ALIKE = {"policy": {"weight": "token"}, "kl": {"weight": "token", "coefficient": 0.1}}


def alike(engine):
    """Terms of one unit need no totals: they are corrected by one factor."""
    windows = own(dist.get_rank())
    for window in windows:
        for seed, rollouts, tokens, _, _ in window:
            losses = losses_of(engine, seed, True, torch.float32)
            engine.backward({name: losses[name] for name in ALIKE}, rollouts=rollouts, tokens=tokens)
            engine.step()


def oracle_alike():
    model = perceptron().double()
    for window in zip(*(own(rank) for rank in range(2)), strict=True):
        parts = [one for rank in window for one in rank]
        tokens = sum(one[2] for one in parts)
        step = 0.0
        for seed, _, weight, _, _ in parts:
            losses = losses_of(model, seed, True, torch.float64)
            step = step + (losses["policy"] + 0.1 * losses["kl"]) * weight / tokens
        gradients = torch.autograd.grad(step, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return [p.detach().flatten().tolist() for p in model.parameters()]


def backward(engine, *names, tokens=5, rollouts=3, **counts):
    losses = losses_of(engine, 1 + dist.get_rank(), True, torch.float32)
    engine.backward({name: losses[name] for name in names}, rollouts=rollouts, tokens=tokens, **counts)
    engine.step()


def unknown_totals(engine):
    """A window of one pass knows its totals; this one has more."""
    backward(engine, *TERMS, rollouts=1, weight={"own": 1.0})


def another_window(engine):
    engine.expect(rollouts=3, tokens=6 + dist.get_rank(), passes=1, weight={"own": 1.0})
    backward(engine, *TERMS, weight={"own": 1.0})


def a_term_of_nobody(engine):
    engine.expect(rollouts=3, tokens=5, passes=1, weight={"own": 1.0, "router": 0})
    backward(engine, "policy", "kl", "own", weight={"own": 1.0})


def an_unknown_name(engine):
    engine.expect(rollouts=3, tokens=5, passes=1, weight={"own": 1.0})
    losses = losses_of(engine, 1, True, torch.float32)
    engine.backward({"value": losses["policy"]}, rollouts=3, tokens=5, weight={"own": 1.0})


def one_tensor(engine):
    engine.backward(losses_of(engine, 1, True, torch.float32)["policy"], rollouts=3, tokens=5)


def a_missing_number(engine):
    engine.expect(rollouts=3, passes=1, weight={"own": 1.0})


def other_numbers(engine):
    more = {"prompts": 1} if dist.get_rank() else {}
    engine.expect(rollouts=3, tokens=5, passes=1, weight={"own": 1.0}, **more)


def no_number(engine):
    engine.expect(rollouts=3, tokens=5, passes=1, weight={"own": float("nan")})


def left_inside_a_window(engine):
    """What passes() had read is lost, and the rest of the window is another."""
    stream = [ds_parity.MicroBatch({"n": n}, 1, 0, 5 + n, weight={"own": 1.0}) for n in range(3)]
    for one in engine.passes(stream, lookahead="window"):
        engine.backward(losses_of(engine, one.inputs["n"], True, torch.float32))
        engine.step()
        break
    engine.finish()


def in_two_rounds(engine):
    """The window goes on behind the stream, so that its totals are not known."""
    stream = [ds_parity.MicroBatch({"n": 1}, 1, 0, 5, weight={"own": 1.0})]
    for one in engine.passes(stream, lookahead="window", finish=False):
        engine.backward(losses_of(engine, one.inputs["n"], True, torch.float32))
        engine.step()


def the_name_of_a_term(engine):
    engine.record("kl", 1.0)


REFUSED = {
    unknown_totals: "WindowError: backward() in window 0, whose totals are not known: the terms of ds_parity.terms",
    another_window: "WindowError: window 0 contains 10 tokens over all ranks, and expect() has said 13 tokens",
    a_term_of_nobody: "WindowError: no micro-batch of any rank has the term 'router'",
    an_unknown_name: "WindowError: 'value': no term of ds_parity.terms, which are policy, kl, router, own",
    one_tensor: "WindowError: backward() got one tensor, and ds_parity.terms names policy, kl, router, own",
    a_missing_number: "WindowError: expect() without tokens=, by which the term 'policy' is weighed",
    other_numbers: "RankDesyncError: ranks are not in the same place",
    no_number: "WindowError: weight is nan",
    left_inside_a_window: "WindowError: window 0 contains policy 10, kl 2, router 2, own 2, and its losses",
    in_two_rounds: "WindowError: backward() in window 0, whose totals are not known",
    the_name_of_a_term: "WindowError: record('kl')",
}


@on_two_ranks
def losses_of_several_terms(folder):
    """By stage and way to know the totals: weights, record, and what is refused."""
    results = {"oracle": oracle(), "oracle alike": oracle_alike()}
    for stage in STAGES:
        for known in TOTALS:
            section = {"lookahead": "window"} if known == "window" else {}
            section |= {"boundary": "caller"} if known == "caller" else {}
            engine = engine_of(stage, **section)
            train(engine, known)
            last = engine.last_step
            results[f"{stage} {known}"] = [weights(engine), last.metrics, last.loss, last.step]
            engine.destroy()
        engine = engine_of(stage, terms=ALIKE)
        alike(engine)
        results[f"{stage} alike"] = [weights(engine), engine.last_step.step]
        engine.destroy()
        engine = engine_of(stage, boundary="caller")
        results[f"{stage} late"] = late(engine)
        engine.destroy()
        for play in REFUSED:
            engine = engine_of(stage)
            results[f"{stage} {play.__name__}"] = [from_all(refusal(lambda e=engine, p=play: p(e))), weights(engine)]
            engine.destroy()
    engine = engine_of(2, terms=ALIKE, passes=12)
    results["part of one"] = from_all(refusal(lambda: [backward(engine, *names) for names in (ALIKE, ["policy"])]))
    engine.destroy()
    results["untouched"] = [p.detach().double().flatten().tolist() for p in perceptron().parameters()]
    return results


@pytest.mark.parametrize("known", TOTALS)
@pytest.mark.parametrize("stage", STAGES)
def test_each_term_is_divided_by_its_own_total(two_ranks, stage, known):
    results = two_ranks.of(losses_of_several_terms)
    trained, metrics, loss, steps = results[f"{stage} {known}"]
    right, means, step = results["oracle"]
    assert steps == len(WINDOWS)
    for expected, values in zip(right, trained, strict=True):
        assert values == pytest.approx(expected, abs=5e-7)
    assert metrics == pytest.approx(means, rel=1e-5)
    assert loss == pytest.approx(step, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_terms_of_one_unit_need_no_totals(two_ranks, stage):
    results = two_ranks.of(losses_of_several_terms)
    trained, steps = results[f"{stage} alike"]
    assert steps == len(WINDOWS)
    for expected, values in zip(results["oracle alike"], trained, strict=True):
        assert values == pytest.approx(expected, abs=3e-7)


@pytest.mark.parametrize("play", REFUSED)
@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_be_right_is_refused_on_every_rank_and_no_step_is_taken(two_ranks, stage, play):
    results = two_ranks.of(losses_of_several_terms)
    said, trained = results[f"{stage} {play.__name__}"]
    assert all(one.startswith(REFUSED[play]) for one in said), said
    assert trained == results["untouched"]


def test_a_term_that_some_passes_lack_is_refused_where_totals_are_not_known(two_ranks):
    said = two_ranks.of(losses_of_several_terms)["part of one"]
    assert all("the terms of ds_parity.terms weigh differently in window 0" in one for one in said), said


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_is_refused_for_its_totals_may_be_run_again(two_ranks, stage):
    said, *last = two_ranks.of(losses_of_several_terms)[f"{stage} late"]
    assert all(one.startswith("WindowError: backward() in window 0, whose totals are not known") for one in said), said
    assert last == [1, 6]
