"""docs/api.md names all that users import, and every name on it has a docstring that fits its signature."""

import logging
import re
from pathlib import Path

import griffe
import pytest

import ds_parity

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()
NAMES = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
# mkdocstrings drops a part of a docstring that it has no heading for, or shows it as plain text.
KINDS = {"text", "parameters", "attributes", "returns", "yields", "raises"}


@pytest.fixture(scope="module")
def package():
    return griffe.load("ds_parity", search_paths=[str(ROOT)], try_relative_path=False, docstring_parser="google")


def documented(package):
    """Every entity that the page shows: the names on it, and the public members of the classes among them."""
    for name in NAMES:
        entity = package[name.removeprefix("ds_parity.")]
        entity = entity.final_target if entity.is_alias else entity
        yield name, entity
        if entity.is_class:
            for member in entity.members.values():
                if member.is_public and not member.is_alias and member.has_docstring:
                    yield f"{name}.{member.name}", member


def test_every_public_name_is_on_it():
    names = {*ds_parity.__all__} - {"__version__", "losses"}
    names |= {"losses.PolicyGradient", "losses.DirectPreference"}
    assert not {name for name in names if f"ds_parity.{name}" not in NAMES}


def test_every_name_on_it_is_there_and_is_no_module(package):
    assert NAMES
    assert len(NAMES) == len(set(NAMES))
    assert not [name for name, entity in documented(package) if entity.is_module]


def test_every_name_on_it_has_a_docstring(package):
    assert not [name for name, entity in documented(package) if not entity.has_docstring]


def test_every_method_of_the_engine_has_a_docstring(package):
    """The page shows a member only where it has one."""
    members = package["engine.engine.ParityEngine"].members.values()
    public = [member for member in members if member.is_public and member.is_function and member.name != "__init__"]
    assert len(public) > 10
    assert not [member.name for member in public if not member.has_docstring]


def test_no_docstring_names_an_argument_that_is_not_there(package, caplog):
    """griffe warns of those, and of arguments without an annotation."""
    with caplog.at_level(logging.WARNING, logger="griffe"):
        parsed = [section for _, entity in documented(package) for section in entity.docstring.parsed]
    assert len(parsed) > 100
    assert not [record.message for record in caplog.records]


def test_no_docstring_has_a_part_that_would_be_lost(package):
    found = {(name, section.kind.value) for name, entity in documented(package) for section in entity.docstring.parsed}
    assert not {(name, kind) for name, kind in found if kind not in KINDS}
