"""DeepSpeed's layer of experts in a small model, and the same model with all experts on one process."""

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.hard.unforeseen.cells import weights_of
from tests.hard.unforeseen.oracle import RATE, WIDTH

EXPERTS, INNER = 4, 8


def _drawn():
    """The weights of both models."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "body": (INNER, WIDTH),
        "body_bias": (INNER,),
        "gate": (EXPERTS, INNER),
        "head": (1, INNER),
        "head_bias": (1,),
        "experts": (EXPERTS, INNER, INNER),
        "experts_bias": (EXPERTS, INNER),
    }
    return {name: 0.5 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


class Experts(nn.Module):
    """Between two layers, DeepSpeed's MoE, of which each rank has EXPERTS / apart experts."""

    def __init__(self, apart):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 1)
        options = {"k": 1, "drop_tokens": False, "min_capacity": 0, "use_rts": False}
        self.moe = MoE(INNER, nn.Linear(INNER, INNER), num_experts=EXPERTS, ep_size=apart, **options)
        count = EXPERTS // apart
        self.first = count * (dist.get_rank() % apart)
        drawn = _drawn()
        with torch.no_grad():
            for name, one in self.named().items():
                one.copy_(drawn[name] if isinstance(name, str) else drawn[name[0]][name[1]])

    def named(self, of=None):
        """The parameters by their names in Whole: a text, or for an expert's a text and its number."""
        of, inner = dict(of or self.named_parameters()), "moe.deepspeed_moe."
        names = {"body": "body.weight", "body_bias": "body.bias", "head": "head.weight", "head_bias": "head.bias"}
        named = {name: of[own] for name, own in names.items()}
        named["gate"] = of[f"{inner}gate.wg.weight"]
        for number in range(len(self.moe.deepspeed_moe.experts.deepspeed_experts)):
            own = f"{inner}experts.deepspeed_experts.{number}"
            named["experts", self.first + number] = of[f"{own}.weight"]
            named["experts_bias", self.first + number] = of[f"{own}.bias"]
        return named

    def forward(self, x, y):
        hidden, *_ = self.moe(torch.tanh(self.body(x)))
        return (self.head(hidden).squeeze(-1) - y).pow(2).mean()


class Whole(nn.Module):
    """The same in plain torch: the gate's best expert answers, times the gate's probability."""

    def __init__(self):
        super().__init__()
        for name, one in _drawn().items():
            self.register_parameter(name, nn.Parameter(one))

    def forward(self, x, y):
        hidden = torch.tanh(x @ self.body.t() + self.body_bias)
        likely = (hidden @ self.gate.t()).softmax(-1)
        best = likely.argmax(-1)
        answer = torch.einsum("ni,noi->no", hidden, self.experts[best]) + self.experts_bias[best]
        hidden = answer * likely.gather(1, best[:, None])
        return ((hidden @ self.head.t() + self.head_bias).squeeze(-1) - y).pow(2).mean()


def grouped(model):
    """An optimizer with the groups that DeepSpeed asks for."""
    group = {"params": list(model.parameters()), "name": "all"}
    return torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=RATE)


def apart(watched):
    """The greatest distance of a weight of this rank from the oracle's."""
    model, right = watched.engine.module, watched.oracle_weights()
    distances = [
        (one - (right[name] if isinstance(name, str) else right[name[0]][name[1]])).abs().max()
        for name, one in model.named(weights_of(watched.engine)).items()
    ]
    return float(torch.stack(distances).max())
