"""Tensors hold what their rollouts hold: padded or packed the same loss, and nothing of a neighbour."""

import math
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_parity
from ds_parity.collation import IGNORED, collate, labels, micro_batches, to_device
from ds_parity.errors import ConfigError
from ds_parity.losses import DirectPreference, PolicyGradient
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import line_turns, load_rollouts, shorten
from ds_parity.planning import MicroBatch, PreferencePair, Rollout, plan
from tests.defaults import default_dtype

SHORT = Rollout("a", (9, 1, 8), prompt_length=2, reward=1.0, advantage=0.5)
LONG = Rollout("b", (9, 2, 3, 4, 8), prompt_length=2, reward=0.0, advantage=-1.0)
GSM8K = shorten(load_rollouts()[:48], 80)
WEIGHTS = ("rollout", "token", "pass", "target")


def pairs(count):
    """Right and wrong solutions of the same question, with a made-up reference."""
    groups = {}
    for rollout in load_rollouts():
        groups.setdefault(rollout.prompt_id, {}).setdefault(rollout.reward, rollout)
    both = [group for group in groups.values() if len(group) == 2][:count]
    return [
        PreferencePair(*shorten((group[1.0], group[0.0]), 64 + 8 * (number % 5)), -3.0 - number, -2.0 - number / 2)
        for number, group in enumerate(both)
    ]


def gradients(module, *batches):
    """Loss and gradient of the weighted mean over micro-batches, weights given with each."""
    module.zero_grad()
    total = sum(weight for _, weight in batches)
    whole = 0.0
    for batch, weight in batches:
        out = module(**batch.inputs)
        loss = (out if isinstance(out, torch.Tensor) else out[0]) * weight / total
        loss.backward()
        whole = whole + loss.detach()
    return whole, torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


class TestPadded:
    def test_pads_on_the_right_and_masks_prompt_and_padding(self):
        batch = collate([SHORT, LONG], prompts=1, pad=5)
        assert batch.inputs["input_ids"].tolist() == [[9, 1, 8, 5, 5], [9, 2, 3, 4, 8]]
        assert batch.inputs["loss_mask"].tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]
        assert batch.inputs["advantages"].tolist() == [0.5, -1.0]
        assert (batch.rollouts, batch.prompts, batch.tokens) == (2, 1, 4)

    def test_labels_are_the_loss_tokens_where_a_model_expects_them(self):
        assert labels(collate([SHORT, LONG])).tolist() == [
            [IGNORED, IGNORED, 8] + [IGNORED] * 2,
            [IGNORED, IGNORED, 3, 4, 8],
        ]


class TestPacked:
    def test_lies_end_to_end_with_positions_and_numbers_of_its_own(self):
        inputs = collate([SHORT, LONG], layout="packed").inputs
        assert inputs["input_ids"].tolist() == [[9, 1, 8, 9, 2, 3, 4, 8]]
        assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
        assert inputs["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
        assert inputs["loss_mask"].tolist() == [[0, 1, 0, 0, 1, 1, 1]]
        assert inputs["advantages"].tolist() == [0.5, -1.0]

    def test_labels_never_ask_for_a_neighbours_first_token(self):
        expected = [IGNORED, IGNORED, 8, IGNORED, IGNORED, 3, 4, 8]
        assert labels(collate([SHORT, LONG], layout="packed")).tolist() == [expected]

    @pytest.mark.parametrize("objective", ["policy_gradient", "nll"])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("weight", WEIGHTS)
    def test_loss_and_gradient_are_those_of_padded_rollouts(self, weight, reduction, objective):
        module = PolicyGradient(build_tiny().double(), weight, reduction, objective)
        units = GSM8K[:7]
        padded, packed = (gradients(module, (collate(units, layout=how), 1)) for how in ("padded", "packed"))
        assert torch.allclose(padded[0], packed[0], rtol=1e-12)
        assert (padded[1] - packed[1]).norm() < 1e-12 * padded[1].norm()

    def test_a_sequence_sees_nothing_of_its_neighbours_to_the_last_bit(self):
        """Also where a neighbour's attention would come to NaN."""
        model = build_tiny()
        other = Rollout("c", (200,) * 11, 1)
        first, second = (collate([one, LONG], layout="packed").inputs for one in (other, Rollout("d", (17,) * 11, 1)))
        logits = [model(inputs["input_ids"], position_ids=inputs["position_ids"])[:, 11:] for inputs in (first, second)]
        assert torch.equal(*logits)
        alone = collate([LONG]).inputs
        assert torch.allclose(model(alone["input_ids"]), logits[0], rtol=1e-5, atol=1e-5)

    def test_only_sequences_are_bound_to_the_models_length(self):
        model = build_tiny()
        units = [Rollout(str(n), (1,) * 1500, 1) for n in range(2)]
        inputs = collate(units, layout="packed").inputs
        assert model(inputs["input_ids"], position_ids=inputs["position_ids"]).shape[1] == 3000
        long = collate([SHORT, Rollout("x", (1,) * 2100, 1)], layout="packed").inputs
        with pytest.raises(ConfigError, match="sequence of 2100 tokens: max_length is 2048"):
            model(long["input_ids"], position_ids=long["position_ids"])


@pytest.mark.parametrize("layout", ["padded", "packed"])
class TestEither:
    @given(shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5))
    def test_the_mask_holds_as_many_tokens_as_the_count_says(self, layout, shapes):
        rollouts = [Rollout("p", (3,) * (prompt + answer), prompt_length=prompt) for prompt, answer in shapes]
        batch = collate(rollouts, layout=layout)
        assert batch.inputs["loss_mask"].sum() == batch.tokens == sum(answer for _, answer in shapes)

    def test_nothing_held_is_an_idle_micro_batch_without_loss_tokens(self, layout):
        batch = collate((), layout=layout, pad=7)
        assert batch.idle
        assert (batch.rollouts, batch.prompts, batch.tokens) == (0, 0, 0)
        assert batch.inputs["input_ids"].tolist() == [[7, 7]]
        assert not batch.inputs["loss_mask"].any()
        loss, gradient = gradients(PolicyGradient(build_tiny()), (batch, 1))
        assert loss == 0
        assert not gradient.any()

    def test_no_two_micro_batches_share_a_tensor(self, layout):
        one, two = collate([SHORT], layout=layout), collate([SHORT], layout=layout)
        assert all(one.inputs[name].data_ptr() != two.inputs[name].data_ptr() for name in one.inputs)

    def test_a_rollout_without_loss_tokens_counts_and_gives_a_loss_of_0(self, layout):
        empty = Rollout("p", (1, 2, 3), prompt_length=3, advantage=1.0)
        batch = collate([empty], layout=layout)
        assert (batch.rollouts, batch.tokens, batch.idle) == (1, 0, False)
        loss, gradient = gradients(PolicyGradient(build_tiny(), "token"), (batch, 1))
        assert loss == 0
        assert not gradient.any()

    @pytest.mark.parametrize("length", [0, 3])
    def test_a_prompt_that_is_none_is_refused_by_name_here_and_in_a_plan(self, layout, length):
        """A prompt longer than its sequence is left behind by cutting the sequence alone: a negative token count."""
        wrong = Rollout("p", (1, 2), prompt_length=length)
        said = f"prompt 'p': prompt_length is {length}, must be from 1 to its 2 tokens"
        with pytest.raises(ConfigError, match=said):
            collate([SHORT, wrong], layout=layout)
        with pytest.raises(ConfigError, match=said):
            plan([SHORT, wrong], dp_world_size=1, target=1, max_tokens=9, layout=layout)

    def test_masks_are_fp32_whatever_the_default_type(self, layout):
        with default_dtype(torch.bfloat16):
            batch, pair = (collate([one], layout=layout) for one in (LONG, PreferencePair(LONG, SHORT, -3.3)))
        kinds = {batch.inputs[name].dtype for name in ("loss_mask", "advantages")}
        assert kinds | {pair.inputs["reference_logps"].dtype} == {torch.float32}

    def test_rollouts_and_pairs_are_not_mixed(self, layout):
        with pytest.raises(ConfigError, match="1 of 2 are preference pairs"):
            collate([SHORT, PreferencePair(SHORT, LONG)], layout=layout)

    def test_to_device_moves_every_input_and_keeps_the_counts(self, layout):
        batch = collate([SHORT, LONG], layout=layout, prompts=1)
        moved = to_device(batch, "meta")
        assert {tensor.device for tensor in moved.inputs.values()} == {torch.device("meta")}
        assert (moved.rollouts, moved.prompts, moved.tokens, moved.held) == (2, 1, 4, batch.held)


class Noted(torch.Tensor):
    """A tensor that notes how it is pinned and moved, and stays where it is."""

    calls: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.pin_memory, torch.Tensor.to):
            cls.calls.append((function.__name__, args[1:], kwargs or {}))
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


class TestMovingToADevice:
    @pytest.fixture(autouse=True)
    def _nothing_is_noted(self):
        Noted.calls.clear()

    def moved(self, device):
        to_device(MicroBatch({name: torch.ones(3).as_subclass(Noted) for name in ("a", "b")}), device)
        return Noted.calls

    def test_copies_from_pinned_memory_and_waits_for_no_accelerator(self):
        one = [("pin_memory", (), {}), ("to", (torch.device("cuda", 0),), {"non_blocking": True})]
        assert self.moved("cuda:0") == one * 2

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_pins_nothing_where_there_is_no_accelerator(self, device):
        assert self.moved(device) == [("to", (torch.device(device),), {})] * 2

    def test_takes_what_lies_on_a_device_as_it_is(self):
        there = torch.ones(3, device="meta").as_subclass(Noted)
        to_device(MicroBatch({"a": there}), "cuda:1")
        assert Noted.calls == [("to", (torch.device("cuda", 1),), {})]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU are not run: there is none here")
    def test_returns_before_the_gpu_has_come_to_the_copy_and_copies_what_stood_there(self):
        batch = collate([SHORT, LONG] * 200)
        for _ in range(2):  # the first round makes the pinned blocks
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # about a second
            moved = [to_device(batch, "cuda") for _ in range(8)]
            waited = torch.cuda.current_stream().query()
            for one in moved:
                for name, value in batch.inputs.items():
                    assert torch.equal(one.inputs[name].cpu(), value)
        assert not waited


@pytest.mark.parametrize("layout", ["padded", "packed"])
class TestPlanned:
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_what_is_told_of_a_micro_batch_is_its_own_rows_alone(self, layout, ranks):
        planned = plan(GSM8K, dp_world_size=ranks, target=16, max_tokens=400, layout=layout)
        seen = []
        for rank in range(ranks):
            for batch in micro_batches(planned, rank):
                assert batch.inputs["advantages"].tolist() == pytest.approx([r.advantage for r in batch.held] or [0.0])
                ids = batch.inputs["input_ids"]
                assert ids.numel() <= 400
                flat = [token for rollout in batch.held for token in rollout.tokens]
                assert layout == "padded" or ids[0].tolist() == (flat or [0, 0])
                seen += batch.held
        assert sorted(seen, key=lambda r: r.tokens) == sorted(GSM8K, key=lambda r: r.tokens)

    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_ranks_take_as_many_passes_and_counts_add_up_to_the_targets(self, layout, ranks):
        planned = plan(GSM8K, dp_world_size=ranks, target=3, max_tokens=400, layout=layout, count="prompt")
        streams = [list(micro_batches(planned, rank)) for rank in range(ranks)]
        assert {len(stream) for stream in streams} == {planned.passes}
        assert sum(batch.prompts for stream in streams for batch in stream) == 3 * len(planned.windows)
        assert sum(batch.idle for stream in streams for batch in stream) == planned.idle_passes
        finished = [sum(batch.prompts for batch in row) for row in zip(*streams, strict=True)]
        closing = [at - 1 for at in torch.tensor([w.passes for w in planned.windows]).cumsum(0).tolist()]
        reached = torch.tensor(finished).cumsum(0).tolist()
        assert [reached.index(3 * (n + 1)) for n in range(len(planned.windows))] == closing

    def test_a_turn_that_is_not_its_rollouts_last_finishes_none(self, layout):
        turns = list(line_turns(load_rollouts()[:12]))
        planned = plan(turns, dp_world_size=2, target=12, max_tokens=2048, layout=layout)
        batches = [batch for rank in range(2) for batch in micro_batches(planned, rank)]
        assert sum(batch.rollouts for batch in batches) == 12
        assert sum(batch.tokens for batch in batches) == sum(r.loss_tokens for r in load_rollouts()[:12])
        assert any(batch.rollouts < len(batch.held) for batch in batches)

    def test_step_wise_training_has_the_gradient_of_whole_trajectories(self, layout):
        whole = GSM8K[:6]
        module = PolicyGradient(build_tiny().double(), "token")
        planned = plan(line_turns(whole), dp_world_size=1, target=6, max_tokens=250, layout=layout)
        batches = [(batch, batch.tokens) for batch in micro_batches(planned, 0)]
        assert len({weight for _, weight in batches}) > 1
        loss, gradient = gradients(module, *batches)
        expected = gradients(module, (collate(whole), 1))
        assert torch.allclose(loss, expected[0], rtol=1e-12)
        assert (gradient - expected[1]).norm() < 1e-12 * expected[1].norm()


class TestRanksOfAPlan:
    def test_each_micro_batch_says_for_how_many_it_was_planned_wherever_it_is_moved(self):
        planned = plan([SHORT, LONG], dp_world_size=3, target=2, max_tokens=9)
        batches = [to_device(one, "meta") for rank in range(3) for one in micro_batches(planned, rank)]
        assert any(batch.idle for batch in batches)
        assert {batch.planned_for for batch in batches} == {3}
        assert collate([SHORT]).planned_for is None

    def test_a_generator_keeps_none_of_them(self):
        stream = micro_batches(plan(GSM8K, dp_world_size=1, target=16, max_tokens=400), 0)
        held = weakref.ref(next(stream).inputs["input_ids"])
        assert held() is None


class TestPairs:
    @pytest.mark.parametrize("layout", ["padded", "packed"])
    def test_chosen_and_rejected_lie_in_one_micro_batch_beside_each_other(self, layout):
        planned = plan(pairs(20), dp_world_size=2, target=10, max_tokens=300, layout=layout)
        for rank in range(2):
            for batch in micro_batches(planned, rank):
                assert batch.inputs["input_ids"].numel() <= 300
                if layout == "padded":
                    assert len(batch.inputs["input_ids"]) == 2 * len(batch.held)
                else:
                    assert batch.inputs["segment_ids"].max() == 2 * len(batch.held) - 1
                assert batch.rollouts == len(batch.held)
                given = [[pair.chosen_logp, pair.rejected_logp] for pair in batch.held]
                assert batch.inputs["reference_logps"].tolist() == given

    @pytest.mark.parametrize("layout", ["padded", "packed"])
    @pytest.mark.parametrize("weight", ["token", "rollout"])
    def test_dpo_over_micro_batches_equals_the_whole_batch(self, layout, weight):
        """Token-weighted loss and margin, accuracy a mean over pairs: means of means would differ."""
        units = pairs(20)
        module = DirectPreference(build_tiny().double(), loss_weight=weight)
        planned = plan(units, dp_world_size=1, target=20, max_tokens=420, layout=layout)
        batches = [(b, b.tokens if weight == "token" else b.rollouts) for b in micro_batches(planned, 0)]
        assert len({count for _, count in batches}) > 1
        loss, gradient = gradients(module, *batches)
        expected = gradients(module, (collate(units), 1))
        assert torch.allclose(loss, expected[0], rtol=1e-12)
        assert (gradient - expected[1]).norm() < 1e-12 * expected[1].norm()
        margins = {
            pair.prompt_id: m for pair, m in zip(units, module(**collate(units).inputs)[1].tolist(), strict=True)
        }
        for batch, _ in batches:
            margins_of_batch = module(**batch.inputs)[1].tolist()
            assert margins_of_batch == pytest.approx([margins[pair.prompt_id] for pair in batch.held], rel=1e-10)

    def test_the_loss_is_the_formula(self):
        """One pair, beta 0.5, sums of log probabilities taken by hand."""
        model = build_tiny().double()
        pair = PreferencePair(SHORT, LONG, chosen_logp=-1.0, rejected_logp=-4.0)

        def logp(rollout):
            logits = model(torch.tensor([rollout.tokens]))[0].log_softmax(-1)
            scored = range(rollout.prompt_length, len(rollout.tokens))
            return sum(logits[at - 1, rollout.tokens[at]] for at in scored)

        margin = 0.5 * ((logp(SHORT) - -1.0) - (logp(LONG) - -4.0))
        loss, margins, tokens = DirectPreference(model, beta=0.5)(**collate([pair]).inputs)
        assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margin).item(), rel=1e-12)
        assert margins.item() == pytest.approx(margin.item(), rel=1e-12)
        assert tokens.tolist() == [4.0]

    @pytest.mark.parametrize("layout", ["padded", "packed"])
    def test_a_policy_that_is_its_own_reference_has_no_margins(self, layout):
        """What `answers` gives is what the loss takes as `reference_logps`, in the order of the pairs."""
        module, inputs = DirectPreference(build_tiny().double()), dict(collate(pairs(5), layout=layout).inputs)
        inputs.pop("reference_logps")
        reference, tokens = module.answers(pairs=5, **inputs)
        loss, margins, _ = module(**inputs, reference_logps=reference)
        assert not margins.any()
        assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
        assert tokens.tolist() == [pair.loss_tokens for pair in pairs(5)]

    def test_pairs_among_rollouts_are_refused_before_anything_is_planned(self):
        with pytest.raises(ConfigError, match="1 preference pairs among 2 rollouts"):
            plan([SHORT, PreferencePair(SHORT, LONG)], dp_world_size=1, target=1, max_tokens=99)

    def test_a_pair_that_is_too_long_is_refused_as_a_whole(self):
        with pytest.raises(ConfigError, match="has 8 tokens, more than max_tokens = 7"):
            plan([PreferencePair(SHORT, LONG)], dp_world_size=1, target=1, max_tokens=7)

    @pytest.mark.parametrize("layout", ["padded", "packed"])
    def test_an_idle_pass_among_pairs_has_the_inputs_of_a_pair(self, layout):
        planned = plan(pairs(3), dp_world_size=2, target=3, max_tokens=160, layout=layout)
        idle = [batch for rank in range(2) for batch in micro_batches(planned, rank) if batch.idle]
        assert len(idle) == planned.idle_passes == 1
        loss, margins, tokens = DirectPreference(build_tiny())(**idle[0].inputs)
        assert margins.shape == tokens.shape == (1,)
        assert not tokens.any()
        assert loss.requires_grad

    def test_another_weight_is_refused(self):
        with pytest.raises(ConfigError, match="loss_weight = 'pass'"):
            DirectPreference(build_tiny(), loss_weight="pass")


@settings(deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 8))
def test_a_stream_holds_its_plan_whatever_the_lengths(lengths, ranks, target):
    rollouts = [Rollout(str(n // 3), (n % 250,) * length, 1) for n, length in enumerate(lengths)]
    planned = plan(rollouts, dp_world_size=ranks, target=target, max_tokens=60)
    for rank in range(ranks):
        for chosen, batch in zip(planned.of_rank(rank), micro_batches(planned, rank), strict=True):
            assert list(batch.held) == [rollouts[i] for i in chosen]
            assert batch.rollouts == len(chosen)


@dataclass(frozen=True, slots=True)
class Sampled(Rollout):
    """A rollout with what its sampler said of it."""

    old_logps: tuple[float, ...] = ()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_a_rollout_of_ones_own_carries_comes_back_row_by_row(layout):
    """Old log-probs, say: in the order of the micro-batch's rows, one of each loss token."""
    own = [
        Sampled(
            f"{n}", tuple(range(2 + n % 5)), 1, advantage=float(n), old_logps=tuple(-0.5 * n for _ in range(1 + n % 5))
        )
        for n in range(24)
    ]
    planned = plan(own, dp_world_size=2, target=8, max_tokens=12, layout=layout)
    for micro_batch in (one for rank in (0, 1) for one in micro_batches(planned, rank)):
        carried = [logp for one in micro_batch.held for logp in one.old_logps]
        assert len(carried) == micro_batch.tokens == int(micro_batch.inputs["loss_mask"].sum())
        advantages = [one.advantage for one in micro_batch.held]
        assert advantages == micro_batch.inputs["advantages"].tolist()[: len(advantages)]


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_a_stream_that_starts_at_a_window_is_the_rest_of_the_whole_one(window):
    turns = list(line_turns(load_rollouts()[:30]))
    planned = plan(turns, dp_world_size=2, target=10, max_tokens=2048)
    for rank in range(2):
        whole, rest = (list(micro_batches(planned, rank, first_window=first)) for first in (0, window))
        assert len(rest) == sum(one.passes for one in planned.windows[window:])
        expected = whole[len(whole) - len(rest) :]
        assert [(b.held, b.rollouts, b.prompts) for b in rest] == [(b.held, b.rollouts, b.prompts) for b in expected]


@pytest.mark.parametrize("window", [-1, 2])
def test_a_window_that_the_plan_does_not_have_is_refused(window):
    planned = plan([SHORT], dp_world_size=1, target=1, max_tokens=9)
    with pytest.raises(ConfigError, match=f"first_window = {window}: the plan has 1 windows"):
        next(micro_batches(planned, 0, first_window=window))


def test_a_rank_that_the_plan_does_not_know_is_refused():
    planned = plan([SHORT], dp_world_size=2, target=1, max_tokens=9)
    with pytest.raises(ConfigError, match=r"rank 2: the plan is for 2 data-parallel ranks.*; plan with"):
        next(ds_parity.micro_batches(planned, 2))


def test_an_unknown_layout_is_refused():
    with pytest.raises(ConfigError, match="layout is 'pack': it must be one of 'packed', 'padded'"):
        collate([SHORT], layout="pack")


TWO_NUMBERS = {
    "a list": [0.5, -0.1],
    "a tensor": torch.tensor([0.5, -0.1]),
    "a list of one": [0.5],
    "nothing": None,
    "a name": "0.5",
    "not a number": math.nan,
    "no finite one": -math.inf,
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", TWO_NUMBERS)
class TestWhatIsNotOneNumber:
    def test_is_no_advantage(self, layout, kind):
        """One number for each token was taken, and the loss mixed rollouts without a word."""
        given = TWO_NUMBERS[kind]
        wrong = Rollout("p", (1, 2, 3, 4), 2, advantage=given)
        with pytest.raises(
            ConfigError, match=r"prompt 'p': advantage is .*one finite number.*loss of your own"
        ) as said:
            collate([SHORT, wrong], layout=layout)
        assert repr(given) in str(said.value)

    def test_is_no_log_probability_of_a_reference(self, layout, kind):
        wrong = PreferencePair(SHORT, LONG, -1.0, TWO_NUMBERS[kind])
        with pytest.raises(ConfigError, match=r"pair of prompt 'a': rejected_logp is .*one finite number.*sum"):
            collate([wrong], layout=layout)


@pytest.mark.parametrize("beta", [0, -1, 0.0, math.nan, math.inf, "x", None])
def test_a_preference_needs_a_strength_above_0(beta):
    with pytest.raises(ConfigError, match=rf"beta = {beta!r}: it must be a finite number above 0"):
        DirectPreference(torch.nn.Identity(), beta)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_number_that_fp32_does_not_have_is_refused(layout):
    with pytest.raises(ConfigError, match=r"advantage is 1e\+39, must be one finite number of fp32"):
        collate([Rollout("p", (1, 2, 3), 1, advantage=1e39)], layout=layout)
    most = torch.finfo(torch.float32).max
    assert collate([Rollout("p", (1, 2, 3), 1, advantage=most)], layout=layout).inputs["advantages"].tolist() == [most]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("make", [list, torch.tensor])
def test_tokens_of_several_rows_in_one_rollout_are_refused(layout, make):
    with pytest.raises(ConfigError, match="must be a sequence of token ids"):
        collate([Rollout("p", make([[1, 2], [3, 4]]), 1)], layout=layout)


@pytest.mark.parametrize("name", ["rollouts", "prompts"])
@pytest.mark.parametrize("count", [-1, 1.5, "1", math.nan])
def test_counts_of_a_micro_batch_are_whole_numbers(name, count):
    with pytest.raises(ConfigError, match=rf"{name} is {count!r}: it is how many these finish"):
        collate([SHORT], **{name: count})


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor([0.5])[0], 0.5, True, 1])
def test_one_number_of_any_kind_is_an_advantage(number):
    assert collate([Rollout("p", (1, 2), 1, advantage=number)]).inputs["advantages"].tolist() == [float(number)]


class TestInputsOfAnotherShape:
    """Torch would spread them over rows that they don't belong to."""

    @pytest.mark.parametrize("layout", ["padded", "packed"])
    @pytest.mark.parametrize("shape", [(2, 3), (2, 1), (), (1, 2)])
    def test_are_no_advantages(self, layout, shape):
        inputs = dict(collate([SHORT, Rollout("b", (1, 2, 3, 4), 2)], layout=layout).inputs)
        inputs["advantages"] = torch.zeros(shape)
        with pytest.raises(ConfigError, match=r"advantages have the shape .*\(B,\), one number a rollout"):
            PolicyGradient(build_tiny())(**inputs)

    @pytest.mark.parametrize("count", [1, 3])
    def test_are_no_advantages_of_other_rows(self, count):
        inputs = {**collate([SHORT, LONG]).inputs, "advantages": torch.zeros(count)}
        with pytest.raises(ConfigError, match=rf"advantages have the shape \({count},\).* 2 rows"):
            PolicyGradient(build_tiny())(**inputs)

    @pytest.mark.parametrize("shape", [(2,), (2, 3), (1, 2, 2)])
    def test_are_no_log_probabilities_of_a_reference(self, shape):
        inputs = {**collate([PreferencePair(SHORT, LONG)]).inputs, "reference_logps": torch.zeros(shape)}
        with pytest.raises(ConfigError, match=r"reference_logps have the shape .*\(B, 2\)"):
            DirectPreference(build_tiny())(**inputs)


@pytest.mark.parametrize("length", [1.5, 2.0, True, None, "2"])
def test_a_length_of_a_prompt_that_is_no_whole_number_is_refused_here_and_in_a_plan(length):
    wrong = Rollout("p", (1, 2, 3), length)
    for call in (lambda: collate([SHORT, wrong]), lambda: plan([wrong], dp_world_size=1, target=1, max_tokens=9)):
        with pytest.raises(ConfigError, match=r"prompt 'p': prompt_length is .* whole number"):
            call()
