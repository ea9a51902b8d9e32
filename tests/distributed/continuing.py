"""Runs that are saved and continued, in the precisions and with the offloading that people train with."""

import copy
from argparse import Namespace
from dataclasses import replace

import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param

import ds_parity
from ds_parity.collation import to_device
from ds_parity.parity.running import weights
from ds_parity.parity.running.layouts import collate_layout
from ds_parity.parity.running.own_batches import stand_in
from ds_parity.parity.running.scenario import Scenario
from tests.distributed.cells import STAGES, TINY, config
from tests.distributed.engines import ledger_of, one_pass

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

ALL_OFFLOADED = {**OFFLOADED, "offload_param": {"device": "cpu"}}

CELLS = [
    *[(stage, precision, {}) for stage in STAGES for precision in ("fp32", "bf16")],
    *[(stage, "bf16-fp32", {}) for stage in (1, 2, 3)],  # DeepSpeed refuses it on stage 0
    *[(stage, precision, OFFLOADED) for stage in (1, 2, 3) for precision in ("fp32", "bf16")],
    *[(3, precision, ALL_OFFLOADED) for precision in ("fp32", "bf16")],
]

# What DeepSpeed's converter to universal checkpoints knows: ZeRO 1 to 3 with Adam's state.
CONVERTED = [
    *[(stage, precision, {}) for stage in (1, 2, 3) for precision in ("fp32", "bf16")],
    (1, "bf16-fp32", {}),  # another wrapper, BF16_Optimizer
    (3, "bf16", OFFLOADED),
]

BEFORE, AFTER = 2, 2


def name_of(stage, precision, offloaded):
    """The name of a cell, in tests and folders."""
    return "-".join([str(stage), precision, *offloaded])


def extended(stage, precision, offloaded, **section):
    """Adam, whose state a checkpoint must keep, under a schedule at fractional progress."""
    section = {"loss_weight": "token", "lr_progress": "rollout", **section}
    made = {**config(stage, optimizer="AdamW", **section), **PRECISIONS[precision]}
    made["zero_optimization"] = {"stage": stage, **offloaded}
    if cpu_adam((stage, precision, offloaded)):
        made["optimizer"]["params"].pop("torch_adam")
    elif offloaded:
        made["zero_force_ds_cpu_optimizer"] = False
    return made


def cpu_adam(cell):
    """Whether DeepSpeedCPUAdam runs a cell, and not torch's Adam."""
    return bool(cell[2]) and cell[1] == "bf16"


def scenario_of(cell, ranks=2):
    """Windows that overshoot, so that a surplus is pending where the checkpoint is saved."""
    windows = BEFORE + AFTER
    return Scenario(name_of(*cell), extended(*cell), ranks, shape="overshoot", windows=windows, seed=3, **TINY)


class Run:
    """One engine on the real rollouts of a scenario, from any pass on.

    Passes are laid out for two ranks and cut anew for others, so that each holds the same rollouts on any number.
    """

    def __init__(self, scenario, config=None):
        self.scenario = scenario
        module = scenario.build()
        self.engine, *_ = ds_parity.initialize(
            model=module, model_parameters=groups_of(module), config=config or scenario.config
        )
        device = self.engine.device
        layout = recut(replace(scenario, ranks=2).layout(), scenario.ranks)
        self.batches = [to_device(row[dist.get_rank()], device) for row in collate_layout(layout)]
        self.idle = stand_in(scenario)

    def one(self, index):
        """Run pass `index`."""
        batch = self.batches[index]
        if batch.rollouts:
            loss = self.engine(**batch.inputs)
            self.engine.backward(loss, rollouts=batch.rollouts, prompts=batch.prompts, tokens=batch.tokens)
        else:
            self.engine.idle(self.engine(**self.idle.inputs))
        self.engine.step()

    def windows(self, count, record=None):
        """Close `count` windows, from the pass on at which the engine stands; what each step was."""
        steps, engine = [], self.engine
        while len(steps) < count and passes_of(engine) < len(self.batches):
            self.one(passes_of(engine))
            if engine.window.passes == 0:
                checksum = weights.summary(weights.vector(engine.module)).checksum
                steps.append((engine.last_step.model_dump(), checksum, stands(engine)))
                if record is not None:
                    record(engine.last_step, engine.module)
        return steps


def groups_of(module):
    """Matrices decay, norms don't, as people set it up."""
    parameters = list(module.parameters())
    return [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]


def recut(layout, ranks):
    """The rollouts of every pass, in their order, dealt to so many ranks as evenly as can be."""
    rows = [[rollout for batch in row for rollout in batch] for row in layout]
    return tuple(
        tuple(tuple(row[len(row) * r // ranks : len(row) * (r + 1) // ranks]) for r in range(ranks)) for row in rows
    )


def passes_of(engine):
    return ledger_of(engine).passes


def stands(engine):
    """Where everything stands that a checkpoint keeps beside weights and the optimizer's state."""
    return {
        "groups": [[group["lr"], group["weight_decay"]] for group in engine.optimizer.param_groups],
        "schedule": copy.deepcopy(engine.lr_scheduler.state_dict()),
        "clocks": [engine.global_steps, engine.global_samples, engine.skipped_steps, passes_of(engine)],
        "window": [engine.window.index, engine.window.closes_at - engine.window.opened_at],
        "progress": ledger_of(engine).progress.nominal,
    }


def fp32_weights(engine):
    """What the optimizer keeps of every parameter in fp32, by name; collective."""
    if not engine.zero_optimization():
        return {}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}


def converted(path, step=BEFORE):
    """What the conversion to a universal checkpoint, as a user does it, ends in; the first rank converts."""
    given = {"input_folder": f"{path}/global_step{step}", "output_folder": f"{path}/universal"}
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    arguments = Namespace(**given, **options, inject_missing_state=True)
    dist.barrier()
    said = ends_in(lambda: ds_to_universal.main(arguments)) if dist.get_rank() == 0 else None
    dist.barrier()
    return said


def ends_in(call):
    """What a call ends in, in words, whoever raised it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def windows_of(engine, rollouts):
    """Run passes that contain so many rollouts on each rank; what each step was."""
    steps = []
    for index, count in enumerate(rollouts):
        one_pass(engine, index, rollouts=count)
        if engine.window.passes == 0:
            checksum = weights.summary(weights.vector(engine.module)).checksum
            steps.append((engine.last_step.model_dump(), checksum, engine.get_lr()))
    return steps
