"""Reading a configuration: what DeepSpeed accepts is accepted, and every fault says where it is."""

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, MutableSequence
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.config import load_config
from ds_parity.errors import ConfigError

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}


def write(folder, text):
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_path_string_mapping_and_base64_read_the_same(tmp_path):
    path = write(tmp_path, json.dumps(CONFIG))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    assert load_config(path) == load_config(str(path)) == load_config(CONFIG) == load_config(encoded) == CONFIG


def test_comments_trailing_commas_and_a_byte_order_mark_are_read(tmp_path):
    text = '\ufeff{\n  // why\n  "a": 1, # and\n  "b": [1, 2,], /* so on */\n}'
    assert load_config(write(tmp_path, text)) == {"a": 1, "b": [1, 2]}


def test_a_mapping_is_copied_deep_and_becomes_plain_dicts():
    source = MappingProxyType({"a": {"b": [1, {"c": 2}]}, "t": (1, [2])})
    copy = load_config(source)
    copy["a"]["b"][1]["c"] = 3
    copy["t"][1].append(3)
    assert source["a"]["b"][1]["c"] == 2
    assert source["t"] == (1, [2])


def test_what_cannot_be_copied_is_kept_as_it_is():
    generator = (number for number in [1])
    assert load_config({"group": generator})["group"] is generator


def test_whole_reals_read_as_deepspeed_reads_them_but_stay_reals_in_the_extra_keys(tmp_path):
    text = '{"bucket": 5e8, "lr": 1e-3, "gradient_accumulation_passes": 8.0, "ds_parity": {"lookahead": 2.0}}'
    config = load_config(write(tmp_path, text))
    assert config["lr"] == 0.001
    assert type(config["bucket"]) is int
    assert type(config["gradient_accumulation_passes"]) is float
    assert type(config["ds_parity"]["lookahead"]) is float


def test_reading_agrees_with_deepspeeds_own_reader(tmp_path):
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    text = '{"a": 1.0, "b": -2.5e3, "c": [1e10, 0.1], "d": {"e": null, f: unquoted\n}, "g": true,}'
    path = str(write(tmp_path, text))
    own, deepspeeds = load_config(path), load_ds_config(path)
    assert own == deepspeeds
    assert repr(own) == repr(deepspeeds)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "a": 1,\n  "b": }', ["config.json, line 3, column 8", "not valid JSON"]),
        ('{"a": 1} x', ["line 1, column 10", "not valid JSON"]),
        (
            '{"passes": 4,\n "clipping": NaN, "size": 1}',
            ["config.json, line 2: clipping = NaN: JSON has no such number"],
        ),
        ('{"a": 1,\n "clipping": NaN,\n "b": 2}', ["config.json, line 2: clipping = NaN: JSON has no such number"]),
        ('{"a": 1,\n "clipping": NaN // none\n}', ["config.json, line 2: clipping = NaN: JSON has no such number"]),
        ('{"a": {\n "clipping": inf\n}}', ["config.json, line 2: clipping = inf: JSON has no such number"]),
        ('{"betas": [0.9, NaN]}', ["config.json, line 1: betas = NaN: JSON has no such number"]),
        ('{\n// "off": inf, set "clip": inf\n"a": 1,\n"b": }', ["config.json, line 4", "not valid JSON"]),
        ('{"a": {"clipping": -Infinity}}', ["config.json, line 1: clipping = -Infinity: JSON has no such number"]),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', ["a.b = 3", "given more than once", "keep one"]),
        ('{"a": 1, "a": 1}', ["a = 1", "given more than once"]),
        ('{"l": [{"x": 1, "x": 2}]}', ["l.0.x = 2", "given more than once"]),
        ("[1, 2]", ["holds [1, 2]", "top level must be an object"]),
        ("8.0", ["holds a number", "top level must be an object"]),
        ("word", ['holds "word"', "top level must be an object"]),
        ('{"a": 1e400}', ["a = ", "1e400", "too large"]),
        ('{"a": ' + "1" * 5000 + "}", ["not valid JSON", "4300"]),
        ('{"a": ' * 5000, ["nested too deep"]),
        ('{"a": "\x01"}', ["line 1, column 9", "not valid JSON: Invalid control character;"]),
        (
            '{"a": 1,\n /* why',
            ["config.json, line 2, column 2", "not valid JSON", "a comment begins", "close it with */"],
        ),
        ('{"a": 1} /* why */ /* *', ["line 1, column 20", "a comment begins"]),
        ("/*/", ["line 1, column 1", "a comment begins"]),
        ("{\n  a: '''", ["line 2, column 6", "a ''' string begins", "close it"]),
        ("{a: '''text'''}", ["line 1, column 5", "a ''' string begins", "a file of one line", "double quotes"]),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere/zero9.json", ['"nowhere/zero9.json"', "no such file", "mapping"]),
        ("abcd", ["no such file"]),
        ("x" * 5000, ["can't be read as a file"]),
        ("a\0b", ["can't be read as a file"]),
        (".", ["can't be read as a file"]),
        (None, ["null", "NoneType"]),
        (7, ["config is 7", "int"]),
        (b"config.json", ["bytes"]),
        (base64.urlsafe_b64encode(b'{"a": ').decode(), ["config in base64, line 1"]),
    ],
)
def test_a_bad_source_is_refused_by_name(source, words):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match=r"latin\.json: byte 7 is not UTF-8"):
        load_config(path)


def test_a_mapping_that_holds_itself_is_refused():
    loop = {}
    loop["loop"] = loop
    with pytest.raises(ConfigError, match="holds itself"):
        load_config(loop)


@given(st.text(alphabet='{}[]":,0123456789.eE+-tfn\n\\u/#*a ') | st.text())
def test_any_text_gives_a_dict_or_a_config_error(text):
    encoded = base64.urlsafe_b64encode(("{" + text).encode("utf-8", "replace")).decode()
    for source in (text, encoded):
        with contextlib.suppress(ConfigError):
            assert isinstance(load_config(source), dict)


def test_importing_the_room_imports_neither_torch_nor_deepspeed():
    code = "import sys, ds_parity.config; print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Listed(MutableSequence):
    """A list of its own kind, as OmegaConf's."""

    def __init__(self, entries):
        self.entries = list(entries)

    def __getitem__(self, at):
        return found(self.entries[at])

    def __len__(self):
        return len(self.entries)

    def __setitem__(self, at, value): ...

    def __delitem__(self, at): ...

    def insert(self, at, value): ...


class Keyed(Mapping):
    """A dict of its own kind, which raises for a value that is missing when it is read."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return found(self.entries[key])

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


def found(value):
    if value == "???":
        raise LookupError("Missing mandatory value: lr\n    full_key: lr\n    object_type=dict")
    return value


def test_sequences_of_their_own_kind_become_lists_and_texts_stay():
    given = {"a": Listed([0.0, Listed([Keyed({"b": Listed([])})])]), "text": "abc", "bytes": b"ab", "shape": (1, [2])}
    read = load_config(Keyed(given))
    assert read == {"a": [0.0, [{"b": []}]], "text": "abc", "bytes": b"ab", "shape": (1, [2])}
    assert type(read["a"]) is type(read["a"][1]) is type(read["a"][1][0]["b"]) is list
    assert type(read["a"][1][0]) is dict


@pytest.mark.parametrize(
    ("given", "path", "kind"),
    [
        (Keyed({"lr": "???"}), "lr", "Keyed"),
        ({"optimizer": Keyed({"params": Keyed({"lr": "???"})})}, "optimizer.params.lr", "Keyed"),
        ({"betas": [1, Listed([0.9, "???"])]}, "betas.1.1", "Listed"),
    ],
)
def test_a_mapping_that_gives_no_value_is_a_config_error_with_its_path(given, path, kind):
    with pytest.raises(ConfigError) as error:
        load_config(given)
    rule = f"the {kind} that holds it gives no value: Missing mandatory value: lr"
    assert str(error.value) == f"{path}: {rule}; give it one, or leave the key out"
