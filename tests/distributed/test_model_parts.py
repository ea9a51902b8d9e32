"""An mpu that divides a model, as Megatron's: ranks that hold parts of it share each micro-batch, and count it once."""

from contextlib import contextmanager

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.utils import groups

import ds_parity
from ds_parity.all_weights import every_weight
from tests.distributed.cells import STAGES, config, runs_forward
from tests.distributed.engines import from_all, refusal
from tests.distributed.infinite import KINDS as KINDS_OF_INF
from tests.distributed.infinite import assert_all_skip, three_steps
from tests.distributed.sets import on_four_ranks, on_two_ranks

pytestmark = pytest.mark.ranks

RATE, CLIP, STEPS, TARGET = 0.1, 0.2, 3, 4
DIVIDED = {"up": 0, "down": 1}  # the dimension that each is divided along
BF16 = {"bf16": {"enabled": True}}


class Mpu:
    """The groups of Megatron: two ranks that follow each other hold one model."""

    SIZE = 2

    def __init__(self):
        ranks = range(dist.get_world_size())
        parts = [list(ranks[first : first + self.SIZE]) for first in ranks[:: self.SIZE]]
        apart = [list(ranks[number :: self.SIZE]) for number in range(self.SIZE)]
        # Every rank makes all groups, in one order.
        of_model, of_data = [dist.new_group(its) for its in parts], [dist.new_group(its) for its in apart]
        self.model, self.data = of_model[dist.get_rank() // self.SIZE], of_data[dist.get_rank() % self.SIZE]
        self.names("model_parallel", self.model)
        self.names("data_parallel", self.data)

    def names(self, kind, group):
        """Give a group the names by which DeepSpeed asks for it."""
        setattr(self, f"get_{kind}_group", lambda: group)
        setattr(self, f"get_{kind}_rank", lambda: dist.get_rank(group))
        setattr(self, f"get_{kind}_world_size", lambda: dist.get_world_size(group))


class Whole(torch.nn.Module):
    """Two layers that are divided, and one that is not."""

    def __init__(self, seed=0):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.up = torch.nn.Parameter(torch.randn(8, 4, generator=made))
        self.down = torch.nn.Parameter(torch.randn(2, 8, generator=made))
        self.last = torch.nn.Parameter(torch.randn(1, 2, generator=made))

    def forward(self, x):
        return (x @ self.up.T).tanh() @ self.down.T @ self.last.T


class Part(Whole):
    """This rank's part of it."""

    def __init__(self, mpu, seed=0):
        super().__init__(seed)
        self.group = mpu.get_model_parallel_group()
        for name, dim in DIVIDED.items():
            whole = getattr(self, name).detach()
            part = torch.nn.Parameter(whole.chunk(mpu.SIZE, dim)[mpu.get_model_parallel_rank()].clone())
            part.model_parallel = True  # DeepSpeed counts the others on the first rank of a model alone
            setattr(self, name, part)

    def forward(self, x):
        return _Sum.apply((x @ self.up.T).tanh() @ self.down.T, self.group) @ self.last.T


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        summed = x.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@contextmanager
def with_mpu():
    """DeepSpeed remembers an mpu, and the groups of hpZ; the next test must not find them."""
    before = groups.mpu, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    try:
        yield Mpu()
    finally:
        groups.mpu, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = before


def build(stage, mpu, seed=0, keys=None, model=None):
    made = {**config(stage, passes=TARGET), "gradient_clipping": CLIP, **(keys or {})}
    del made["scheduler"]
    made["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    model = model or (Part(mpu, seed) if mpu is not None else Whole(seed))
    return ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=made, mpu=mpu)[0]


def sample(number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def whole(engine, mpu):
    found = {}
    for (name, parameter), kept in zip(engine.module.named_parameters(), every_weight(engine.module), strict=True):
        own = kept.values.view(getattr(parameter, "ds_shape", parameter.shape)).double().to(engine.device)
        parts = [own]
        if name in DIVIDED:
            parts = [torch.empty_like(own) for _ in range(mpu.SIZE)]
            dist.all_gather(parts, own, group=mpu.get_model_parallel_group())
        found[name] = torch.cat(parts, DIVIDED.get(name, 0)).cpu()
    return found


def expected(numbers):
    """One step for each list of micro-batches, in float64: the weights, the losses, and the norms."""
    model, losses, norms = Whole().double(), [], []
    for of_step in numbers:
        loss = sum(model(sample(number).double()).pow(2).mean() for number in of_step) / len(of_step)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.nn.utils.get_total_norm(gradients).item()
        losses.append(loss.item())
        norms.append(norm)
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            one.data.sub_(RATE * min(1.0, CLIP / (norm + 1e-6)) * gradient)
    return dict(model.named_parameters()), losses, norms


def furthest(ones, others):
    return max((ones[name] - others[name]).abs().max().item() for name in ones)


def trained(engine, mpu):
    """Run micro-batches of which each data-parallel rank has another number, and return those of each step."""
    kind, steps = next(engine.module.parameters()).dtype, []
    for first in range(0, STEPS * TARGET, TARGET):
        # The first data-parallel rank runs three of four.
        mine = range(first + 3, first + 4) if mpu.get_data_parallel_rank() else range(first, first + 3)
        for turn in range(3):
            if turn < len(mine):
                x = sample(mine[turn]).to(engine.device, kind)
                engine.backward(engine(x).float().pow(2).mean(), rollouts=1)
            else:
                engine.idle(engine(sample(0).to(engine.device, kind)).sum())
            engine.step()
        steps.append((engine.last_step.loss, engine.last_step.grad_norm, engine.last_step.rollouts))
    return steps


def steps_and_loads(folder, stage, keys):
    with with_mpu() as mpu:
        engine = build(stage, mpu, keys=keys)
        steps = trained(engine, mpu)
        weights, losses, norms = expected([range(n * TARGET, (n + 1) * TARGET) for n in range(STEPS)])
        found = whole(engine, mpu)
        engine.save_checkpoint(folder, tag="of parts")
        engine.destroy()
        other = build(stage, mpu, seed=1, keys=keys)
        path, _ = other.load_checkpoint(folder)
        loaded = furthest(whole(other, mpu), found)
        other.destroy()
    return {
        "ranks": engine.dp_world_size,
        "rollouts": [rollouts for *_, rollouts in steps],
        "losses": max(abs(one / other - 1) for (one, *_), other in zip(steps, losses, strict=True)),
        "norms": max(abs(one / other - 1) for (_, one, _), other in zip(steps, norms, strict=True)),
        "weights": furthest(found, weights),
        "loaded": loaded if path else None,
    }


KINDS = {"fp32": {}, "bf16": BF16}
CELLS = {f"{stage} {kind}": (stage, KINDS[kind]) for stage in STAGES for kind in KINDS if stage or kind == "fp32"}


@on_four_ranks
def parts_of_two(folder):
    return from_all({cell: steps_and_loads(f"{folder}/{cell}", *CELLS[cell]) for cell in CELLS})


class TestPartsOfAModel:
    """Steps of a model that an mpu divides, beside those of the whole model."""

    @pytest.mark.parametrize("cell", CELLS)
    def test_the_steps_are_those_of_the_whole_model(self, four_ranks, cell):
        # bf16 rounds weights to 2**-9 of their size, which is 2 at most, in each of three steps.
        near = 2e-6 if "fp32" in cell else 0.02
        for found in four_ranks.of(parts_of_two):
            one = found[cell]
            assert one["ranks"] == 2
            assert one["rollouts"] == [TARGET] * STEPS
            assert max(one["losses"], one["norms"], one["weights"]) < near

    @pytest.mark.parametrize("cell", CELLS)
    def test_a_checkpoint_is_loaded_on_every_rank(self, four_ranks, cell):
        for found in four_ranks.of(parts_of_two):
            assert found[cell]["loaded"] == 0


@on_two_ranks
def refusals(folder):
    said = {}
    with with_mpu() as mpu:
        said["some"] = from_all(refusal(lambda: build(1, mpu if dist.get_rank() else None)))
        engine = build(2, mpu)
        x = sample(0).to(engine.device)
        said["counts"] = from_all(
            refusal(lambda: engine.backward(engine(x).pow(2).mean(), rollouts=1 + dist.get_rank()))
        )
        engine.destroy()
        said["norm"] = from_all(refusal(lambda: build(0, mpu, keys=BF16)))
        build(1, mpu).destroy()
        said["remembered"] = from_all(refusal(lambda: build(1, None)))
        engine = build(3, mpu)
        engine.save_checkpoint(folder, tag="of parts")
        alone = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
        said["weights alone"] = from_all(refusal(lambda: engine.load_checkpoint(folder, **alone)))
        engine.destroy()
        engine = build(1, mpu, keys={"checkpoint": {"load_universal": True}})
        said["universal"] = from_all(refusal(lambda: engine.load_checkpoint(folder, tag="of parts")))
        engine.destroy()
        mpu.get_pipe_parallel_world_size = lambda: 2
        said["stages"] = from_all(refusal(lambda: build(1, mpu)))
        del mpu.get_pipe_parallel_world_size
        mpu.names("data_parallel", mpu.model)
        said["groups"] = from_all(refusal(lambda: build(1, mpu)))
    return said


@on_two_ranks
def limits(folder):
    """Seconds that the sum over a model's parts may take inside a forward, and behind it."""
    with with_mpu() as mpu:
        engine = build(0, mpu, keys={"ds_parity": {"exchange_timeout": 17}})
        backend, inside = mpu.model._get_backend(torch.device("cpu")), []
        engine.module.register_forward_hook(lambda *_: inside.append(backend.options._timeout.total_seconds()))
        engine(sample(0).to(engine.device))
        engine.destroy()
        return from_all([*inside, backend.options._timeout.total_seconds()])


def test_a_rank_waits_for_another_part_no_longer_than_for_another_pass(two_ranks):
    for inside, behind in two_ranks.of(limits):
        assert inside == 17 < behind


def _steps_of_inf(keys, of="down"):
    with with_mpu() as mpu:
        engine = build(0, mpu, keys={"gradient_accumulation_passes": 1, "gradient_clipping": 0, **keys})
        return three_steps(
            engine,
            getattr(engine.module, of),
            lambda: engine(sample(0).to(engine.device)).float().pow(2).mean(),
            lambda: {name: one.tolist() for name, one in whole(engine, mpu).items()},
            infinite=mpu.get_model_parallel_rank() == 1,
        )


@on_two_ranks
def infinite_parts(folder):
    found = {name: _steps_of_inf(keys) for name, keys in KINDS_OF_INF.items()}
    return from_all({**found, "of all parts": _steps_of_inf(KINDS_OF_INF["clipped"], of="last")})


@pytest.mark.parametrize("name", [*KINDS_OF_INF, "of all parts"])
def test_all_parts_skip_a_step_of_which_one_has_an_infinite_gradient(two_ranks, name):
    assert_all_skip([found[name] for found in two_ranks.of(infinite_parts)])


class Sliced(Mpu):
    """Slices of a sequence on ranks that follow each other, and parts of a model on others."""

    def __init__(self):
        super().__init__()
        self.names("sequence_parallel", self.model)
        self.names("sequence_data_parallel", dist.group.WORLD)
        self.names("tensor_model_parallel", self.data)


class Undivided(Mpu):
    """One that has no group of a model's parts, and all ranks among its data-parallel ones."""

    SIZE = 1

    def __init__(self):
        super().__init__()
        self.get_model_parallel_group = lambda: None


@on_four_ranks
def beside_slices(folder):
    """Both at once, and an mpu of neither."""
    said = {}
    with with_mpu():
        said["both"] = from_all(refusal(lambda: build(1, Sliced(), model=Whole())))
    with with_mpu():
        engine = build(1, Undivided(), model=Whole())
        said["neither"] = from_all(engine.dp_world_size)
        engine.destroy()
    return said


def test_parts_of_sequences_and_of_models_are_not_taken_for_each_other(four_ranks):
    found = four_ranks.of(beside_slices)
    for said in found["both"]:
        assert said.startswith("ConfigError: an mpu that divides the model over ranks [")
    assert found["neither"] == [4] * 4


@on_two_ranks
def stages(folder):
    """An mpu of two stages for a model that has none."""
    with with_mpu():
        grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=1))
        return from_all(refusal(lambda: build(1, grid, model=Whole())))


def test_an_mpu_of_stages_is_refused_for_a_model_without_stages(two_ranks):
    for said in two_ranks.of(stages):
        assert said.startswith("ConfigError: an mpu of 2 pipeline stages, and model= is no deepspeed.PipelineModule")


@on_four_ranks
def other_partitions(folder):
    """Parameters of ZeRO 3 that are divided over ranks that hold different parts: by zero.Init, and by hpZ."""
    said = {}
    with with_mpu() as mpu:
        with deepspeed.zero.Init():
            model = torch.nn.Linear(4, 4)
        said["zero.Init"] = from_all(refusal(lambda: build(3, mpu, model=model)))

        def forward_only():
            return ds_parity.initialize(model=model, config=runs_forward(config(3)), mpu=mpu)[0].destroy()

        said["whole, forward only"] = from_all(refusal(forward_only))
        with deepspeed.zero.Init():
            model = torch.nn.Linear(4, 4)
        model.weight.model_parallel = True
        said["forward only"] = from_all(refusal(forward_only))
        with deepspeed.zero.Init(data_parallel_group=mpu.get_data_parallel_group()):
            model = torch.nn.Linear(4, 4)
        said["right"] = from_all(refusal(lambda: build(3, mpu, model=model).destroy()))
        hpz = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
        said["hpZ"] = from_all(refusal(lambda: build(3, mpu, keys=hpz)))
    return said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zero.Init", "and the mpu sums gradients over ranks"),
        ("forward only", "and the mpu sums gradients over ranks"),
        ("hpZ", "and gradients are summed over ranks"),
    ],
)
def test_parameters_are_divided_over_ranks_with_the_same_part_alone(four_ranks, name, says):
    found = four_ranks.of(other_partitions)
    assert found["right"] == found["whole, forward only"] == ["nothing was raised"] * 4
    for said in found[name]:
        assert said.startswith("ConfigError: ")
        assert says in said


@on_four_ranks
def mixed_by_hpz(folder):
    """What the first pass of bare DeepSpeed takes for the weight of a part, which is its number."""
    with with_mpu() as mpu:
        part = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.constant_(part.weight, 1 + mpu.get_model_parallel_rank())
        zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
        bare = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        engine = deepspeed.initialize(model=part, model_parameters=part.parameters(), config=bare, mpu=mpu)[0]
        found = engine(torch.ones(1, 64, device=engine.device)).mean().item() / 64
        engine.destroy()
        return from_all(found)


def test_bare_deepspeed_mixes_parts_with_hpz_and_says_nothing(four_ranks):
    """When this fails, DeepSpeed has changed: hpZ may be right beside AutoTP and an mpu (`refuse_mixed_parts`)."""
    assert four_ranks.of(mixed_by_hpz) == [1.5] * 4  # parts 1 and 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("counts", "RankDesyncError: ranks that share a micro-batch passed different counts: rank 0 Counts(rollouts=1"),
        ("norm", "ConfigError: an mpu that divides the model over 2 ranks, on ZeRO stage 0 in fp16 or bf16 with SGD"),
        ("remembered", "ConfigError: no mpu is given, but an earlier engine of this process had one"),
        ("some", "RankDesyncError: ranks step together with others who do not with them: [0, 1]; [1]"),
        ("weights alone", "CheckpointError: load_checkpoint(load_optimizer_states=False) on ZeRO stage 3 with an mpu"),
        ("universal", "CheckpointError: load_checkpoint("),
        ("stages", "ConfigError: an mpu of 2 pipeline stages, and model= is no deepspeed.PipelineModule"),
        ("groups", "ConfigError: the mpu divides the model over ranks [0, 1], whose data-parallel groups have 2 ranks"),
    ],
)
def test_what_cannot_be_right_with_parts_is_refused_on_every_rank(two_ranks, name, says):
    for said in two_ranks.of(refusals)[name]:
        assert said.startswith(says)
