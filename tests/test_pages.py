"""README.md and the pages of docs/ say what the code does."""

import ast
import configparser
import inspect
import json
import re
import shlex
from textwrap import indent

import click
import pytest
import typer

from ds_parity.cli.entry import app
from ds_parity.config import parse
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.parity.matrix.variant import STAGES
from ds_parity.parity.matrix.variants import VARIANTS as ROWS
from ds_parity.parity.subjects.controls.known import known
from ds_parity.parity.verification.verify import verify
from ds_parity.planning import plan
from tests.pages import PAGES, ROOT, blocks, commands, section, text, titled
from tools import page_tables, update_docs
from tools.from_pipelinerl.quotas import deal, packed

# Where the Python blocks of each page are run.
RUN = {
    "README": "tests/distributed/test_page_blocks.py",
    "tutorial": "tests/distributed/test_tutorial.py",
    "training_loop": "tests/distributed/test_page_blocks.py",
    "loops": "tests/distributed/test_loops_page.py",
    "several_engines": "tests/distributed/test_several_engines_page.py",
    "pipelines": "tests/distributed/test_pipelines.py",
    "sequence_parallelism": "tests/distributed/test_sequence.py",
    "frameworks": "tests/frameworks/test_frameworks_page.py",
    "planning": "tests/distributed/test_page_blocks.py",
    "own_model": "tests/distributed/test_page_blocks.py",
    "models": "tests/distributed/test_models_page.py",
    "from_pipelinerl": "tests/test_pages.py",
    "open_instruct": "tests/test_pages.py",
    "open_instruct_dpo": "tests/test_pages.py",
    "trl_grpo": "tests/test_pages.py",
    "ci": "tests/test_pages.py",
}
COMMANDS = [(page, line.split("#")[0].strip()) for page in PAGES for line in commands(page)]
OWN = [(page, line) for page, line in COMMANDS if line.startswith("ds-parity ")]
CONFIGURATIONS = [(page, number) for page in PAGES for number in range(len(blocks(page, "json")))]


class TestReadme:
    def test_it_is_short_and_shows_code_on_the_first_screen(self):
        lines = text("README").splitlines()
        assert len(lines) <= 150
        assert "```python" in lines[:20]

    def test_what_its_links_lead_to_is_there(self):
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text("README"))
        assert len(links) > 15
        for path, anchor in links:
            assert (ROOT / path).exists(), path
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w]+", "-", heading.lower()) for heading in headings], anchor

    def test_its_summary_of_the_matrix_is_the_first_line_of_the_page(self):
        counts = update_docs.shown(PAGES["matrix"], "matrix").split(" (")[0]
        assert update_docs.shown(PAGES["README"], "matrix") == f"{counts}.\n"

    def test_its_faults_are_rows_of_the_page_and_those_of_the_program(self):
        rows, all_rows = (update_docs.shown(PAGES[page], "figures").splitlines() for page in ("README", "how_it_works"))
        assert len(rows) == 2 + len(update_docs.IN_README) == 5
        assert set(rows) < set(all_rows)
        named = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in all_rows[2:]]
        assert named == [*page_tables.BY_HAND.values()]


@pytest.mark.parametrize("part", update_docs.PAGES)
def test_a_table_is_what_its_program_makes(part):
    page, make = update_docs.PAGES[part]
    assert update_docs.shown(page, part) == make(), f"run `make pages`: {page.name} has another table of {part}"


def test_the_matrix_on_its_page_has_the_rows_and_stages_of_the_matrix():
    table = update_docs.shown(PAGES["matrix"], "matrix")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    ran = [row for row in rows[2:] if any(row[1:])]
    assert [row[0] for row in ran] == [variant.name for variant in ROWS]
    for row, variant in zip(ran, ROWS, strict=True):
        assert [stage for stage, cell in zip(STAGES, row[1:], strict=True) if cell != "-"] == [*variant.stages], row[0]
        assert [stage for stage, cell in zip(STAGES, row[1:], strict=True) if "refused" in cell] == [*variant.refused]
        assert "FAILED" not in row
        assert "differs" not in row


@pytest.mark.parametrize(("page", "number"), CONFIGURATIONS)
def test_a_json_block_is_a_configuration_that_parses(page, number):
    assert parse(json.loads(blocks(page, "json")[number])) is not None


def test_the_python_of_every_page_is_run_somewhere():
    assert {page for page in PAGES if "```python" in text(page)} == RUN.keys()
    assert [page for page, where in RUN.items() if page not in read_by((ROOT / where).read_text())] == []
    assert len(titled("tutorial")) == len(blocks("tutorial", "python")) + len(blocks("tutorial", "json")), (
        "its test runs the files that a reader saves, and a block without a title is no file"
    )


def read_by(source):
    """The pages whose blocks a test reads: what it gives to `blocks` or `titled`, and names of pages kept for that."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("blocks", "titled") and node.args:
            found |= {one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)}
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("READ", "PAGE"):
            found |= {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return found


def test_no_fence_is_of_an_unknown_kind():
    kinds = {kind for page in PAGES for kind in re.findall(r"^ *```(\w+)", text(page), re.MULTILINE)}
    assert kinds <= {"python", "json", "text", "bash", "diff"}


@pytest.mark.parametrize(("page", "line"), OWN)
def test_a_command_line_is_taken(page, line):
    group = typer.main.get_command(app)
    name, command, given = group.resolve_command(click.Context(group), shlex.split(line)[1:])
    command.make_context(name, given)


def test_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = {re.match(r"make ([\w-]+)", line)[1] for _, line in COMMANDS if line.startswith("make ")}
    targets |= {target for page in PAGES for target in re.findall(r"`make ([\w-]+)`", text(page))}
    assert {"verify", "test", "matrix"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_commands_start_scripts_that_have_their_flags():
    starts = [line for _, line in COMMANDS if re.match(r"(deepspeed|python) ", line) and ".py" in line]
    tools = [re.search(r"(tools/\S+\.py)(.*)", line) for line in starts]
    assert len([found for found in tools if found]) > 20
    for script, given in (found.groups() for found in tools if found):
        assert set(re.findall(r"--[\w-]+", given)) <= flags(ROOT / script), script
    own = {line.split()[-1] for line, found in zip(starts, tools, strict=True) if not found}
    assert own == {name for name in titled("tutorial") if name in ("plain.py", "train.py", "uneven.py")}


def flags(script):
    """The options of a script: what it or a neighbour that it imports adds to a parser."""
    found, tree = set(), ast.parse(script.read_text())
    for node in ast.walk(tree):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if name in ("add_argument", "add"):  # a script may give the method a shorter name
            found |= {one.value for one in node.args if isinstance(one, ast.Constant) and one.value.startswith("--")}
        elif name == "add_config_arguments":  # DeepSpeed's own
            found |= {"--deepspeed", "--deepspeed_config"}
        elif name == "arguments":  # of tools/from_pipelinerl and tools/migrations, which make options of its keywords
            found |= {f"--{one.arg.replace('_', '-')}" for one in node.keywords}
        for neighbour in [node.module] if isinstance(node, ast.ImportFrom) else []:
            for beside in (script.parent / f"{neighbour}.py", ROOT / f"{str(neighbour).replace('.', '/')}.py"):
                found |= flags(beside) if beside.exists() and ROOT / "tools" in beside.parents else set()
    return found


def test_extras_that_commands_install_are_there():
    known = configparser.ConfigParser()
    known.read(ROOT / "setup.cfg")
    asked = {
        extra for page in PAGES for found in re.findall(r"\[([\w,]+)\]'", text(page)) for extra in found.split(",")
    }
    assert asked >= {"report", "foreign"}
    assert asked <= {*known["options.extras_require"]}


def test_the_example_of_a_users_test_calls_verify_as_it_can_be_called():
    (block,) = blocks("ci", "python")
    names = {}
    exec(block, names)
    given = {}
    names["test_parity"](lambda config, **options: given.update(options, config=config))
    assert given.pop("golden")
    inspect.signature(verify).bind(given.pop("config"), "folder", **given)


class TestFromPipelineRL:
    def test_the_loop_is_that_of_its_tool(self):
        (block,) = blocks("from_pipelinerl", "python")
        assert indent(block, "    ") in (ROOT / "tools" / "from_pipelinerl" / "after.py").read_text()

    def test_the_configuration_is_that_of_its_tool(self):
        config = json.loads((ROOT / "tools" / "from_pipelinerl" / "ds_config.json").read_text())
        table = section("from_pipelinerl", "What replaces what")
        for name, value in [("gradient_accumulation_passes", 64), *config["ds_parity"].items()]:
            assert f'"{name}": {json.dumps(value)}' in table
        assert config["gradient_accumulation_passes"] == 64

    def test_the_passes_that_it_shows_are_those_of_quotas_and_of_a_plan(self):
        """Figures of a run are what its machine rounds; passes follow from the rollouts alone."""
        rollouts = load_rollouts()[: 4 * page_tables.WINDOW]
        windows = [rollouts[at : at + page_tables.WINDOW] for at in range(0, len(rollouts), page_tables.WINDOW)]
        by_quota = [list(deal(window, 2, packed(page_tables.MAX_TOKENS))) for window in windows]
        planned = plan(rollouts, dp_world_size=2, target=page_tables.WINDOW, max_tokens=page_tables.MAX_TOKENS)
        shown, same, after, found = blocks("from_pipelinerl", "text")
        idle = sum(row.count([]) for rows in by_quota for row in rows)
        said = [line.partition(", weights")[0] for line in shown.splitlines()]
        quotas = f"{sum(map(len, by_quota))} passes, {idle} idle on a rank"
        assert said == [
            f"before: {quotas}", f"after: {quotas}", f"after: {planned.passes} passes, 0 idle on a rank",
            f"as found: {quotas}",
        ]  # fmt: skip
        assert _column(same, 2) == [str(len(rows)) for rows in by_quota]
        assert _column(after, 2) == [str(window.passes) for window in planned.windows]
        assert float(_column(found, 6)[0]) * 64 == pytest.approx(float(_column(same, 6)[0]), rel=1e-5)


def test_the_python_of_a_migration_is_that_of_its_tool():
    migrations = ROOT / "tools" / "migrations"
    (block,) = blocks("open_instruct", "python")
    assert indent(block, "    ") in (migrations / "open_instruct" / "planned.py").read_text()
    normalised, by_step = blocks("trl_grpo", "python")
    assert by_step in (migrations / "trl_grpo" / "after.py").read_text()
    assert normalised.splitlines()[0] in (migrations / "trl_grpo" / "after.py").read_text()
    (block,) = blocks("open_instruct_dpo", "python")
    assert block.strip() in (migrations / "open_instruct_dpo" / "after.py").read_text()


def _column(table, number):
    return [line.split("│")[number].strip() for line in table.splitlines() if line.startswith("│    ")]


def test_the_changelog_has_the_form_of_keep_a_changelog():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[(Unreleased|\d+\.\d+\.\d+)\](?: - \d{4}-\d\d-\d\d)?", line) for line in versions)
    kinds = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    changes = lines[lines.index(versions[0]) :]
    assert not [line for line in changes if line.startswith("  ")], "one line for each change"
    items = [line for line in changes if line and not line.startswith(("#", "- "))]
    assert all(line.endswith(":") for line in items), "a line is a change, a heading, or the name of a group"
    assert not re.search(r"no longer|any more|anymore|now works|used to", "\n".join(changes[: _end(changes)])), (
        "nobody had the state before"
    )


def _end(changes):
    """The lines of the first section."""
    return next((at for at, line in enumerate(changes) if at and line.startswith("## ")), len(changes))


PROSE = [*PAGES.values(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_no_line_of_prose_is_longer_than_120(path):
    """Tables, code, pictures and what `make matrix` writes cannot be broken."""
    prose = re.sub(r"^ *```.*?^ *```$|<!-- matrix:.*?<!-- matrix: end -->", "", path.read_text(), flags=re.S | re.M)
    broken = [line for line in prose.splitlines() if not re.match(r"\||    |!\[", line)]
    assert [line for line in broken if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_prose_reads_as_a_link_to_a_name(page):
    """A subscript of a subscript is a link in Markdown: `make docs` ends at a name that no page has."""
    prose = re.sub(r"`[^`]*`", "", re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE))
    assert re.findall(r"\S*\]\[.*", prose) == []


def test_the_table_of_controls_has_all_of_them():
    """What was caught and named is what `make controls` found; the counts of faults are those of the program."""
    rows = [line.strip("|").split("|") for line in update_docs.shown(PAGES["harness"], "controls").splitlines()[2:]]
    configurations = [name.strip(" `") for name, *_ in rows]
    made = re.search(r"^CONTROLS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert configurations == sorted(f"{name}.json" for name in made)
    for name, caught, named, alarms, _ in rows:
        config = json.loads((ROOT / "ds_configs" / name.strip(" `")).read_text())
        stage = config["zero_optimization"]["stage"]
        faults = sum(stage in control.stages for control in known().values())
        assert caught.strip() == f"{faults} of {faults}"
        assert 0 < int(named) <= faults
        assert alarms.strip().startswith("0 of ")
