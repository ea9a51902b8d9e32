"""ZeRO 0 with "sparse_gradients": rows of an embedding's gradient that add up to 0 are lost.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/sparse_gradients_zero0.py

A gradient is reduced as its rows that are not 0, and these are looked for in the sums of rows
(runtime/sparse_tensor.py, `torch.sum(dense_tensor, dim=1)`). Behind a LayerNorm every row adds up to about 0, and some
to 0 exactly.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import NotThere, exit_code, tell


class Words(torch.nn.Module):
    """An embedding of two numbers, of which the output is the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(4, 2)
        torch.nn.init.zeros_(self.words.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum of differences."""
        first, second = self.words(ids).unbind(-1)
        return (first - second).sum()


def stepped(half: bool) -> float:
    """Return the first number of a word, after a step at a rate of 1 with the gradient [1, -1]."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sparse_gradients": True,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    if half:
        config["bf16"] = {"enabled": True}
    model = Words()
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except Exception as error:
        if "has been removed" in str(error):
            raise NotThere("DeepSpeed has taken the key back") from None
        raise
    engine.backward(engine(torch.tensor([2], device=engine.device)))
    engine.step()
    return engine.module.words.weight[2, 0].item()


def main() -> dict[str, str]:
    """Take one step in each precision."""
    return tell(
        {"ZeRO 0 in fp32": partial(stepped, False), "ZeRO 0 in bf16": partial(stepped, True)},
        said=lambda value: f"the weight is {value:g}; right is -1",
        right=lambda value: value == -1,
        fault=lambda value: value == 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
