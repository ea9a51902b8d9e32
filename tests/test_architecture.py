"""docs/architecture.md lists the folders that are there, and docs/glossary.md names what is there."""

import re
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def listed(text):
    """The paths of a listing in which two blanks of indentation are one folder."""
    parents, paths = [], []
    for line in text.splitlines():
        indentation, name = re.match(r"( *)(\S+)", line).groups()
        parents = parents[: len(indentation) // 2]
        paths.append("".join([*parents, name]))
        parents.append(name)
    return paths


@pytest.fixture(scope="module")
def paths():
    return listed(re.search(r"```text\n(ds_parity/\n.*?)```", ARCHITECTURE, re.DOTALL)[1])


def test_the_folders_of_the_listing_are_the_folders_of_the_package(paths):
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "ds_parity").rglob("__init__.py")}
    assert sorted(path for path in paths if path.endswith("/")) == sorted(folders)


def test_the_modules_of_the_listing_are_there(paths):
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_public_modules_beside_the_rooms_are_in_the_listing(paths):
    public = {
        f"ds_parity/{path.name}"
        for path in (ROOT / "ds_parity").glob("*.py")
        if path.name not in ("_version.py", "__main__.py")
    }
    assert public <= set(paths)


def test_a_missing_folder_would_be_noticed():
    text = "ds_parity/\n  config/\n  engine/    the wrapper\n    ranks/\n  cli/\n"
    assert listed(text) == [
        "ds_parity/",
        "ds_parity/config/",
        "ds_parity/engine/",
        "ds_parity/engine/ranks/",
        "ds_parity/cli/",
    ]


@pytest.fixture(scope="module")
def package():
    """What is declared in the package, read and not imported."""
    return griffe.load("ds_parity", search_paths=[str(ROOT)], try_relative_path=False)


def test_every_name_of_the_package_in_the_glossary_is_there(package):
    names = {name.removeprefix("ds_parity.") for name in re.findall(r"`(ds_parity(?:\.\w+)+)`", GLOSSARY)}
    # Keys of the section ds_parity of a configuration.
    keys = {"overshoot", "last_window", "loss_weight", "lookahead", "boundary", "terms"}
    assert keys < names
    for name in names - keys:
        assert package[name], name


def test_every_attribute_in_the_glossary_is_one_of_its_class(package):
    rooms = {"Rollout": "", "Counts": "window.", "Window": "window.", "Settings": "config.", "StepRecord": "trace."}
    rooms |= {"ParityEngine": ""}
    pairs = re.findall(r"`([A-Z]\w+)\.(\w+)`", GLOSSARY)
    assert {owner for owner, _ in pairs} == rooms.keys()
    for owner, attribute in pairs:
        entity = package[rooms[owner] + owner]
        assert attribute in entity.final_target.members, f"{owner}.{attribute}"
