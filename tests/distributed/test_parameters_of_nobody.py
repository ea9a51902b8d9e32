"""Parameters that are not frozen and that no optimizer steps: the norm, and checkpoints, of ZeRO 0 to 3."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import ds_parity
from ds_parity.engine.internals import unstepped
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import STAGES
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SAVED, OWN, LIMIT = 0.7, 0.2, 0.3
DTYPES = ("float32", "bfloat16", "float16")


class _Model(torch.nn.Module):
    """A layer that is trained, and a weight that nobody freezes or steps."""

    def __init__(self, value, shape=(5, 3), frozen=(2,)):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.head = torch.nn.Parameter(torch.full(shape, value))
        self.frozen = torch.nn.Parameter(torch.full(frozen, value), requires_grad=False)

    def forward(self, x):
        return (torch.tanh(self.layer(x)) @ self.head.t()).float().pow(2).mean()


def _engine(stage, value, model=None, step=None, **keys):
    model = _Model(value) if model is None else model
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    optimizer = torch.optim.AdamW(model.layer.parameters() if step is None else step, lr=0.1)
    return ds_parity.initialize(model=model, optimizer=optimizer, config=made)[0]


def _step(engine):
    engine.backward(engine(torch.ones(2, 4, device=engine.device)), rollouts=1)
    engine.step()


def _head(engine):
    with GatheredParameters([engine.module.head] if hasattr(engine.module.head, "ds_id") else []):
        return engine.module.head.detach().flatten().tolist()


def _loaded(stage, path, *, universal, **options):
    """What a load ends in, and the weight behind it."""
    engine = _engine(stage, OWN, checkpoint={"load_universal": universal})
    said = from_all(refusal(lambda: engine.load_checkpoint(path, **options)))
    dist.barrier()
    return said, _head(engine)


@at_length_on_two_ranks
def weights_of_nobody(folder):
    """By stage: what loads of a checkpoint of ds_parity, and of one of bare DeepSpeed, end in."""
    results = {}
    for stage in STAGES:
        path, bare = f"{folder}/{stage}", f"{folder}/bare-{stage}"
        engine = _engine(stage, SAVED)
        _step(engine)
        engine.save_checkpoint(path)
        trains = [one.requires_grad for _, one in sorted(engine.module.named_parameters())]
        engine.__wrapped__.save_checkpoint(bare)
        found = {"as it is": _loaded(stage, path, universal=False), "trains": trains}
        found["weights alone"] = _loaded(stage, path, universal=False, load_optimizer_states=False)
        if stage:
            assert converted(path, 1) in (None, "nothing was raised")
            found["universal"] = _loaded(stage, path, universal=True)
        found["bare"] = _loaded(stage, bare, universal=False)
        found["bare, not strict"] = _loaded(stage, bare, universal=False, load_module_strict=False)
        if stage == 3:
            assert converted(bare, 1) in (None, "nothing was raised")
            found["bare, universal"] = _loaded(stage, bare, universal=True)
        results[stage] = found
    return from_all(results)


def _kept(src, dst):
    """Loads the layer, and leaves the rest as it is."""
    there = {name: value for name, value in src.items() if name.startswith("layer")}
    dst.load_state_dict(there, strict=False)


@at_length_on_two_ranks
def loads_beside_nobody(folder):
    """On ZeRO 3: what loads end in that leave such a weight to somebody else, or find another one."""
    engine, found = _engine(3, SAVED), {}
    _step(engine)
    engine.save_checkpoint(folder)
    found["left out"] = from_all(refusal(lambda: engine.save_checkpoint(f"{folder}-b", exclude_frozen_parameters=True)))
    found["custom"] = _loaded(3, folder, universal=False, load_optimizer_states=False, custom_load_fn=_kept)
    for name, shapes in {"head": {"shape": (4, 3)}, "frozen": {"frozen": (3,)}}.items():
        other = _engine(3, OWN, _Model(OWN, **shapes))
        found[name] = [from_all(refusal(lambda: other.load_checkpoint(folder))), _head(other)]  # noqa: B023
    found["theirs"] = _two_engines(f"{folder}-two")
    return from_all(found)


def _two_engines(folder):
    """The weight of a second engine over the model, behind a load of the first one's checkpoint from before."""
    model = _Model(SAVED)
    first = _engine(3, SAVED, model)
    second = _engine(3, SAVED, model, step=[model.head])
    first.save_checkpoint(folder)
    with GatheredParameters([model.head], modifier_rank=0):
        model.head.data.fill_(OWN)
    first.load_checkpoint(folder)
    return _head(second)


@at_length_on_two_ranks
def norms_beside_nobody(folder):
    """By stage and dtype of autocast: the norm, and how far a step has gone, and both in fp64 without the weight."""
    results = {}
    with fp16_allowed():
        for stage in STAGES:
            for dtype in DTYPES:
                autocast = {} if dtype == "float32" else {"torch_autocast": {"enabled": True, "dtype": dtype}}
                engine = _engine(stage, OWN, gradient_clipping=LIMIT, **autocast)
                _step(engine)
                results[f"{stage} {dtype}"] = float(engine.get_global_grad_norm())
                engine.destroy()
                forget_autocast()
    return from_all(results)


def _norms():
    """The norm of the trained layer's gradient in fp64, and of all."""
    model = _Model(OWN).double()
    model(torch.ones(2, 4, dtype=torch.float64)).backward()
    layer, everything = (list(one.parameters()) for one in (model.layer, model))
    return [float(torch.nn.utils.get_total_norm([p.grad for p in of if p.requires_grad])) for of in (layer, everything)]


@pytest.mark.parametrize("what", ["as it is", "weights alone", "universal"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_nobody_steps_is_loaded(two_ranks_at_length, stage, what):
    for results in two_ranks_at_length.of(weights_of_nobody):
        if not stage and what == "universal":
            continue  # DeepSpeed loads none there
        said, head = results[str(stage)][what]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([SAVED] * 15)


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_leaves_it_as_it_was(two_ranks_at_length, stage):
    for results in two_ranks_at_length.of(weights_of_nobody):
        assert results[str(stage)]["trains"] == [False, True, True, True]


@pytest.mark.parametrize("what", ["bare", "bare, universal"])
def test_where_the_checkpoint_has_nothing_of_it_zero3_says_so(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(weights_of_nobody):
        for said in results["3"][what][0]:
            assert "the checkpoint has no head: ZeRO stage 3 of DeepSpeed saves nothing of a parameter" in said
        said, head = results["3"]["bare, not strict"]
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([OWN] * 15)


def test_what_is_left_out_with_the_frozen_ones_is_refused(two_ranks_at_length):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        for said in results["left out"]:
            assert said.startswith(
                "CheckpointError: save_checkpoint(exclude_frozen_parameters=True) on ZeRO stage 3: head"
            )


def test_a_function_of_the_callers_leaves_it_as_it_does(two_ranks_at_length):
    for said, head in (results["custom"] for results in two_ranks_at_length.of(loads_beside_nobody)):
        assert said == ["nothing was raised"] * 2
        assert head == pytest.approx([OWN] * 15)


@pytest.mark.parametrize("what", ["head", "frozen"])
def test_one_of_another_shape_is_refused(two_ranks_at_length, what):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        said, head = results[what]
        assert all(f"the checkpoint's {what} has the shape" in one for one in said), said
        assert head == pytest.approx([OWN] * len(head))


def test_what_another_engine_steps_stays_as_that_one_has_it(two_ranks_at_length):
    for results in two_ranks_at_length.of(loads_beside_nobody):
        assert results["theirs"] == pytest.approx([OWN] * 15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_has_no_loss_scale_in_it(two_ranks_at_length, stage, dtype):
    own, everything = _norms()
    wanted = everything if not stage and dtype != "float16" else own
    for results in two_ranks_at_length.of(norms_beside_nobody):
        assert results[f"{stage} {dtype}"] == pytest.approx(wanted, rel={"float32": 1e-5}.get(dtype, 2e-2))


def test_many_names_are_counted():
    assert "has no a, b, c, and 2 more: ZeRO" in unstepped.lacks(list("abcde"))
