"""DeepSpeed's Adam, ZeRO 0 in fp32: a parameter that is frozen, or of another dtype, changes the steps of others.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/fused_adam_count.py

FusedAdam steps a whole group with the count of its last parameter that has a gradient, and adds to that one alone
(ops/adam/fused_adam.py: `state` is what the loop has left). Where another one is the last, its count is 0 still, and
the group begins Adam's bias correction anew. Of a group with two dtypes each adds to that count, and a step counts
twice. Nothing is raised.
"""

import sys

import deepspeed
import torch
from _places import exit_code, tell


def first_layer(frozen: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weights of the first of two layers, which do not meet, behind four steps.

    Args:
        frozen: whether the second layer is frozen behind two steps.
        dtype: of the second layer.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3, bias=False) for _ in range(2))
    model[1].to(dtype)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for number in range(4):
        if number == 2:
            model[1].requires_grad_(not frozen)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(engine.device)
        engine.backward(sum(layer(x.to(layer.weight.dtype)).float().pow(2).mean() for layer in model))
        engine.step()
    return model[0].weight.detach().clone()


def apart(frozen: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """Return how far the first layer is from where it is beside a like one, in shares of its way."""
    torch.manual_seed(0)
    begun = torch.nn.Linear(3, 3, bias=False).weight.detach()
    due, found = first_layer().cpu(), first_layer(frozen, dtype).cpu()
    return ((found - due).norm() / (due - begun).norm()).item()


def main() -> dict[str, str]:
    """Freeze the second layer behind two steps, and give it another dtype."""
    deepspeed.init_distributed()
    return tell(
        {
            "ZeRO 0, the other layer frozen": lambda: apart(frozen=True),
            "ZeRO 0, the other layer of another dtype": lambda: apart(dtype=torch.bfloat16),
        },
        said=lambda value: f"a layer is {value:.3f} of its way from where it is beside a trained one in fp32",
        right=lambda value: value < 1e-5,
        fault=lambda value: value > 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
