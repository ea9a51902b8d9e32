"""Streams on two ranks: which idle passes are run, what is read when, and what is refused."""

import re
import threading
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import Batch, build, forward, from_all, one_pass, refusal, run_stream
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def skipped_idle(folder):
    """Seven micro-batches on rank 0, two on rank 1, which idles inside a window, at its end and in an open one."""
    results = {}
    for stage in STAGES:
        for ahead in (0, 3):
            reached = []
            for skip in (True, False):
                engine = build(config(stage, passes=6))
                count = 2 if dist.get_rank() else 7
                handed, steps = run_stream(engine, [Batch(n) for n in range(count)], lookahead=ahead, skip_idle=skip)
                last = engine.last_step
                reached.append((weights.vector(engine.module), handed, steps, last, engine.micro_steps))
            (one, handed, steps, last, passes), (other, every, all_steps, _, _) = reached
            results[f"{stage} {ahead}"] = {
                "equal": torch.equal(one, other),
                "handed": from_all(handed),
                "without skipping": from_all(every),
                "steps": [from_all(steps), from_all(all_steps)],
                "last": last.model_dump(),
                "micro_steps": passes,
            }
    return results


@pytest.mark.parametrize("ahead", ["0", "3"])
class TestSkippedIdlePasses:
    """Windows of 4 passes (rank 1 idle in the last two) and 3 (idle in all), the second one left open."""

    def test_come_to_the_same_bits_as_if_they_were_run(self, two_ranks, stage, ahead):
        assert two_ranks.of(skipped_idle)[f"{stage} {ahead}"]["equal"]

    def test_are_handed_out_at_the_boundary_and_at_a_windows_start_alone_on_zero_0_and_1(self, two_ranks, stage, ahead):
        result = two_ranks.of(skipped_idle)[f"{stage} {ahead}"]
        assert result["handed"] == ([7, 4] if stage in "01" else [7, 7])
        assert result["without skipping"] == [7, 7]

    def test_are_counted_all_the_same(self, two_ranks, stage, ahead):
        result = two_ranks.of(skipped_idle)[f"{stage} {ahead}"]
        assert (result["last"]["step"], result["last"]["passes"], result["last"]["idle_passes"]) == (2, 3, 3)
        assert result["micro_steps"] == 7

    def test_hide_no_boundary_from_any_rank(self, two_ranks, stage, ahead):
        assert two_ranks.of(skipped_idle)[f"{stage} {ahead}"]["steps"] == [[[1], [1]], [[1], [1]]]


@on_two_ranks
def explicit_idle(folder):
    """A stream that says itself where it is idle: the first passes of rank 1, before it has anything to re-run."""
    results = {}
    for stage in STAGES:
        engine, nothing = build(config(stage, passes=4)), Batch(9, 0, 0, 0)
        stream = [nothing, nothing, Batch(1), nothing] if dist.get_rank() else [Batch(n) for n in range(3)] + [nothing]
        handed, steps = run_stream(engine, stream)
        plain = build(config(stage, passes=4))
        for n in range(3):
            if dist.get_rank() and n < 2:
                plain.idle(forward(plain, 9))
                plain.step()
            else:
                one_pass(plain, 1 if dist.get_rank() else n, rollouts=1)
        equal = torch.equal(weights.vector(engine.module), weights.vector(plain.module))
        results[stage] = {"handed": from_all(handed), "steps": from_all(steps), "equal": equal}
    return results


def test_a_stream_may_say_itself_where_it_is_idle(two_ranks, stage):
    """A window's first pass is handed out, its second skipped or run, a real one closes it; the last opens one."""
    result = two_ranks.of(explicit_idle)[stage]
    assert result["equal"]
    assert result["handed"] == ([4, 3] if stage in "01" else [4, 4])
    assert result["steps"] == [[1], [1]]


@on_two_ranks
def without_inputs(folder):
    """Rank 1 says in its second pass that it has nothing, with no inputs; then it does so in its first."""
    results, rank = {}, dist.get_rank()
    nothing = ds_parity.MicroBatch({}, 0, 0, 0)

    def run(engine, *stream, **options):
        items = [nothing if seed is None else ds_parity.MicroBatch({"seed": seed}, 1, 0, 3) for seed in stream]
        for one in engine.passes(items, **options):
            engine.backward(forward(engine, **one.inputs))
            engine.step()
        return weights.vector(engine.module)

    for stage in STAGES:
        plain = build(config(stage, passes=5))
        for n in range(3):
            if rank and n == 1:
                plain.idle(forward(plain, 5))
                plain.step()
            else:
                one_pass(plain, n + 5 * rank, rollouts=1)
        for ahead in (0, 2):
            seeds = [5, None, 7] if rank else [0, 1, 2]
            ran = run(build(config(stage, passes=5)), *seeds, lookahead=ahead, skip_idle=False)
            results[f"{stage} {ahead}"] = torch.equal(ran, weights.vector(plain.module))
    for stage in (0, 2):
        dry = build(config(stage))
        told = refusal(lambda: run(dry, None if rank else 0, 1))  # noqa: B023  (called at once)
        results[f"dry {stage}"] = from_all(told)
    return results


@pytest.mark.parametrize("ahead", ["0", "2"])
def test_what_holds_nothing_and_has_no_inputs_runs_the_smallest_micro_batch(two_ranks, stage, ahead):
    assert two_ranks.of(without_inputs)[f"{stage} {ahead}"]


@pytest.mark.parametrize("stage", ["0", "2"])
def test_nothing_to_run_in_the_first_pass_is_said_on_every_rank(two_ranks, stage):
    for told in two_ranks.of(without_inputs)[f"dry {stage}"]:
        assert re.match("WindowError: 1 of 2 ranks have no micro-batch at all that has inputs", told)


class _Heads(torch.nn.Module):
    """Two heads; a micro-batch uses one or both, and the other has no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, seed, both):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(self.body.weight.device)
        out = self.a(self.body(x)).pow(2).mean()
        return out + self.b(self.body(x)).pow(2).mean() if both else out


@on_two_ranks
def heads(folder):
    """Rank 1 uses one head alone and is idle after it: it reduces zeros for the other.

    ZeRO 2 and 3 reduce in every pass, and take no ranks that use other parameters in one.
    """
    results = {}
    both, one = Batch(1), Batch(2)
    streams = {
        "closed": ([both] * 4, [one, Batch(3, 0, 0, 0), Batch(3, 0, 0, 0), one]),
        "open": ([both] * 3, [one]),
    }
    for stage, (name, stream) in product((0, 1), streams.items()):
        reached = []
        for skip in (True, False):
            module = _Heads()
            extended = config(stage, passes=6 if name == "closed" else 12)
            engine, *_ = ds_parity.initialize(model=module, model_parameters=module.parameters(), config=extended)
            handed = 0
            for batch in engine.passes(stream[dist.get_rank()], idle=Batch(3, 0, 0, 0), skip_idle=skip):
                handed += 1
                engine.backward(engine(batch.seed, batch is not one))
                engine.step()
            reached.append((weights.vector(engine.module), handed))
        (skipped, handed), (run_all, _) = reached
        results[f"{stage} {name}"] = {"equal": torch.equal(skipped, run_all), "handed": from_all(handed)}
    return results


@pytest.mark.parametrize("ending", ["closed", "open"])
@pytest.mark.parametrize("stage", ["0", "1"])
def test_an_idle_pass_is_not_run_for_a_parameter_that_has_no_gradient(two_ranks, stage, ending):
    """ZeRO 1 reduces only parameters that have one: ranks reduced different buckets here (seen: connection reset)."""
    result = two_ranks.of(heads)[f"{stage} {ending}"]
    assert result["equal"]
    assert result["handed"] == {"closed": [4, 2], "open": [3, 1]}[ending]  # the real passes


@on_two_ranks
def online(folder):
    """Rollouts that are made while training goes on: each of them by the weights of the moment, on a slow rank."""
    results = {}
    for stage in STAGES:
        reached = []
        for slow in (True, False):
            engine, asked = build(config(stage, passes=6)), []

            def produced(engine=engine, asked=asked, slow=slow):
                for n in range(6):
                    asked.append(engine.micro_steps)
                    time.sleep(0.03 if slow and dist.get_rank() else 0)
                    yield Batch(n)

            run_stream(engine, produced(), lookahead=0)
            reached.append(weights.vector(engine.module))
        results[stage] = {"asked": from_all(asked), "equal": torch.equal(*reached)}
    return results


class TestOnlineStreams:
    def test_without_look_ahead_nothing_is_asked_for_before_the_pass_before_it_has_ended(self, two_ranks, stage):
        assert two_ranks.of(online)[stage]["asked"] == [[0, 1, 2, 3, 4, 5]] * 2

    def test_a_slow_rank_makes_no_difference(self, two_ranks, stage):
        assert two_ranks.of(online)[stage]["equal"]


@on_two_ranks
def misuse_of_passes(folder):
    """Counts that contradict a turn's, turns under a mean, and a step that is owed while a pass could be skipped."""
    turn = Batch(1, 0, 0, 5)
    results = {}
    by_token = build(config(1, passes=20, loss_weight="token"))
    for _ in by_token.passes([turn], finish=False):
        results["contradicted"] = refusal(lambda: by_token.backward(forward(by_token, 1), rollouts=7, tokens=999))
        break
    by_rollout = build(config(1, passes=20))
    parts = Batch(1, 2, 0, 9)
    parts.held = ("a turn", "a turn", "a last turn", "a whole one")
    results["parts"] = refusal(lambda: next(iter(by_rollout.passes([parts]))))
    owed = build(config(1, passes=20, exchange_timeout=20))

    def without_step():
        stream = [Batch(1), Batch(9, 0, 0, 0)] if dist.get_rank() else [Batch(1), Batch(2)]
        for batch in owed.passes(stream, finish=False):
            owed.backward(forward(owed, batch.seed))

    begun = time.perf_counter()
    results["owed"] = refusal(without_step)
    results["seconds"] = time.perf_counter() - begun
    return results


MISUSE = {
    "contradicted": "WindowError: backward\\(\\) got {'rollouts': 7, 'tokens': 999} but passes\\(\\) has announced",
    "parts": "WindowError: a micro-batch of 9 loss tokens in 4 sequences finishes 2 rollouts",
    "owed": "WindowError: .*waits for its step",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_of_passes_is_refused_with_the_rule(two_ranks, case):
    assert re.match(MISUSE[case], two_ranks.of(misuse_of_passes)[case])


def test_a_step_that_is_owed_is_told_without_a_wait(two_ranks):
    assert two_ranks.of(misuse_of_passes)["seconds"] < 15


@on_two_ranks
def read_in_a_thread(folder):
    """The same streams with and without a thread that reads ahead; one that is left early; one that raises."""
    results = {}
    for stage in STAGES:
        for ahead in (0, 3):
            reached = []
            for prefetch in (0, 2):
                engine = build(config(stage, passes=6))
                count = 2 if dist.get_rank() else 7
                handed, steps = run_stream(engine, (Batch(n) for n in range(count)), lookahead=ahead, prefetch=prefetch)
                reached.append((weights.vector(engine.module).tolist(), from_all(handed), from_all(steps), _readers()))
            results[f"{stage} {ahead}"] = reached
    engine = build(config(2, passes=6))
    for _ in engine.passes((Batch(n) for n in range(50)), prefetch=2):
        break
    results["left"] = _readers()

    def raising():
        yield Batch(0)
        if dist.get_rank():
            raise ValueError("no rollouts")
        yield Batch(1)

    engine, said = build(config(2, passes=6)), ""
    try:
        run_stream(engine, raising(), prefetch=2)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    results |= {"raised": from_all(said), "raised, readers": _readers()}

    def gathering():
        for n in range(9):
            gathered.group_advantages(["a", "b"], [1.0, 0.0])
            yield Batch(n)

    gathered = build(config(2, passes=6))
    results["gathers"] = from_all(refusal(lambda: run_stream(gathered, gathering(), prefetch=2)))
    return results


def _readers():
    return sum(thread.name == "ds_parity prefetch" for thread in threading.enumerate())


class TestPrefetch:
    def test_a_stream_that_talks_to_other_ranks_in_the_thread_is_told_how_not_to(self, two_ranks):
        for said in two_ranks.of(read_in_a_thread)["gathers"]:
            assert said.startswith("WindowError: the stream of passes(prefetch=...) gathers rewards in its thread")
            assert said.endswith("read the stream with prefetch=0")

    def test_a_thread_that_reads_ahead_changes_no_bit_and_is_gone_afterwards(self, two_ranks):
        seen = two_ranks.of(read_in_a_thread)
        for stage, ahead in product(STAGES, (0, 3)):
            plain, read_ahead = seen[f"{stage} {ahead}"]
            assert read_ahead == plain
            assert read_ahead[-1] == 0

    def test_nothing_is_left_of_it_when_the_loop_is_left_or_the_stream_raises(self, two_ranks):
        seen = two_ranks.of(read_in_a_thread)
        assert seen["left"] == seen["raised, readers"] == 0
        assert "no rollouts" in seen["raised"][0]
        assert seen["raised"][1] == "ValueError: no rollouts"
