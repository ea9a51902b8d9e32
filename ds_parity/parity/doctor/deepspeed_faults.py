"""Faults of DeepSpeed itself: which configurations meet them, on which versions they were seen, and the way out.

A script in tools/deepspeed_faults shows each, and tests/parity/test_doctor_faults.py checks that there is one. On which
versions they are there was measured (`measured.py`). A version is only ever said to have a fault where it was measured,
or where DeepSpeed's issue says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_parity.config.features import FETCHED
from ds_parity.config.refusals import names_fp32
from ds_parity.parity.doctor.measured import FAULT, RIGHT, measured, numbers, of_places
from ds_parity.parity.doctor.reading import Reading
from ds_parity.values import whole


@dataclass(frozen=True)
class DeepSpeedFault:
    """A fault of DeepSpeed.

    Attributes:
        name: of its script, or "DeepSpeed #" and the number of its issue.
        effect: what it does to training, one sentence.
        way_out: what to change for a bare DeepSpeed.
        before: a release, and the way out on those before it, where the other one would not help.
        met: whether a configuration meets it.
        only_if: what else it needs, of the loop or of the model; "" where the configuration is enough.
        script: the script that shows it, where its name is another one.
        between: first and last version that DeepSpeed's issue names, both included.
        kept_from: whether `ds_parity.initialize` corrects it, avoids it, or refuses what leads to it.
        raises: it is an error that DeepSpeed raises, in place of a wrong number.
    """

    name: str
    effect: str
    way_out: str
    met: Callable[[Reading], bool]
    only_if: str = ""
    script: str = ""
    between: tuple[str, str] | None = None
    kept_from: bool = True
    raises: bool = False
    before: tuple[str, str] | None = None

    @property
    def path(self) -> str:
        """Where its script is in the repository of ds_parity."""
        return f"tools/deepspeed_faults/{self.script_name}.py"

    @property
    def script_name(self) -> str:
        """The name of its script."""
        return self.script or self.name

    def on(self, version: str, reading: Reading) -> bool | None:
        """Return whether a version has the fault where a configuration meets it; None where that is not known."""
        outcomes = self.outcomes(version, reading)
        if self.between is not None:
            first, last = map(numbers, self.between)
            # What is wrong in the same place on other versions is another fault.
            if outcomes is None or not first <= numbers(version) <= last:
                return first <= numbers(version) <= last
        if outcomes is None:
            return None
        errors = any(outcome.startswith("error:") for outcome in outcomes)
        if self.raises:
            return errors
        # Where a version raises on a CPU, DeepSpeed's issue still says what is wrong where it does not.
        if FAULT in outcomes or (errors and self.between is not None):
            return True
        absent = all(outcome == RIGHT or outcome.startswith("not there:") for outcome in outcomes)
        return False if absent or self.script else None

    def way_out_on(self, version: str | None) -> str:
        """Return what to change for a bare DeepSpeed of a version; None: for the newest."""
        if version is not None and self.before is not None and numbers(version) < numbers(self.before[0]):
            return self.before[1]
        return self.way_out

    def outcomes(self, version: str, reading: Reading) -> list[str] | None:
        """Return what was measured on a version where a configuration meets the fault; None where nothing was."""
        places = measured().get(version, {}).get(self.script_name)
        return None if places is None else of_places(places, reading)

    def tried_elsewhere(self, version: str, reading: Reading) -> bool:
        """Return whether its script was run with a version, but has no place where a configuration is."""
        return self.script_name in measured().get(version, {}) and self.outcomes(version, reading) is None

    def seen(self, reading: Reading) -> list[str]:
        """Return the versions that were measured and have it where a configuration meets it."""
        return [version for version in measured() if self.on(version, reading)]


SEVERAL_PASSES = "a step has several passes"
_LEFT_OUT = "a step leaves out a parameter that an earlier step used"
FAULTS: tuple[DeepSpeedFault, ...] = (
    DeepSpeedFault(
        "fp16_zero0_unscaled_loss",
        "the loss is not scaled, but the step unscales: every update is too small by the loss scale",
        "use ZeRO 1, 2 or 3, or bf16",
        lambda c: c.fp16 and c.stage == 0,
        # 0.18.4 is wrong in bf16 too, and 0.18.6 to 0.18.10 raise on ZeRO 1 and 2.
        before=("0.19.0", "use DeepSpeed 0.19.0 or newer with ZeRO 1, 2 or 3, or with bf16"),
    ),
    DeepSpeedFault(
        "fp16_growing_scale",
        "the step at which the loss scale grows is applied at half its size",
        "use bf16, or a fixed fp16.loss_scale",
        lambda c: c.fp16 and c.dynamic,
    ),
    DeepSpeedFault(
        "autocast_fp16_clipping",
        "clipping acts on the scaled gradient, so that every step is cut to the limit / 65536",
        "use bf16 in torch_autocast, or gradient_clipping 0",
        lambda c: c.autocast_fp16 and c.stage > 0 and c.clips,
    ),
    DeepSpeedFault(
        "autocast_fp16_overflow",
        "after an overflow the loss scale never comes down, and no step is ever taken again",
        "use bf16 in torch_autocast, or ZeRO 0",
        lambda c: c.autocast_fp16 and c.stage > 0,
    ),
    DeepSpeedFault(
        "autocast_fp16_groups",
        "where the loss scale grows, later parameter groups are applied at half their size",
        "use bf16 in torch_autocast, or one parameter group",
        lambda c: c.autocast_fp16 and c.stage > 0,
        "the optimizer has several parameter groups, or ZeRO 3 several sub-groups",
    ),
    DeepSpeedFault(
        "autocast_fp16_scale_not_saved",
        "behind a load the loss scale is 65536 again, and a step is skipped for each halving to where it was",
        "save the state of the GradScaler beside the checkpoint",
        lambda c: c.autocast_fp16,
        "a run goes on from a checkpoint",
    ),
    DeepSpeedFault(
        "autocast_fp16_zero0_skip",
        "a skipped step is counted as taken, and the learning rate moves",
        "use bf16 in torch_autocast",
        lambda c: c.autocast_fp16 and c.stage == 0,
    ),
    DeepSpeedFault(
        "autocast_outlives_its_engine",
        "later engines of the process get the loss scale of this one, whatever their configuration says",
        "give every engine a process of its own, or use bf16 in torch_autocast",
        lambda c: c.autocast_fp16 and c.stage > 0,
        "the process builds another engine after this one",
    ),
    DeepSpeedFault(
        "stale_gradient",
        "a parameter that a step does not use is moved by its last gradient again",
        "have every step use every trainable parameter",
        lambda c: c.stage == 3 or (c.offloads and c.stage > 0),
        _LEFT_OUT,
    ),
    DeepSpeedFault(
        "used_in_some_passes",
        "a parameter that only early passes of a step use loses its gradient, or ranks step by their own",
        "have every pass use every trainable parameter, or leave out CPU offload and overlap_comm",
        # Plain ZeRO 2 in 0.17.6 alone: what was measured decides.
        lambda c: c.stage == 2 or (c.stage == 3 and c.offloads) or (c.stage == 1 and c.overlaps),
        "the last pass of a step leaves out a parameter that an earlier pass used",
        before=("0.18.4", "use DeepSpeed 0.19.0 or newer, and have every pass use every trainable parameter"),
    ),
    DeepSpeedFault(
        "predivide_zero3",
        "the gradient is divided by gradient_predivide_factor twice",
        "leave gradient_predivide_factor out",
        lambda c: (
            c.stage == 3
            and c.raw("gradient_predivide_factor") not in (None, 1, 1.0)
            and c.off("zero_optimization.reduce_scatter")
        ),
        "gradient_predivide_factor is the number of ranks, and reduce_scatter is off",
    ),
    DeepSpeedFault(
        "boundary_never_marked",
        "a step keeps the last backward alone (with CPU offload: all but the first)",
        "call set_gradient_accumulation_boundary() before every backward",
        lambda c: c.stage in (1, 2) and not c.accumulates,
        "the loop calls backward() several times before one step()",
    ),
    DeepSpeedFault(
        "allreduce_zero1_overlap",
        "engine.allreduce_gradients() reduces nothing",
        "leave out overlap_comm",
        # Without overlap_comm in 0.18.9 alone.
        lambda c: c.stage == 1,
        "the loop calls engine.allreduce_gradients() itself",
        before=("0.19.0", "use DeepSpeed 0.19.0 or newer, and leave out overlap_comm"),
    ),
    DeepSpeedFault(
        "clip_norm_lost",
        "get_global_grad_norm() is None, so that logs have no gradient norm",
        "use ZeRO 1, which steps alike",
        lambda c: c.fp32 and not c.autocast_fp16 and c.stage == 0 and c.clips,
        before=("0.19.0", "use DeepSpeed 0.19.0 or newer with ZeRO 1, which steps alike"),
    ),
    DeepSpeedFault(
        "clipped_in_default_dtype",
        "gradients are clipped by a coefficient that is rounded to torch's default dtype",
        "leave torch.set_default_dtype() alone, or build the model under it and set fp32 for the loop",
        lambda c: c.fp32 and not c.autocast_fp16 and c.stage == 0 and c.clips,
        "torch's default dtype is bf16 or fp16",
    ),
    DeepSpeedFault(
        "forward_past_the_engine",
        "the last pass replaces the others, earlier passes count twice, or losses are not divided by the passes",
        "call engine(...) once before every backward",
        lambda c: True,
        "the loop calls engine.module(...), or two forwards before two backwards",
        before=("0.19.0", "use DeepSpeed 0.19.0 or newer, and call engine(...) once before every backward"),
    ),
    DeepSpeedFault(
        "zero_grad_mid_window",
        "zero_grad() drops the passes before it",
        "call zero_grad() after step() only",
        lambda c: True,
        "the loop calls zero_grad() before each pass",
    ),
    DeepSpeedFault(
        "nan_gradient_zero0",
        "all weights become NaN, where ZeRO 1 to 3 of newer versions skip the step",
        "use ZeRO 1, which steps alike",
        # Which stages it is on, the versions differ in.
        lambda c: c.fp32 and not c.autocast_fp16,
        "a gradient is not finite",
        before=("0.19.8", "use DeepSpeed 0.19.8 or newer with ZeRO 1, 2 or 3"),
    ),
    DeepSpeedFault(
        "ranks_use_other_parameters",
        "gradients of different parameters are added up",
        "have all ranks use the same parameters in a pass, or use ZeRO 0",
        lambda c: c.stage in (1, 2),
        "ranks use different parameters in one pass (adapters, experts, branches)",
    ),
    DeepSpeedFault(
        "gradients_in_another_order",
        "gradients of different parameters are added up",
        "have all ranks run all branches in one order, and multiply what is not wanted by 0",
        lambda c: c.stage == 2 or (c.stage == 1 and c.overlaps),
        "ranks use the same parameters in another order in one pass",
    ),
    DeepSpeedFault(
        "reached_twice",
        "of a parameter's two gradients the second replaces the first",
        "set use_reentrant=False for activation checkpointing",
        lambda c: c.stage == 3,
        "one backward runs two uses of a block with reentrant activation checkpointing (a block that is used twice, "
        "two forwards for one backward)",
    ),
    DeepSpeedFault(
        "norm_of_own_parameters",
        "each rank clips by the norm of the parameters that it has used itself",
        "have all ranks use the same parameters",
        lambda c: c.stage == 1 and c.sums_in_fp32,
        "ranks use different parameters in one step",
    ),
    DeepSpeedFault(
        "experts_without_leaves",
        "weights and gradients of different experts are mixed",
        "make the layer of experts a leaf module (zero_optimization.leaf_module)",
        lambda c: c.stage == 3,
        "ranks use different experts, or adapters, of the same size in one pass",
    ),
    DeepSpeedFault(
        "leaf_hooks",
        "the gradients of a leaf module are lost, or its backward raises",
        "make leaves only of modules that are given hidden states by position, and return a tensor or a tuple of them",
        lambda c: c.stage == 3,
        "a leaf module is the first of the model, or returns a dict, a list or a dataclass",
    ),
    DeepSpeedFault(
        "engines_of_one_model",
        'a forward raises an AssertionError that says "INFLIGHT"',
        "set zero_optimization.stage3_prefetch_bucket_size to 0 in both engines",
        lambda c: c.stage == 3 and c.raw("zero_optimization.stage3_prefetch_bucket_size") != 0,
        "the process has another engine over the same model",
    ),
    DeepSpeedFault(
        "odd_shapes",
        'initialize() raises "self.dim() cannot be 0 to view ... as Byte", or "self.stride(-1) must be 1"',
        "make it a parameter of shape (1,), or one that is contiguous",
        lambda c: True,
        "the model has a parameter without a dimension, or one that is not contiguous (channels_last, a transpose)",
    ),
    DeepSpeedFault(
        "expert_norm_zero0",
        "clips by the mean of the ranks' norms, which is smaller than the norm of the gradient",
        "use ZeRO 1 or 2",
        lambda c: c.fp32 and c.stage == 0 and c.clips,
        "the model has experts on different ranks (DeepSpeed's MoE, ep_size above 1)",
    ),
    DeepSpeedFault(
        "expert_norm_unfused",
        "experts are left out of the norm, which is reported too small, and clips too little",
        "use ZeRO 1 or 2, or DeepSpeed's fused Adam",
        lambda c: (c.bf16 or c.fp16) and c.stage == 0 and c.clips,
        "the model has DeepSpeed's MoE layers, and the optimizer is none of DeepSpeed's fused Adam",
    ),
    DeepSpeedFault(
        "experts_in_any_order",
        "ranks add up gradients of other experts, and come to norms and weights of their own, without an error",
        "start all ranks with PYTHONHASHSEED=0, or sort the parameter groups of experts by their names",
        lambda c: c.stage in (1, 2),
        "the model has experts of several ep_size (DeepSpeed's MoE)",
    ),
    DeepSpeedFault(
        "checkpoint_bf16_zero0",
        "a checkpoint has no state of the optimizer: the step after loading it undoes what was loaded",
        "use ZeRO 1 or 2",
        lambda c: c.bf16 and c.stage == 0,
        "a run goes on from a checkpoint",
    ),
    DeepSpeedFault(
        "weights_alone_zero0",
        "the step after load_checkpoint(load_optimizer_states=False) undoes what was loaded",
        "call engine.optimizer.refresh_fp32_params() behind it, or load with load_module_only=True",
        lambda c: not c.fp32 and c.stage == 0,
        "a run begins with the weights of a checkpoint, without its optimizer's states",
    ),
    DeepSpeedFault(
        "masters_of_before",
        "the step after a load with load_from_fp32_weights: false undoes what was loaded",
        "leave load_from_fp32_weights out, or call engine.optimizer.refresh_fp32_params() behind the load",
        lambda c: c.sums_in_fp32 and c.stage == 1 and c.raw("zero_optimization.load_from_fp32_weights") is False,
        "a run goes on from a checkpoint",
    ),
    DeepSpeedFault(
        "moved_weights",
        "weights that were given memory of their own are stepped no more, or what is loaded into them alone is lost",
        "write into weights in place (parameter.data.copy_(tensor)), and don't convert the model there and back",
        lambda c: c.stage in (1, 2),
        "the loop assigns parameter.data, or converts the model and converts it back",
    ),
    DeepSpeedFault(
        "tied_sums_apart",
        "each stage steps a tied weight by its own part of the gradient, and has another one from then on",
        "leave offload_optimizer or data_types.grad_accum_dtype out",
        lambda c: c.sums_in_fp32 and c.stage == 1 and c.offloads,
        "the model is a PipelineModule with a tied layer",
    ),
    DeepSpeedFault(
        "tied_weights_unused",
        "a weight that a stage does not use gets the gradient of another one, or a stage waits for ever",
        "let each stage of the tied layer use all weights that it shares",
        lambda c: c.stage in (0, 1),
        "the model is a PipelineModule with a tied layer that shares several weights",
    ),
    DeepSpeedFault(
        "stage_of_tied_weights",
        "a stage that has nothing but tied weights of the first one raises in its first step, and the others wait",
        "give each stage a weight of its own (partition_method)",
        lambda c: (c.bf16 and c.stage == 0) or (c.sums_in_fp32 and c.stage == 1 and not c.offloads),
        "the model is a PipelineModule with a tied layer that is alone on its stage",
    ),
    DeepSpeedFault(
        "checkpointed_over_ids",
        "the first trained layers behind ids, or behind what is frozen, have no gradient, or torch raises",
        "give PipelineModule activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint",
        lambda c: c.stage in (0, 1),
        "the model is a PipelineModule that checkpoints activations by the reentrant function",
    ),
    DeepSpeedFault(
        "norms_of_stages",
        "a step waits for ever: stages add up one norm for each parameter group, and have other numbers of them",
        "give each stage as many groups",
        lambda c: c.stage == 1 and (c.offloads or not c.sums_in_fp32),
        "the model is a PipelineModule, and a stage has no parameter of a group that another one has, such as a bias",
    ),
    DeepSpeedFault(
        "checkpoint_bf16_pipeline",
        "load_checkpoint() raises a KeyError; with load_optimizer_states=False the next step undoes what was loaded",
        "use ZeRO 1",
        lambda c: c.bf16 and c.stage == 0,
        "the model is a PipelineModule, and a run goes on from a checkpoint",
    ),
    DeepSpeedFault(
        "adagrad_built_anew",
        "another Adagrad is stepped: a torch scheduler, the groups' own values and a class of one's own have no effect",
        "use a scheduler of the JSON and one group, or another optimizer",
        lambda c: c.stage in (1, 2, 3) and not (c.stage == 1 and c.sums_in_fp32),
        "the optimizer is torch's Adagrad",
    ),
    DeepSpeedFault(
        "step_at_start",
        "the optimizer is stepped once while the engine is built: Adam's first steps are shorter, and weight decay is "
        "applied once more",
        "use ZeRO 1, or a warmup, in which it does not matter",
        lambda c: not c.fp32 and c.stage == 0,
        "the LR does not begin near 0",
        kept_from=False,
    ),
    DeepSpeedFault(
        "sparse_gradients_zero0",
        "rows of an embedding's gradient that add up to 0 are lost",
        "leave sparse_gradients out",
        lambda c: c.stage == 0 and c.on("sparse_gradients"),
    ),
    DeepSpeedFault(
        "sparse_gradient_not_clipped",
        "clipping leaves a sparse gradient as it is",
        "use Embedding without sparse=True",
        lambda c: c.fp32 and c.stage == 0 and c.clips,
        "the model has an Embedding(sparse=True)",
    ),
    DeepSpeedFault(
        "frozen_on_the_way",
        "gradients are lost or applied again, or a parameter is never stepped",
        "freeze and unfreeze before the engine is built",
        lambda c: c.stage > 0,
        "the loop freezes or unfreezes parameters after the start",
    ),
    DeepSpeedFault(
        "fused_adam_count",
        "the other parameters of the group take longer or shorter steps: DeepSpeed's Adam counts anew",
        "set torch_adam to true in the optimizer's params",
        lambda c: (
            c.stage == 0
            and not (c.bf16 or c.fp16)
            and c.optimizer in ("adam", "adamw")
            and not c.on("optimizer.params.torch_adam")
        ),
        "the loop freezes parameters after the start, a step has no gradient of some, or a group has two dtypes",
    ),
    DeepSpeedFault(
        "frozen_still_moves",
        "a parameter that was frozen after it was trained goes on moving, by momentum, Adam's moments or weight decay",
        "freeze before the engine is built, or give it a parameter group of its own, and set the group's lr to 0",
        lambda c: c.stage > 0 or c.bf16 or c.fp16,
        "the loop freezes parameters after the start",
        kept_from=False,
    ),
    DeepSpeedFault(
        "hpz_keeps_frozen",
        "behind load_checkpoint passes use the frozen weights that the engine had before",
        "give the model the frozen weights before the engine is built",
        lambda c: c.stage == 3 and (whole(c.raw("zero_optimization.zero_hpz_partition_size")) or 1) > 1,
        "parameters are frozen, and a checkpoint is loaded",
    ),
    DeepSpeedFault(
        "rates_of_others",
        "the learning rate is not that of the schedule, and most of torch's schedulers go on from it for ever",
        "set the lr of each group to the scheduler's get_last_lr() behind the load",
        lambda c: True,
        "a checkpoint is loaded with load_optimizer_states=False or load_lr_scheduler_states=False",
    ),
    DeepSpeedFault(
        "module_only_zero3",
        "nothing is loaded, and no error shows",
        "load without load_module_only",
        lambda c: c.stage == 3,
        "the loop calls load_checkpoint(load_module_only=True)",
    ),
    DeepSpeedFault(
        "latest_weights_zero3",
        "the weights of another checkpoint are loaded: those that the file latest names, whatever the tag",
        "let latest name the tag, or load the optimizer's states, too",
        lambda c: c.stage == 3,
        "a run begins with the weights of an older checkpoint, without its optimizer's states",
    ),
    DeepSpeedFault(
        "converted_twice",
        "weights that a hook of a module's state_dict() converts, renames or packs are loaded wrong",
        "load the optimizer's states, too, or take such hooks out",
        lambda c: c.stage == 3,
        "the loop calls load_checkpoint(load_optimizer_states=False) for a model with such hooks",
    ),
    DeepSpeedFault(
        "frozen_experts",
        "behind load_checkpoint() each rank has the frozen weights of the first rank's experts",
        "train on ZeRO 1, or freeze nothing of an expert",
        lambda c: c.stage == 2,
        "the model has DeepSpeed's MoE layer with ep_size above 1, and weights of its experts are frozen",
    ),
    DeepSpeedFault(
        "experts_not_contiguous",
        "experts on different ranks are trained by the gradients of all of them",
        "leave contiguous_gradients out, or use ZeRO 0",
        lambda c: c.stage == 1 and c.raw("zero_optimization.contiguous_gradients") is False,
        "the model has DeepSpeed's MoE layer with ep_size above 1",
    ),
    DeepSpeedFault(
        "frozen_by_function",
        "what a custom_load_fn makes of a frozen weight is replaced by what was saved",
        "write such weights behind load_checkpoint()",
        lambda c: c.stage == 2,
        "weights are frozen, and load_checkpoint() is given a custom_load_fn",
    ),
    DeepSpeedFault(
        "autotp_loses_adapters",
        "a layer with an adapter, a forward of its own or hooks gives what its weight and bias give alone",
        "merge adapters into the layers, leave the layer out of the plan, or leave tensor_parallel out",
        lambda c: (whole(c.raw("tensor_parallel.autotp_size")) or 1) > 1,
        "AutoTP divides a layer of the model that has more than a weight and a bias, such as one of LoRA",
    ),
    DeepSpeedFault(
        "skips_for_ever",
        "behind one step with a gradient that is not finite, every step is skipped, and nothing is learned",
        "leave data_types.grad_accum_dtype out, or offload_optimizer",
        lambda c: c.stage in (1, 2) and not c.fp32 and c.offloads and names_fp32(c.raw("data_types.grad_accum_dtype")),
        "a gradient is not finite once, as fp16 brings about by its loss scale",
    ),
    DeepSpeedFault(
        "tied_since_saved",
        "a checkpoint of two weights is loaded into a model that ties them, and one is lost, or steps begin from both",
        "load it into a model that does not tie them, or make one weight of them before it is loaded",
        lambda _: True,
        "a model ties weights that were several when its checkpoint was saved",
    ),
    DeepSpeedFault(
        "unstepped_not_saved",
        "a checkpoint has nothing of a weight that is not frozen and in no group of the optimizer",
        "freeze what is not trained (requires_grad_(False)) before the engine is built",
        lambda c: c.stage == 3,
        "the optimizer was given a part of the model, and the rest is not frozen",
    ),
    DeepSpeedFault(
        "converted_with_left_over",
        "a universal checkpoint has weights and states of other places, without an error",
        "give each checkpoint a tag of its own, or remove files of ranks that the run has not before a conversion",
        lambda c: c.stage == 3,
        "a run of fewer ranks saves under the tag of a run of more, and the checkpoint is converted",
    ),
    DeepSpeedFault(
        "loss_scale_of_others",
        "behind a checkpoint of a run without fp16 the loss scale is 1 for ever, and small gradients are nothing",
        "load it with the precision that saved it, or begin with its weights alone (load_optimizer_states=False)",
        lambda c: c.fp16 and c.stage > 0,
        "a run in fp16 goes on from a checkpoint of fp32, or from a universal one of bf16",
    ),
    DeepSpeedFault(
        "nvme_not_loaded",
        "a run that goes on from a checkpoint counts its steps anew, with the learning rates of a new optimizer",
        "offload the optimizer's states to the CPU",
        lambda c: c.stage == 3 and c.raw("zero_optimization.offload_optimizer.device") == "nvme",
        "a run goes on from a checkpoint",
    ),
    DeepSpeedFault(
        "clips_as_saved",
        "gradients are clipped as the run that saved the checkpoint did, whatever gradient_clipping says",
        "set engine.optimizer.clip_grad behind load_checkpoint()",
        lambda c: c.stage in (1, 2),
        "a run goes on from a checkpoint with another gradient_clipping",
    ),
    DeepSpeedFault(
        "states_of_others",
        "a checkpoint gives the optimizer's states to other parameters",
        "load it with the round_robin_gradients that saved it, or with load_optimizer_states=False",
        lambda c: c.stage in (1, 2),
        "a run goes on from a checkpoint of another zero_optimization.round_robin_gradients",
    ),
    DeepSpeedFault(
        "universal_in_turns",
        "a universal checkpoint has the weights and the optimizer's states of other parameters",
        "leave round_robin_gradients out of the run that saves what is converted",
        lambda c: c.stage in (1, 2) and c.on("zero_optimization.round_robin_gradients"),
        "a checkpoint is converted to a universal one",
    ),
    DeepSpeedFault(
        "universal_empty_partition",
        "the load raises an IndexError on a rank, and the others wait for it",
        "put the parameters of a group of few elements into another group",
        lambda c: c.stage in (1, 2) and c.on("checkpoint.load_universal"),
        "a parameter group has hardly more elements than there are ranks",
    ),
    DeepSpeedFault(
        "universal_off_the_cpu",
        "a universal checkpoint is loaded, and the optimizer of torch's raises in its first step",
        "load it with offload_optimizer, or set the optimizer's step to a tensor",
        lambda c: c.stage != 0 and c.on("checkpoint.load_universal") and not c.offloads,
        "the run that saved it had offload_optimizer, and this one has an optimizer of torch's",
    ),
    DeepSpeedFault(
        "universal_of_others",
        "the weights, or a group's learning rate and weight decay, are given to others, and nothing raises",
        "load it into the model, the shapes and the parameter groups that saved it",
        lambda c: c.stage != 0 and c.on("checkpoint.load_universal"),
        "the universal checkpoint is of another model, or of other parameter groups",
    ),
    DeepSpeedFault(
        "universal_of_stages",
        "a universal checkpoint has one stage's weights and moments for what each stage has of its own",
        "load the checkpoint itself, with as many stages and columns",
        lambda c: c.stage == 1 and c.on("checkpoint.load_universal"),
        "the model is a PipelineModule with a tied layer that has more than its stages share",
    ),
    DeepSpeedFault(
        "settings_of_stages",
        "a universal checkpoint gives every stage the settings of the first stage's parameter groups",
        "load the checkpoint itself, with as many stages and columns",
        lambda c: c.stage == 1 and c.on("checkpoint.load_universal"),
        "the model is a PipelineModule whose stages have groups with other learning rates or weight decays",
    ),
    DeepSpeedFault(
        "first_dtype_for_all",
        "gradients are rounded to the dtype of the optimizer's first parameter, and none that is not finite is found",
        "give the optimizer the trained parameters alone, or convert the model to one dtype",
        lambda c: c.fp32 and c.stage == 2,
        "the optimizer's first parameter, frozen or not, is in bf16 or fp16, and trained ones are in fp32",
    ),
    DeepSpeedFault(
        "universal_without_a_file",
        "a parameter stays as the new engine began with it, and nothing raises",
        "look whether each folder below zero/ of the universal checkpoint has a file fp32.pt before it is loaded",
        lambda c: c.stage in (1, 2) and c.on("checkpoint.load_universal"),
        "the universal checkpoint has lost the file of a parameter's weights",
    ),
    DeepSpeedFault(
        "universal_without_buffers",
        "buffers and frozen weights stay those that the new engine began with, and nothing raises",
        "load them into the model before deepspeed.initialize, out of the module in the checkpoint's file of the model",
        lambda c: c.stage != 0 and c.on("checkpoint.load_universal"),
        "the model has buffers that are saved, or frozen weights",
    ),
    DeepSpeedFault(
        "universal_without_layers",
        "a pipeline's buffers and frozen weights stay those that the new engine began with, and nothing raises",
        "load them into the layers before deepspeed.initialize, out of the files layer_*-model_states.pt",
        lambda c: c.stage == 1 and c.on("checkpoint.load_universal"),
        "the model is a PipelineModule with frozen weights or buffers",
    ),
    DeepSpeedFault(
        "path_is_a_pattern",
        "the checkpoint is not found again, or on ZeRO 0 that of a neighbour is loaded (run1 for run[1])",
        "give folders and tags of checkpoints no [ ] * or ? in their names",
        lambda _: True,
        "the folder or the tag of a checkpoint has one of [ ] * ? in its name",
    ),
    DeepSpeedFault(
        "forward_before_the_step",
        "the gradient mixes the activations of the old weights with the new weights",
        "run every forward behind the last step",
        lambda c: c.stage != 0 or not c.fp32,
        "the loop runs the forward of a pass before a step, and its backward behind it",
    ),
    DeepSpeedFault(
        "gradient_read_scaled",
        "a gradient that is read through engine(x) is divided by gradient_accumulation_steps, or reading it raises",
        "read it through engine.module(x)",
        lambda c: True,
        f"{SEVERAL_PASSES}, and the loop calls torch.autograd.grad on what engine(x) has returned",
    ),
    DeepSpeedFault(
        "scheduler_by_batch_size",
        "the scheduler takes the batch size for what it was not given: for a metric, or for the epoch",
        "give step(lr_kwargs=...) what the scheduler's step() takes, and nothing else",
        lambda c: True,
        "the loop gives ReduceLROnPlateau no metric or another scheduler one, or a scheduler raises a TypeError",
    ),
    DeepSpeedFault(
        "weights_written_zero3",
        "safe_set_full_fp32_param and safe_set_full_optimizer_state raise on the last ranks alone, and the others wait",
        "write this rank's part with safe_set_local_fp32_param and safe_set_local_optimizer_state",
        lambda c: c.stage == 3,
        "the loop writes a parameter or a state of a size that the ranks do not divide",
    ),
    DeepSpeedFault(
        "client_state_again",
        "a checkpoint gets the optimizer's states of the one before, or save_checkpoint() raises a KeyError",
        "save your own values alone, and not what load_checkpoint() has returned",
        lambda c: True,
        "a run saves a client state that load_checkpoint() has returned",
    ),
    DeepSpeedFault(
        "divided_twice_zero0",
        "a loss that its caller has divided is divided by gradient_accumulation_steps once more",
        "use ZeRO 1, 2 or 3, or give backward() another tensor than the model has returned: loss * 1",
        lambda c: c.stage == 0,
        f"{SEVERAL_PASSES}, and backward(scale_wrt_gas=False) is given what the model has returned",
    ),
    DeepSpeedFault(
        "checkpoint_mid_window",
        "the gradients of the passes before the save are lost",
        "save after step() at a boundary only",
        lambda c: True,
        "the loop saves between two boundaries",
    ),
    DeepSpeedFault(
        "latest_before_all_files",
        "`latest` names a checkpoint that is not complete, so that the run can't be resumed",
        "keep the checkpoint before, and write its tag into `latest` by hand",
        lambda c: c.stage > 0,
        "the run is killed while it saves",
    ),
    DeepSpeedFault(
        "set_train_batch_size",
        "the next step is made of the wrong number of passes",
        "build a new engine in place of it",
        lambda c: True,
        "the loop calls set_train_batch_size()",
    ),
    DeepSpeedFault(
        "round_robin_fp32_param",
        "it returns the values of another parameter; training is right",
        "leave round_robin_gradients out",
        lambda c: c.stage in (1, 2) and c.on("zero_optimization.round_robin_gradients"),
        "the loop calls safe_get_full_fp32_param()",
        kept_from=False,
    ),
    DeepSpeedFault(
        "states_behind_a_load",
        "it raises on the rank that has the state, and other ranks wait; training is right",
        "use stage 3, or read the states before the load",
        lambda c: c.stage in (1, 2),
        "the loop calls safe_get_full_optimizer_state() behind load_checkpoint()",
    ),
    DeepSpeedFault(
        "states_of_later_groups",
        "it raises for the parameters of all groups but the first, and other ranks wait; training is right",
        "give the optimizer one group, or use stage 3",
        lambda c: c.stage == 2 or (c.stage == 1 and (c.offloads or not c.sums_in_fp32)),
        "the optimizer has several groups, and the loop calls safe_get_full_optimizer_state()",
    ),
    DeepSpeedFault(
        "fetched_by_all_reduce",
        "what lies in a weight's padding, which nobody has written, is added to the next weight",
        "leave stage3_use_all_reduce_for_fetch_params out",
        lambda c: c.stage == 3 and (c.on(FETCHED.key) or c.on(FETCHED.other_key)),
        "the ranks do not divide the size of a weight",
    ),
    DeepSpeedFault(
        "lion_moves_unused_weights",
        "weights whose gradient has always been 0 (embedding rows of unseen tokens) move in every step",
        "use AdamW, or Lion without CPU offload",
        lambda c: c.optimizer == "lion" and c.offloads,
        kept_from=False,
    ),
    DeepSpeedFault(
        "l2_adam_on_cpu",
        "weight decay is decoupled, as AdamW's is, though adam_w_mode is false",
        "use DeepSpeed 0.19.6 or newer, or set torch_adam to true in the optimizer's params",
        # "auto" is neither: it is filled in later.
        lambda c: c.optimizer == "adam" and not c.offloads and c.off("optimizer.params.adam_w_mode"),
        "ranks run on CPUs, the optimizer's weight_decay is not 0, and it is not torch's (torch_adam)",
    ),
    DeepSpeedFault(
        "several_passes",
        'the first step raises "Output 0 of SplitBackward0 is a view and is being modified inplace"',
        "use DeepSpeed 0.19.8, or ZeRO 3",
        lambda c: c.stage == 2 or (c.stage == 1 and not c.sums_in_fp32),
        between=("0.18.6", "0.18.10"),
        raises=True,
    ),
    DeepSpeedFault(
        "DeepSpeed #7967",
        "accumulated gradients are wrong with CPU offload",
        "use DeepSpeed 0.19.8, or leave CPU offload out",
        lambda c: c.offloads and c.stage in (1, 2),
        SEVERAL_PASSES,
        script="several_passes",
        between=("0.16", "0.18.9"),
    ),
    DeepSpeedFault(
        "DeepSpeed #7985",
        "the last micro-batch of a step is not reduced between ranks",
        "use DeepSpeed 0.19.8, or accumulate in bf16",
        lambda c: c.stage == 1 and c.sums_in_fp32,
        script="several_passes",
        between=("0.18.6", "0.18.10"),
    ),
    DeepSpeedFault(
        "DeepSpeed #7839",
        "bf16 is stepped by fp16's optimizer: updates are divided by a loss scale that no loss was multiplied by (from "
        "0.18.4 on), or contain the gradients of the steps before (0.17.6)",
        # From 0.18.6 to 0.18.10 fp32 accumulation on ZeRO 1 has another fault (#7985).
        "use DeepSpeed 0.19.0 or newer, or ZeRO 1 without fp32 accumulation",
        lambda c: (c.bf16 and c.stage == 0) or (c.stage == 1 and c.sums_in_fp32),
        script="several_passes",
        between=("0.17.6", "0.18.5"),
    ),
    DeepSpeedFault(
        "DeepSpeed #7718",
        "the gradient that ZeRO 2 accumulates is wrong",
        "use DeepSpeed 0.18.4, 0.19.0 or newer, or ZeRO 1 or 3",
        lambda c: c.stage == 2,
        SEVERAL_PASSES,
        script="several_passes",
        between=("0.17.6", "0.17.6"),
    ),
)
"""All that are known; their order is that of tools/deepspeed_faults/README.md."""
