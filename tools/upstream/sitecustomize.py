"""Reaches every process of DeepSpeed's tests, those that pytest's plugins don't: fork servers and spawned ranks.

Python imports this at its start where the folder is on PYTHONPATH. It imports nothing heavy: `deepspeed.initialize` is
replaced when something imports `deepspeed`.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Replacer(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find `deepspeed` as everyone does, and replace its `initialize` once it is imported."""
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            from replaced import replace_initialize

            replace_initialize(module, os.environ["DS_PARITY_UPSTREAM"])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("DS_PARITY_UPSTREAM", "bare") != "bare":
    sys.meta_path.insert(0, _Replacer())
