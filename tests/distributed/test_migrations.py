"""The trainers' loops before and after, as the pages of docs/migrations/ tell of them: run again, and compared."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.sets import on_two_ranks
from tools.migrations import tables
from tools.migrations.measure import HERE, NAMES, measured

pytestmark = pytest.mark.ranks


@on_two_ranks
def migrations(folder):
    """What every migration comes to."""
    Path(folder).mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return {name: measured(name, Path(folder) / name) for name in NAMES}


@pytest.fixture
def ran(two_ranks):
    return two_ranks.of(migrations)


def kept(name):
    return json.loads((HERE / name / "found.json").read_text())


def same(measured, told):
    """Whether two values are the same but for what another machine rounds otherwise."""
    if isinstance(told, dict):
        return measured.keys() == told.keys() and all(same(measured[key], told[key]) for key in told)
    if isinstance(told, list):
        return len(measured) == len(told) and all(map(same, measured, told))
    if isinstance(told, float):
        return measured == pytest.approx(told, rel=1e-3, abs=1e-4)
    return measured == told


@pytest.mark.parametrize("name", NAMES)
def test_what_its_page_tells_is_what_it_comes_to(ran, name):
    told = kept(name)
    assert ran[name].keys() == told.keys()
    for part, value in told.items():
        assert same(ran[name][part], value), f"{name}, {part}: run `make migrations`"


class TestOpenRLHF:
    @pytest.mark.parametrize("model", ["actor", "critic"])
    def test_dynamic_batches_train_on_the_last_micro_batch_alone_below_zero_3(self, ran, model):
        probed = ran["openrlhf"]["probed"]
        for stage, right in ((1, False), (2, False), (3, True)):
            old, new = (probed[f"dynamic, ZeRO {stage}, {when}"][model] for when in ("before", "after"))
            assert {step["pattern"] for step in new} == {"as expected"}
            assert all(("last-backward-only" in step["pattern"]) is not right for step in old)
            assert all((abs(tables.entered(step) - 1) < 1e-3) is right for step in old)

    def test_on_zero_3_both_loops_make_the_same_steps_bit_for_bit(self, ran):
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
