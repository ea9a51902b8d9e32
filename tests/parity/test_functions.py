"""Functions by their names: what can't be found is refused with what is wrong, and before ranks are started where it can be."""

import json
import sys

import pytest

from ds_parity.errors import ConfigError
from ds_parity.parity.functions import refuse_unknown, resolve


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package.module:build", r"'no_such_package\.module:build'.*No module named 'no_such_package'"),
        ("ds_parity.parity.model:no_such", r"'ds_parity\.parity\.model:no_such'.*no attribute 'no_such'"),
        ("ds_parity.parity.model", r"'ds_parity\.parity\.model'.*write package\.module:function"),
        ("", r"'' does not name a function"),
        ("ds_parity.parity.model:VOCAB", r"'ds_parity\.parity\.model:VOCAB' is a int: it must be a function"),
        (".model:build", r"'\.model:build'.*write package\.module:function"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused_with_what_is_wrong(name, says):
    with pytest.raises(ConfigError, match=says):
        resolve(name)


def test_a_name_that_leads_to_a_function_gives_the_function():
    assert resolve("json:dumps") is json.dumps


@pytest.mark.parametrize("name", ["nowhere:build", "nowhere.module:build", "json", "", ".model:build", ":build"])
def test_a_package_that_no_rank_will_find_is_refused_in_the_same_words(name):
    with pytest.raises(ConfigError, match=r"does not name a function that can be imported .*package\.module:function"):
        refuse_unknown(name)


def test_a_package_is_found_where_ranks_look_and_is_not_imported(tmp_path, monkeypatch):
    """In the working directory, and in the folders that are given."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"loops_{name}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path / "here")
    before = list(sys.path)
    refuse_unknown("loops_here:train")
    refuse_unknown("loops_there:train", [str(tmp_path / "there")])
    with pytest.raises(ConfigError, match="loops_there"):
        refuse_unknown("loops_there:train")
    assert sys.path == before
    assert not {"loops_here", "loops_there"} & sys.modules.keys()
