"""What `make package` finds fault with: a wheel or a source archive with too little, or too much."""

import configparser
import re
from pathlib import PurePath

import pytest
import yaml

import ds_parity
from tools.check_package import ROOT, SOURCES, faults, named, tracked

KNOWN = ["ds_parity/__init__.py", "ds_parity/cli/train.py.txt", "tests/test_cli.py", "README.md"]
WHEEL = ["ds_parity/__init__.py", "ds_parity/cli/train.py.txt", "ds_parity-0.1.0.dist-info/METADATA"]
SOURCE = [*WHEEL[:2], *SOURCES, "PKG-INFO", "ds_parity.egg-info/SOURCES.txt"]


def test_archives_with_the_package_and_what_belongs_to_it_are_right():
    assert faults(WHEEL, SOURCE, KNOWN) == []


def test_a_file_that_the_setup_takes_in_is_needed():
    setup = "long_description = file: README.md, docs/more.md\ndocs = file: docs/requirements.txt\n"
    assert named(setup) == {"README.md", "docs/more.md", "docs/requirements.txt"}
    assert faults(WHEEL, SOURCE, KNOWN, named("file: docs/more.md")) == ["the source archive lacks docs/more.md"]
    assert faults(WHEEL, [*SOURCE, "docs/more.md"], KNOWN, named("file: docs/more.md")) == []


@pytest.mark.parametrize(
    ("wheel", "source", "said"),
    [
        (WHEEL[1:], SOURCE, "the wheel lacks ds_parity/__init__.py"),
        ([*WHEEL, "tests/test_cli.py"], SOURCE, "the wheel has tests/test_cli.py"),
        (WHEEL, SOURCE[1:], "the source archive lacks ds_parity/__init__.py"),
        (WHEEL, [*SOURCE, "tests/test_cli.py"], "the source archive has tests/test_cli.py"),
        (WHEEL, [path for path in SOURCE if path != "CHANGELOG.md"], "the source archive lacks CHANGELOG.md"),
    ],
)
def test_what_is_missing_or_too_much_is_named(wheel, source, said):
    (fault,) = faults(wheel, source, KNOWN)
    assert fault.startswith(said)


def test_files_that_are_no_python_are_part_of_the_package():
    """A build leaves out what setup.cfg forgets, and a folder of Python that has no __init__.py."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["ds_parity"].split()
    package = {PurePath(path).relative_to("ds_parity") for path in tracked() if path.startswith("ds_parity/")}
    others = {path for path in package if path.suffix != ".py"}
    assert len(others) > 10
    # A * of setuptools, as one of a shell, does not go into folders.
    assert [str(path) for path in others if not any(same_depth(path, one) for one in patterns)] == []
    folders = {path.parent for path in package if path.suffix == ".py"}
    assert [str(folder) for folder in folders if folder / "__init__.py" not in package] == []


def same_depth(path, pattern):
    return path.match(pattern) and len(path.parts) == len(PurePath(pattern).parts)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == ds_parity.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert (citation["title"], citation["license"]) == (setup["metadata"]["name"], setup["metadata"]["license"])


def test_the_issue_template_is_a_form_and_its_commands_are_there():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    asked = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(asked) == len(set(asked)) > 3
    assert all(part["attributes"]["label"] for part in form["body"] if part["type"] != "markdown")
    said = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
    from typer.main import get_command

    from ds_parity.cli import app

    command = get_command(app)
    named = re.findall(r"ds-parity ([\w-]+)", said)
    options = {option for one in command.params for option in one.opts}
    assert {"doctor", "init", "verify", "compare"} <= set(named)
    assert [name for name in named if name not in {*command.commands, *options}] == []
    taken = {option for one in command.commands.values() for parameter in one.params for option in parameter.opts}
    assert set(re.findall(r"option `(--[\w-]+)", said)) == {"--report"} <= taken


def test_ci_checks_the_package():
    assert re.search(r"^make .*package$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    recipe = re.search(r"^package:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert "tools/check_package.py" in recipe
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^build==", pinned, re.MULTILINE)
    assert re.search(r"^twine==", pinned, re.MULTILINE)
