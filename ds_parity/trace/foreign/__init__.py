"""Traces of other trainers, read as ds_parity's: JSON Lines, CSV, transformers, TensorBoard, Weights & Biases."""

from ds_parity.trace.foreign.field_names import NAMES, parse_maps
from ds_parity.trace.foreign.read import open_pair, read_any, read_pair

__all__ = ["NAMES", "open_pair", "parse_maps", "read_any", "read_pair"]
