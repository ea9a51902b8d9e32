"""AutoTP: ranks that hold parts of one model share each micro-batch, and count it once."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

import ds_parity
from ds_parity.all_weights import every_weight
from ds_parity.parity.running import weights
from ds_parity.parity.running.half_precision import forget_hpz
from ds_parity.parity.subjects.references.private_state import forget_tensor_groups
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import read_header
from tests.distributed.cells import STAGES, config, runs_forward
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_four_ranks, on_two_ranks

try:
    from deepspeed.runtime.tensor_parallel import init_utils
except ImportError:  # 0.18.4 lacks it, where AutoTP is refused
    init_utils = None

pytestmark = pytest.mark.ranks

DOWN = {"patterns": [r".*down\.weight$"], "partition_type": "row"}
PLAN = {
    "use_default_specs": False,
    "layer_specs": [{"patterns": [r".*up\.weight$"], "partition_type": "column"}, DOWN],
}
BF16 = {"bf16": {"enabled": True}}


class Divided(torch.nn.Module):
    """Two layers that AutoTP divides, and one that it leaves whole."""

    def __init__(self, whole="last"):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(4, 8)
        self.named = whole
        self.add_module(whole, torch.nn.Linear(1, 1))
        self.down = torch.nn.Linear(8, 1, bias=False)

    def forward(self, x):
        # Behind both: what is whole must see what is whole, or its gradients are parts of a sum.
        return getattr(self, self.named)(self.down(self.up(x).tanh()))


@contextmanager
def forgetting():
    """DeepSpeed remembers the groups of an AutoTP engine; the next test must not find them."""
    try:
        yield
    finally:
        groups.mpu = None
        if init_utils is not None:
            init_utils._TP_MODEL_INIT_ARGS = None
        forget_tensor_groups(0)


def divided_config(stage, size=2, passes=4, **keys):
    made = {**config(stage, passes=passes), "tensor_parallel": {"autotp_size": size, "partition_config": PLAN}, **keys}
    return {key: value for key, value in made.items() if value is not None}


def build(extended, model=None, **keywords):
    model = model or Divided()
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended, **keywords)
    return engine


def loss_of(engine, seed):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return engine(x.to(engine.device, next(engine.module.parameters()).dtype)).float().pow(2).mean()


def one_pass(engine, seed, **counts):
    engine.backward(loss_of(engine, seed), **counts)
    engine.step()


class Scaled(torch.nn.Linear):
    """Has a factor of its own, which is 1."""

    def __init__(self, *sizes, trained=False, **options):
        super().__init__(*sizes, **options)
        self.factor = torch.nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, x):
        return super().forward(x) * self.factor


class Bounded(torch.nn.Linear):
    """Has no more parameters, and gives another thing."""

    def forward(self, x):
        return super().forward(x).tanh()


class Nearly(torch.nn.Linear):
    """Gives a little less."""

    def forward(self, x):
        return super().forward(x) * 0.99


class Capped(torch.nn.Linear):
    """Gives nearly the same, where that is small."""

    def forward(self, x):
        return (super().forward(x) / 50).tanh() * 50


class Shifted(torch.nn.Linear):
    """Adds a little of an input."""

    def forward(self, x):
        return super().forward(x) + 1e-3 * x[..., :1]


class Rounded(torch.nn.Linear):
    """Its weight has 8 bits."""

    def forward(self, x):
        step = self.weight.abs().max() / 127
        return torch.nn.functional.linear(x, (self.weight / step).round() * step, self.bias)


class Dropped(torch.nn.Linear):
    """Drops some of what it gives, in training."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


def counted(layer, x):
    """A forward that would tell of a call that nobody has asked for."""
    layer.calls += 1
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


class Spelt(torch.nn.Linear):
    """Is a plain one, in its own words, as Falcon's is."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class InParts(torch.nn.Linear):
    """Is a plain one that sums in parts, whose rounding is another."""

    def forward(self, x):
        pairs = zip(x.split(1, -1), self.weight.split(1, -1), strict=True)
        return sum(part @ weight.T for part, weight in pairs) + self.bias


def with_layer(made, hook=None):
    model = Divided()
    model.up = made(4, 8)
    if hook is not None:
        model.up.register_forward_hook(hook)
    return model


def doubled(module, inputs, output):
    return output * 2


LAYERS = {
    "a frozen factor": (lambda: with_layer(Scaled), "factor"),
    "a trained factor": (lambda: with_layer(partial(Scaled, trained=True)), "factor"),
    "another function": (lambda: with_layer(Bounded), "what its own forward() does"),
    "a hook": (lambda: with_layer(torch.nn.Linear, doubled), "its hook doubled"),
    "weight norm": (
        lambda: with_layer(lambda *sizes: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(*sizes))),
        "parametrizations.weight.original0",
    ),
    "a little less": (lambda: with_layer(Nearly), "what its own forward() does"),
    "a bound in bf16": (lambda: with_layer(Capped).bfloat16(), "what its own forward() does"),
    "a little more in bf16": (lambda: with_layer(Shifted).bfloat16(), "what its own forward() does"),
    "8 bits": (lambda: with_layer(Rounded), "what its own forward() does"),
    "dropout": (lambda: with_layer(Dropped), "what its own forward() does"),
    "a plain one": (lambda: with_layer(Spelt), None),
    "a plain one in parts": (lambda: with_layer(InParts), None),
    "a compiled one": (lambda: with_layer(lambda *sizes: torch.compile(torch.nn.Linear(*sizes))), None),
}


@at_length_on_two_ranks
def layers_of_more(folder):
    """By stage, or how it runs, and layer: what the build of an engine over it ends in."""
    with forgetting():
        build(divided_config(2)).destroy()  # which an older release refuses, where the tests are left out
    said = {}
    for name, (made, _) in LAYERS.items():
        for stage in (0, 2, 3):
            with forgetting():
                said[f"{stage} {name}"] = from_all(refusal(lambda: build(divided_config(stage), made())))  # noqa: B023
        with forgetting():
            extended = runs_forward(divided_config(0))
            said[f"forward {name}"] = from_all(refusal(lambda: build(extended, made())))  # noqa: B023
    with forgetting():
        hook = doubled if dist.get_rank() == 0 else None
        said["one rank"] = from_all(refusal(lambda: build(divided_config(2), with_layer(torch.nn.Linear, hook))))
    with forgetting():
        model = Divided()
        state = torch.random.get_rng_state()
        model.last.calls, model.last.forward = 0, partial(counted, model.last)  # it is not in the plan
        build(divided_config(2), model)
        said["untouched"] = from_all([model.last.calls, torch.equal(state, torch.random.get_rng_state())])
    return said


@pytest.mark.slow
@pytest.mark.parametrize("way", [0, 2, 3, "forward"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_more_than_its_weight_is_refused_where_it_is_replaced(two_ranks_at_length, name, way):
    without = LAYERS[name][1]
    for said in two_ranks_at_length.of(layers_of_more)[f"{way} {name}"]:
        if without is None:
            assert said == "nothing was raised"
        else:
            assert said.startswith("ConfigError: tensor_parallel.autotp_size = 2: in the place of up (")
            assert f"and is without {without}. Merge adapters" in said


@pytest.mark.slow
def test_what_one_rank_loses_is_told_to_the_others(two_ranks_at_length):
    own, told = two_ranks_at_length.of(layers_of_more)["one rank"]
    assert own.startswith("ConfigError: tensor_parallel.autotp_size = 2: in the place of up (")
    assert told.startswith("RankDesyncError")
    assert "its hook doubled" in told


@pytest.mark.slow
def test_no_layer_is_run_to_see_what_it_does_but_one_that_was_replaced(two_ranks_at_length):
    assert two_ranks_at_length.of(layers_of_more)["untouched"] == [[0, True]] * 2


@on_two_ranks
def refusals(folder):
    """What can't be right, each alone."""
    cases = {
        "too many": lambda: build(divided_config(2, 4)),
        "mpu": lambda: build(divided_config(2), mpu=SimpleNamespace()),
        "mesh": lambda: build(divided_config(2), mesh_param=(2, 1)),
        "norm": lambda: build(divided_config(0, **BF16)),
        "heads": lambda: build(divided_config(2), Divided("q_norm")),
    }
    said = {}
    for name, case in cases.items():
        with forgetting():
            said[name] = from_all(refusal(case))
    with forgetting():
        group = dist.new_group([0, 1])
        given = deepspeed.tp_model_init(Divided(), tp_size=2, dtype=torch.float32, tp_group=group)
        said["group"] = from_all(refusal(lambda: build(divided_config(2), given)))
        trains_nothing = {key: value for key, value in divided_config(0).items() if key != "optimizer"}
        said["group, forward only"] = from_all(refusal(lambda: build(trains_nothing, given)))
    with forgetting():
        of_one = deepspeed.tp_model_init(Divided(), tp_size=1, dtype=torch.float32, tp_group=group)
        said["group of one"] = from_all(refusal(lambda: build(config(2), of_one)))
    with forgetting():
        extended = divided_config(2)
        extended["tensor_parallel"]["tp"] = {"tp_size": 2, "tp_group": group}
        said["group in the section"] = from_all(refusal(lambda: build(extended)))
    with forgetting():
        build(divided_config(2)).destroy()
        said["remembered"] = from_all(refusal(lambda: build(config(2))))
        said["remembered, forward only"] = from_all(refusal(lambda: build(runs_forward(config(0, passes=4)))))
        said["right, forward only"] = from_all(refusal(lambda: build(runs_forward(divided_config(0)))))
    return said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "too many",
            "the configuration is refused:\n  tensor_parallel.autotp_size = 4: 2 ranks can't be divided into groups",
        ),
        ("mpu", "tensor_parallel.autotp_size = 2 with mpu=: AutoTP makes groups of its own and forgets those"),
        ("mesh", "tensor_parallel.autotp_size = 2 with mesh_param=: AutoTP makes groups of its own"),
        ("norm", "tensor_parallel.autotp_size = 2 on ZeRO stage 0 in fp16 or bf16 with SGD: DeepSpeed takes the norm"),
        ("heads", "q_norm.weight (and 1 more): a norm of heads, of which each rank has its own"),
        ("group", "tp_group is given (to tp_model_init(), or in tensor_parallel): DeepSpeed builds no engine with it"),
        ("group of one", "tp_group is given (to tp_model_init(), or in tensor_parallel): DeepSpeed builds no engine"),
        ("group, forward only", "tp_group is given (to tp_model_init(), or in tensor_parallel): DeepSpeed builds no"),
        ("remembered, forward only", "no mpu is given, but an earlier engine of this process had one (or AutoTP)"),
        ("group in the section", "tp_group is given (to tp_model_init(), or in tensor_parallel): DeepSpeed builds no"),
        (
            "remembered",
            "the configuration has no tensor_parallel.autotp_size, but an earlier engine of this process had it",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank_with_the_reason(two_ranks, name, says):
    for said in two_ranks.of(refusals)[name]:
        assert said.startswith(f"ConfigError: {says}")


def test_a_reference_model_may_be_divided_as_its_actor(two_ranks):
    assert two_ranks.of(refusals)["right, forward only"] == ["nothing was raised"] * 2


@on_four_ranks
def gathered_by_hpz(folder):
    """Engines on ZeRO 3 with hpZ, behind one with it, and one that only runs forward."""
    said, hpz = {}, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    try:
        with forgetting():
            said["of its own"] = from_all(refusal(lambda: build(divided_config(3, **hpz))))
        forget_hpz()
        with forgetting():
            build({**config(3), **hpz}).destroy()
            groups.mpu = None
            said["of another"] = from_all(refusal(lambda: build(divided_config(3))))
        with forgetting():
            runs_forward = {key: value for key, value in divided_config(3).items() if key != "optimizer"}
            said["forward only"] = from_all(refusal(lambda: build(runs_forward)))
    finally:
        forget_hpz()
    return said


@pytest.mark.parametrize("name", ["of its own", "of another", "forward only"])
def test_hpz_does_not_gather_weights_of_other_parts(four_ranks, name):
    """Two windows of bare DeepSpeed have norms of 1.0203 and 0.9961 then, where 1.0236 and 0.9976 are right."""
    for said in four_ranks.of(gathered_by_hpz)[name]:
        assert said.startswith("ConfigError: zero_hpz_partition_size, of this engine or of an earlier one of this")


@on_four_ranks
def another_size(folder):
    """An engine of groups of another size than those that DeepSpeed has made."""
    with forgetting():
        build(divided_config(2)).destroy()
        return from_all(refusal(lambda: build(divided_config(2, 4))))


def test_groups_that_deepspeed_has_made_once_are_not_taken_for_others(four_ranks):
    for said in four_ranks.of(another_size):
        assert said.startswith("ConfigError: tensor_parallel.autotp_size = 4, but DeepSpeed took groups of 2 ranks")


@on_four_ranks
def different_counts(folder):
    """Ranks of a group that pass different counts, and streams of different lengths."""
    results = {}
    with forgetting():
        engine = build(divided_config(2, passes=8, **{"ds_parity": {"loss_weight": "token"}}))
        tokens = 10 + (dist.get_rank() == 3)
        results["tokens"] = from_all(refusal(lambda: engine.backward(loss_of(engine, 0), rollouts=1, tokens=tokens)))
        stream = [MicroBatch({}, rollouts=1, prompts=1, tokens=10)] * (2 if dist.get_rank() == 1 else 3)
        results["streams"] = from_all(refusal(lambda: list(engine.passes(stream, lookahead=3))))
        engine.backward(loss_of(engine, 0), rollouts=1, tokens=10)
        results["goes on"] = (engine.window.rollouts, engine.window.tokens, engine.dp_world_size)
        engine.destroy()
    return results


class TestCounts:
    """A micro-batch that several ranks run counts once."""

    @pytest.mark.parametrize("name", ["tokens", "streams"])
    def test_a_rank_that_differs_from_its_group_ends_in_an_error_on_every_rank(self, four_ranks, name):
        for said in four_ranks.of(different_counts)[name]:
            assert said.startswith("RankDesyncError: ranks that share a micro-batch passed different counts: rank ")

    def test_the_engine_goes_on_and_counts_two_micro_batches_of_four_ranks(self, four_ranks):
        assert four_ranks.of(different_counts)["goes on"] == [2, 20, 2]


def after_two_windows(engine):
    """Norms of two windows of four rollouts, and all weights after them."""
    norms = []
    for seed in range(8 // engine.dp_world_size):
        one_pass(engine, 10 * (dist.get_rank() // 2) + seed)
        if engine.window.passes == 0:
            norms.append(engine.last_step.grad_norm)
    return norms, weights.vector(engine.module).tolist()


@on_two_ranks
def by_function(folder):
    """An engine whose division stands in the configuration, and one for which tp_model_init() has recorded it."""
    results = {}
    with forgetting():
        engine = build(divided_config(2))
        results["section"] = after_two_windows(engine)
        engine.destroy()
    with forgetting():
        model = deepspeed.tp_model_init(Divided(), tp_size=2, dtype=torch.float32)
        recorded = divided_config(2)
        del recorded["tensor_parallel"]["autotp_size"]
        engine = build(recorded, model)
        results["recorded"], results["ranks"] = after_two_windows(engine), engine.dp_world_size
        engine.destroy()
    return results


def test_a_size_that_tp_model_init_has_recorded_is_that_of_the_configuration(two_ranks):
    result = two_ranks.of(by_function)
    assert result["ranks"] == 1
    assert result["recorded"] == result["section"]
    assert len(result["section"][0]) == 2


@on_two_ranks
def read_whole(folder):
    """All weights of a divided model, read before and after a step, and the start that a trace tells of."""
    results = {}
    extra = {"plain": {}, "summed": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}}
    for name, keys in extra.items():
        with forgetting():
            trace = f"{folder}/{name}.jsonl"
            engine = build(divided_config(1, **keys, **{"ds_parity": {"trace": trace}}))
            start = weights.trained(engine.module)
            norms, after = after_two_windows(engine)
            moved = torch.cat([one.values for one in every_weight(engine.module)])
            results[name] = {
                "start": start.tolist(),
                "moved": from_all(moved.tolist()),
                "norm": float(start.double().norm()),
                "after": after,
                "norms": norms,
            }
            engine.finish()
            engine.destroy()
            if dist.get_rank() == 0:
                results[name]["header"] = read_header(trace).start.norm
    return results


class TestWholeWeights:
    """What reads weights for traces and comparisons gathers them, and leaves the engine as it is."""

    @pytest.mark.parametrize("name", ["plain", "summed"])
    def test_they_are_those_of_the_undivided_model_on_every_rank(self, two_ranks, name):
        result = two_ranks.of(read_whole)[name]
        undivided = torch.cat([p.detach().flatten() for p in Divided().parameters()])
        torch.testing.assert_close(
            torch.tensor(result["start"]), undivided, rtol=0, atol=0 if name == "plain" else 2e-3
        )
        assert result["moved"][0] == result["moved"][1]
        assert result["header"] == pytest.approx(result["norm"], rel=1e-6)

    @pytest.mark.parametrize("name", ["plain", "summed"])
    def test_training_goes_on_behind_the_reading(self, two_ranks, name):
        """DeepSpeed's own context for it takes parameters out of BF16_Optimizer's buffer: they are stepped no more."""
        result = two_ranks.of(read_whole)[name]
        assert max(abs(a - b) for a, b in zip(result["start"], result["after"], strict=True)) > 0.01
        assert result["norms"][0] != result["norms"][1]


@on_two_ranks
def saved_whole(folder):
    """What save_16bit_model() writes by stage, beside all weights; and norms of windows behind it."""
    results = {}
    sub_parameters = [{"patterns": [r".*up\.weight$"], "partition_type": "column", "shape": [2, -1]}, DOWN]
    of_two = {"tensor_parallel": {"autotp_size": 2, "partition_config": {**PLAN, "layer_specs": sub_parameters}}}
    for name, stage, keys in [(str(stage), stage, {}) for stage in STAGES] + [
        ("summed", 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
        ("sub-parameters", 1, of_two),
    ]:
        with forgetting():
            extended = divided_config(stage, **keys)
            extended["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
            engine = build(extended)
            after_two_windows(engine)
            _, unsaved = after_two_windows(engine)
            engine.destroy()
            engine = build(extended)
            engine.save_16bit_model(f"{folder}/{name}", "start.bin")
            after_two_windows(engine)
            saved = engine.save_16bit_model(f"{folder}/{name}")
            gathered = engine._consolidated_16bit_state_dict()
            whole = weights.vector(engine.module).tolist()
            norms, later = after_two_windows(engine)
            results[name] = {"saved": from_all(saved), "whole": whole, "norms": norms}
            results[name] |= {"later": later, "unsaved": unsaved}
            engine.destroy()
            if dist.get_rank() == 0:
                state = torch.load(f"{folder}/{name}/pytorch_model.bin")
                results[name]["written"] = {key: list(value.shape) for key, value in state.items()}
                results[name]["gathered"] = {key: list(value.shape) for key, value in gathered.items()}
                start = torch.load(f"{folder}/{name}/start.bin")
                results[name]["start"] = torch.cat([one.flatten().float() for one in start.values()]).tolist()
                results[name]["values"] = torch.cat([one.flatten() for one in state.values()]).tolist()
    return results


@pytest.mark.parametrize("name", [*map(str, STAGES), "summed", "sub-parameters"])
def test_the_model_is_saved_whole_and_trained_on(two_ranks, name):
    """DeepSpeed writes the first rank's part on ZeRO 0 to 2."""
    result = two_ranks.of(saved_whole)[name]
    assert result["saved"] == [True, True]
    assert result["written"] == {key: list(value.shape) for key, value in Divided().state_dict().items()}
    assert result["values"] == pytest.approx(result["whole"], rel=1e-2 if name == "summed" else 1e-6)
    undivided = torch.cat([p.detach().flatten() for p in Divided().parameters()]).tolist()
    assert result["start"] == pytest.approx(undivided, abs=2e-3 if name == "summed" else 0)
    assert result["gathered"] == result["written"]
    assert result["later"] == result["unsaved"] != result["whole"]
    assert len(result["norms"]) == 2


def tied_decoder():
    """A model of transformers whose head is its embedding, as in every small Qwen and Llama."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))


@on_two_ranks
def tied(folder):
    """Logits of a model that ties its embedding: their shape, and a loss of one's own on each rank."""
    ids = torch.arange(12).reshape(2, 6)
    results = {}

    def loss_of_logits(logits):
        return -logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None].to(logits.device)).mean()

    plain = tied_decoder()(input_ids=ids).logits
    results["plain"] = [list(plain.shape), loss_of_logits(plain).item()]
    with forgetting():
        extended = divided_config(2)
        extended["tensor_parallel"] = {"autotp_size": 2}
        engine = build(extended, tied_decoder())
        logits = engine(input_ids=ids.to(engine.device)).logits
        results["divided"] = from_all([list(logits.shape), loss_of_logits(logits).item()])
        engine.destroy()
    return results


def test_a_tied_head_gives_the_logits_of_the_whole_vocabulary(two_ranks):
    """DeepSpeed 0.19.8 gives each rank a part of them there, and a loss of one's own would be wrong without a word."""
    result = two_ranks.of(tied)
    shape, loss = result["plain"]
    for divided_shape, divided_loss in result["divided"]:
        assert divided_shape == shape
        assert divided_loss == pytest.approx(loss, rel=1e-5)


@on_four_ranks
def resumed(folder):
    """A run of two windows, and one that goes on from the checkpoint behind the first in a fresh engine."""
    results = {}
    for stage in (0, 1, 2, 3):
        with forgetting():
            engine = build(divided_config(stage))
            for seed in range(2):
                one_pass(engine, 10 * (dist.get_rank() // 2) + seed)
            engine.save_checkpoint(f"{folder}/divided{stage}")
            whole = after_two_windows(engine)
            engine.destroy()
            fresh = build(divided_config(stage))
            load = partial(fresh.load_checkpoint, f"{folder}/divided{stage}")
            alone = refusal(lambda load=load: load(load_optimizer_states=False)) if stage == 3 else ""
            load()
            results[str(stage)] = {"whole": whole, "resumed": after_two_windows(fresh), "step": fresh.last_step.step}
            results[str(stage)]["alone"] = alone
            fresh.destroy()
    return results


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_checkpoint_goes_on_bit_for_bit(four_ranks, stage):
    result = four_ranks.of(resumed)[stage]
    assert result["resumed"] == result["whole"]
    assert result["step"] == 3


def test_weights_alone_are_refused_on_zero3_with_the_way_out(four_ranks):
    said = four_ranks.of(resumed)["3"]["alone"]
    assert "with tensor_parallel.autotp_size = 2: DeepSpeed can't read the weights of a divided model alone" in said
