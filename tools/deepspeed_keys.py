"""Print ds_parity/config/known_keys.py: the keys that the installed DeepSpeed reads from its configuration.

    python -m tools.deepspeed_keys > ds_parity/config/known_keys.py

Two sources: the fields of DeepSpeed's pydantic models, and a dict that notes which keys DeepSpeed's parser asks it for.
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel
from torch import optim

Keys = dict[str, set[str]]

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "hybrid_engine": HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
}
"""The sections that DeepSpeed reads by a pydantic model."""


class Noting(dict[str, Any]):
    """A dict that notes which keys it is asked for, under its own path."""

    def __init__(self, path: str, notes: Keys, **values: Any) -> None:
        super().__init__(values)
        self.path, self.notes = path, notes

    def _note(self, key: object) -> None:
        if isinstance(key, str):
            self.notes.setdefault(self.path, set()).add(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Note, then look up."""
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        """Return itself: `key in section.keys()` is asked of it too."""
        return self

    def __copy__(self) -> Noting:
        return self


def asked() -> Keys:
    """Return the keys that DeepSpeed's parser asks for, by the path of the section ("" for the top level)."""
    notes: Keys = {}
    _parse(Noting("", notes, train_batch_size=1), notes)
    done: set[str] = set()
    # A key may be a section: it is given an empty one, and what is then asked of that is noted in turn.
    while waiting := [p for p in _paths(notes) if p not in done]:
        for path in waiting:
            done.add(path)
            _parse(_nested(path.split("."), "", notes), notes)
    return notes


def _paths(notes: Keys) -> Iterator[str]:
    for section, keys in list(notes.items()):
        yield from (f"{section}.{key}".lstrip(".") for key in sorted(keys))


def _nested(path: list[str], above: str, notes: Keys) -> Noting:
    values: dict[str, Any] = {} if above else {"train_batch_size": 1}
    if path:
        values[path[0]] = _nested(path[1:], f"{above}.{path[0]}".lstrip("."), notes)
    return Noting(above, notes, **values)


def _parse(config: Noting, notes: Keys) -> None:
    try:
        DeepSpeedConfig(config)
    except Exception:  # a number where a section was put, or the other way round: what was asked until then is noted
        return


def fields(model: type[BaseModel], path: str) -> Keys:
    """Return the keys of a model and of the models in it, by path."""
    found: Keys = {path: set()}
    for name, field in model.model_fields.items():
        spelt = {name, *filter(None, [field.alias])}
        found[path] |= spelt
        for inner in _models(field.annotation):
            for key in spelt:
                found |= fields(inner, f"{path}.{key}")
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def keys() -> Keys:
    """Return all keys by section."""
    found = asked()
    for path, model in MODELS.items():
        for section, names in fields(model, path).items():
            found.setdefault(section, set()).update(names)
    return found


def optimizers() -> set[str]:
    """Return the types of optimizers: DeepSpeed's own, which it takes in any case, and torch's, as they are written."""
    torchs = {name for name, kind in vars(optim).items() if isinstance(kind, type) and name != "Optimizer"}
    return set(DEEPSPEED_OPTIMIZERS) | torchs


def schedulers() -> set[str]:
    """Return the types of schedulers: DeepSpeed's own and torch's."""
    torchs = (name for name in optim.lr_scheduler.__all__ if name[0].isupper() and name != "LRScheduler")
    return {*VALID_LR_SCHEDULES, *torchs}


# Their keys are passed on to what DeepSpeed's parser does not show, so that a list of them would have gaps.
_OPEN = ("autotuning", "data_efficiency", "pipeline", "compression_training", "elasticity", "tensor_parallel.")

_HEAD = '''"""The keys that DeepSpeed reads from its configuration, as `python -m tools.deepspeed_keys` prints them.

tests/config/test_misspelt.py checks this table against the DeepSpeed that is installed.
"""

from typing import Final
'''


def table() -> Keys:
    """Return the keys of the sections whose keys are all known, and of the top level."""
    found = {path: names for path, names in keys().items() if not path.startswith(_OPEN)}
    # DeepSpeed asks for the parameters only where there is a type.
    found["optimizer"].add("params")
    found["scheduler"].add("params")
    return dict(sorted(found.items()))


def _module() -> str:
    lines = [_HEAD, f'VERSION: Final = "{version("deepspeed")}"', "", "KEYS: Final[dict[str, frozenset[str]]] = {"]
    for path, names in table().items():
        lines += [f'    "{path}": {_set_of(names, " " * 8)}', "    ),"]
    lines += ["}", '"""By the path of the section, "" for the top level."""']
    for name, names, why in (
        (
            "OPTIMIZERS",
            optimizers(),
            "Types of optimizers: DeepSpeed's own in lower case, torch's as they are written.",
        ),
        ("SCHEDULERS", schedulers(), "Types of schedulers, DeepSpeed's own and torch's."),
    ):
        lines += ["", f"{name}: Final = {_set_of(names, ' ' * 4)}", ")", f'"""{why}"""']
    return "\n".join(lines)


def _set_of(names: set[str], indent: str) -> str:
    words = textwrap.wrap(" ".join(sorted(names)), 112 - len(indent), break_on_hyphens=False)
    texts = [f'{indent}"{line} "' for line in words[:-1]] + [f'{indent}"{words[-1]}".split()']
    return "\n".join(["frozenset(", *texts])


if __name__ == "__main__":
    print(_module())
