"""The parameter groups of an optimizer, of which DeepSpeed shows it one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ds_parity.engine.internals.surface import Engine


@contextmanager
def whole_groups(engine: Engine) -> Iterator[None]:
    """Give the optimizer its groups back where a step of it raises: a checkpoint may be loaded behind that.

    ZeRO 1 and 2 leave it with the group that it was stepping, and ZeRO 3 with a part of the parameters of one
    (`_optimizer_step` in stage_1_and_2.py and stage3.py, 0.19.8).
    """
    wrapped = (engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None))
    held = [(one, one.param_groups) for one in wrapped if one is not None]
    params = [[group["params"] for group in groups] for _, groups in held]
    try:
        yield
    except BaseException:
        for (optimizer, groups), of_groups in zip(held, params, strict=True):
            optimizer.param_groups = groups
            for group, of_group in zip(groups, of_groups, strict=True):
                group["params"] = of_group
        raise
