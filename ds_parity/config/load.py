"""Reading a configuration as DeepSpeed does. Every fault is a ConfigError that says where it is."""

import base64
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hjson

from ds_parity.config.faults import Fault, refuse, show
from ds_parity.config.settings import PASSES, SECTION
from ds_parity.errors import ConfigError
from ds_parity.values import object_of, repeated

# Python writes them into JSON; HJSON takes them, and all behind them on their line, for a text.
_NOT_FINITE = re.compile(
    r'(?:^|[{,])[ \t]*"(?P<key>[^"\n]*)"\s*:\s*(?:\[[^\]"\n]*)?(?P<value>[-+]?\b(?:NaN|Infinity|nan|inf))\b',
    re.MULTILINE,
)
# Sequences that are one value, and tuples, of which DeepSpeed's dicts may hold named ones.
_KEPT = (str, bytes, bytearray, memoryview, range, tuple)
_ACCEPTED = "give the path of a JSON file, a mapping, or urlsafe base64 of JSON"


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration as DeepSpeed reads it.

    Args:
        source: the path of a JSON or HJSON file, a mapping, or urlsafe base64 of a JSON object.

    Returns:
        A copy in plain dicts and lists. Whole reals in a text (5e8) are ints, as DeepSpeed reads them, but for those in
        the extra keys, which stay reals and are refused later.

    Raises:
        ConfigError: a missing file, invalid JSON (with line and column), a duplicate key, or no object at the top.
    """
    if isinstance(source, Mapping):
        return plain_copy(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config is {show(source)}, of type {type(source).__name__}: {_ACCEPTED}")
    path = os.fsdecode(source)
    decoded = _base64_text(path) if isinstance(source, str) else None
    return _read_text(decoded, "config in base64") if decoded is not None else _read_text(_read_file(path), path)


def plain_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration: mappings become dicts, sequences lists, tuples are copied, anything else is kept as it is.

    Not `copy.deepcopy`: DeepSpeed's dicts may hold process groups, which can't be copied.

    Raises:
        ConfigError: the configuration contains itself, is nested too deep, or a mapping of its own kind gives no value
            for a key (OmegaConf's for one that is missing, or interpolates what isn't there).
    """
    try:
        return _entries(config, "")
    except RecursionError:
        raise ConfigError("config is nested too deep, or holds itself: write it as a plain JSON object") from None


def _entries(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {key: _copied(_value(config, key, f"{path}{key}"), f"{path}{key}.") for key in config}


def _copied(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return _entries(value, path)
    if isinstance(value, Sequence) and not isinstance(value, _KEPT):
        return [_copied(_value(value, at, f"{path}{at}"), f"{path}{at}.") for at in range(len(value))]
    return tuple(_copied(entry, f"{path}{at}.") for at, entry in enumerate(value)) if type(value) is tuple else value


def _value(holder: Any, key: Any, path: str) -> Any:
    try:
        return holder[key]
    except RecursionError:
        raise
    except Exception as error:  # whatever a configuration library raises, which isn't imported here
        said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{path}: the {type(holder).__name__} that holds it gives no value: {said}; give it one, or leave the key "
            "out"
        ) from error


def _base64_text(source: str) -> str | None:
    """Return the JSON object in a base64 string; None where `source` must be a path."""
    try:
        text = base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"config = {show(path)}: no such file (a relative path starts at the working directory); {_ACCEPTED}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config = {show(path)}: can't be read as a file ({error}); {_ACCEPTED}") from None


class _Real:
    """The text of a real number. hjson would turn 8.0 into 8 at once, but the extra keys refuse 8.0."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __int__(self) -> int:
        return 0  # hjson compares this with the number, finds it unequal, and so keeps the number as it is

    def __repr__(self) -> str:
        return self.text

    def as_deepspeed_reads_it(self) -> float | int:
        number = float(self.text)
        return int(number) if number.is_integer() and abs(number) < 1e10 else number


def _read_text(text: str, name: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError(f"{name} is empty: a configuration is a JSON object; write {{...}} with DeepSpeed's keys")
    try:
        tree = hjson.loads(text, object_pairs_hook=object_of, parse_float=_Real)
        if not isinstance(tree, dict):
            _refuse_top_level(tree, name)
        _refuse_words(tree, text, name)
        rule, way_out = f"given more than once in {name}", "keep one: which of them would count is not defined"
        refuse([*(Fault(*one, rule, way_out) for one in repeated(tree)), *_number_faults(tree, "")])
        return {key: _settled(value, strict=key in (PASSES, SECTION)) for key, value in tree.items()}
    except hjson.HjsonDecodeError as error:
        if bare := _NOT_FINITE.search(text):
            raise _not_finite(bare, text, name) from None
        where = f"line {error.lineno}, column {error.colno}"
        what = error.msg.removesuffix(" %r at").removesuffix(" %r")  # hjson fills in the character after the wrong one
        raise ConfigError(f"{name}, {where}: not valid JSON: {what}; correct the file there") from None
    except IndexError:  # hjson looks for the end of a comment or of a ''' string past the end of the text
        raise ConfigError(_never_ends(text, name)) from None
    except RecursionError:
        raise ConfigError(
            f"{name}: nested too deep to be read; a DeepSpeed configuration is a few levels deep"
        ) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON: {error}; correct the file") from None


def _not_finite(bare: re.Match[str], text: str, name: str) -> ConfigError:
    line = text.count("\n", 0, bare.start("value")) + 1
    return ConfigError(
        f"{name}, line {line}: {bare['key']} = {bare['value']}: JSON has no such number; write a finite one, or leave "
        "the key out"
    )


def _refuse_words(tree: Any, text: str, name: str) -> None:
    """Raise ConfigError where a number that is not finite stands on a line of its own, and was read as a text."""
    # HJSON takes all of a line behind the word for the text: a comma, and a comment.
    texts = {(key, value.split()[0].rstrip(",")) for key, value in _texts(tree) if value.strip()}
    for bare in _NOT_FINITE.finditer(text):
        if (bare["key"], bare["value"]) in texts:
            raise _not_finite(bare, text, name)


def _texts(node: Any) -> Iterator[tuple[str, str]]:
    """Yield each text with the key that it is written behind."""
    if isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, dict):
        for key, value in node.items():
            if isinstance(value, str):
                yield key, value
            else:
                yield from _texts(value)


def _never_ends(text: str, name: str) -> str:
    """Return the message for a text with a comment or a ''' string whose end hjson did not find."""
    comment = text.find("/*", max(0, text.rfind("*/") - 1))  # one back, since the two marks share the star in /*/
    if comment >= 0:
        at, rule, way_out = comment, "a comment begins there and never ends", "close it with */"
    elif "\n" in text:
        at, rule, way_out = text.rfind("'''"), "a ''' string begins there and never ends", "close it with '''"
    else:
        at, rule = text.find("'''"), "a ''' string begins there, which can't be read in a file of one line"
        way_out = "write it in double quotes"
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"{name}, line {line}, column {column}: not valid JSON: {rule}; {way_out}"


def _refuse_top_level(tree: Any, name: str) -> NoReturn:
    value = "a number" if isinstance(tree, _Real) else show(tree)
    raise ConfigError(f"{name} holds {value}: the top level must be an object; write {{...}} around the keys")


def _number_faults(node: Any, path: str) -> Iterator[Fault]:
    """Yield a fault for each number that is not finite."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _number_faults(value, f"{path}{key}.")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _number_faults(value, f"{path}{index}.")
    elif isinstance(node, _Real) and not math.isfinite(float(node.text)):
        yield Fault(path.rstrip("."), node.text, "too large for a floating-point number", "write a smaller number")


def _settled(node: Any, strict: bool) -> Any:
    """Return the tree in plain dicts and numbers; where `strict`, whole reals stay reals."""
    if isinstance(node, dict):
        return {key: _settled(value, strict) for key, value in node.items()}
    if isinstance(node, list):
        return [_settled(value, strict) for value in node]
    if isinstance(node, _Real):
        return float(node.text) if strict else node.as_deepspeed_reads_it()
    return node
