"""The extended DeepSpeed configuration: read, checked and rewritten. Imports neither torch nor deepspeed."""

from ds_parity.config.faults import ABSENT
from ds_parity.config.load import load_config
from ds_parity.config.misspelt import misspelt, refuse_misspelt
from ds_parity.config.rewrite import Change, Rewrite, rewrite
from ds_parity.config.settings import MAX_LOOKAHEAD, Settings, parse

__all__ = [
    "ABSENT",
    "MAX_LOOKAHEAD",
    "Change",
    "Rewrite",
    "Settings",
    "load_config",
    "misspelt",
    "parse",
    "refuse_misspelt",
    "rewrite",
]
