"""Accelerate's loop, as its documentation writes it, on ranks that are there already."""

import os

from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DummyOptim
from deepspeed.accelerator import get_accelerator

from ds_parity.config import rewrite
from ds_parity.parity.running.own_batches import own_batches
from ds_parity.parity.running.scenario import Scenario


class Accelerated:
    """A window of as many micro-batches as its fixed gradient_accumulation_steps, each of one rollout."""

    def __init__(self, scenario):
        wanted = Scenario.from_json(scenario)
        module = wanted.build()
        self.accelerator = accelerator_of(rewrite(wanted.config, wanted.ranks).config)
        self.net, self.optimizer = self.accelerator.prepare(module, DummyOptim(module.parameters()))
        self.batches = own_batches(wanted)

    def window(self):
        accelerator, net, optimizer = self.accelerator, self.net, self.optimizer
        for batch in self.batches:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch.inputs))
                optimizer.step()
                optimizer.zero_grad()


def accelerator_of(plain):
    """Accelerate over a plain configuration."""
    backend = begin_anew()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=plain),
        gradient_accumulation_steps=plain["gradient_accumulation_steps"],
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )


def begin_anew():
    """Let accelerate start DeepSpeed in this process, whatever it did before; return the backend of its ranks."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    backend = get_accelerator().communication_backend_name()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend=backend)  # accelerate 1.15 finds none by itself for DeepSpeed on CPUs
    return backend
