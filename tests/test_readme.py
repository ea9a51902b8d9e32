"""The README says what the code does."""

import inspect
import json
import re
import shlex
from pathlib import Path
from textwrap import indent

import click
import pytest
import typer

from ds_parity.cli import app
from ds_parity.config import Settings, parse
from ds_parity.config.settings import key_path
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.verification.verify import verify

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0] for line in re.findall(r"^ +(ds-parity .*)$", README, re.MULTILINE)]
# Where each of its Python blocks is run.
RUN = {
    "In your trainer": "tests/distributed/test_readme_blocks.py",
    "Frameworks": "tests/frameworks/test_readme_section.py",
    "Planning: rollouts to micro-batches": "tests/distributed/test_readme_blocks.py",
    "With your own model and tokenizer": "tests/distributed/test_readme_blocks.py",
    "From PipelineRL": "here, as part of tools/from_pipelinerl/after.py",
    "The harness": "here",
}


def key_table():
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        # Required but for windows that the caller ends, as its meaning says.
        required = field.is_required() or name == "gradient_accumulation_passes"
        default = "required" if required else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{key_path(name)}` | {default} | {field.description} |")
    return "\n".join(rows)


def test_the_key_table_is_that_of_the_settings():
    assert key_table() in README, f"put this table into README.md:\n{key_table()}"


def test_its_json_blocks_are_configurations_that_parse():
    blocks = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    assert blocks
    assert all(parse(json.loads(block)) is not None for block in blocks)


def test_its_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\s*make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile


def medians(section):
    """The medians of a section of RESULTS.md, a row of its table each."""
    text = re.search(
        rf"<!-- {section} -->(.*?)<!-- end -->", (ROOT / "benchmarks" / "RESULTS.md").read_text(), re.DOTALL
    )
    rows = [line.split("|")[2:-1] for line in text[1].splitlines() if line.startswith("| ")]
    return [[re.findall(r"(-?\d+\.\d+) \(", cell) for cell in row] for row in rows[2:]]


def shown(start):
    """What stands in the last column of the row of "What was measured" that begins so, as numbers."""
    table = README.split("## What was measured")[1].split("\n## ")[0]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {start}")]
    return re.findall(r"\d+\.\d+", row.rsplit("|", 2)[1])


def test_ratios_beside_the_engine_driven_by_hand_are_medians_of_the_results():
    full, short, larger = [[cell[0] for cell in row] for row in medians("by-hand")]
    assert shown("time of a window") == full
    assert shown("the same, rollouts of 192 tokens, counts pass by pass") == short
    assert shown("the same, 3.3 million parameters") == larger


def test_ratios_by_passes_are_medians_of_the_results():
    """Windows of 8, 64 and 512: the ratio and what is added, counts ahead, then pass by pass."""
    ahead, added_ahead, apart, added_apart = ([row[column][0] for row in medians("passes")[2:]] for column in range(4))
    assert shown("the same, ZeRO 2, windows of 8, 64 and 512") == ahead
    assert shown("the same, counts pass by pass") == apart
    assert shown("what a pass costs more") == added_ahead + added_apart


def test_the_import_of_the_configuration_layer_is_a_median_of_the_results():
    assert shown("import of") == [f"{float(medians('import')[2][0][0]):.2f}"]


def test_rollouts_a_second_are_those_of_the_results():
    """From the least to the greatest of the four stages."""
    rows = [sorted(cell[0] for cell in row) for row in medians("recipe")]
    ends = [end for padded, packed in (rows[:2], rows[2:]) for row in (padded, packed) for end in (row[0], row[-1])]
    assert re.findall(r"\d\.\d\d", README.split("of the padded recipe |")[1].split("\n\n")[0]) == ends


def test_causes_by_symptom_are_those_that_a_diagnosis_gives():
    table = README.split("## What is wrong, by symptom")[1].split("\n## ")[0]
    names = re.findall(r"\*([a-z-]+)\*", table)
    assert len(names) > 12
    assert set(names) <= REMEDIES.keys()


@pytest.mark.parametrize("line", COMMANDS)
def test_its_command_lines_are_taken(line):
    group = typer.main.get_command(app)
    name, command, given = group.resolve_command(click.Context(group), shlex.split(line)[1:])
    command.make_context(name, given)


def test_its_python_is_run_somewhere():
    sections = re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", README, re.DOTALL | re.MULTILINE)
    assert {title for title, text in sections if "```python" in text} == RUN.keys()
    assert all((ROOT / where).exists() for where in RUN.values() if where.startswith("tests/"))


def test_its_example_of_a_users_test_calls_verify_as_it_can_be_called():
    block = re.search(r"```python\n(def test_parity.*?)```", README, re.DOTALL)
    names = {}
    exec(block[1], names)
    given = {}
    names["test_parity"](lambda config, **options: given.update(options, config=config))
    assert given.pop("golden")
    inspect.signature(verify).bind(given.pop("config"), "folder", **given)


def test_its_commands_start_scripts_that_have_their_flags():
    commands = re.findall(r"^\s*(?:deepspeed|python) .*?(tools/\S+\.py)(.*?)(?: #.*)?$", README, re.MULTILINE)
    assert commands
    for script, given in commands:
        folder = (ROOT / script).parent
        sources = "".join(path.read_text() for path in folder.glob("*.py"))
        for flag in re.findall(r"--([\w-]+)", given):
            assert re.search(rf"--{flag}\b|\b{flag.replace('-', '_')}=", sources), f"{script} --{flag}"


def test_the_loop_in_place_of_pipelinerls_is_that_of_its_tool():
    block = README.split("## From PipelineRL")[1].split("```python\n")[1].split("```")[0]
    assert indent(block, "    ") in (ROOT / "tools" / "from_pipelinerl" / "after.py").read_text()


def test_the_configuration_that_pipelinerls_loop_comes_to_is_that_of_its_tool():
    section = README.split("## From PipelineRL")[1].split("\n## ")[0]
    config = json.loads((ROOT / "tools" / "from_pipelinerl" / "ds_config.json").read_text())
    for name, value in [("gradient_accumulation_passes", 64), *config["ds_parity"].items()]:
        assert f'"{name}": {json.dumps(value)}' in section
    assert config["gradient_accumulation_passes"] == 64
