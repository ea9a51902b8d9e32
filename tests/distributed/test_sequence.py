"""Sequence-parallel groups of 2 out of 4 ranks: what bare DeepSpeed does with them, and what ds_parity does."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups

import ds_parity
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from ds_parity.parity.running import weights
from ds_parity.parity.subjects import candidate
from ds_parity.planning.rollout import MicroBatch
from tests.distributed.cells import DTYPES, STAGES, config
from tests.distributed.continuing import converted, ends_in
from tests.distributed.engines import build, from_all, refusal
from tests.distributed.sequence import BF16, FP32_ACCUMULATION, loss_of, ragged, remembering, without_mpu
from tests.distributed.sets import on_four_ranks
from tests.pages import blocks

pytestmark = pytest.mark.ranks


class _PowersOfTwo(torch.nn.Module):
    # The gradient of every weight is 2^rank, so a sum tells which ranks are in it.
    def __init__(self):
        super().__init__()
        self.small, self.large = (torch.nn.Linear(size, 1, bias=False) for size in (8, 64))
        with torch.no_grad():
            self.small.weight.zero_()
            self.large.weight.zero_()

    def forward(self, small, large):
        return (self.small(small).sum() + self.large(large).sum()) * float(2 ** dist.get_rank())


class _Megatron:
    """An mpu with a data-parallel group of its own, as Megatron's."""

    def __init__(self):
        made = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0], [1], [2], [3])]
        self.data, self.alone = made[dist.get_rank() % 2], made[2 + dist.get_rank()]

    def __getattr__(self, name):
        if name.startswith("get_sequence"):
            return getattr(parallel_state_sp, name)
        if not name.startswith("get_"):
            raise AttributeError(name)
        group = self.data if "data_parallel" in name else self.alone
        results = {"group": group, "rank": dist.get_rank(group), "size": dist.get_world_size(group)}
        return lambda: results[name.rsplit("_", 1)[1]]


@on_four_ranks
def gathered_as_on_the_page(folder):
    """The loss that the page gathers, and the gradient that this rank's part has of it, in groups of two."""
    rank, made = dist.get_rank(), [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    weight = torch.ones(3, requires_grad=True)
    (code,) = blocks("sequence_parallelism", "python")
    names = {"torch": torch, "dist": dist, "mpu": SimpleNamespace(get_sequence_parallel_group=lambda: made[rank // 2])}
    names |= {"loss_sum": (weight * (torch.arange(3.0) + rank)).sum(), "token_count": torch.tensor(2.0 + rank)}
    exec(compile(code, "sequence_parallelism", "exec"), names)
    names["loss"].backward()
    return from_all([float(names["loss"].detach()), weight.grad.tolist()])


def test_the_page_gathers_a_loss_of_which_ranks_have_equal_shares(four_ranks):
    """Over gloo torch's own function raises in the second group. The sum of ranks gives twice the gradient."""
    for rank, (loss, gradient) in enumerate(four_ranks.of(gathered_as_on_the_page)):
        first = rank - rank % 2
        tokens = 2.0 + first + 3.0 + first
        assert loss == pytest.approx((3.0 + 3 * first + 6.0 + 3 * first) / tokens)
        assert gradient == pytest.approx([2 * (index + rank) / tokens for index in range(3)])


def step_of_bare(keys, **keywords):
    """The step of every rank's first weight of both layers, as bare DeepSpeed takes it at lr 1."""
    plain = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    model = _PowersOfTwo()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**plain, **keys}, **keywords
    )
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, 8, dtype=dtype), torch.ones(1, 64, dtype=dtype)))
    engine.step()
    steps = []
    for layer in (engine.module.small, engine.module.large):
        with GatheredParameters([layer.weight], enabled=hasattr(layer.weight, "ds_id")):
            steps.append(-float(layer.weight.detach().float().flatten()[0]))
    engine.destroy()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, steps)
    return every


@on_four_ranks
def divisors(folder):
    """By what the sum over 4 ranks is divided, by configuration."""
    cells = {
        f"{stage}-{name}": (stage, keys) for stage, (name, keys) in product(STAGES, [("fp32", {}), ("bf16", BF16)])
    }
    cells |= {"2-accumulated": (2, FP32_ACCUMULATION), "2-sum": (2, {"gradient_allreduce_op": "sum"})}
    results = {}
    for name, (stage, keys) in cells.items():
        with remembering() as mpu:
            results[name] = step_of_bare({"zero_optimization": {"stage": stage}, **keys}, mpu=mpu)
    with remembering():
        keys = {"zero_optimization": {"stage": 1}, **FP32_ACCUMULATION}
        results["1-accumulated"] = step_of_bare(keys, mpu=_Megatron())
    return results


CONFIGURATIONS = {
    "mesh": {"zero_optimization": {"stage": 2}},
    "key": {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2},
    "megatron": {"zero_optimization": {"stage": 3}},
    "scatter": {"zero_optimization": {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 32}},
    "predivide": {"zero_optimization": {"stage": 2, "reduce_scatter": False}, "gradient_predivide_factor": 4.0},
}


@on_four_ranks
def wrong_sums(folder):
    """What bare DeepSpeed does where it is wrong, and how ds_parity refuses it."""
    results = {}
    for name, keys in CONFIGURATIONS.items():
        with remembering() as mpu:
            keywords = {"mesh": {"mesh_param": (2, 2)}, "key": {}, "megatron": {"mpu": _Megatron()}}.get(
                name, {"mpu": mpu}
            )
            said = refusal(lambda k=keys, kw=keywords: build({**config(2, passes=4), **k}, **kw))
            groups.mpu = groups.mesh_device = None
            results[name] = {"bare": step_of_bare(keys, **keywords), "said": said}
    with remembering() as mpu:
        results["accumulated"] = {"said": refusal(lambda: build({**config(1, passes=4), **FP32_ACCUMULATION}, mpu=mpu))}
        groups.mpu = groups.mesh_device = None
        build(config(2, passes=4), mpu=mpu).destroy()
        results["remembered"] = {"said": refusal(lambda: build(config(2, passes=4)))}
    return results


OLDER = before(release("0.19.8"))
SUM = 1.0 + 2.0 + 4.0 + 8.0


@pytest.mark.skipif(OLDER, reason="read in DeepSpeed 0.19.8; before it, other things go wrong too")
class TestWhatDeepSpeedDoes:
    """engine/internals/base.py, zero3.py and groups.py rely on it; each rank's gradient is 2^rank."""

    def test_zero_3_divides_by_all_ranks_and_the_others_by_the_data_parallel_ones(self, four_ranks):
        result = four_ranks.of(divisors)
        expected = {f"{stage}-{dtype}": SUM / (4 if stage == 3 else 2) for stage, dtype in product(range(4), DTYPES)}
        expected |= {"1-accumulated": SUM / 2, "2-accumulated": SUM / 2, "2-sum": SUM}
        assert result == {name: [[step, step]] * 4 for name, step in expected.items()}

    @pytest.mark.parametrize(
        ("name", "steps"),
        [
            ("mesh", [[5.0, 5.0], [10.0, 10.0]] * 2),  # (1 + 4) / 1 and (2 + 8) / 1: ranks part
            ("key", [[SUM / 4] * 2] * 4),  # no sequence parallelism at all
            ("megatron", [[2.5, 2.5], [5.0, 5.0]] * 2),
            ("scatter", [[SUM / 2, SUM / 4]] * 4),  # two layers of one model
            ("predivide", [[SUM / 4] * 2] * 4),
        ],
    )
    def test_what_is_refused_goes_wrong_in_bare_deepspeed(self, four_ranks, name, steps):
        assert four_ranks.of(wrong_sums)[name]["bare"] == steps


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mesh",
            "a sequence-parallel size of 2 from mesh_param, without an mpu that has get_sequence_data_parallel_group",
        ),
        ("key", "sequence_parallel_size = 2, but the sequence-parallel size from no mpu and no mesh_param is 1"),
        ("megatron", "gradients are summed over ranks [0, 2], which leaves out sequence-parallel peers [0, 1]"),
        ("scatter", "zero_optimization.reduce_scatter = false with sequence parallelism on ZeRO stage 3"),
        ("predivide", "gradient_predivide_factor = 4 with sequence parallelism, equal to the number of ranks"),
        ("accumulated", "bf16 with fp32 accumulation on ZeRO stage 1, and an mpu whose get_model_parallel_group"),
        ("remembered", "DeepSpeed took a sequence-parallel size of 2, but 1 was asked for"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_reason(four_ranks, name, says):
    assert four_ranks.of(wrong_sums)[name]["said"].startswith(f"ConfigError: {says}")


def one_pass(engine, seed, **options):
    engine.backward(loss_of(engine, seed, **options))
    engine.step()


@on_four_ranks
def different_counts(folder):
    """Peers that pass different counts, also where their sums over ranks cancel, and streams of different lengths."""
    off = {"one": [0, 0, 0, 1], "cancelling": [0, 1, 0, -1], "by-first": [0, 0, 1, 0]}
    results = {}
    with remembering() as mpu:
        engine = build(config(2, passes=8, loss_weight="token"), mpu=mpu)
        for name, more in off.items():
            tokens = 10 + more[dist.get_rank()]
            results[name] = from_all(
                refusal(lambda t=tokens: engine.backward(loss_of(engine, 0), rollouts=1, tokens=t))
            )
        length = 2 if dist.get_rank() == 3 else 3
        stream = [MicroBatch({}, rollouts=1, prompts=1, tokens=10)] * length
        results["streams"] = from_all(refusal(lambda: list(engine.passes(stream, lookahead=3))))
        engine.backward(loss_of(engine, 0), rollouts=1, tokens=10)
        results["goes on"] = (engine.window.rollouts, engine.window.tokens)
    return results


class TestCounts:
    """Peers that hold slices of one micro-batch must count it alike."""

    def test_a_rank_that_differs_from_its_peer_ends_in_an_error_on_every_rank(self, four_ranks):
        for said in four_ranks.of(different_counts)["one"]:
            assert said.startswith("RankDesyncError: ranks that share a micro-batch passed different counts: rank 2 ")
            assert "tokens=10); rank 3 Counts(rollouts=1, prompts=0, tokens=11)." in said
            assert "rank 0" not in said

    @pytest.mark.parametrize("name", ["cancelling", "by-first", "streams"])
    def test_also_where_the_sum_does_not_show_it(self, four_ranks, name):
        every = four_ranks.of(different_counts)[name]
        assert all("passed different counts" in said for said in every), every

    def test_nothing_was_counted_by_a_refused_pass_and_the_engine_goes_on(self, four_ranks):
        assert four_ranks.of(different_counts)["goes on"] == [2, 20]


@on_four_ranks
def shares(folder):
    """Gathered losses against own shares times the size: the same step and the same loss."""
    results = {}
    for stage, share in product(STAGES, (False, True)):
        with remembering() as mpu:
            engine = build(config(stage, passes=4), mpu=mpu)
            for seed in range(4):
                one_pass(engine, seed, share=share)
            step = engine.last_step
            results[f"{stage}-{share}"] = (step.loss, step.grad_norm, weights.vector(engine.module).tolist())
            engine.destroy()
    return results


@on_four_ranks
def same_weights(folder):
    """Every rank's weights after a ragged scenario."""
    results = {}
    for stage in STAGES:
        kept = []
        engine = candidate.run(ragged(stage, "fp32"), lambda _, module, into=kept: into.append(weights.vector(module)))
        engine.destroy()
        groups.mpu = None
        results[stage] = from_all([weights.summary(vector).checksum for vector in kept])
    return results


@on_four_ranks
def not_finite(folder):
    """An idle micro-batch of one group whose loss is NaN on every rank of it."""
    results = {}
    for stage in STAGES:
        with remembering() as mpu:
            engine = build(config(stage, passes=2), mpu=mpu)
            one_pass(engine, 0)
            bad = loss_of(engine, 1) * (float("nan") if dist.get_rank() < 2 else 1.0)
            if dist.get_rank() < 2:
                engine.idle(bad)
            else:
                engine.backward(bad)
            engine.step()
            one_pass(engine, 2)
            results[stage] = (
                engine.last_step.loss,
                bool(weights.vector(engine.module).isfinite().all()),
                engine.global_steps,
            )
            engine.destroy()
    return results


@pytest.mark.parametrize("stage", STAGES)
class TestEveryStage:
    def test_an_own_share_times_the_size_is_a_gathered_loss(self, four_ranks, stage):
        gathered, shared = (four_ranks.of(shares)[f"{stage}-{share}"] for share in (False, True))
        for one, other in zip(gathered, shared, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-7)

    def test_all_ranks_hold_the_same_weights(self, four_ranks, stage):
        every = four_ranks.of(same_weights)[str(stage)]
        assert len(every[0]) >= 3
        assert all(checksums == every[0] for checksums in every)

    def test_an_idle_micro_batch_contributes_nothing_also_where_its_loss_is_nan(self, four_ranks, stage):
        loss, finite, steps = four_ranks.of(not_finite)[str(stage)]
        assert loss is not None
        assert finite
        assert steps == 2


def resumes(stage):
    """Adam, whose states alone can be converted."""
    return config(stage, passes=4, optimizer="AdamW")


@on_four_ranks
def resumed(folder):
    """A window after a checkpoint, by the engine that saved it and by one that loads it."""
    results = {}
    for stage in (1, 2, 3):
        with remembering() as mpu:
            first, second = (build(resumes(stage), mpu=mpu) for _ in range(2))
            for seed in range(4):
                one_pass(first, seed)
            # Older releases look for a file of each rank of the mpu, and save one.
            with without_mpu(first, OLDER), without_mpu(second, OLDER):
                first.save_checkpoint(f"{folder}-{stage}")
                second.load_checkpoint(f"{folder}-{stage}")
            made = converted(f"{folder}-{stage}")
            universal = {**resumes(stage), "checkpoint": {"load_universal": True}}
            third = build(universal, mpu=mpu)
            said = ends_in(lambda third=third, stage=stage: third.load_checkpoint(f"{folder}-{stage}"))
            for engine in (first, second, third):
                for seed in range(4, 6):
                    one_pass(engine, seed)
            same = [torch.equal(weights.vector(first.module), weights.vector(one.module)) for one in (second, third)]
            results[stage] = from_all((same[0], second.global_steps, second.global_samples))
            results[f"{stage} universal"] = from_all((made, said, same[1], third.global_steps))
            for engine in (first, second, third):
                engine.destroy()
    return results


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_resumes_bit_for_bit(four_ranks, stage):
    assert four_ranks.of(resumed)[str(stage)] == [[True, 3, 12]] * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_is_converted_and_resumes(four_ranks, stage):
    """On ZeRO 1 and 2 DeepSpeed takes the ranks of a sequence for tensor-parallel ones."""
    result = four_ranks.of(resumed)[f"{stage} universal"]
    assert [made for made, *_ in result] == ["nothing was raised", None, None, None]
    assert [rest for _, *rest in result] == [["nothing was raised", True, 3]] * 4


def _planned(engine, rollouts, rank=None):
    """What the planning page says: a plan of the engine's data-parallel ranks, and this rank's number among them."""
    own = dist.get_rank(engine.data_parallel_group) if rank is None else rank
    planned = ds_parity.plan(rollouts, dp_world_size=engine.dp_world_size, target=8, max_tokens=150)
    return ds_parity.micro_batches(planned, own)


def _read(engine, stream):
    """The prompts that this rank trains on, and the steps."""
    read = []
    # With a look-ahead ranks hear of a wrong part before they gather a loss, where the other of their group is missing.
    for number, batch in enumerate(engine.passes(stream, lookahead=2)):
        read += [] if batch.idle else [one.prompt_id for one in batch.held]
        engine.backward(loss_of(engine, number))
        engine.step()
    return [engine.dp_world_size, dist.get_world_size(engine.data_parallel_group), sorted(read), engine.global_steps]


@on_four_ranks
def plans_of_groups(folder):
    """By stage and plan: what each rank trains on, or is told."""
    rollouts = [replace(one, prompt_id=at) for at, one in enumerate(shorten(load_rollouts()[:16], 48))]
    results = {}
    for stage in STAGES:
        with remembering() as mpu:
            engine = build(config(stage, passes=8), mpu=mpu)
            results[f"{stage} one plan"] = from_all(_read(engine, _planned(engine, rollouts)))
            others = shorten(load_rollouts()[16:32], 48)  # of which no rank has made a plan
            apart = others[:: -1 if dist.get_rank() > 1 else 1]
            results[f"{stage} two"] = from_all(refusal(lambda e=engine, r=apart: _read(e, _planned(e, r))))
            engine.destroy()
        with remembering() as mpu:
            engine = build(config(stage, passes=8), mpu=mpu)
            part = dist.get_rank() % 2
            results[f"{stage} part"] = from_all(refusal(lambda e=engine, p=part: _read(e, _planned(e, rollouts, p))))
            engine.destroy()
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_share_micro_batches_read_one_part_of_a_plan(four_ranks, stage):
    found = four_ranks.of(plans_of_groups)
    one, same, other, last = found[f"{stage} one plan"]
    assert (one, other) == (same, last)
    assert [*one[:2], one[3]] == [2, 2, 2]
    assert sorted(one[2] + other[2]) == list(range(16))
    assert all("take their micro-batches from different plans" in said for said in found[f"{stage} two"])
    assert all("RankDesyncError" in said or "ConfigError" in said for said in found[f"{stage} part"])
