"""References, controls and the oracle share nothing with the engine under test but data types.

What both sides computed by one piece of code could be wrong on both sides alike, and no comparison would show it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUBJECTS = "ds_parity.parity.subjects"
JUDGES = (f"{SUBJECTS}.references", f"{SUBJECTS}.controls", f"{SUBJECTS}.oracle")

# Data types and what makes data: settings, values, rollouts, micro-batches, traces, the losses that users call.
DATA = ("config", "values", "planning", "trace", "collation", "losses", "token_losses", "errors")
# What starts ranks and hands a scenario to any subject; and sequence parallelism, DeepSpeed's own on both sides.
HARNESS = ("parity.running", "parity.data", "parity.subjects.ulysses")
ALLOWED = (*JUDGES, *(f"ds_parity.{room}" for room in (*DATA, *HARNESS)))
# Packages that hold a docstring alone. The root is not among them: its names lead to the engine.
EMPTY = ("ds_parity.parity", SUBJECTS)

# A function by its name, as `resolve` imports it.
NAMED = re.compile(r"(ds_parity(?:\.\w+)+):[\w.]+")


def modules():
    """Every module of the package by its name, as text."""
    found = {}
    for path in sorted((ROOT / "ds_parity").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported(text: str, known: dict[str, str]) -> Iterator[str]:
    """Yield the package's modules that a module imports anywhere in it, or names in a string as `resolve` takes it."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module or "" for name in full]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [match[1] for match in NAMED.finditer(node.value)]
        yield from (name for name in names if name.partition(".")[0] == "ds_parity")


def inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def trespasses(known: dict[str, str]) -> list[str]:
    """Return each way from a judge, through what is allowed, to what is not: `a > b > c`."""
    ways = {module: module for module in known if inside(module, JUDGES)}
    ahead, found = list(ways), []
    while ahead:
        module = ahead.pop()
        for name in imported(known[module], known):
            if name in ways or name in EMPTY:
                continue
            ways[name] = f"{ways[module]} > {name}"
            if inside(name, ALLOWED):
                ahead.append(name)
            else:
                found.append(ways[name])
    return found


def test_references_controls_and_the_oracle_reach_no_module_of_the_engine_under_test():
    known = modules()
    assert sum(inside(module, JUDGES) for module in known) > 50
    assert trespasses(known) == []


@pytest.mark.parametrize(
    ("where", "line", "way"),
    [
        ("references.bare", "from ds_parity.engine.internals.adapter import choose", "ds_parity.engine"),
        ("controls.loop", "from ds_parity.engine import driver", "controls.loop > ds_parity.engine.driver"),
        ("oracle", "import ds_parity.window", "oracle > ds_parity.window"),
        ("references.alone", "from ds_parity.parity.subjects.candidate import run", "candidate"),
        ("references.fixed", "def f():\n    import ds_parity\n    return ds_parity.initialize", "fixed > ds_parity"),
        ("references.fixed", "RUN = 'ds_parity.parity.subjects.candidate:run'", "fixed > .*subjects.candidate"),
    ],
)
def test_a_planted_import_is_found_with_the_way_to_it(where, line, way):
    known = modules()
    known[f"{SUBJECTS}.{where}"] += f"\n\n{line}\n"
    (found,) = trespasses(known)
    assert re.search(way, found)


def test_an_import_planted_in_a_neutral_room_is_found_through_it():
    known = modules()
    known["ds_parity.parity.running.layouts"] += "\nfrom ds_parity.engine.listeners import tracing\n"
    (found,) = trespasses(known)
    assert found.endswith("ds_parity.parity.running.layouts > ds_parity.engine.listeners.tracing")
