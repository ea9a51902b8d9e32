"""The README says what the code does."""

import json
import re
from pathlib import Path
from textwrap import indent

from ds_parity.config import Settings, parse
from ds_parity.config.settings import key_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def key_table():
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
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
