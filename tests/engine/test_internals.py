"""What ds_parity/engine/internals relies on inside DeepSpeed.

Each guard that fails says what changed, and which file relies on it.
"""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from ds_parity.engine.internals import guards
from ds_parity.engine.internals.guard_list import GUARDS, changed
from ds_parity.engine.internals.guards import CLASSES, ZERO3, Guard, missing, touched_names, users

ENGINE_FILES = guards.Path(guards.__file__).parents[1]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.name} for {guard.used_in}")
def test_deepspeed_still_does_what_is_relied_on(guard):
    said = guard.changed()
    assert said is None, said


def test_deepspeed_still_has_every_name_that_is_used():
    gone = list(missing())
    assert not gone, "; ".join(map(str, gone))


def test_every_name_of_the_surface_is_used():
    unused = [
        f"{protocol}.{name}"
        for protocol, name in touched_names()
        if not any(protocol == "Engine" or file.startswith("internals/") for file in users(name))
    ]
    assert not unused, f"these names of surface.py are used nowhere, remove them: {unused}"


def test_every_guard_names_files_that_exist():
    named = {Path(guard.used_in.partition(" and ")[0]) for guard in GUARDS}
    named |= {Path("internals") / guard.used_in.partition(" and ")[2] for guard in GUARDS if " and " in guard.used_in}
    absent = [str(file) for file in named if not (ENGINE_FILES / file).is_file()]
    assert not absent, f"guards name files that are not there: {absent}"


def test_every_protocol_stands_for_classes_of_deepspeed():
    protocols = {protocol for protocol, _ in touched_names()}
    assert protocols == set(CLASSES), "enter each protocol of surface.py in guards.CLASSES"


# What the room uses beside DeepSpeed: of torch, of Python, of DeepSpeed's documented accelerator, and of ds_parity.
OTHERS = {
    *(
        "_C",
        "__wrapped__",
        "_will_engine_execute_node",
        "autograd",
        "clear_autocast_cache",
        "enable_grad",
        "encode",
        *("get_data_parallel_group", "get_model_parallel_world_size"),  # of an mpu that a caller makes
        "off",
        "enter_context",
        "expand_as",
        "grad_fn",
        "graph",
        "increment_version",
        "is_compiling",
        "is_dataclass",
        "is_inference",
        "tree_leaves",
        "next_functions",
        "register_hook",
    ),
    "data_ptr",
    *("allclose", "difference", "from_iterable", "intersection", "replace"),
    *("is_floating_point", "read_text", "strip"),
    *("Process", "create_time", "exists", "resolve", "st_mtime_ns", "stat"),  # of files and their age
    *("TemporaryFile", "fileno", "fstat", "st_mtime", "time"),  # and by which clock it goes
    *("are_of_another_stage", "have_replaced"),  # of what a save has written
    *("renamed", "saves"),  # of our own Files
    *(
        "Size",
        "is_initialized",
        "endswith",
        "fullmatch",
        "glob",
        "rglob",
        "relative_to",
        "as_posix",
        "new_empty",
        "Generator",
        "manual_seed",
        "rand",
        "named_buffers",
        "missing_keys",
        "unexpected_keys",
        "is_file",
        "promote_types",
        "is_dir",
        "iterdir",
        "parent",
        "startswith",
        "isdigit",
        "isnan",
        "partition",
        "state_dict",
        "stem",
        *("suffix", "with_name"),
        *("arange", "round", "scatter_", "sign"),
        *("ChainedScheduler", "_schedulers"),
        "item",
        *("_schema", "alias_info", "arguments", "is_write", "untyped_storage"),  # of a function of torch's
        "places",  # of our own _Writes
    ),
    # Of a pipeline's module: guards name the last two.
    *("ckpt_layer_path", "ckpt_layer_path_list", "get_tied_weights_and_groups"),
    # of DeepSpeed's torch_autocast.py, which a guard holds to
    *("PARAM_COMM_DTYPE_ATTR_NAME", "TORCH_AUTOCAST_DTYPE", "TORCH_AUTOCAST_INITIALIZED", "get_comm_dtype"),
    *("ds_pipe_replicated", "forward_funcs"),  # of a pipeline's parameters and module: guards name them
    *("float32", "functional", "pad", "pop", "popitem", "compiler", "disable", "Muon", "optim"),
    *("contiguous", "dim", "is_contiguous", "layout", "shape", "stride", "strided"),
    *("Adagrad", "any", "cat", "defaults", "equal", "no_grad", "signature", "type", "uint8"),
    *("__delattr__", "__setattr__", "dense_gradients", "differ", "forget", "note"),
    *("_adapter", "_known", "clears_all"),  # newcomers of an engine
    *("changed", "holds_the_same", "prod"),  # of what a group said
    *("after_backward", "gradients_in"),  # of a loop that trains nothing
    *("generic", "ndarray", "register_forward_pre_hook"),  # of numpy, and of a module
    *("VAR_KEYWORD", "VAR_POSITIONAL", "bind", "default", "empty", "kind"),  # of a signature
    *("GatheredParameters", "Module", "Parameter", "all", "bfloat16", "cpu", "detach", "dtype", "flatten", "float"),
    *("float16", "inf", "linalg", "logical_not", "master", "new_zeros", "vector_norm", "where", "zero"),
    *(
        "_version",
        "add_param_group",
        "cached_property",
        "count_nonzero",
        "engine",
        "floor",
        "getLogger",
        "gradients_seen",
        "holds_gradients",
    ),
    *("float64", "get_total_norm", "guard", "isfinite", "nn", "on_accelerator", "prepare", "to", "utils", "warning"),
    *(
        "bit_length",
        "crc32",
        "to_bytes",
        "wraps",
        "current_device_name",
        "bit_count",
        "begin_window",
        "named_parameters",
        "WeakMethod",
        "modules",
        "partial",
        "takes",
    ),
    *(
        "register_post_accumulate_grad_hook",
        "_ended",
        "_kept",
        "_warned",
        "broken",
        "clears_strays",
        "ref",
        "coalesce",
        "empty_like",
        "is_sparse",
    ),
    *("MAX", "ReduceOp", "as_tensor", "int32", "keeps", "of", "tolist"),
    *("checkpoint", "get_cuda_rng_tracker", "get_states", "non_reentrant_checkpoint"),  # of activations
    *("_hp_grad", "grad_accum"),  # of parameters: guards name them
    *("fill_", "last_batch_iteration"),  # the latter of DeepSpeed's schedulers
    *("left", "rates", "scheduler"),  # of a load without the scheduler's state
    *("dumps", "hexdigest"),  # of what such a state has
    *("_parameters", "abs", "beside", "get_float32_matmul_precision", "has", "max"),  # of a layer before AutoTP
    *("Embedding", "Linear", "__qualname__", "forward", "linear", "weight", "stood"),
    *("array_equal", "bool", "is_complex", "func", "functional_call", "fork_rng", "randn", "random"),
    *("_non_persistent_buffers_set", "buffers", "put_into"),  # the last one of what a state changes
    *("ObjectProxy", "Optimizer", "ProcessGroup", "WORLD", "group", "groups"),
    *("SGD", "Tensor", "VALID_LR_SCHEDULES", "__name__", "clone", "count"),
    *("fromkeys", "full_like", "get", "get_process_group_ranks", "get_rank"),
    *("get_sequence_parallel_world_size", "get_world_size", "grad", "is_integer", "items", "join", "keys"),
    *("last_epoch", "mul_", "narrow", "nominal", "optim", "param_groups", "parameters", "passes", "units"),
    *("register_step_post_hook", "remove", "resolves_data_dependency", "rollouts", "state", "synchronize"),
    *("target", "values", "view", "whole", "zero_", "zeros", "zeros_like"),
    *("compile", "get_tensor_model_parallel_group", "index", "mesh_device", "search"),
    *("WeakSet", "_everybody", "_stepped", "add", "begin", "discard", "end", "explain", "refuse"),
    *("_built", "in_use_beside", "isdisjoint", "union", "unlink", "Match", "use"),
    *("append", "clear", "copy_", "data", "device_name", "numel", "proxy", "setdefault", "view_as", "waits"),
    *("__traceback__", "all_reduce", "clamp", "clip_grads_with_norm_", "co_name", "f_code", "pow", "split", "sqrt"),
    *("full", "stack", "sum", "tb_frame", "tb_next"),
    *("is_grad_enabled", "name", "named_modules", "refuse_unreduced", "register_forward_hook"),
    *("register_step_pre_hook", "SparseAdam", "__module__", "__mro__", "get_default_dtype", "tensor"),
    *("MethodType", "_ending", "keeps_steps", "Module", "SyncBatchNorm", "training", "copy_first_gradient"),
}


NOT_OF_DEEPSPEED = ("surface.py", "older_surface.py", "guards.py", "guard_list.py", "installed.py", "unread.py")


def test_the_surface_lists_all_that_the_room_uses_of_deepspeed():
    """mypy can't see through what a protocol gives as Any."""
    listed = {name for _, name in touched_names()}
    beyond = {
        f"{path.name}: {node.attr}"
        for path in sorted((ENGINE_FILES / "internals").glob("*.py"))
        if path.name not in NOT_OF_DEEPSPEED
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
        and node.attr not in listed | OTHERS
    }
    assert not beyond, f"enter these in surface.py, or in OTHERS where they are not DeepSpeed's: {sorted(beyond)}"


def test_a_name_that_is_gone_is_said_with_the_files_that_use_it(monkeypatch):
    monkeypatch.setattr(guards, "_has", lambda owner, name: name != "_overflow_clean_up")
    said = changed()
    assert said[0].says == (
        "DeepSpeedZeroOptimizer_Stage3._overflow_clean_up is gone. internals/zero3.py in ds_parity/engine uses it. "
        "Read it again there"
    )
    assert len(said) == 1


STEP = Guard(
    ZERO3,
    "step",
    "internals/zero3.py",
    "discard() does the same",
    ("self._pre_step()", "self._partition_all_parameters()"),
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "no_such_step"}, "no_such_step is gone"),
        ({"owner": "deepspeed.runtime.no_such_room:Class"}, "is gone (No module named"),
        ({"lines": ("self._no_such_call()",)}, "'self._no_such_call()' is gone"),
        ({"lines": STEP.lines[1::-1]}, "comes earlier now"),
        ({"absent": STEP.lines[:1]}, "is new"),
        ({"once": ("self",)}, "times"),
        ({"first": ("overflow", "self._pre_step()")}, "no longer come first in this order"),
        ({"first": ("self._no_such_call()",)}, "no longer come first in this order"),
        ({"all_of": (r"self\._pre_\w+", ("self._pre_step", "self._pre_other"))}, "matches self._pre_step"),
        ({"signature": ("self",)}, "it takes self, closure"),
    ],
)
def test_each_kind_of_change_is_seen_and_said_with_the_file_and_the_reason(change, says):
    """Seeded: the guard of ZeRO 3's step holds, and no longer once one of its parts is another."""
    assert STEP.changed() is None
    said = replace(STEP, **change).changed()
    assert says in said
    assert "ds_parity/engine/internals/zero3.py relies on it: discard()" in said


def test_a_text_that_is_there_twice_counts_in_its_order():
    text = Guard(
        guards.ENGINE, "step", "internals/counters.py", "nothing", ("self.tput_timer", "self.micro_steps += 1")
    )
    assert text.changed() is None


# What no text shows.


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_deepspeed_schedulers_take_a_position_and_stand_one_behind(name):
    schedule = getattr(lr_schedules, name)
    relies = f"{name}.step has changed; ds_parity/engine/internals/schedule.py places a schedule by it"
    assert len(inspect.signature(schedule.step).parameters) == 2, relies
    assert "self.last_batch_iteration = " in inspect.getsource(schedule.step), relies


def test_deepspeeds_sequence_parallel_state_stands_for_the_model_parallel_one():
    """Why BF16_Optimizer is refused with it (internals/groups.py); if this fails, it may be right now."""
    assert parallel_state_sp.get_model_parallel_rank is parallel_state_sp.get_sequence_parallel_rank, (
        "parallel_state_sp no longer says that its groups are model-parallel: groups.py refuses BF16_Optimizer for it"
    )
