"""docs/api.md is what the docstrings say, and they say of every argument what there is to say of it."""

import ast
import logging
from importlib import import_module
from pathlib import Path

import griffe
import pytest

import ds_parity
from tools import write_api


@pytest.fixture(scope="module")
def reference():
    return write_api.reference()


def test_the_reference_that_is_kept_is_that_of_the_docstrings(reference):
    assert write_api.API.read_text() == reference, "docstrings or signatures changed: run `make api`"


def test_every_public_name_is_in_it(reference):
    names = {*ds_parity.__all__} - {"__version__", "losses"}
    names |= {"losses.PolicyGradient", "losses.DirectPreference"}
    assert not {name for name in names if f"### `ds_parity.{name}`\n" not in reference}


def test_no_docstring_names_an_argument_that_is_not_there(caplog):
    """griffe warns of those, and of arguments without an annotation."""
    with caplog.at_level(logging.WARNING, logger="griffe"):
        write_api.reference()
    assert not [record.message for record in caplog.records]


def test_every_method_of_the_engine_is_in_it(reference):
    engine = griffe.load("ds_parity", search_paths=[str(write_api.ROOT)])["engine.engine.ParityEngine"]
    methods = {name for name, member in engine.members.items() if member.is_public and name != "__init__"}
    assert len(methods) > 15
    assert not {name for name in methods if f"#### `ParityEngine.{name}`\n" not in reference}


def test_what_a_chapter_says_is_imported_from_a_module_is_there():
    for introduction, _, names in write_api.CHAPTERS.values():
        if introduction.startswith("`from"):
            module = import_module(introduction.split()[1])
            assert not [name for name in names.split() if not hasattr(module, name.split(".")[-1])], introduction


def test_a_long_signature_is_one_that_python_takes():
    def signature(source):
        (function,) = griffe.visit("m", filepath=Path("m.py"), code=source).functions.values()
        return write_api._signature(function, "one").removeprefix("```text\n").removesuffix("\n```")

    long = "a_name_that_makes_the_line_as_long_as_it_takes_to_be_broken_into_several_of_them"
    for source in (
        f"def one({long}: int, *, keyword: int = 1) -> None: ...",
        f"def one({long}: int, *arguments: int, keyword: int = 1, **others: int) -> None: ...",
    ):
        shown = signature(source)
        assert shown.count("\n") > 3
        assert ast.unparse(ast.parse(f"def {shown}: ...")) == ast.unparse(ast.parse(source))


def test_a_module_in_place_of_what_is_in_it_is_refused(monkeypatch):
    monkeypatch.setattr(write_api, "CHAPTERS", {"All": ("all", "ds_parity.parity.diagnosis", "diagnose")})
    with pytest.raises(ValueError, match="is a module"):
        write_api.reference()


def test_a_docstring_with_a_part_that_would_be_lost_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ds_parity").mkdir()
    (tmp_path / "ds_parity" / "__init__.py").write_text(
        'def one():\n    """One.\n\n    Examples:\n        >>> one()\n        1\n    """\n'
    )
    monkeypatch.setattr(write_api, "ROOT", tmp_path)
    monkeypatch.setattr(write_api, "CHAPTERS", {"All": ("all", "ds_parity", "one")})
    with pytest.raises(ValueError, match=r"ds_parity\.one: its docstring has a section of kind 'examples'"):
        write_api.reference()
