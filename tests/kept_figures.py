"""Figures of tools/migrations/ that are kept beside its loops, and how close a new run must come to them."""

import json

import pytest

from tools.migrations.measure import HERE


def kept(name):
    return json.loads((HERE / name / "found.json").read_text())


def same(measured, told):
    """Whether two values are the same but for what another machine rounds otherwise."""
    if isinstance(told, dict):
        return measured.keys() == told.keys() and all(same(measured[key], told[key]) for key in told)
    if isinstance(told, list):
        return len(measured) == len(told) and all(map(same, measured, told))
    if isinstance(told, float):
        return measured == pytest.approx(told, rel=1e-3, abs=1e-4)
    return measured == told
