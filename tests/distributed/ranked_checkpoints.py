"""What ranks do with checkpoints, each in a few lines; what they return is asserted in test_checkpoints.py."""

import copy
import logging
import runpy
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ds_parity
from ds_parity.collation import to_device
from ds_parity.config import rewrite
from ds_parity.parity.running import weights
from ds_parity.parity.running.layouts import collate_layout
from ds_parity.parity.running.recording import Recorder
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.candidate import stand_in
from tests.distributed.cells import STAGES, TINY, config
from tests.distributed.ranked import _from_all, _listen, build, forward, one_pass, refusal

TASKS = ["continued", "by_command", "not_converted", "schedulers", "into_windows", "bare"]
ELSEWHERE = ["universal", "other_size"]

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
    rows = [[one for held in row for one in held] for row in layout]
    return tuple(
        tuple(tuple(row[len(row) * r // ranks : len(row) * (r + 1) // ranks]) for r in range(ranks)) for row in rows
    )


def passes_of(engine):
    return engine._self_driver.ledger.passes


def stands(engine):
    """Where everything stands that a checkpoint keeps beside weights and the optimizer's state."""
    return {
        "groups": [[group["lr"], group["weight_decay"]] for group in engine.optimizer.param_groups],
        "schedule": copy.deepcopy(engine.lr_scheduler.state_dict()),
        "clocks": [engine.global_steps, engine.global_samples, engine.skipped_steps, passes_of(engine)],
        "window": [engine.window.index, engine.window.closes_at - engine.window.opened_at],
        "progress": engine._self_driver.ledger.progress.nominal,
    }


def continued(folder):
    """A run, and two that go on from its checkpoint: in a fresh engine, and in one that stands inside a window.

    What the run is from the checkpoint on is traced, and the checkpoint converted, for other numbers of ranks.
    """
    found = {}
    for cell in CELLS:
        name, scenario = name_of(*cell), scenario_of(cell)
        path = f"{folder}/{name}"
        run = Run(scenario)
        run.windows(BEFORE)
        saved, masters = stands(run.engine), fp32_weights(run.engine)
        run.engine.save_checkpoint(path)
        with Recorder(Path(folder) / "traces", scenario, "ds_parity") as recorder:
            whole = run.windows(AFTER, recorder)
        other, loaded, resumed = Run(scenario), [], []
        for state in ("fresh", "used"):
            other.engine.load_checkpoint(path)
            loaded.append(stands(other.engine))
            with Recorder(Path(folder) / "traces", scenario, state) as recorder:
                resumed.append(other.windows(AFTER, recorder))
            other.one(0)
        found[name] = {
            "saved": saved,
            "loaded": loaded,
            "alike": [resumed[0] == whole, resumed[1] == resumed[0]],
            "open": other.engine.window.passes,
            "from zero": collected(path, masters) if cell[0] else None,
            "converted": converted(path) if cell in CONVERTED else None,
        }
        run.engine.destroy()
        other.engine.destroy()
    return found


def fp32_weights(engine):
    """What the optimizer keeps of every parameter in fp32, by name; collective."""
    if not engine.zero_optimization():
        return {}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}


def collected(path, masters):
    """Whether DeepSpeed's own collector of fp32 weights gives those that the engine had, or what it says instead."""
    dist.barrier()
    if dist.get_rank():
        return None
    try:
        state = get_fp32_state_dict_from_zero_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return sorted(state) == sorted(masters) and all(torch.equal(state[name], masters[name]) for name in masters)


def converted(path, step=BEFORE):
    """What the conversion to a universal checkpoint, as a user does it, ends in; the first rank converts."""
    given = {"input_folder": f"{path}/global_step{step}", "output_folder": f"{path}/universal"}
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    arguments = Namespace(**given, **options, inject_missing_state=True)
    dist.barrier()
    said = ends_in(lambda: ds_to_universal.main(arguments)) if dist.get_rank() == 0 else None
    dist.barrier()
    return said


def by_command(folder):
    """What DeepSpeed's documentation names: the converter's command, and the script that lies beside a checkpoint."""
    made = extended(2, "fp32", {}, loss_weight="rollout")
    engine = build(made)
    held(engine, [3, 3])
    engine.save_checkpoint(folder)
    masters = fp32_weights(engine)
    dist.barrier()
    said = _from_all(_command(folder) if dist.get_rank() == 0 else _script(folder))
    state = torch.load(f"{folder}/fp32/pytorch_model.bin")
    other = build({**made, "checkpoint": {"load_universal": True}})
    path, _ = other.load_checkpoint(folder)
    return {
        "said": said,
        "script": all(torch.equal(state[name], master) for name, master in masters.items()),
        "path": path,
        "stands": stands(other) == stands(engine),
        "same": torch.equal(weights.vector(engine.module), weights.vector(other.module)),
    }


def _command(folder):
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", f"{folder}/global_step1", "--output_folder", f"{folder}/universal"]
    module = ["-m", "deepspeed.checkpoint.ds_to_universal"]
    done = subprocess.run([sys.executable, *module, *folders, *options], capture_output=True, text=True, check=False)
    return [done.returncode, done.stderr[-2000:] if done.returncode else ""]


def _script(folder):
    # As a command it writes shards, with a package that DeepSpeed doesn't depend on.
    script = runpy.run_path(f"{folder}/zero_to_fp32.py")
    script["convert_zero_checkpoint_to_state_dict"](folder, f"{folder}/fp32", max_shard_size=None)
    return [0, ""]


def not_converted(folder):
    """Checkpoints that DeepSpeed's converter does not know, with its message."""
    found = {}
    for name, made in (
        ("ZeRO 0", config(0, "fp32", 4, "AdamW")),
        ("SGD", config(1, "fp32", 4)),
        ("SGD 3", config(3, "fp32", 4)),
    ):
        engine = build(made)
        for seed in range(2):
            one_pass(engine, seed)
        engine.save_checkpoint(f"{folder}/{name}")
        found[name] = converted(f"{folder}/{name}", 1)
    return found


SCHEDULERS = {
    "WarmupCosineLR": {"total_num_steps": 40, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 5},
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50),
}


def schedulers(folder):
    """Runs that are continued under other schedulers: after 3 steps, nominal progress 4.5, a surplus of 4 pending."""
    found = {}
    cells = [(name, "rollout") for name in SCHEDULERS] + [(name, "optimizer_step") for name in list(SCHEDULERS)[2:]]
    for stage, (name, progress) in enumerate(cells):
        made = config(stage % 4, passes=8, optimizer="AdamW", lr_progress=progress)
        scheduler = SCHEDULERS[name]
        keywords = {}
        if callable(scheduler):
            del made["scheduler"]
            keywords["lr_scheduler"] = scheduler
        else:
            made["scheduler"] = {"type": name, "params": scheduler}
        engine = build(made, **keywords)
        held(engine, [3, 3, 9, 3])
        engine.save_checkpoint(f"{folder}/{name}-{progress}")
        whole = held(engine, [2, 3, 1, 3])
        other, resumed = build(made, **keywords), []
        for _ in range(2):
            other.load_checkpoint(f"{folder}/{name}-{progress}")
            resumed.append(held(other, [2, 3, 1, 3]) == whole)
        found[f"{name}, {progress}"] = {"rates": [step["lr"][0] for step, *_ in whole], "alike": resumed}
    return found


def held(engine, rollouts):
    """Run passes that hold so many rollouts on each rank; what each step was."""
    steps = []
    for index, count in enumerate(rollouts):
        one_pass(engine, index, rollouts=count)
        if engine.window.passes == 0:
            checksum = weights.summary(weights.vector(engine.module)).checksum
            steps.append((engine.last_step.model_dump(), checksum, engine.get_lr()))
    return steps


def into_windows(folder):
    """Saving and loading inside a window, weights alone, another target, other LR progress, and no checkpoint at all."""
    found = {}
    for stage in STAGES:
        extended = config(stage, passes=8, lr_progress="rollout")
        path = f"{folder}/{stage}"
        engine = build(extended)
        nothing = engine.load_checkpoint(f"{folder}/nowhere")
        held(engine, [3, 3, 1])
        refused = refusal(lambda engine=engine, path=path: engine.save_checkpoint(path))
        engine.backward(forward(engine, 5), rollouts=3)
        owed = refusal(lambda engine=engine, path=path: engine.save_checkpoint(path))
        engine.step()
        engine.save_checkpoint(path)
        reached = []
        for dirty in (False, True):
            other = build(extended)
            if dirty:
                held(other, [3, 3, 3, 1])
                open_passes = other.window.passes
                other.load_checkpoint(f"{folder}/nowhere")
                kept = other.window.passes
            _, state = other.load_checkpoint(path)
            reached.append(held(other, [2, 1, 3]))
        other.save_checkpoint(path, "again", {"ds_parity": "old", "mine": 1}, False)
        other_target = build(config(stage, passes=6))
        other_target.load_checkpoint(path, load_module_only=True)
        alone = [other_target.global_samples, other_target.window.index]
        message = refusal(lambda other=other_target, path=path: other.load_checkpoint(path))
        by_step = build(config(stage, passes=8))
        progress = refusal(lambda other=by_step, path=path: other.load_checkpoint(path))
        by_step.load_checkpoint(path, load_lr_scheduler_states=False)
        kept_schedule = build(extended)
        held(kept_schedule, [3, 3])
        kept_schedule.load_checkpoint(path, load_lr_scheduler_states=False)
        found[stage] = {
            "nothing": nothing,
            "refused": [refused, owed],
            "clean": reached[0],
            "dirty": reached[1],
            "nowhere": [open_passes, kept],
            "state": sorted(state["ds_parity"]),
            "other target": message,
            "weights alone": alone,
            "other progress": progress,
            "own progress": kept_schedule._self_driver.ledger.progress.nominal,
        }
        again = build(extended)
        _, state = again.load_checkpoint(path, "again")
        found[stage]["again"] = [state["mine"], stands(again) == stands(other)]
    return found


def bare(folder):
    """From bare DeepSpeed to ours and back, four rollouts a step; what each engine's LR was, step by step."""
    found = {}
    for stage in STAGES:
        extended = config(stage, passes=4, lr_progress="rollout")
        first = build_bare(extended)
        for seed in range(10):
            first.backward(forward(first, seed))
            first.step()
        first.save_checkpoint(f"{folder}/bare-{stage}")
        rates = [first.get_lr()[0]]
        said, handler = _listen()
        ours = build(extended)
        ours.load_checkpoint(f"{folder}/bare-{stage}")
        logging.getLogger("ds_parity").removeHandler(handler)
        loaded = torch.equal(weights.vector(first.module), weights.vector(ours.module))
        rates.append(ours.get_lr()[0])
        steps = held(ours, [1, 1])
        rates.append(ours.get_lr()[0])
        held(ours, [3])  # one and a half nominal steps
        rates.append(ours.get_lr()[0])
        ours.save_checkpoint(f"{folder}/ours-{stage}")
        back = build_bare(extended)
        path, state = back.load_checkpoint(f"{folder}/ours-{stage}")
        rates.append(back.get_lr()[0])
        for seed in range(2):
            back.backward(forward(back, seed))
            back.step()
        rates.append(back.get_lr()[0])
        uninterrupted = build_bare(extended)
        uninterrupted.load_checkpoint(f"{folder}/bare-{stage}")
        for seed in range(2):
            uninterrupted.backward(forward(uninterrupted, seed))
            uninterrupted.step()
        found[stage] = {
            "rates": rates,
            "said": said.getvalue(),
            "loaded": loaded,
            "step": [steps[0][0]["step"], steps[0][0]["rollouts"], ours.global_samples],
            "as bare": steps[0][1] == weights.summary(weights.vector(uninterrupted.module)).checksum,
            "back": [path is not None, "ds_parity" in state, back.global_steps],
        }
    return found


def build_bare(extended):
    """Bare DeepSpeed with what the extended configuration is rewritten to."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    plain = rewrite(extended, dist.get_world_size()).config
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    return engine


# On other numbers of ranks than two.


def universal(folder, saved):
    """Go on from the universal checkpoints that `continued` left in `saved`, and trace it."""
    found = {}
    for cell in CONVERTED:
        scenario = scenario_of(cell, dist.get_world_size())
        run = Run(scenario, {**scenario.config, "checkpoint": {"load_universal": True}})
        run.engine.load_checkpoint(f"{saved}/{name_of(*cell)}")
        found[name_of(*cell)] = stands(run.engine)
        with Recorder(Path(folder), scenario, "ds_parity") as recorder:
            run.windows(AFTER, recorder)
        run.engine.destroy()
    return found


def other_size(folder, saved):
    """Load what two ranks saved as it is: ZeRO 0 goes on, the other stages are told on every rank what to do."""
    found = {}
    for stage in STAGES:
        cell = (stage, "fp32", {})
        run = Run(scenario_of(cell, dist.get_world_size()))
        found[stage] = _from_all(
            ends_in(lambda run=run, cell=cell: run.engine.load_checkpoint(f"{saved}/{name_of(*cell)}"))
        )
        if stage == 0:
            found["stands"] = stands(run.engine)
            with Recorder(Path(folder), run.scenario, "ds_parity") as recorder:
                run.windows(AFTER, recorder)
        run.engine.destroy()
    return found


def ends_in(call):
    """What a call ends in, in words, whoever raised it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
