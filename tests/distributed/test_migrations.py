"""The trainers' loops before and after, as the pages of docs/migrations/ tell of them: run again, and compared."""

from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity.errors import ConfigError
from ds_parity.planning import Rollout
from tests.beside import begun_with_the_session
from tests.kept_figures import kept, same
from tests.rank_sets import RankSet
from tools.migrations import tables
from tools.migrations.fast_llm import documents
from tools.migrations.fast_llm import task as fast_llm
from tools.migrations.measure import BY_COUNTS, NAMES, measured
from tools.migrations.onevision import task as onevision
from tools.migrations.open_instruct.packs import cut
from tools.migrations.open_instruct.task import BATCH, BATCHES, LR, MINI_BATCHES
from tools.migrations.roll import batches
from tools.migrations.roll import task as roll
from tools.migrations.skyrl import mini_batches

# A start of its own: what every run of the other tests would wait for takes a minute or two.
on_two_ranks = RankSet(2, timeout=900, patience=600)


@on_two_ranks
def migrations(folder):
    """What every migration comes to."""
    Path(folder).mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return {name: measured(name, Path(folder) / name) for name in NAMES + BY_COUNTS}


@begun_with_the_session("migrated")
def all_migrations(folder, _):
    """What the registered task leaves."""
    return on_two_ranks.errand(folder)


@pytest.fixture(scope="session")
def migrated(begun):
    folder = begun.folder_of("migrated")
    return on_two_ranks.launched(folder, begun.result("migrated")).of(migrations)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_its_page_tells_is_what_it_comes_to(migrated, name):
    told = kept(name)
    assert migrated[name].keys() == told.keys()
    for part, value in told.items():
        assert same(migrated[name][part], value), f"{name}, {part}: run `make migrations`"


@pytest.mark.ranks
@pytest.mark.slow
class TestOpenRLHF:
    @pytest.mark.parametrize("model", ["actor", "critic"])
    def test_dynamic_batches_train_on_the_last_micro_batch_alone_below_zero_3(self, migrated, model):
        probed = migrated["openrlhf"]["probed"]
        for stage, right in ((1, False), (2, False), (3, True)):
            old, new = (probed[f"dynamic, ZeRO {stage}, {when}"][model] for when in ("before", "after"))
            assert {step["pattern"] for step in new} == {"as expected"}
            assert all(("last-backward-only" in step["pattern"]) is not right for step in old)
            assert all((abs(tables.entered(step) - 1) < 1e-3) is right for step in old)

    def test_on_zero_3_both_loops_make_the_same_steps_to_six_digits_and_the_same_weights(self, migrated):
        assert migrated["openrlhf"]["same_weights"]["dynamic, ZeRO 3"] == {"actor": True, "critic": True}
        trained = migrated["openrlhf"]["trained"]
        assert trained["dynamic, ZeRO 3, before"] == trained["dynamic, ZeRO 3, after"]

    def test_fixed_batches_lose_their_windows_where_an_epoch_ends(self, migrated):
        probed, trained = migrated["openrlhf"]["probed"], migrated["openrlhf"]["trained"]
        old, new = (probed[f"fixed, ZeRO 2, {when}"]["actor"] for when in ("before", "after"))
        assert [step["rollouts"] for step in old] == [8] * 5
        assert [step["rollouts"] for step in new] == [8, 8, 4] * 2
        assert all(tables.entered(step) == pytest.approx(1, abs=1e-4) for step in new)
        sums = [tables.entered(step) for step in old]
        assert sums[:2] == pytest.approx([1, 1], abs=1e-4)
        assert all(abs(one - 1) > 0.05 for one in sums[2:])
        old, new = (trained[f"fixed, ZeRO 2, {when}"]["actor"] for when in ("before", "after"))
        assert old[:2] == new[:2], "as long as the windows are the same, so are the steps"


@pytest.mark.ranks
@pytest.mark.slow
class TestOpenInstruct:
    def test_slices_are_right_on_zero_2_and_too_small_by_their_number_on_zero_3(self, migrated):
        probed = migrated["open_instruct"]["probed"]
        sums = {name: tables.entered(steps[0]) for name, steps in probed.items()}
        assert sums.pop("slices, ZeRO 3, before") == pytest.approx(0.5, abs=1e-4)
        assert [*sums.values()] == pytest.approx([1, 1, 1], abs=1e-4)

    def test_over_the_same_packs_every_step_is_equal_bit_for_bit(self, migrated):
        assert migrated["open_instruct"]["compared"]["after"]["equal"]
        assert migrated["open_instruct"]["same_weights"]
        assert migrated["open_instruct"]["trained"]["before"] == migrated["open_instruct"]["trained"]["after"]

    def test_the_schedule_ends_where_the_data_ends_and_nothing_is_dropped(self, migrated):
        found = migrated["open_instruct"]
        old, new = found["trained"]["before"], found["trained"]["planned"]
        everything = BATCH * BATCHES
        assert sum(step["rollouts"] for step in old) == everything - sum(found["cut"]["dropped"]) < everything
        assert len(old) == sum(found["cut"]["steps"]) < len(new) == BATCHES * MINI_BATCHES
        assert {step["rollouts"] for step in new} == {BATCH // MINI_BATCHES}
        assert new[-1]["lr"] == pytest.approx(LR / len(new))
        assert old[-1]["lr"] > 1.9 * new[-1]["lr"]


@pytest.mark.ranks
@pytest.mark.slow
class TestRoll:
    """The runs have the rollouts and the learning rates from which the page's tables are made; six digits are kept."""

    @pytest.fixture
    def rates(self):
        return [roll.LR * roll.falling(at) for at in range(24)]

    def test_the_schedule_ends_in_the_middle_of_the_data(self, migrated, rates):
        steps = migrated["roll"]["trained"]["before"]
        cut = [step for batch in roll.generated() for step in batches.steps(batch, roll.RANKS, roll.MOST, roll.GAS)]
        assert [step["rollouts"] for step in steps] == [batches.rollouts_of(step) for step in cut]
        assert (len(steps), sum(step["rollouts"] for step in steps)) == (24, 192)
        assert [step["lr"] for step in steps] == pytest.approx(rates[:24], rel=1e-5)
        assert [step["lr"] for step in steps[12:]] == [0.0] * 12

    def test_by_rollouts_it_ends_with_the_data(self, migrated, rates):
        steps = migrated["roll"]["trained"]["after"]
        assert [step["rollouts"] for step in steps] == [16] * 12
        assert [step["lr"] for step in steps] == pytest.approx(rates[:12], rel=1e-5)


@pytest.mark.ranks
@pytest.mark.slow
class TestFastLlm:
    def test_by_documents_its_rule_and_ours_are_equal_bit_for_bit(self, migrated):
        found = migrated["fast_llm"]
        assert found["compared"]["documents, trace"]["equal"]
        assert found["same_weights"]["documents"]
        assert found["trained"]["documents, before"] == found["trained"]["documents, same"]

    def test_its_log_is_read_beside_a_trace_of_deepspeed(self, migrated):
        compared = migrated["fast_llm"]["compared"]
        assert compared["documents, log"]["equal"]
        assert {"grad_norm", "loss"} <= set(compared["labels, log"]["differ"])

    def test_by_labels_a_step_is_too_large_by_its_passes(self, migrated):
        probed = migrated["fast_llm"]["probed"]
        for step in probed["labels, before"]:
            assert tables.entered(step) == pytest.approx(step["passes"], abs=1e-3)
        for name in ("labels, after", "documents, before", "documents, after"):
            assert [tables.entered(step) for step in probed[name]] == pytest.approx([1] * 4, abs=1e-3)

    def test_where_a_surplus_is_carried_the_steps_follow_from_the_documents(self, migrated):
        trained = migrated["fast_llm"]["trained"]
        old, new = ([step["rollouts"] for step in trained[f"documents, {when}"]] for when in ("before", "after"))
        assert sum(new) == fast_llm.COUNT
        assert len(new) == fast_llm.COUNT // fast_llm.TARGET
        assert len(old) < len(new)
        assert min(old) >= fast_llm.TARGET


@pytest.mark.ranks
@pytest.mark.slow
class TestSkyRL:
    def test_by_prompts_the_steps_are_ours_but_for_rounding(self, migrated):
        assert migrated["skyrl"]["compared"]["prompts"]["equal"]
        old, new = (migrated["skyrl"]["trained"][name] for name in ("prompts", "after"))
        assert [step["rollouts"] for step in old] == [step["rollouts"] for step in new] == [8] * 12
        assert [step["lr"] for step in old] == [step["lr"] for step in new]
        assert sum(step["passes"] for step in new) < sum(step["passes"] for step in old)

    def test_by_sequences_a_batch_of_two_turns_makes_twice_the_steps_and_the_schedule_ends_before(self, migrated):
        steps = migrated["skyrl"]["trained"]["sequences"]
        assert [step["rollouts"] for step in steps] == [8] * 4 + [4] * 8
        assert [step["lr"] for step in steps[8:]] == [0.0] * 4
        assert not migrated["skyrl"]["compared"]["sequences"]["equal"]

    def test_sequences_that_are_no_multiple_are_refused(self, migrated):
        assert "130 sequences make no mini-batches of 8" in migrated["skyrl"]["refused"]["message"]

    def test_fewer_sequences_than_ranks_are_equal_bit_for_bit(self, migrated):
        assert migrated["skyrl"]["compared"]["few"]["equal"]
        assert migrated["skyrl"]["same_weights"]["few"]
        assert [step["rollouts"] for step in migrated["skyrl"]["trained"]["few, after"]] == [1] * 3


@pytest.mark.ranks
@pytest.mark.slow
class TestOpenInstructDPO:
    def test_with_ds_parity_every_pair_weighs_the_same(self, migrated):
        steps = migrated["open_instruct_dpo"]["probed"]["after"]
        assert [step["rollouts"] for step in steps] == [10, 10, 10, 10, 4]
        assert {step["pattern"] for step in steps} == {"as expected"}

    @pytest.mark.parametrize("rule", ["alike", "tokens", "gas"])
    def test_by_the_other_rules_pairs_have_other_shares(self, migrated, rule):
        steps = migrated["open_instruct_dpo"]["probed"][rule]
        assert all("other shares" in step["pattern"] for step in steps[:4])
        last = 1 / 3 if rule == "gas" else 1
        assert tables.entered(steps[4]) == pytest.approx(last, abs=1e-3)

    def test_the_accuracy_is_that_of_the_pairs(self, migrated):
        probed = migrated["open_instruct_dpo"]["probed"]
        first = {name: steps[0]["accuracy"] for name, steps in probed.items()}
        assert first["after"] == pytest.approx(0.2)
        assert all(abs(first[rule] - 0.2) > 0.03 for rule in ("alike", "tokens", "gas"))


@pytest.mark.ranks
@pytest.mark.slow
class TestOneVision:
    def test_the_first_window_has_one_micro_batch_divided_by_four(self, migrated):
        steps = migrated["onevision"]["trained"]["before"]
        assert [step["passes"] for step in steps] == [1] + [4] * 7
        assert tables.entered(migrated["onevision"]["probed"]["before"][0]) == pytest.approx(1 / 4, abs=1e-3)
        assert migrated["onevision"]["left"] == {"before": 3, "half": 0, "merged": 0, "after": 0}

    def test_a_window_sees_four_learning_rates_and_half_mended_the_schedule_ends_at_a_quarter(self, migrated):
        trained = migrated["onevision"]["trained"]
        assert [len(set(step["rates"])) for step in trained["before"]] == [1] + [4] * 7
        assert [len(set(step["rates"])) for step in trained["half"]] == [1] * 8
        budget = onevision.TOTAL
        rates = [onevision.LR * onevision.factor(at, budget) for at in range(onevision.STEPS)]
        assert [step["lr"] for step in trained["half"]] == pytest.approx(rates, rel=1e-5)
        assert trained["half"][-1]["lr"] > 0.7 * onevision.LR > 0.1 * onevision.LR > trained["after"][-1]["lr"]

    def test_merged_and_with_ds_parity_all_is_equal_bit_for_bit(self, migrated):
        assert migrated["onevision"]["compared"]["merged"]["equal"]
        assert migrated["onevision"]["same_weights"]["merged"]

    def test_compare_names_the_shifted_windows(self, migrated):
        assert "boundary-off-by-one" in migrated["onevision"]["compared"]["before"]["cause"]


@pytest.mark.ranks
@pytest.mark.slow
def test_no_cause_is_named_that_is_not_there(migrated):
    """A short window at an epoch's end is no resume; sequences counted as prompts end windows at another target."""
    assert migrated["openrlhf"]["compared"]["fixed, ZeRO 2"]["actor"]["cause"] == []
    assert migrated["skyrl"]["compared"]["sequences"]["cause"] == ["another-target"]


class TestDocumentsOfAStep:
    """The rule of Fast-LLM beside `overshoot: carry`, by the documents of each pass."""

    @pytest.mark.parametrize(
        ("counts", "target", "reset", "carry"),
        [
            ([4, 4, 4, 4], 8, [2, 2], [2, 2]),
            ([5, 5, 5, 5, 4], 8, [2, 2], [2, 2, 1]),
            ([20, 4, 4, 4], 8, [1, 2], [1, 1, 2]),
            ([1, 1], 8, [], []),
        ],
    )
    def test_passes_of_each_step(self, counts, target, reset, carry):
        assert list(documents.by_reset(counts, target)) == reset
        assert list(documents.by_carry(counts, target)) == carry


class TestMiniBatches:
    """The rules of SkyRL, by sequences of each prompt."""

    @pytest.fixture
    def sequences(self):
        turns = {"a": 3, "b": 1, "c": 2, "d": 3}
        return [Rollout(name, (1,) * 8, 4, rollout_id=name) for name, count in turns.items() for _ in range(count)]

    def test_by_prompts_each_has_so_many_prompts(self, sequences):
        parts = mini_batches.by_prompts(sequences, 2)
        assert ["".join(one.prompt_id for one in part) for part in parts] == ["aaab", "ccddd"]

    def test_by_sequences_their_number_must_divide(self, sequences):
        with pytest.raises(ConfigError, match="9 sequences make no mini-batches of 4"):
            mini_batches.by_sequences(sequences, 4)
        assert [len(part) for part in mini_batches.by_sequences(sequences, 3)] == [3, 3, 3]

    @pytest.mark.parametrize(("count", "ranks"), [(1, 4), (4, 4), (5, 2), (3, 8)])
    def test_every_rank_has_as_many_and_what_is_added_has_no_loss(self, sequences, count, ranks):
        shares = mini_batches.shares(sequences[:count], ranks)
        assert len(shares) == ranks
        assert len({len(share) for share in shares}) == 1
        assert sum(one.loss_tokens for share in shares for one in share) == 4 * count


class TestTokenBoundedBatches:
    """The rule of ROLL, by lengths."""

    @pytest.mark.parametrize(
        ("lengths", "most", "passes"),
        [
            ([10] * 8, 20, [2, 2]),
            ([10] * 8, 10, [1] * 4),
            ([5, 5, 5, 5, 10, 10, 10, 10], 20, [2, 2]),
            ([30, 10], 20, [1]),
        ],
    )
    def test_rows_are_padded_to_the_longest(self, lengths, most, passes):
        rollouts = [Rollout(str(at), (1,) * length, 1) for at, length in enumerate(lengths)]
        rows = batches.micro_batches(rollouts, 2, most)
        assert [len(row[0]) for row in rows] == [len(row[1]) for row in rows] == passes
        assert sum(len(share) for row in rows for share in row) == len(lengths)


class TestPacks:
    """The rule of open-instruct, by numbers of packs that a rank has."""

    @pytest.mark.parametrize(
        ("packs", "ranks", "steps", "dropped"),
        [(8, 2, 4, 0), (9, 2, 4, 1), (11, 2, 5, 1), (14, 2, 3, 2), (12, 2, 6, 0), (1, 2, 0, 1)],
    )
    def test_steps_and_dropped_packs(self, packs, ranks, steps, dropped):
        rollouts = [Rollout(str(number), (1,) * 10, 5) for number in range(packs)]
        found = cut(rollouts, ranks, most=10, mini_batches=4)
        assert (len(found.steps), found.dropped) == (steps, dropped)
