"""What DeepSpeed keeps to itself is touched in engine/internals and in three named files of the harness only.

So a new version of DeepSpeed can break only these.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ds_parity.engine.internals.guards import touched_names

PACKAGE = Path(__file__).parents[1] / "ds_parity"

# DeepSpeed documents what its package itself exports; these rooms it moves about as it likes.
PRIVATE_ROOMS = ("runtime", "ops", "utils", "sequence")
_ROOM = re.compile(rf"deepspeed\.(?:{'|'.join(PRIVATE_ROOMS)})(?:\.\w+)*")

# Classes that pass what they have not on to what they stand for; `_self_...` is wrapt's own room of a proxy.
_PROXY = re.compile(r"ObjectProxy|ParityEngine")

# State that has no underscore and is no interface either: nothing documents it, and versions rename it.
STATE = {
    *("loss_scale_config", "cur_scale", "cur_iter", "dynamic_loss_scale", "loss_scaler", "use_grad_scaling"),
    *("custom_loss_scaler", "external_loss_scale", "override_loss_scale", "clip_fp32_gradients", "basic_optimizer"),
    *("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler", "averaged_gradients", "all_grad_tensors"),
    *("fp32_groups_gradients_flat", "fp32_groups_has_gradients", "bit16_groups", "micro_step_id", "micro_steps"),
    *("clear_hp_grads", "clear_lp_grads", "reset_cpu_buffers", "setup_buckets", "get_gradient_for_reduction"),
    *("reduce_ready_partitions_and_remove_grads", "overlapping_partition_gradients_reduce_epilogue"),
    *("gradient_average", "has_moe_layers", "inside_no_sync_ctxt", "tput_timer", "checkpoint_engine", "is_decoupled"),
    *("allreduce_gradients", "finalize_gradient_accumulation_boundary", "norm_for_param_grads", "params_in_partition"),
    *("accumulated_grads_in_cpu", "single_partition_of_fp32_groups", "grad_position"),
    *("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"),
}
STATE |= {name for protocol, name in touched_names() if protocol.endswith("Optimizer")}
# Names that mean something else elsewhere too: a JSON key, torch's and the harness's own.
STATE -= {"zero_grad", "loss_scale", "offload_optimizer", "overflow", "communication_data_type"}

# Whole files and rooms that may, each with what it is for.
ALLOWED = {
    "engine/internals/": "the room of the engine that is there for it",
    "all_weights.py": "master weights, by safe_get_full_fp32_param; the harness needs it where the engine can't run",
    "parity/running/half_precision.py": "clears what a torch_autocast engine leaves in its process",
    "parity/subjects/references/private_state.py": "all that the references and the controls touch",
    "parity/subjects/ulysses.py": "DeepSpeed's own sequence parallelism, which a user imports from the same places",
}
# Single names elsewhere, each with why it is not DeepSpeed's private state.
EXCUSED = {
    ("engine/initialize.py", "_self_driver"): "the proxy's own driver",
    ("parity/doctor/measured.py", "overlap_comm"): "the key of a configuration, in the name of a place",
    ("engine/ranks/hostsum.py", "_get_default_store"): "torch's, which has no public name for the store of all ranks",
    ("engine/ranks/limits.py", "_get_backend"): "torch's: ProcessGroup.set_timeout limits groups of one backend alone",
    ("engine/ranks/limits.py", "_timeout"): "torch's, whose time-out of a group can be set and not read otherwise",
    ("engine/ranks/limits.py", "_set_default_timeout"): "torch's, as distributed_c10d._set_pg_timeout calls it",
    (
        "engine/trainers.py",
        "_entropy_bonus_enabled",
    ): "TRL's, which has no public name for whether its loss has a bonus",
    ("engine/trainers.py", "_loss_shifts_labels"): "transformers', by which its Trainer itself counts labels",
    ("engine/stand_ins.py", "_fields"): "the interface of Python's namedtuples, which begins with an underscore",
    ("engine/stand_ins.py", "_replace"): "the interface of Python's namedtuples, which begins with an underscore",
    ("engine/unloadable.py", "load_state_dict"): "torch's, of a model",
    ("parity/matrix/precision_rows.py", "immediate_grad_update"): "the key of a configuration",
    ("parity/subjects/references/torch_counterparts.py", "adam_w_mode"): "the key of a configuration",
    ("parity/matrix/setups.py", "deepspeed.ops.adam"): "where DeepSpeed's documentation imports DeepSpeedCPUAdam from",
    ("parity/matrix/needed.py", "deepspeed.ops.op_builder"): "where DeepSpeed's own ds_report asks for its operators",
    ("parity/running/memory.py", "_cdata"): "torch's, as its own torch.multiprocessing.reductions tells storages apart",
    ("parity/running/worker.py", "_exit"): "os._exit is Python's own",
    ("parity/doctor/inquiry.py", "_exit"): "os._exit is Python's own",
    ("parity/running/left_behind.py", "_exit"): "os._exit is Python's own",
    ("parity/subjects/candidate.py", "_self_driver"): "ds_parity's own engine, not DeepSpeed's",
    (
        "parity/running/memory.py",
        "allreduce_gradients",
    ): "a public method of the engine, watched as forward and backward are",
}


def touched(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each use of DeepSpeed's private rooms, or of somebody else's private attribute."""
    tree = ast.parse(text)
    own = set(_defined(tree))
    behind_proxies = _by_proxies(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in _imported(node) if _ROOM.fullmatch(name))
        elif isinstance(node, ast.Attribute):
            whole = _ROOM.fullmatch(_dotted(node))
            if whole or node.attr in STATE or _is_foreign(node, own) or node in behind_proxies:
                yield node.lineno, whole[0] if whole else node.attr
        elif isinstance(node, ast.Constant) and _names_it(node.value):
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and re.match(r"_(?!_)", str(name.value)):
                yield node.lineno, str(name.value)


def _dotted(node: ast.AST) -> str:
    """Return a name with its attributes as it is written, and nothing of what is computed: unparsing takes long."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module == "deepspeed":
        return [f"deepspeed.{alias.name}" for alias in node.names]
    return [node.module or ""]


def _is_foreign(node: ast.Attribute, own: set[str]) -> bool:
    private = node.attr.startswith("_") and not node.attr.startswith("__")
    return private and not _by_itself(node) and node.attr not in own


def _by_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _names_it(value: object) -> bool:
    # As import_module takes a name.
    return isinstance(value, str) and (value in STATE or _ROOM.fullmatch(value) is not None)


def _by_proxies(tree: ast.AST) -> set[ast.AST]:
    """Return the private attributes that a proxy reads of itself, which are those of what it stands for."""
    reads: set[ast.AST] = set()
    inherited = _methods_of_proxies()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and any(_PROXY.search(ast.unparse(base)) for base in kind.bases):
            own = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} | inherited
            reads |= {
                node
                for node in ast.walk(kind)
                if isinstance(node, ast.Attribute)
                and _by_itself(node)
                and re.match(r"_(?!_|self_)", node.attr)
                and node.attr not in own
            }
    return reads


@cache
def _methods_of_proxies() -> frozenset[str]:
    proxy = ast.parse((PACKAGE / "engine" / "engine.py").read_text())
    return frozenset(node.name for node in ast.walk(proxy) if isinstance(node, ast.FunctionDef))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines itself: its functions, classes, variables, and attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _by_itself(node):
            yield node.attr


@cache
def package() -> dict[str, list[tuple[int, str]]]:
    """What each file of the package touches."""
    return {str(path.relative_to(PACKAGE)): list(touched(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))}


def test_only_the_named_files_touch_what_deepspeed_keeps_to_itself():
    beyond = [
        f"{file}:{line}: {name}"
        for file, uses in package().items()
        for line, name in uses
        if not file.startswith(tuple(ALLOWED)) and (file, name) not in EXCUSED
    ]
    assert not beyond, f"move this into one of {', '.join(ALLOWED)}: {beyond}"


def test_every_permission_is_still_used():
    used = package()
    assert [one for one in ALLOWED if not any(used[file] for file in used if file.startswith(one))] == []
    assert [one for one in EXCUSED if one[1] not in [name for _, name in used.get(one[0], [])]] == []


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("from deepspeed.runtime.engine import DeepSpeedEngine", "deepspeed.runtime.engine"),
        ("from deepspeed import runtime", "deepspeed.runtime"),
        ("def f():\n    import deepspeed.utils.groups", "deepspeed.utils.groups"),
        ("import deepspeed\nx = deepspeed.ops.adam", "deepspeed.ops.adam"),
        (
            "from importlib import import_module\nx = import_module('deepspeed.sequence.layer')",
            "deepspeed.sequence.layer",
        ),
        ("def f(engine):\n    return engine._global_grad_norm", "_global_grad_norm"),
        ("def f(engine):\n    engine.optimizer.external_loss_scale = 1", "external_loss_scale"),
        ("def f(optimizer):\n    return getattr(optimizer, 'averaged_gradients', None)", "averaged_gradients"),
        ("def f(engine):\n    return getattr(engine, '_step_applied')", "_step_applied"),
        ("class A(wrapt.ObjectProxy):\n    def f(self):\n        return self._global_grad_norm", "_global_grad_norm"),
        ("class A(ParityEngine):\n    def f(self):\n        self._running = 1", "_running"),
        ("def f(engine):\n    _x = 1\n    return engine.optimizer._x", "_x"),
        ("def f(engine):\n    return engine.optimizer.reduction_stream, engine.optimizer.fp16_groups", "fp16_groups"),
    ],
)
def test_what_is_planted_is_found_by_its_name(planted, name):
    assert name in [found for _, found in touched(planted)]


@pytest.mark.parametrize(
    "planted",
    [
        "import deepspeed\nx = deepspeed.initialize, deepspeed.DeepSpeedEngine, deepspeed.zero.GatheredParameters",
        "from deepspeed.accelerator import get_accelerator",
        "class A:\n    def f(self):\n        self._x = 1\n    def g(self, other):\n        return other._x == self._y",
        "def f(engine):\n    return engine.__class__, engine.optimizer.param_groups",
        "x = 'read in deepspeed.runtime.engine, 0.19.8'",
        "class A(wrapt.ObjectProxy):\n    def f(self):\n        return self._self_x, self._g()\n    def _g(self): ...",
    ],
)
def test_what_is_public_or_the_files_own_is_not_found(planted):
    assert list(touched(planted)) == []
