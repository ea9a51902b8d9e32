"""ZeRO adds gradients up by the places of their parameters: where ranks have other orders, no engine is built."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from deepspeed.runtime import engine as deepspeed_engine

import ds_parity
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks
from tests.distributed.test_model_parts import Part, with_mpu
from tests.distributed.test_pipelines import alone_in_the_process

pytestmark = pytest.mark.ranks
WIDTH = 4
OFTEN, SELDOM = STAGES[:2], STAGES[2:]
MADE = {"type": "SGD", "params": {"lr": 0.1}}


class Net(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.two(self.one(x))


def by_dimensions(model, parts):
    return [{"params": [p for p in model.parameters() if p.dim() == dim], **said} for dim, said in parts]


def within(model, apart):
    ordered = list(model.parameters())
    return torch.optim.SGD(ordered[::-1] if apart else ordered, lr=0.1)


def of_groups(model, apart):
    parts = [(2, {}), (1, {})]
    return torch.optim.SGD(by_dimensions(model, parts[::-1] if apart else parts), lr=0.1)


def of_rates(model, apart):
    return torch.optim.SGD(by_dimensions(model, [(2, {"lr": 0.2 if apart else 0.1}), (1, {"lr": 0.1})]))


def of_classes(model, apart):
    return (torch.optim.Adam if apart else torch.optim.SGD)(model.parameters(), lr=0.1)


def of_own_words(model, apart):
    """What no optimizer reads, and numbers of other types that are the same."""
    said = {"lr": np.float64(1) if apart else 1, "log": "last" if apart else "first", "foreach": apart}
    return torch.optim.SGD([{"params": list(model.parameters()), **said}])


def of_pairs(model, apart):
    return torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.1, 0.2) if apart else (0.9, 0.95))


def of_arrays(model, apart):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=np.float32(0.5 if apart else 0.9))


WAYS = {
    "within a group": within,
    "of groups": of_groups,
    "of rates": of_rates,
    "of classes": of_classes,
    "of pairs": of_pairs,
    "of arrays": of_arrays,
}
FUNCTIONS = ("within a group", "of groups", "of rates", "of pairs", "read once")


def read_once(model, apart):
    """Groups of what can be read once only, as DeepSpeed makes its optimizer of them."""
    groups = [[model.one.weight, model.one.bias], [model.two.weight, model.two.bias]]
    return [{"params": iter(group)} for group in (groups[::-1] if apart else groups)]


def built(stage, way, apart):
    made = config(stage, passes=2)
    del made["scheduler"]
    made |= {"optimizer": MADE, "zero_allow_untested_optimizer": True}
    model = Net(("two", "one") if apart and way == "of the model" else ("one", "two"))
    if way == "of the model":
        given = {}
    elif way == "of model_parameters":
        ordered = list(model.parameters())
        given = {"model_parameters": ordered[::-1] if apart else ordered}
    elif way == "of a function read once":
        given = {"model_parameters": read_once(model, apart)}
    elif way == "of a frozen type":
        model.one = model.one.to(torch.float16 if apart else torch.bfloat16).requires_grad_(False)
        given = {"optimizer": torch.optim.SGD(model.two.parameters(), lr=0.1)}
    else:
        made_of = of_own_words if way == "of own words" else WAYS[way.removeprefix("of a function ")]
        optimizer = (lambda _: made_of(model, apart)) if way.startswith("of a function ") else made_of(model, apart)
        given = {"optimizer": optimizer}
    if "optimizer" in given:
        del made["optimizer"]
    ds_parity.initialize(model=model, config=made, **given)[0].destroy()


ALL = (*WAYS, "of the model", "of model_parameters", "of a frozen type", *(f"of a function {one}" for one in FUNCTIONS))


def compared(stages):
    """By stage and way: what each rank says where its order is another, and where it is the same."""
    last = dist.get_rank() == 1
    return {
        f"{stage} {way}": [from_all(refusal(lambda s=stage, w=way, a=apart: built(s, w, a))) for apart in (last, False)]
        for stage in stages
        for way in (*ALL, "of own words")
    }


@on_two_ranks
def orders(folder):
    """In every run; the other stages are built over what these are."""
    return compared(OFTEN)


@at_length_on_two_ranks
def orders_at_length(folder):
    """Seldom."""
    return compared(SELDOM)


def _own_words_may_differ(found, stage):
    assert found[f"{stage} of own words"] == [["nothing was raised"] * 2] * 2


@pytest.mark.parametrize("stage", OFTEN)
def test_what_no_optimizer_reads_may_differ(two_ranks, stage):
    _own_words_may_differ(two_ranks.of(orders), stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SELDOM)
def test_so_it_may_on_other_stages(two_ranks_at_length, stage):
    _own_words_may_differ(two_ranks_at_length.of(orders_at_length), stage)


NAMED = {
    "of rates": 'parameter group 0: lr (rank 0 has "0.1"; rank 1 has "0.2")',
    "of pairs": "parameter group 0: betas (",
    "of arrays": "parameter group 0: momentum (",
    "of classes": "class of the optimizer (",
    "of a frozen type": "parameter one.",
    "of a function of rates": "parameter group 0: lr (",
    "of a function of pairs": "parameter group 0: betas (",
}


@pytest.mark.parametrize("stage", OFTEN)
@pytest.mark.parametrize("way", ALL)
def test_ranks_with_another_order_are_told(two_ranks, stage, way):
    _told(two_ranks.of(orders)[f"{stage} {way}"], way)


@pytest.mark.slow
@pytest.mark.parametrize("stage", SELDOM)
@pytest.mark.parametrize("way", ALL)
def test_so_they_are_on_other_stages(two_ranks_at_length, stage, way):
    _told(two_ranks_at_length.of(orders_at_length)[f"{stage} {way}"], way)


def _told(found, way):
    apart, alike = found
    assert alike == ["nothing was raised"] * 2
    for said in apart:
        assert said.startswith("RankDesyncError: ranks differ in ")
        assert NAMED.get(way, "the place of one.") in said
        assert ("the order of a set is by chance" in said) is (way not in NAMED)


def changed(stage, last, name):
    """What the first step says behind a change of the loop's, on the last rank alone or on all, and the next ones."""
    model, half = Net(("one", "two")), name == "loss scale"
    optimizer = (torch.optim.Adam if name == "betas" else torch.optim.SGD)(model.parameters(), lr=0.1)
    made = config(stage, passes=2) | ({"fp16": {"enabled": True, "initial_scale_power": 8}} if half else {})
    del made["scheduler"], made["optimizer"]
    made["zero_allow_untested_optimizer"] = True
    engine = ds_parity.initialize(model=model, optimizer=optimizer, config=made)[0]
    said = []
    for number in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(engine.device)
        engine.backward(engine(x.half() if half else x).float().square().mean(), rollouts=1)
        if last and not number:
            CHANGES[name](engine)
        said.append(refusal(engine.step))
        if said[-1].startswith("RankDesyncError"):
            break
    engine.destroy()
    return said[-1]


def in_groups_of(engine, **change):
    for group in engine.optimizer.param_groups:
        group.update(change)


def clip(engine):
    # ZeRO 0 clips by the one, the others by the other.
    engine._config.gradient_clipping = engine.optimizer.clip_grad = 0.05


def scale(engine):
    engine.optimizer.override_loss_scale(16)


def another_parameter(engine):
    # ZeRO 1 to 3 step what they have made of the parameters.
    engine.optimizer.param_groups[0]["params"].pop()


CHANGES = {
    "weight_decay": lambda engine: in_groups_of(engine, weight_decay=0.3),
    "maximize": lambda engine: in_groups_of(engine, maximize=True),
    "betas": lambda engine: in_groups_of(engine, betas=(0.1, 0.2)),
    "gradient_clipping": clip,
    "loss scale": scale,
    "parameters": another_parameter,
    "a number of numpy": lambda engine: in_groups_of(engine, weight_decay=np.float32(0.5)),
}
SAID = {
    "weight_decay": "weight_decay of parameter group 0 (rank 0 has what it was at the start; rank 1 has 0.3)",
    "maximize": "maximize of parameter group 0 (rank 0 has what it was at the start; rank 1 has True)",
    "betas": "betas of parameter group 0 (rank 0 has what it was at the start; rank 1 has (0.1, 0.2))",
    "gradient_clipping": "gradient_clipping (rank 0 has what it was at the start; rank 1 has 0.05)",
    "loss scale": "the loss scale (rank 0 has 256; rank 1 has 16)",
    "parameters": "the parameters of parameter group 0 (rank 0 has what it was at the start; rank 1 has 3, "
    "the first of which is one.weight (names 20979c5e))",
    "a number of numpy": "weight_decay of parameter group 0 (rank 0 has what it was at the start; rank 1 has 0.5)",
}
# fp16 is run from ZeRO 1 on, and only ZeRO 0 steps the model's own parameters.
NEEDS = {"loss scale": (1, 2, 3), "parameters": (0,)}
CELLS = [(stage, name) for stage in STAGES for name in CHANGES if stage in NEEDS.get(name, STAGES)]
CHANGED_OFTEN = [cell for cell in CELLS if cell[0] in OFTEN]
CHANGED_SELDOM = [cell for cell in CELLS if cell[0] in SELDOM]


def changes_of(cells):
    last = dist.get_rank() == 1
    with fp16_allowed():
        return {
            f"{stage} {name}": [from_all(changed(stage, one, name)) for one in (last, True)] for stage, name in cells
        }


@on_two_ranks
def changes(folder):
    return changes_of(CHANGED_OFTEN)


@at_length_on_two_ranks
def changes_at_length(folder):
    return changes_of(CHANGED_SELDOM)


@pytest.mark.parametrize(("stage", "name"), CHANGED_OFTEN)
def test_what_one_rank_changes_beside_its_loop_is_told_before_the_step(two_ranks, stage, name):
    _told_before(two_ranks.of(changes)[f"{stage} {name}"], name)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), CHANGED_SELDOM)
def test_so_it_is_on_other_stages(two_ranks_at_length, stage, name):
    _told_before(two_ranks_at_length.of(changes_at_length)[f"{stage} {name}"], name)


def _told_before(found, name):
    apart, alike = found
    assert alike == ["nothing was raised"] * 2
    for said in apart:
        assert said.startswith(f"RankDesyncError: ranks differ in {SAID[name]}. So the step would be")


class Experts(torch.nn.Module):
    """A layer with all experts on each rank, and one with an expert on each of two."""

    def __init__(self):
        super().__init__()
        options = {"k": 1, "drop_tokens": False, "min_capacity": 0, "use_rts": False, "num_experts": 2}
        for size in (1, 2):
            setattr(self, f"of_{size}", MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH, bias=False), ep_size=size, **options))
        for number, weight in enumerate(self.parameters()):
            weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, x):
        return self.of_2(self.of_1(x)[0])[0]


def within_experts(groups, apart):
    """The parameters of each group of experts in another order."""
    return [one | {"params": one["params"][::-1]} if apart and one.get("moe") else one for one in groups]


def of_experts(groups, apart):
    """The groups in the order that a set of names has by chance (tools/deepspeed_faults/experts_in_any_order.py)."""
    apart_ones = sorted((one for one in groups if one.get("moe")), key=lambda one: one["name"], reverse=apart)
    return [*(one for one in groups if not one.get("moe")), *apart_ones]


def norms_of_experts(stage, *, own, apart, order=of_experts):
    """Of each of two steps; `own`: the loop makes the groups."""
    model, made = Experts(), {**config(stage, passes=2), "gradient_clipping": 0.1}
    del made["scheduler"]
    made |= {"optimizer": MADE, "zero_allow_untested_optimizer": True}
    given = {"model_parameters": list(model.parameters())}
    if own:
        groups = order(in_groups([{"params": given["model_parameters"], "name": "all"}]), apart)
        del made["optimizer"]
        given = {"optimizer": torch.optim.SGD(groups, lr=0.1)}
    with wrapped(deepspeed_engine, "configure_moe_param_groups", lambda split: lambda p: of_experts(split(p), apart)):
        engine = ds_parity.initialize(model=model, config=made, **given)[0]
    found = []
    for number in range(2):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        engine.backward((engine(x.to(engine.device)) - 3).pow(2).mean(), rollouts=1)
        engine.step()
        found.append(engine.last_step.grad_norm)
    engine.destroy()
    return found


@on_two_ranks
@alone_in_the_process
def experts(folder):
    last, found = dist.get_rank() == 1, {}
    for stage in STAGES[:3]:
        found[f"{stage} DeepSpeed's"] = [
            from_all(norms_of_experts(stage, own=False, apart=apart)) for apart in (last, False)
        ]
        own = from_all(refusal(lambda s=stage: norms_of_experts(s, own=True, apart=last)))
        found[f"{stage} within"] = from_all(
            refusal(lambda s=stage: norms_of_experts(s, own=True, apart=last, order=within_experts))
        )
        found[f"{stage} own"] = own, from_all(norms_of_experts(stage, own=True, apart=False))
    return found


@pytest.mark.parametrize("stage", STAGES[:3])
def test_groups_of_experts_have_one_order_on_all_ranks(two_ranks, stage):
    found = two_ranks.of(experts)
    (first, second), right = found[f"{stage} DeepSpeed's"]
    assert first == second == right[0] == right[1]
    apart, alike = found[f"{stage} own"]
    assert alike[0] == alike[1]
    for said in apart:
        assert said.startswith("RankDesyncError: ranks differ in experts of ep_size_1 (rank 0 has ")
        assert "PYTHONHASHSEED=0" in said
    for said in found[f"{stage} within"]:
        assert said.startswith("RankDesyncError: ranks differ in experts of ep_size_1 (rank 0 has ")


def without_rate(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor leaves it, which finds one in its step()
    return optimizer


@on_two_ranks
def rates(folder):
    """An optimizer without a rate, and a function that makes one; and a function that raises on one rank."""
    made = config(0, passes=2)
    del made["scheduler"], made["optimizer"]
    model = Net(("one", "two"))

    def raising(_):
        if dist.get_rank() == 1:
            raise ValueError("no optimizer today")
        return torch.optim.SGD(model.parameters(), lr=0.1)

    ways = {"given": without_rate(model), "made": lambda _: without_rate(model), "raising": raising}
    said = {}
    for name, optimizer in ways.items():
        try:
            said[name] = refusal(lambda it=optimizer: ds_parity.initialize(model=model, optimizer=it, config=made))
        except ValueError as error:
            said[name] = f"ValueError: {error}"
    try:
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "lr_scheduler": raising_behind_one}
        said["scheduler"] = refusal(lambda: ds_parity.initialize(model=model, config=made, **given))
    except ValueError as error:
        said["scheduler"] = f"ValueError: {error}"
    return from_all(said)


@on_two_ranks
def beside_another(folder):
    """Ranks that step apart, each with a part of a model, of which one gives a function; at last another engine."""
    with with_mpu() as mpu:
        model = Part(mpu)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = (lambda _: optimizer) if dist.get_rank() else optimizer
        made = config(0, passes=2)
        del made["scheduler"], made["optimizer"]
        said = refusal(lambda: ds_parity.initialize(model=model, optimizer=given, config=made, mpu=mpu))
    return from_all(said)


def test_a_function_of_one_group_of_ranks_waits_for_no_other(two_ranks):
    assert two_ranks.of(beside_another) == ["nothing was raised"] * 2


def raising_behind_one(optimizer):
    if dist.get_rank() == 1:
        raise ValueError("no scheduler today")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


@pytest.mark.parametrize("name", ["given", "made"])
def test_an_optimizer_without_a_learning_rate_is_refused(two_ranks, name):
    for said in two_ranks.of(rates):
        assert said[name].startswith("ConfigError: parameter group 0 of SGD has the learning rate None")


@pytest.mark.parametrize(("name", "said"), [("raising", "no optimizer today"), ("scheduler", "no scheduler today")])
def test_a_function_that_raises_on_one_rank_is_told_to_the_other(two_ranks, name, said):
    first, second = two_ranks.of(rates)
    assert second[name] == f"ValueError: {said}"
    assert first[name].startswith("RankDesyncError: ")
    assert said in first[name]
