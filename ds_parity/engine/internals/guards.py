"""What DeepSpeed must still be for this room to be right: checked by name, each with a sentence.

`surface.py` lists every name that is used. Here stands, first, that each of them is still there, and second, what the
code around the most private of them must still do. Texts were read in DeepSpeed 0.19.8. A guard that fails says what
DeepSpeed changed and which file relies on it; that file has to be read against the new DeepSpeed before the version is
supported.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from ds_parity.config.releases import release
from ds_parity.engine.internals import older_surface, surface
from ds_parity.engine.internals.installed import before

_HERE = Path(__file__).parent
_SURFACES = (surface.__name__, older_surface.__name__)
RUNTIME = "deepspeed.runtime."
ENGINE = RUNTIME + "engine:DeepSpeedEngine"
ZERO12 = RUNTIME + "zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO3 = RUNTIME + "zero.stage3:DeepSpeedZeroOptimizer_Stage3"
PIPELINE = RUNTIME + "pipe.engine:PipelineEngine"
BF16 = RUNTIME + "bf16_optimizer:BF16_Optimizer"
FP16 = RUNTIME + "fp16.fused_optimizer:FP16_Optimizer"
UNFUSED = RUNTIME + "fp16.unfused_optimizer:FP16_UnfusedOptimizer"
INIT = RUNTIME + "zero.partition_parameters:Init"
GATHERED = RUNTIME + "zero.partition_parameters:GatheredParameters"
TIMER = "deepspeed.utils.timer:ThroughputTimer"

# The classes that a protocol stands for.
CLASSES = {
    "Engine": (ENGINE,),
    "ZeroOptimizer": (ZERO12, ZERO3),
    "Zero12Optimizer": (ZERO12,),
    "LinkedOptimizer": (ZERO12, BF16),
    "Zero3Optimizer": (ZERO3,),
    "Bf16Optimizer": (BF16,),
    "LowPrecisionOptimizer": (FP16, UNFUSED),
    "Zero3Parameter": (),  # torch's parameters, to which zero.Init adds what guard_list.py checks
    "Zero12Parameter": (),  # likewise, by deepspeed/utils/tensor_fragment.py
    "AdamOptimizer": ("deepspeed.ops.adam.fused_adam:FusedAdam",),
    "LossScaleConfig": (RUNTIME + "fp16.loss_scaler:LossScaleConfig",),
    "ThroughputTimer": (TIMER,),
    "EngineTimers": (RUNTIME + "engine:EngineTimers",),
    "WallClockTimer": ("deepspeed.utils.timer:SynchronizedWallClockTimer",),
    "ExpertLayer": ("deepspeed.moe.sharded_moe:MOELayer",),
    "Monitor": ("deepspeed.monitor.monitor:MonitorMaster",),
    "CheckpointEngine": (RUNTIME + "checkpoint_engine.checkpoint_engine:CheckpointEngine",),
    "GradScaler": ("torch.amp.grad_scaler:GradScaler",),
    "OlderEngine": (ENGINE,),
    "OlderZero12": (ZERO12,),
    "OlderZero3": (ZERO3,),
    "Offload": (RUNTIME + "zero.parameter_offload:DeepSpeedZeRoOffload",),
    "Coordinator": (RUNTIME + "zero.partitioned_param_coordinator:PartitionedParameterCoordinator",),
    "OlderBf16": (BF16,),
    "OlderHalf": (FP16, UNFUSED),
    "Grid": (RUNTIME + "pipe.topology:PipelineParallelGrid",),
    "Pipeline": (PIPELINE,),
    "Stages": (RUNTIME + "pipe.module:PipelineModule",),
    "TiedSpec": (RUNTIME + "pipe.module:TiedLayerSpec",),
    "Swapper": (
        RUNTIME + "swap_tensor.partitioned_optimizer_swapper:PartitionedOptimizerSwapper",
        RUNTIME + "swap_tensor.pipelined_optimizer_swapper:PipelinedOptimizerSwapper",
    ),
}

# Names that older releases lack, or protocols whose whole class they lack, with the first release that was read to have
# them. `older.py` and its neighbours supply them, or nothing asks for them there.
SINCE = {
    "torch_autocast_enabled": "0.17.6",
    "get_param_comm_dtype": "0.17.6",
    "clear_backward_seen_flag": "0.18.9",
    "LossScaleConfig": "0.18.9",
    "loss_scale_config": "0.18.9",
    "coalesce_grad_reduction": "0.19.3",
    "_get_param_partition_rank": "0.19.3",
    "finalize_gradient_accumulation_boundary": "0.19.5",
    "_offload_accumulated_param_ids": "0.19.5",
    "_restore_cpu_offload_grad_to_gpu": "0.19.5",
    "_offload_boundary_param_ids": "0.19.5",
    "_offload_grad_partition_at_boundary": "0.19.5",
    "_swap_out_offload_fp32_gradients": "0.19.5",
    "_use_compact_grad_partition_buffer": "0.19.8",
}
# What reading a class raises where only its compiled file is there, or one of another Python: by one rank perhaps.
_UNREADABLE = (OSError, SyntaxError)
# Protocols of older_surface.py, with the release from which nothing asks for their names any more.
UNTIL = {
    "OlderEngine": "0.18.5",
    "OlderZero12": "0.19.5",
    "OlderZero3": "0.19.5",
    "Swapper": "0.19.5",
    "Offload": "0.19.3",
    "Coordinator": "0.19.3",
    "OlderBf16": "0.19.0",
    "OlderHalf": "0.18.6",
}
SUPPLIED = ("use_grad_scaling",)


@dataclass(frozen=True, slots=True)
class Guard:
    """Lines that the source of a class or method of DeepSpeed must have, or must not have.

    Attributes:
        owner: `module:Class` of DeepSpeed, or `module:` for the whole module.
        method: of that class; empty for the whole class or module.
        used_in: the file of ds_parity that relies on it, below ds_parity/engine.
        says: what it relies on, as a sentence.
        lines: texts that must be there, in this order.
        first: texts whose first occurrences must be in this order.
        all_of: a pattern, and all that it must match, in this order.
        absent: texts that must not be there.
        once: texts that must be there exactly once.
        signature: the parameters that the method must have; not checked where it is None.
        since: the first release that was read to have it; for older ones `older.py` does it, or does without.
    """

    owner: str
    method: str
    used_in: str
    says: str
    lines: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    all_of: tuple[str, tuple[str, ...]] | None = None
    absent: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    signature: tuple[str, ...] | None = None
    since: str = ""

    @property
    def name(self) -> str:
        """The class and method, for people."""
        return ".".join(filter(None, (self.owner.rpartition(":")[2] or self.owner.rstrip(":"), self.method)))

    def changed(self) -> str | None:
        """Return what DeepSpeed changed, as a sentence; None where the guard holds, or this DeepSpeed is older."""
        if self.since and before(release(self.since)):
            return None
        try:
            text = source(self.owner, self.method)
        except (ImportError, AttributeError) as error:
            return self._sentence(f"is gone ({error})")
        except _UNREADABLE as error:
            return self._sentence(f"can't be read ({error})")
        change = next(chain(self._out_of_order(text), self._unlike(text)), None)
        return None if change is None else self._sentence(f"has changed: {change}")

    def _out_of_order(self, text: str) -> Iterator[str]:
        at = -1
        for line in self.lines:
            at, before = text.find(line, at + 1), at
            if at < 0:
                yield f"{line!r} {'comes earlier now' if line in text and before >= 0 else 'is gone'}"
                return
        places = [text.find(line) for line in self.first]
        if -1 in places or places != sorted(places):
            yield f"{', '.join(map(repr, self.first))} no longer come first in this order"

    def _unlike(self, text: str) -> Iterator[str]:
        yield from (f"{line!r} is new" for line in self.absent if line in text)
        yield from (f"{line!r} is there {text.count(line)} times" for line in self.once if text.count(line) != 1)
        if self.all_of is not None and (matches := tuple(re.findall(self.all_of[0], text))) != self.all_of[1]:
            yield f"{self.all_of[0]!r} matches {', '.join(matches) or 'nothing'}"
        if self.signature is not None and self.signature != (taken := _parameters(text)):
            yield f"it takes {', '.join(taken)}"

    def _sentence(self, what: str) -> str:
        return f"{self.name} {what}. ds_parity/engine/{self.used_in} relies on it: {self.says}. Read it again there"


def source(owner: str, method: str = "") -> str:
    """Return the text of a method, class or module of DeepSpeed; decorators that hide it are looked through.

    Raises:
        ImportError: there is no such module.
        AttributeError: there is no such class or method.
    """
    kind = _owner(owner)
    if not method:
        return _text(kind)
    for base in (base for base in kind.__mro__ if base.__module__.startswith("deepspeed")):
        if method in (methods := _methods(base)):
            return methods[method]
    raise AttributeError(f"{owner} has no {method}")


def missing() -> Iterator[Missing]:
    """Yield every name of `surface.py` that DeepSpeed no longer has."""
    for protocol, name in touched_names():
        if protocol in UNTIL and (name in SINCE or name in SUPPLIED or not before(release(UNTIL[protocol]))):
            continue
        since = SINCE.get(name) or SINCE.get(protocol)
        if since is not None and before(release(since)):
            continue
        yield from (Missing(owner, name, why) for owner in CLASSES[protocol] if (why := _lack(owner, name)))


@dataclass(frozen=True, slots=True)
class Missing:
    """A name of `surface.py` that a class of DeepSpeed does not have.

    Attributes:
        owner: `module:Class` of DeepSpeed.
        name: of the attribute.
        why: what is the matter with it.
    """

    owner: str
    name: str
    why: str

    def __str__(self) -> str:
        name = f"{self.owner.rpartition(':')[2]}.{self.name}"
        files = self.used_in or "surface.py"
        return f"{name} {self.why}. {files} in ds_parity/engine uses it. Read it again there"

    @property
    def used_in(self) -> str:
        """The files that use it, below ds_parity/engine."""
        return ", ".join(users(self.name))


def touched_names() -> Iterator[tuple[str, str]]:
    """Yield each protocol of `surface.py` with each name that it declares itself."""
    protocols = [*vars(surface).items(), *vars(older_surface).items()]
    for protocol, kind in dict(protocols).items():
        if not getattr(kind, "_is_protocol", False) or kind.__module__ not in _SURFACES:
            continue
        declared = vars(kind)
        names = {
            *declared.get("__annotations__", {}),
            *(name for name in declared if inspect.isfunction(declared[name])),
        }
        own = (name for name in names if not (name.startswith("__") or name in ("_no_init_or_replace_init",)))
        yield from ((protocol, name) for name in sorted(own))


@cache
def users(name: str) -> tuple[str, ...]:
    """Return the files below ds_parity/engine that use a name of DeepSpeed's as an attribute, or in a string."""
    engine = _HERE.parent
    return tuple(
        str(path.relative_to(engine))
        for path in sorted(engine.rglob("*.py"))
        if path.name not in ("surface.py", "older_surface.py", "guards.py", "guard_list.py") and name in _names(path)
    )


# A file is walked once, and not for every name.
@cache
def _names(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    found = (text for node in nodes for text in (getattr(node, "attr", None), getattr(node, "value", None)))
    return frozenset(text for text in found if isinstance(text, str))


# Classes of 4,000 lines are read once, and not for every name.
@cache
def _text(kind: Any) -> str:
    return textwrap.dedent(inspect.getsource(kind))


@cache
def _methods(kind: Any) -> dict[str, str]:
    text = _text(kind)
    lines = text.splitlines(keepends=True)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    # The walk goes by depth, so of two functions of one name the method comes first; it is the one that counts.
    return {node.name: _segment(lines, node) for node in reversed(functions)}


def _segment(lines: list[str], node: ast.FunctionDef) -> str:
    # ast.get_source_segment splits the whole text anew for every node.
    first = lines[node.lineno - 1][node.col_offset :]
    return "".join([first, *lines[node.lineno : node.end_lineno]]).rstrip("\n")


def _owner(owner: str) -> Any:
    module, _, kind = owner.partition(":")
    imported = import_module(module)
    return getattr(imported, kind) if kind else imported


def _parameters(text: str) -> tuple[str, ...]:
    # Read from the text, because decorators hide the signature.
    (function,) = (node for node in ast.parse(textwrap.dedent(text)).body if isinstance(node, ast.FunctionDef))
    return tuple(argument.arg for argument in (*function.args.posonlyargs, *function.args.args))


def _lack(owner: str, name: str) -> str | None:
    try:
        return None if _has(owner, name) else "is gone"
    except _UNREADABLE as error:
        return f"can't be read ({error})"


def _has(owner: str, name: str) -> bool:
    """Whether a class has an attribute, or one of its bases gives its objects one."""
    try:
        kind = _owner(owner)
    except (ImportError, AttributeError):  # the whole class is gone
        return False
    if hasattr(kind, name):
        return True
    # Double underscores are mangled, so the source has the short name.
    short = name.removeprefix(f"_{kind.__name__}") if name.startswith(f"_{kind.__name__}__") else name
    bases = (base for base in kind.__mro__ if base.__module__.startswith(("deepspeed", "torch.amp")))
    texts = (_text(base) for base in bases)
    return any(f"self.{short} = " in text or f"self.{short}: " in text or f"self.{short}," in text for text in texts)
