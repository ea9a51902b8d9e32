"""The trainers' loops before and after, as the pages of docs/migrations/ tell of them: run again, and compared."""

from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity.planning import Rollout
from tests.kept_figures import kept, same
from tests.rank_sets import RankSet
from tools.migrations import tables
from tools.migrations.measure import BY_COUNTS, NAMES, measured
from tools.migrations.open_instruct.packs import cut
from tools.migrations.open_instruct.task import BATCH, BATCHES, LR, MINI_BATCHES
from tools.migrations.roll import batches
from tools.migrations.roll import task as roll

# A start of its own: what every run of the other tests would wait for takes a minute or two.
on_two_ranks = RankSet(2, timeout=900, patience=600)


@on_two_ranks
def migrations(folder):
    """What every migration comes to."""
    Path(folder).mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return {name: measured(name, Path(folder) / name) for name in NAMES + BY_COUNTS}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return on_two_ranks.launch(tmp_path_factory.mktemp("migrations")).of(migrations)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_its_page_tells_is_what_it_comes_to(ran, name):
    told = kept(name)
    assert ran[name].keys() == told.keys()
    for part, value in told.items():
        assert same(ran[name][part], value), f"{name}, {part}: run `make migrations`"


@pytest.mark.ranks
@pytest.mark.slow
class TestOpenRLHF:
    @pytest.mark.parametrize("model", ["actor", "critic"])
    def test_dynamic_batches_train_on_the_last_micro_batch_alone_below_zero_3(self, ran, model):
        probed = ran["openrlhf"]["probed"]
        for stage, right in ((1, False), (2, False), (3, True)):
            old, new = (probed[f"dynamic, ZeRO {stage}, {when}"][model] for when in ("before", "after"))
            assert {step["pattern"] for step in new} == {"as expected"}
            assert all(("last-backward-only" in step["pattern"]) is not right for step in old)
            assert all((abs(tables.entered(step) - 1) < 1e-3) is right for step in old)

    def test_on_zero_3_both_loops_make_the_same_steps_to_six_digits_and_the_same_weights(self, ran):
        assert ran["openrlhf"]["same_weights"]["dynamic, ZeRO 3"] == {"actor": True, "critic": True}
        trained = ran["openrlhf"]["trained"]
        assert trained["dynamic, ZeRO 3, before"] == trained["dynamic, ZeRO 3, after"]

    def test_fixed_batches_lose_their_windows_where_an_epoch_ends(self, ran):
        probed, trained = ran["openrlhf"]["probed"], ran["openrlhf"]["trained"]
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
    def test_slices_are_right_on_zero_2_and_too_small_by_their_number_on_zero_3(self, ran):
        probed = ran["open_instruct"]["probed"]
        sums = {name: tables.entered(steps[0]) for name, steps in probed.items()}
        assert sums.pop("slices, ZeRO 3, before") == pytest.approx(0.5, abs=1e-4)
        assert [*sums.values()] == pytest.approx([1, 1, 1], abs=1e-4)

    def test_over_the_same_packs_every_step_is_equal_bit_for_bit(self, ran):
        assert ran["open_instruct"]["compared"]["after"]["equal"]
        assert ran["open_instruct"]["same_weights"]
        assert ran["open_instruct"]["trained"]["before"] == ran["open_instruct"]["trained"]["after"]

    def test_the_schedule_ends_where_the_data_ends_and_nothing_is_dropped(self, ran):
        found = ran["open_instruct"]
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

    def test_the_schedule_ends_in_the_middle_of_the_data(self, ran, rates):
        steps = ran["roll"]["trained"]["before"]
        cut = [step for batch in roll.generated() for step in batches.steps(batch, roll.RANKS, roll.MOST, roll.GAS)]
        assert [step["rollouts"] for step in steps] == [batches.rollouts_of(step) for step in cut]
        assert (len(steps), sum(step["rollouts"] for step in steps)) == (24, 192)
        assert [step["lr"] for step in steps] == pytest.approx(rates[:24], rel=1e-5)
        assert [step["lr"] for step in steps[12:]] == [0.0] * 12

    def test_by_rollouts_it_ends_with_the_data(self, ran, rates):
        steps = ran["roll"]["trained"]["after"]
        assert [step["rollouts"] for step in steps] == [16] * 12
        assert [step["lr"] for step in steps] == pytest.approx(rates[:12], rel=1e-5)


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
