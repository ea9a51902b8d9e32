"""Losses of a pipeline are divided whatever they are: a function, a module, or nothing."""

from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.pipeline import PipelinedEngine


class Stage(torch.nn.Module):
    """A stage, as DeepSpeed's PipelineModule keeps its loss."""

    def __init__(self, loss_fn):
        super().__init__()
        self.loss_fn = loss_fn


@pytest.mark.parametrize("loss", [torch.nn.MSELoss(), torch.nn.functional.mse_loss], ids=["a module", "a function"])
def test_a_loss_is_divided_while_a_window_runs_and_is_itself_again(loss):
    stage = Stage(loss)
    outputs, labels = torch.ones(1, requires_grad=True), torch.zeros(1)
    with PipelinedEngine._weighed(SimpleNamespace(module=stage), [4.0]):
        assert float(stage.loss_fn(outputs, labels)) == 0.25
    assert stage.loss_fn is loss
    assert float(stage.loss_fn(outputs, labels)) == 1.0
    assert len(list(stage.children())) == isinstance(loss, torch.nn.Module)
