"""Sequence-parallel groups of 2 out of 4 ranks: scenarios, and small things; asserted in test_sequence.py."""

from contextlib import contextmanager
from itertools import product

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups

from ds_parity.parity.running import weights
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import candidate, ulysses
from ds_parity.parity.verification.verify import call
from ds_parity.planning.rollout import MicroBatch
from tests.distributed.cells import DTYPES, STAGES, TINY, config, probe_call
from tests.distributed.ranked import build, refusal

TASKS = ["divisors", "wrong_sums", "different_counts", "shares", "same_weights", "resumed", "not_finite"]
SHARED = {"sequence_parallel": 2, **TINY}
BF16 = {"bf16": {"enabled": True}}
FP32_ACCUMULATION = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def ragged(stage, dtype):
    """Token weights, idle micro-batches, losses divided by an estimate, and a last window that stays open."""
    extended = config(stage, dtype, loss_weight="token")
    return Scenario(f"sequence-{stage}-{dtype}", extended, shape="overshoot", windows=3, short=5, seed=3, **SHARED)


def streams(stage):
    """Streams that run dry at different times, counts known ahead, clipped gradients."""
    section = {"loss_weight": "token", "lookahead": 5, "lr_progress": "rollout"}
    extended = {**config(stage, **section), "gradient_clipping": 0.1}  # below the norm of every step
    name = f"sequence-streams-{stage}"
    return Scenario(name, extended, shape="overshoot", drive="passes", windows=3, seed=4, **SHARED)


def summed(stage):
    extended = config(stage, loss_weight="token", loss_reduction="sum")
    return Scenario(f"sequence-summed-{stage}", extended, shape="overshoot", windows=3, seed=6, **SHARED)


def uniform(stage):
    return Scenario(f"sequence-uniform-{stage}", config(stage, passes=6), shape="uniform", windows=3, **SHARED)


def probed(stage, name="fp32", **keys):
    extended = {**config(stage, loss_weight="token"), **keys}
    return Scenario(f"sequence-probe-{stage}-{name}", extended, shape="overshoot", windows=2, seed=3, **SHARED)


REFERENCES = ("deepspeed-loop", "torch", "ds_parity")
RUNS = [
    *[(ragged(*cell), REFERENCES) for cell in product(STAGES, DTYPES)],
    *[(streams(stage), REFERENCES) for stage in (0, 2, 3)],
    *[(summed(stage), REFERENCES) for stage in (1, 3)],
    *[(uniform(stage), ("deepspeed", "ds_parity")) for stage in (2, 3)],
]
PROBES = [
    *[probed(stage) for stage in STAGES],
    probed(2, "accumulated", **FP32_ACCUMULATION),
    probed(2, "summed-gradients", gradient_allreduce_op="sum"),
    probed(1, "no-reduce-scatter", zero_optimization={"stage": 1, "reduce_scatter": False}),
]
PROBED = "ds_parity.parity.subjects.candidate:run"


def calls(folder):
    runs = [call(scenario, engine, folder) for scenario, engines in RUNS for engine in engines]
    return [*runs, *[probe_call(scenario, PROBED) for scenario in PROBES]]


# What bare DeepSpeed divides by.


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
        found = {"group": group, "rank": dist.get_rank(group), "size": dist.get_world_size(group)}
        return lambda: found[name.rsplit("_", 1)[1]]


@contextmanager
def remembering():
    """DeepSpeed remembers mpu and mesh of an engine; the next one must not find them."""
    groups.mpu = groups.mesh_device = None
    try:
        yield ulysses._mpu(2)
    finally:
        groups.mpu = groups.mesh_device = None


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


def divisors(folder):
    """By what the sum over 4 ranks is divided, by configuration."""
    cells = {
        f"{stage}-{name}": (stage, keys) for stage, (name, keys) in product(STAGES, [("fp32", {}), ("bf16", BF16)])
    }
    cells |= {"2-accumulated": (2, FP32_ACCUMULATION), "2-sum": (2, {"gradient_allreduce_op": "sum"})}
    found = {}
    for name, (stage, keys) in cells.items():
        with remembering() as mpu:
            found[name] = step_of_bare({"zero_optimization": {"stage": stage}, **keys}, mpu=mpu)
    with remembering():
        keys = {"zero_optimization": {"stage": 1}, **FP32_ACCUMULATION}
        found["1-accumulated"] = step_of_bare(keys, mpu=_Megatron())
    return found


CONFIGURATIONS = {
    "mesh": {"zero_optimization": {"stage": 2}},
    "key": {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2},
    "megatron": {"zero_optimization": {"stage": 3}},
    "scatter": {"zero_optimization": {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 32}},
    "predivide": {"zero_optimization": {"stage": 2, "reduce_scatter": False}, "gradient_predivide_factor": 4.0},
}


def wrong_sums(folder):
    """What bare DeepSpeed does where it is wrong, and how ds_parity refuses it."""
    found = {}
    for name, keys in CONFIGURATIONS.items():
        with remembering() as mpu:
            keywords = {"mesh": {"mesh_param": (2, 2)}, "key": {}, "megatron": {"mpu": _Megatron()}}.get(
                name, {"mpu": mpu}
            )
            said = refusal(lambda k=keys, kw=keywords: build({**config(2, passes=4), **k}, **kw))
            groups.mpu = groups.mesh_device = None
            found[name] = {"bare": step_of_bare(keys, **keywords), "said": said}
    with remembering() as mpu:
        found["accumulated"] = {"said": refusal(lambda: build({**config(1, passes=4), **FP32_ACCUMULATION}, mpu=mpu))}
        groups.mpu = groups.mesh_device = None
        build(config(2, passes=4), mpu=mpu).destroy()
        found["remembered"] = {"said": refusal(lambda: build(config(2, passes=4)))}
    return found


# The engine.


def loss_of(engine, seed, share=False):
    """A loss over 6 samples of this data-parallel rank, of which a rank holds 3; gathered, or the own share times 2."""
    generator = torch.Generator().manual_seed(seed + 100 * (dist.get_rank() // 2))
    own = torch.randn(6, 4, generator=generator).chunk(2)[dist.get_rank() % 2]
    mine = engine(own.to(engine.device)).pow(2).sum()
    if share:
        return 2 * mine / 6
    return ulysses.gathered(mine, parallel_state_sp.get_sequence_parallel_group()).sum() / 6


def one_pass(engine, seed, **options):
    engine.backward(loss_of(engine, seed, **options))
    engine.step()


def everyone(value):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def different_counts(folder):
    """Peers that pass different counts, also where their sums over ranks cancel, and streams of different lengths."""
    off = {"one": [0, 0, 0, 1], "cancelling": [0, 1, 0, -1], "by-first": [0, 0, 1, 0]}
    found = {}
    with remembering() as mpu:
        engine = build(config(2, passes=8, loss_weight="token"), mpu=mpu)
        for name, more in off.items():
            tokens = 10 + more[dist.get_rank()]
            found[name] = everyone(refusal(lambda t=tokens: engine.backward(loss_of(engine, 0), rollouts=1, tokens=t)))
        length = 2 if dist.get_rank() == 3 else 3
        stream = [MicroBatch({}, rollouts=1, prompts=1, tokens=10)] * length
        found["streams"] = everyone(refusal(lambda: list(engine.passes(stream, lookahead=3))))
        engine.backward(loss_of(engine, 0), rollouts=1, tokens=10)
        found["goes on"] = (engine.window.rollouts, engine.window.tokens)
    return found


def shares(folder):
    """Gathered losses against own shares times the size: the same step and the same loss."""
    found = {}
    for stage, share in product(STAGES, (False, True)):
        with remembering() as mpu:
            engine = build(config(stage, passes=4), mpu=mpu)
            for seed in range(4):
                one_pass(engine, seed, share=share)
            step = engine.last_step
            found[f"{stage}-{share}"] = (step.loss, step.grad_norm, weights.vector(engine.module).tolist())
            engine.destroy()
    return found


def same_weights(folder):
    """Every rank's weights after a ragged scenario."""
    found = {}
    for stage in STAGES:
        kept = []
        engine = candidate.run(ragged(stage, "fp32"), lambda _, module, into=kept: into.append(weights.vector(module)))
        engine.destroy()
        groups.mpu = None
        found[stage] = everyone([weights.summary(vector).checksum for vector in kept])
    return found


def resumed(folder):
    """A window after a checkpoint, by the engine that saved it and by one that loads it."""
    found = {}
    for stage in (1, 2, 3):
        with remembering() as mpu:
            first, second = (build(config(stage, passes=4), mpu=mpu) for _ in range(2))
            for seed in range(4):
                one_pass(first, seed)
            first.save_checkpoint(f"{folder}-{stage}")
            second.load_checkpoint(f"{folder}-{stage}")
            for engine in (first, second):
                for seed in range(4, 6):
                    one_pass(engine, seed)
            same = torch.equal(weights.vector(first.module), weights.vector(second.module))
            found[stage] = everyone((same, second.global_steps, second.global_samples))
            first.destroy()
            second.destroy()
    return found


def not_finite(folder):
    """An idle micro-batch of one group whose loss is NaN on every rank of it."""
    found = {}
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
            found[stage] = (
                engine.last_step.loss,
                bool(weights.vector(engine.module).isfinite().all()),
                engine.global_steps,
            )
            engine.destroy()
    return found
