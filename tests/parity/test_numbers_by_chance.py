"""Numbers that are read off one step, or that other data have as well, name no cause alone."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace
from ds_parity.trace.foreign import open_pair

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


@pytest.mark.parametrize(("losses", "of_a_policy"), [((-0.25, 0.1), True), ((0.25, 0.1), True), ((2.5, 1.1), False)])
def test_a_loss_of_a_policy_may_have_no_tokens_in_it(losses, of_a_policy):
    """Other inputs with the same rewards, as of another chat template."""
    rows = [{"loss": loss} for loss in losses]
    wrong = [row | {"grad_norm": 1.37 - 0.3 * n} for n, row in enumerate(rows)]
    diagnosis, _ = found(trace(*rows), trace(*wrong))
    assert ("data" in diagnosis.classes) == of_a_policy


@pytest.mark.parametrize(("first", "late"), [(1, True), (11, True), (11, False)])
def test_windows_that_end_a_pass_late_are_told_in_excerpts_too(first, late):
    """Where each has about one pass more, and not twice as many."""

    def cut(rollouts):
        held = [{"rollouts": n, "prompts": n, "tokens": 9 * n, "total": 9.0 * n, "passes": n // 2} for n in rollouts]
        steps = trace(*(row | {"loss": 1 + 1 / n} for n, row in enumerate(held, 7))).steps
        return Trace(
            HEADER.model_copy(update={"ranks": 1}),
            tuple(one.model_copy(update={"step": n}) for n, one in enumerate(steps, first)),
        )

    _, groups = found(cut([8] * 10), cut([10] * 8 if late else [16] * 5))
    named = set().union(*groups)
    assert "another-target" in named
    assert ("boundary-a-pass-late" in named) == late


def windows(rollouts, tokens):
    rows = zip(rollouts, tokens, strict=True)
    counts = ({"rollouts": n, "prompts": n, "tokens": held, "total": float(held)} for n, held in rows)
    return trace(*(row | {"loss": 1 + row["tokens"] / 90, "grad_norm": 1 + row["tokens"] / 70} for row in counts))


@pytest.mark.parametrize(("tokens", "named"), [((19, 18, 19, 19), False), ((17, 14, 13, 16), True)])
def test_rollouts_are_dropped_with_their_tokens_and_other_data_have_less_as_well(tokens, named):
    _, groups = found(windows((7, 7, 7, 6), (20, 18, 13, 17)), windows((6, 6, 7, 6), tokens))
    assert ({"silent-truncation", "data-or-seed"} in groups) == named
    assert named or not any("silent-truncation" in group for group in groups)


@pytest.mark.parametrize("first", [2, 9])
def test_windows_of_other_data_are_those_of_no_late_boundary_in_an_excerpt(first):
    """What the first window of the run held tells a late one; of an excerpt it is not known."""
    sides = []
    for rollouts, tokens in (((6, 4, 4, 7), (9, 13, 11, 17)), ((9, 4, 4, 5), (18, 9, 13, 17))):
        rows = zip(rollouts, tokens, (2, 1, 1, 2), strict=True)
        counts = ({"rollouts": n, "prompts": n, "tokens": t, "passes": p} for n, t, p in rows)
        steps = trace(*(row | {"loss": 9 / row["tokens"], "grad_norm": 1 + row["tokens"] / 9} for row in counts)).steps
        held = tuple(one.model_copy(update={"step": n}) for n, one in enumerate(steps, first))
        sides.append(Trace(HEADER, held))
    _, groups = found(*sides)
    assert "data-or-seed" in groups[0]


def of_digits(folder, *sides):
    paths = [folder / f"{side}.jsonl" for side in "ab"]
    for path, losses in zip(paths, sides, strict=True):
        lines = (f'{{"step": {n}, "loss": {loss!r}, "lr": {0.01 / n:.4f}}}\n' for n, loss in enumerate(losses, 1))
        path.write_text("".join(lines))
    one, other = open_pair(*paths)
    return found(one, other)[1]


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_losses_of_a_last_digit_do_not_tell_that_they_are_those_of_the_step_before(size, tmp_path):
    """0, 0, 0, 0.0001, 0 against 0, 0, 0, 0, 0.0001: a policy gradient's loss with four decimals."""
    groups = of_digits(tmp_path, [0.0, 0.0, 0.0, size, 0.0], [0.0, 0.0, 0.0, 0.0, size])
    assert groups == []


@pytest.mark.parametrize("off", [0.0, 0.0003])
def test_losses_that_are_well_apart_tell_that_those_of_the_step_before_come_again(off, tmp_path):
    losses = [1.2345, 0.8642, 1.1357, 0.7913, 1.4689]
    groups = of_digits(tmp_path, losses, [*losses[:3], *(round(loss - off, 4) for loss in losses[2:4])])
    assert groups == [{"reported-loss", "resume-repeats-data"}]
