"""What a micro-batch holds where nobody says, and what has to be said."""

import numpy as np
import pytest
import torch

from ds_parity.config import parse
from ds_parity.engine.arguments import (
    counts_by_name,
    counts_of,
    refuse_contradiction,
    refuse_forgotten,
    refuse_left_behind,
    refuse_mean_of_parts,
    refuse_what_is_no_loss,
)
from ds_parity.errors import WindowError
from ds_parity.window import Counts, Term, Terms, Weighting


def settings(**section):
    return parse({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_passes": 4, "ds_parity": section})


def test_rollouts_have_a_default_where_nothing_else_is_needed():
    assert counts_of(settings(), 3, {}) == Counts(rollouts=3)
    assert counts_of(settings(), 3, {"tokens": 7}) == Counts(rollouts=3, tokens=7)
    assert counts_of(settings(), 3, {"rollouts": 0, "prompts": 2}) == Counts(rollouts=0, prompts=2)


@pytest.mark.parametrize("given", [{}, {"rollouts": 1}, {"rollouts": 1, "prompts": 1}])
def test_tokens_are_asked_for_where_the_loss_is_weighed_by_them(given):
    with pytest.raises(WindowError, match="tokens="):
        counts_of(settings(loss_weight="token"), 3, given)


@pytest.mark.parametrize("given", [{}, {"rollouts": 4}, {"rollouts": 4, "tokens": 9}])
def test_prompts_are_asked_for_where_they_close_the_window(given):
    """Without them no window would ever end, and no error show."""
    with pytest.raises(WindowError, match="prompts="):
        counts_of(settings(count="prompt"), 3, given)
    assert counts_of(settings(count="prompt"), 3, {**given, "prompts": 0}).prompts == 0


def test_counts_inside_passes_may_be_repeated_and_not_contradicted():
    refuse_contradiction(Counts(2, 1, 9), {"rollouts": 2, "tokens": 9})
    with pytest.raises(WindowError, match=r"\{'tokens': 8\} but passes\(\) has announced"):
        refuse_contradiction(Counts(2, 1, 9), {"rollouts": 2, "tokens": 8})


@pytest.mark.parametrize("tokens", [torch.tensor(9), np.int64(9)])
def test_counts_may_be_tensors_on_the_host_and_become_plain_ints(tokens):
    given = counts_by_name(None, None, tokens)
    assert given == {"tokens": 9}
    assert type(given["tokens"]) is int


@pytest.mark.parametrize("tokens", [torch.tensor(9.0), torch.zeros((), dtype=torch.int64, device="meta")])
def test_a_count_that_can_not_be_taken_is_refused_before_it_is_compared(tokens):
    """Comparing it with what passes() announced would read it; 9.0 was taken there, and nowhere else."""
    with pytest.raises(WindowError, match="tokens is "):
        counts_by_name(1, None, tokens)


def test_what_earlier_passes_gave_is_asked_for():
    refuse_forgotten({"rollouts", "tokens"}, {"rollouts": 1, "tokens": 0, "prompts": 1}, Counts(1, 1, 0))
    with pytest.raises(WindowError) as refused:
        refuse_forgotten({"rollouts", "tokens"}, {"prompts": 1}, Counts(3, 1, 0))
    said = str(refused.value)
    assert said.startswith(
        "backward(prompts=1) without rollouts= and tokens=, which earlier passes of this engine gave"
    )
    assert "it would count 3 rollouts and 0 tokens" in said


def test_counts_that_went_with_passes_are_asked_for():
    refuse_left_behind(Counts(2, 0, 7), {"rollouts": 2}, Counts(2))
    with pytest.raises(
        WindowError, match=r"that was left .*Counts\(rollouts=2, prompts=0, tokens=7\).* pass rollouts="
    ):
        refuse_left_behind(Counts(2, 0, 7), {"tokens": 7}, Counts(1, 0, 7))
    with pytest.raises(WindowError, match="pass rollouts= here"):
        refuse_left_behind(Counts(), {}, Counts(1))


def test_in_an_idle_pass_the_stand_ins_counts_are_no_contradiction():
    refuse_contradiction(Counts(0, 0, 0), {"rollouts": 2, "tokens": 8})


@pytest.mark.parametrize(
    "loss",
    [
        1.0,
        (torch.ones(1, requires_grad=True),),
        torch.ones(2, requires_grad=True),
        torch.ones(1),
        torch.ones(1, requires_grad=True).to_sparse(),
    ],
)
def test_what_has_no_gradient_or_several_elements_is_no_loss(loss):
    with pytest.raises(WindowError, match="that is no loss"):
        refuse_what_is_no_loss(loss)


def test_a_term_that_is_no_loss_is_named():
    with pytest.raises(WindowError, match=r"no loss \(the term 'policy'\): .* give 0.0 \* one that is"):
        refuse_what_is_no_loss(torch.ones(1), "policy")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_without_gradients_is_refused_by_the_name_of_what_switches_them_off(mode):
    loss = torch.ones(1, requires_grad=True) * 2
    refuse_what_is_no_loss(loss)
    with mode(), pytest.raises(WindowError, match=r"torch.no_grad\(\) or torch.inference_mode\(\)"):
        refuse_what_is_no_loss(loss)


def test_a_turn_may_lack_the_terms_that_are_means_over_rollouts():
    terms = Terms((Term("policy", "token"), Term("kl", "rollout")))
    turn = Counts(0, 0, 8)
    refuse_mean_of_parts(Weighting.of_terms(terms, "mean"), turn, given={"policy"})
    with pytest.raises(WindowError, match="are means over the rollouts that it finishes"):
        refuse_mean_of_parts(Weighting.of_terms(terms, "mean"), turn)
