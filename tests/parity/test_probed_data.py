"""What the probe looks at: windows in which every pass and every rank weighs, whatever the seed."""

from dataclasses import replace

import pytest

from ds_parity.config import load_config
from ds_parity.parity.probe.decomposition import decompose
from ds_parity.parity.probe.probed_data import EVERYWHERE, SOMEWHERE, first_window, probed_data, weightless
from ds_parity.parity.probe.start import Probed
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import windows_of
from tests.distributed import cells
from tests.parity.test_probe_math import EXPECTED, gradients, update

SEEDS = range(30)


def base(config=None, ranks=2, **values):
    values = {"max_tokens": 256, "shape": "overshoot", "windows": 2, **values}
    return Scenario("probe", config or cells.config(2), ranks, **values)


@pytest.mark.parametrize("path", ["zero2_bf16", "zero2_fp32"])
def test_no_seed_probes_a_pass_or_a_rank_that_weighs_nothing(path):
    """Of these seeds, 14 began with a pass in which no rank had anything: a loop that leaves it out was right."""
    config = load_config(f"ds_configs/{path}.json")
    blind = [seed for seed in SEEDS if not any(map(any, first_window(base(config, seed=seed))[0]))]
    assert len(blind) == 14, "nothing is left to be mended"
    for seed in SEEDS:
        data = probed_data(base(config, seed=seed))
        assert weightless(first_window(data[EVERYWHERE])) == []
        shares = first_window(data[SOMEWHERE])
        assert all(any(map(any, row)) for row in shares)
        assert all(any(map(any, column)) for column in zip(*shares, strict=True))
        assert weightless(shares), "no rank is idle"


ODD = {
    "own weights": {"loss_weight": "weight"},
    "terms": {"terms": {"a": {"weight": "token"}, "b": {"weight": "weight"}}, "lookahead": "window"},
    "prompts": {"passes": 16, "count": "prompt"},
    "fewer than ranks": {"passes": 1},
    "large": {"passes": 256},
}


@pytest.mark.parametrize("section", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_weighs_in_every_pass_whatever_a_micro_batch_weighs_by(section, ranks):
    full = probed_data(base(cells.config(2, **section), ranks))[EVERYWHERE]
    assert weightless(first_window(full)) == []


def test_what_a_configuration_does_not_allow_is_named():
    """With fewer rollouts than ranks, and an error where a window goes beyond its target, ranks must be idle."""
    config = cells.config(2, passes=3, overshoot="error")
    data = probed_data(base(config, 4))
    left = weightless(first_window(data[EVERYWHERE]))
    assert len(left) == 1
    assert data[SOMEWHERE].shape == "ragged"
    for scenario in data.values():
        windows = windows_of(scenario.batches(), scenario.settings)
        assert {window.total for window in windows} == {3.0}


def test_the_same_scenario_is_chosen_again():
    assert probed_data(base()) == probed_data(base())
    assert probed_data(base())[EVERYWHERE].layout() == probed_data(base())[EVERYWHERE].layout()


def test_another_draw_of_a_seed_is_another_raggedness_of_the_same_rollouts():
    one, other = base(), replace(base(), draw=1)
    laid = [[rollout for row in drawn.layout() for cell in row for rollout in cell] for drawn in (one, other)]
    assert one.layout() != other.layout()
    assert laid[0][:24] == laid[1][:24]


class TestWhatIsNotTested:
    def result(self, expected=EXPECTED, idle=()):
        rows = gradients(6, idle=idle)
        return decompose(update(expected, rows), rows, expected)

    def test_is_what_weighs_nothing_or_has_no_gradient(self):
        """Rank 1 weighs nothing in pass 1, and the gradient of rank 0 in pass 2 is 0."""
        expected = [[0.1, 0.2], [0.3, 0.0], [0.1, 0.3]]
        found = self.result(expected, idle=(3, 4))
        assert found.untested == [(1, 1), (2, 0)]
        assert Probed(EVERYWHERE, found).missed == ["rank 1 in pass 1", "rank 0 in pass 2"]

    def test_is_nothing_where_all_weigh_and_is_not_said_of_idle_ranks(self):
        assert self.result().untested == []
        found = self.result([[0.1, 0.2], [0.3, 0.0], [0.1, 0.3]], idle=(3,))
        assert Probed(SOMEWHERE, found).missed == []

    def test_is_of_a_micro_batch_no_term_of_which_weighs(self):
        expected = [[0.5, 0.1, 0.0, 0.6], [0.25, 0.9, 0.0, 0.0]]
        rows = gradients(8, idle=(6, 7))
        assert decompose(update(expected, rows), rows, expected, ("policy", "kl")).untested == [(1, 1)]
