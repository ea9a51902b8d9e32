"""The README says what the code does."""

import json
import re
from pathlib import Path

from ds_parity.config import Settings, parse
from ds_parity.config.settings import key_path
from ds_parity.parity.diagnosis.causes import REMEDIES

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


def test_causes_by_symptom_are_those_that_a_diagnosis_gives():
    table = README.split("## What is wrong, by symptom")[1].split("\n## ")[0]
    names = re.findall(r"\*([a-z-]+)\*", table)
    assert len(names) > 12
    assert set(names) <= REMEDIES.keys()
