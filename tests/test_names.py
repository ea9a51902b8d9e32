"""A name means one thing: no two modules of the package share theirs, nor do two public classes."""

import ast
from collections import defaultdict
from pathlib import Path

import ds_parity

ROOT = Path(ds_parity.__file__).parent


def shared(named):
    """The names that stand in several places, with the places."""
    places = defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return {name: several for name, several in places.items() if len(several) > 1}


def modules():
    return [path for path in sorted(ROOT.rglob("*.py")) if path.name != "__init__.py"]


def test_no_two_modules_share_a_name():
    assert len(modules()) > 100
    assert shared((path.stem, str(path.relative_to(ROOT))) for path in modules()) == {}


def public_classes():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, str(path.relative_to(ROOT))


def test_no_two_public_classes_share_a_name():
    assert len(list(public_classes())) > 50
    assert shared(public_classes()) == {}
