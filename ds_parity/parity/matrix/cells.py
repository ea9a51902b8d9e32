"""A cell: a variant on a ZeRO stage, as the scenarios that are run for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_parity.config import rewrite
from ds_parity.errors import ConfigError
from ds_parity.parity.matrix.needed import lacking
from ds_parity.parity.matrix.variant import Variant
from ds_parity.parity.matrix.variants import VARIANTS
from ds_parity.parity.running.scenario import Scenario

CHECKS = ("probe", "deepspeed-loop", "torch", "deepspeed", "memory")
NOT_PROBED = "it takes SGD and no schedule in every row, and would measure the rows on precision once more"
_TINY = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 64}


@dataclass(frozen=True)
class Cell:
    """One variant on one ZeRO stage."""

    variant: Variant
    stage: int

    @property
    def name(self) -> str:
        """Short, unique, fit for a folder."""
        slug = re.sub(r"[^a-z0-9.]+", "-", f"{self.variant.group} {self.variant.name}".lower()).strip("-")
        return f"{slug}-zero{self.stage}"

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the features of releases that its loop asks for by a call."""
        return self.variant.calls if self.stage in self.variant.calling else ()

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return int(self.variant.fields.get("ranks", 2))

    @property
    def processes(self) -> int:
        """All ranks that run it."""
        return self.ragged.processes

    @cached_property
    def ragged(self) -> Scenario:
        """Windows of uneven passes, weighed by tokens, so that each is corrected at its boundary."""
        wanted: dict[str, Any] = {"shape": "overshoot", "windows": 3, "seed": 3, **_TINY}
        wanted |= {**self.variant.fields, **self.variant.ragged}
        return Scenario(f"{self.name}/ragged", self._config("token"), **wanted)

    @cached_property
    def uniform(self) -> Scenario:
        """Windows that bare DeepSpeed's fixed accumulation can run."""
        wanted: dict[str, Any] = {"shape": "uniform", "windows": 3, "seed": 5, **_TINY, **self.variant.fields}
        return Scenario(f"{self.name}/uniform", self._config("rollout"), **wanted)

    @property
    def probed(self) -> Scenario:
        """The ragged scenario as the probe takes it: only a setup that freezes parameters still matters there."""
        keeps = (self.ragged.setup or "").endswith((":frozen", ":adapters"))
        return replace(self.ragged, name=f"{self.name}/probe", setup=self.ragged.setup if keeps else None)

    @cached_property
    def refusal(self) -> str | None:
        """Why ds_parity refuses the configuration, None where it doesn't (the engine may still)."""
        try:
            rewrite(self.ragged.config, self.ranks)
        except ConfigError as error:
            return str(error)
        return None

    @property
    def not_run(self) -> str | None:
        """Why the cell can't be run here, None where it can."""
        return lacking(self.variant.needs)

    @property
    def left_out(self) -> dict[str, str]:
        """Checks that are not made, and why."""
        same = {"probe": NOT_PROBED} if self.variant.group in ("optimizer", "scheduler") else {}
        return {**same, **self.variant.left_out}

    def checks(self) -> tuple[str, ...]:
        """Return the checks that are made."""
        return tuple(check for check in CHECKS if check not in self.left_out)

    def _config(self, weight: str) -> dict[str, Any]:
        return merged(_base(self.stage, self.variant.passes, weight), self.variant.patch)


def cells(variants: Iterable[Variant] = VARIANTS, *, quick: bool = False) -> tuple[Cell, ...]:
    """Return the cells of the matrix, row by row."""
    return tuple(Cell(v, stage) for v in variants for stage in (v.quick if quick else v.stages))


def merged(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a patch merged in, section by section; None removes a key."""
    result = {**config}
    for key, value in patch.items():
        replaced = key in ("optimizer", "scheduler") or not isinstance(value, Mapping)
        result[key] = value if replaced else merged(result.get(key) or {}, value)
    return {key: value for key, value in result.items() if value is not None}


def _base(stage: int, passes: int, weight: str) -> dict[str, Any]:
    """SGD, which hides no factor as Adam would; clipping that bites; a schedule that moves from the first step."""
    warmup = {"warmup_num_steps": 10, "warmup_min_lr": 0.025, "warmup_max_lr": 0.05, "warmup_type": "linear"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": passes,
        "ds_parity": {"loss_weight": weight},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
