"""Numbers that are read off one step, or that other data have as well, name no cause alone."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace

HEADER = Header(
    scenario="toy", seed=1, versions={}, device="cpu", ranks=4, config_hash="ab", engine="other", optimizer="AdamW"
)
PLAIN = {"passes": 2, "idle_passes": 0, "rollouts": 4, "prompts": 4, "tokens": 8, "total": 4.0, "lr": (0.01,)}


def trace(*rows):
    steps = (PLAIN | {"loss": 1 + 0.1 * n, "grad_norm": 1 + 0.07 * n} | row for n, row in enumerate(rows))
    return Trace(HEADER, tuple(StepRecord(step=n, **row) for n, row in enumerate(steps, 1)))


def found(one, other):
    diagnosis = diagnose(one, other, compare(one, other, Tier.REASSOCIATED))
    return diagnosis, [{cause.name for cause in group} for group in grouped(diagnosis.causes)]


@pytest.mark.parametrize(("factor", "named"), [(0.62341, False), (12 / 14, True)])
def test_a_weight_of_idle_passes_that_one_step_alone_shows_is_a_whole_number(factor, named):
    """A lost pass of this step makes any factor, which is one of some weight."""
    rows = [{"passes": n, "idle_passes": 2 * (n > 1), "total": 12.0} for n in (1, 2, 1, 1)]
    wrong = [row | ({"grad_norm": 1.07 * factor} if n == 1 else {}) for n, row in enumerate(rows)]
    _, groups = found(trace(*rows), trace(*wrong))
    assert any("idle-counted" in group for group in groups) == named


def test_the_total_of_the_window_before_is_as_good_as_a_target_that_all_but_the_last_have_met():
    rows = [{"rollouts": n, "total": float(n), "passes": 4 if n == 8 else 3} for n in (8, 8, 8, 6)]
    wrong = [*rows[:3], rows[3] | {"grad_norm": (1 + 0.07 * 3) * 6 / 8}]
    _, groups = found(trace(*rows), trace(*wrong))
    assert {"target-not-actual", "wrong-window"} <= groups[0]


@pytest.mark.parametrize("losses", [(-0.25, 0.1), (0.25, 0.1)])
def test_a_loss_of_a_policy_may_have_no_tokens_in_it(losses):
    """Other inputs with the same rewards, as of another chat template."""
    rows = [{"loss": loss} for loss in losses]
    wrong = [row | {"grad_norm": 1.37 - 0.3 * n} for n, row in enumerate(rows)]
    diagnosis, _ = found(trace(*rows), trace(*wrong))
    assert ("data" in diagnosis.classes) == (min(losses) < 0)


def windows(rollouts, tokens):
    rows = zip(rollouts, tokens, strict=True)
    counts = ({"rollouts": n, "prompts": n, "tokens": held, "total": float(held)} for n, held in rows)
    return trace(*(row | {"loss": 1 + row["tokens"] / 90, "grad_norm": 1 + row["tokens"] / 70} for row in counts))


@pytest.mark.parametrize(("tokens", "named"), [((19, 18, 19, 19), False), ((17, 14, 13, 16), True)])
def test_rollouts_are_dropped_with_their_tokens_and_other_data_have_less_as_well(tokens, named):
    _, groups = found(windows((7, 7, 7, 6), (20, 18, 13, 17)), windows((6, 6, 7, 6), tokens))
    assert ({"silent-truncation", "data-or-seed"} in groups) == named
    assert named or not any("silent-truncation" in group for group in groups)
