"""The bundled loss of several terms: gradients of different directions from one forward, each with its own unit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from ds_parity.token_losses import logits_of, masked, reduced, token_logps

# What a term's mean within a micro-batch runs over, where the term's weight in the window says nothing of it.
_MEANS = {"weight": "rollout", "target": "rollout"}


class SeveralTerms(nn.Module):
    """A policy with as many loss terms as a configuration names, whatever their names are.

    The first term is the policy gradient, or the negative log likelihood. The loss of a token in term number n, from 1
    on, is x ** (n + 1) / (n + 1), where x = logp + log(V) and V is the number of token ids: for n = 1 this is the k2
    estimate of the KL divergence to the uniform policy (Schulman 2020, joschu.net/blog/kl-approx.html), and the others
    only have to point in other directions.

    Args:
        policy: as `PolicyGradient` takes it.
        units: the weight of each term by its name: rollout | token | pass | target | weight.
        loss_reduction: mean | sum.
        objective: of the first term, policy_gradient | nll.
    """

    def __init__(
        self, policy: nn.Module, units: Mapping[str, str], loss_reduction: str = "mean", objective: str = "nll"
    ) -> None:
        super().__init__()
        self.policy = policy
        self.units = dict(units)
        self.loss_reduction = loss_reduction
        self.objective = objective

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        advantages: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the terms of a micro-batch; arguments as those of `PolicyGradient.forward`.

        Returns:
            A scalar in fp32 (in fp64 where the logits are fp64) for every term, by its name.
        """
        logits = logits_of(self.policy, input_ids, position_ids)[:, :-1]
        logp = token_logps(logits, input_ids[:, 1:])
        by_token = advantages[:, None] if segment_ids is None else advantages[segment_ids[:, 1:]]
        first = -logp if self.objective == "nll" else -by_token.to(logp.dtype) * logp
        beyond = logp + math.log(logits.shape[-1])
        terms = {}
        for number, (name, unit) in enumerate(self.units.items()):
            losses = beyond ** (number + 1) / (number + 1) if number else first
            summed = masked(losses, loss_mask, segment_ids, len(advantages))
            terms[name] = reduced(*summed, _MEANS.get(unit, unit), self.loss_reduction)
        return terms
