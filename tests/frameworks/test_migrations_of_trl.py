"""TRL's own trainer before and after, as its page in docs/migrations/ tells of it: run again, and compared."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.frameworks.small import on_two_ranks
from tests.kept_figures import kept, same
from tools.migrations import tables

pytestmark = [pytest.mark.hf, pytest.mark.ranks]


@on_two_ranks
def trl_grpo(folder):
    """What the migration comes to."""
    from tools.migrations.measure import measured

    Path(folder).mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return measured("trl_grpo", Path(folder))


@on_two_ranks
def trainer(folder):
    """What the migration of transformers' Trainer comes to."""
    from tools.migrations.measure import measured

    Path(folder).mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return measured("trainer", Path(folder))


@pytest.fixture
def ran(framework_ranks):
    return framework_ranks.of(trl_grpo)


@pytest.fixture
def trained(framework_ranks):
    return framework_ranks.of(trainer)


def test_what_its_page_tells_is_what_it_comes_to(ran):
    """As far as the first generation goes: the next one samples with weights that another machine rounds otherwise."""
    for loss, steps in kept("trl_grpo")["probed"].items():
        assert same(ran["probed"][loss][:2], steps[:2]), f"{loss}: run `make migrations`"


def test_the_page_tells_the_norms_of_the_first_step(ran):
    norms = {f"{ran['trained'][loss][0]['grad_norm']:.3f}" for loss in ("bnpo", "dapo", "after")}
    assert norms == {"0.627", "0.520", "0.548"}
    assert not any(ran["compared"][loss]["equal"] or ran["compared"][loss]["cause"] for loss in ("bnpo", "dapo"))


def shares(step):
    rows = zip(step["coefficients"], step["expected"], strict=True)
    return [one / right for row in rows for one, right in zip(*row, strict=True)]


def test_bnpo_weighs_micro_batches_alike(ran):
    for step in ran["probed"]["bnpo"]:
        assert [one for row in step["coefficients"] for one in row] == pytest.approx([1 / 4] * 4, abs=1e-4)
    assert max(abs(share - 1) for step in ran["probed"]["bnpo"] for share in shares(step)) > 0.2


def test_dapo_divides_by_the_average_step_of_a_generation(ran):
    steps = ran["probed"]["dapo"]
    for step in steps:
        assert shares(step) == pytest.approx([tables.entered(step)] * 4, abs=1e-3)
    assert max(abs(tables.entered(step) - 1) for step in steps) > 0.1
    for at in (0, 2):
        tokens = [step["tokens"] for step in steps[at : at + 2]]
        right = [2 * one / sum(tokens) for one in tokens]
        assert [tables.entered(step) for step in steps[at : at + 2]] == pytest.approx(right, abs=1e-3)


@pytest.mark.parametrize("loop", ["after", "bnpo, normalised", "dapo, normalised"])
def test_by_the_tokens_of_the_step_every_coefficient_is_right(ran, loop):
    for step in ran["probed"][loop]:
        assert shares(step) == pytest.approx([1] * 4, abs=1e-3)


def test_normalised_both_losses_are_one(ran):
    for loss in ("bnpo", "dapo"):
        assert ran["compared"][f"{loss}, normalised"]["equal"]


@pytest.mark.parametrize("loss", ["bnpo", "dapo"])
def test_compare_names_the_division_of_trl_between_traces_of_engines(ran, loss):
    assert "divided-by-trainer" in ran["compared"][f"{loss}, traces of the engine"]["cause"]


class TestTrainer:
    """Where `num_items_in_batch` is not the number of labels of the step, and normalised."""

    def test_what_its_page_tells_is_what_it_comes_to(self, trained):
        told = kept("trainer")
        assert trained.keys() == told.keys()
        for part, value in told.items():
            assert same(trained[part], value), f"{part}: run `make migrations`"

    @pytest.mark.parametrize("kind", ["own", "means"])
    def test_shares_are_wrong_and_their_sum_is_right(self, trained, kind):
        for step in trained["probed"][f"{kind}, before"]:
            assert tables.entered(step) == pytest.approx(1, abs=1e-3)
        assert max(abs(share - 1) for step in trained["probed"][f"{kind}, before"] for share in shares(step)) > 0.1
        assert not trained["compared"][f"{kind}, before"]["equal"]

    @pytest.mark.parametrize("loop", ["own, after", "means, after", "right, after", "right, before"])
    def test_normalised_every_coefficient_is_right(self, trained, loop):
        for step in trained["probed"][loop]:
            assert shares(step) == pytest.approx([1] * 4, abs=1e-3)
        assert loop == "right, before" or trained["compared"][loop]["equal"]
