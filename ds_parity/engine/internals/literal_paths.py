"""Takes the path of a checkpoint for what it is: DeepSpeed reads it as a pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import zero_to_fp32

from ds_parity.engine.internals.replaced import wrapped


@contextmanager
def literal_paths() -> Iterator[None]:
    """Return a context in which a load finds a checkpoint whose folder or tag has one of `[`, `]`, `*` and `?`.

    DeepSpeed looks for the files of the model by `glob`, with the folder and the tag in the pattern (runtime/engine.py,
    _get_all_ckpt_names, runtime/pipe/module.py, ckpt_layer_path_list, and for weights alone on ZeRO 3 utils/
    zero_to_fp32.py, get_checkpoint_files, 0.19.8). So it doesn't find those of `run[1]`, or finds those of `run1`,
    which on ZeRO 0 are all of a checkpoint (tools/deepspeed_faults/path_is_a_pattern.py).
    """
    with (
        wrapped(DeepSpeedEngine, "_get_all_ckpt_names", _escaping(1, 2)),
        wrapped(PipelineModule, "ckpt_layer_path_list", _escaping(1)),
        wrapped(zero_to_fp32, "get_checkpoint_files", _escaping(0)),
    ):
        yield


def _escaping(*places: int) -> Callable[[Callable[..., list[str]]], Callable[..., list[str]]]:
    """Return what makes of a function one that takes its arguments at these places for no patterns."""

    def made(names: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def found(*given: Any) -> list[str]:
            return names(*(escape(str(one)) if at in places else one for at, one in enumerate(given)))

        return found

    return made
