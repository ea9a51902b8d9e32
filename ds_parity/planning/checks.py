"""Checks of what is to be planned: rollouts, numbers and choices that cannot be meant are refused by name."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ds_parity.errors import ConfigError
from ds_parity.planning.keys import by_value, refuse_two_kinds, refuse_what_is_no_key, tokens_of
from ds_parity.planning.rollout import PreferencePair, Rollout, Unit

_MOST, _MOST_RANKS = 2**30, 2**20  # a greater number is a slip of the keyboard

_FP32 = (2 - 2.0**-24) * 2.0**127  # from here on a number is infinite in fp32
_PLAIN = (tuple, list, range)
_CHOICES = {"count": ("rollout", "prompt"), "layout": ("packed", "padded"), "oversize": ("refuse", "own")}


def numbers(**values: Any) -> list[int]:
    """Return the numbers as plain ints.

    Raises:
        ConfigError: one is not whole, or not from 1 to 2**30 (2**20 for ranks).
    """
    for name, value in values.items():
        number = whole(value)
        most = _MOST_RANKS if name == "dp_world_size" else _MOST
        if number is None or not 1 <= number <= most:
            raise ConfigError(f"{name} is {value!r}: it must be a whole number from 1 to {most:,}")
    return [operator.index(value) for value in values.values()]


def check_choices(**values: str) -> None:
    """Raise ConfigError where a choice is unknown."""
    for name, value in values.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, _CHOICES[name]))}")


def listed(rollouts: Iterable[Any]) -> list[Unit]:
    """Return rollouts, turns or pairs as a list.

    Raises:
        ConfigError: one of them is none of these, or has no tokens that could be counted, or an id that is no key.
    """
    if isinstance(rollouts, str | bytes | Mapping) or not isinstance(rollouts, Iterable):
        raise ConfigError(
            f"rollouts are a {type(rollouts).__name__}: they must be a list (or any other iterable) of "
            "ds_parity.Rollout or PreferencePair; of a dict give its values()"
        )
    units = list(rollouts)
    for index, unit in enumerate(units):
        if type(unit) is Rollout and type(unit.tokens) in _PLAIN:  # of a million rollouts nearly all
            continue
        if isinstance(unit, PreferencePair):
            for name in ("chosen", "rejected"):
                check_rollout(f"{name} of a pair of prompt {_prompt_of(unit)!r}", getattr(unit, name))
        else:
            check_rollout(f"rollout {index}", unit)
    units = by_value(units)
    for name in ("prompt_id", "rollout_id"):
        _check_keys(name, [getattr(unit, name) for unit in units])
    refuse_two_kinds(unit.prompt_id for unit in units)
    return units


def _check_keys(name: str, keys: Sequence[Any]) -> None:
    try:
        # A NaN is not equal to itself.
        fit = all(key == key for key in set(keys))  # noqa: PLR0124
    except TypeError:
        fit = False
    if not fit:
        for index, key in enumerate(keys):
            refuse_what_is_no_key(f"rollout {index}: {name} is {reprlib.repr(key)} ({type(key).__name__})", key)


def check_rollout(said: str, given: Any) -> None:
    """Raise ConfigError where something is no rollout, or its tokens are no sequence.

    Args:
        said: which one it is, for the error.
        given: what it is.
    """
    if not isinstance(given, Rollout):
        raise ConfigError(
            f"{said} is {reprlib.repr(given)}: it must be a ds_parity.Rollout(prompt_id, tokens, prompt_length), or "
            "for two answers of which one is preferred a ds_parity.PreferencePair(chosen, rejected)"
        )
    try:
        wrong = isinstance(given.tokens, str | bytes | Mapping) or len(given.tokens) < 0
    except TypeError:
        wrong = True
    if wrong:
        raise wrong_tokens(given)


def wrong_tokens(sequence: Rollout) -> ConfigError:
    """Return the error of a sequence whose tokens are none."""
    return ConfigError(
        f"rollout of prompt {sequence.prompt_id!r}: tokens are {reprlib.repr(sequence.tokens)}, must be a sequence of "
        "token ids, prompt first, as (5, 7, 9); give what the tokenizer returned"
    )


def _prompt_of(pair: PreferencePair) -> Any:
    return getattr(pair.chosen, "prompt_id", getattr(pair.rejected, "prompt_id", None))


def whole(value: Any) -> int | None:
    """Return a whole number as a plain int, None where it is none: a flag is none either."""
    # A tensor of one flag has an index, which numpy's flags have not.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def sizes_of(rollouts: Sequence[Unit], layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) the tokens that each rollout or pair takes in a micro-batch, and (n,) the sum of its rows' squares.

    In a padded micro-batch it takes these where no other row is longer: its rows times the longest of them.

    Raises:
        ConfigError: a rollout has no tokens or no prompt, a turn is there twice, or pairs and rollouts are mixed.
    """
    pairs = sum(isinstance(unit, PreferencePair) for unit in rollouts)
    if pairs not in (0, len(rollouts)):
        raise ConfigError(
            f"{pairs} preference pairs among {len(rollouts)} rollouts: a micro-batch holds one kind; plan them apart"
        )
    rows = 2 if pairs else 1
    sequences: Sequence[Any] = [one for unit in rollouts for one in unit.sequences] if pairs else rollouts
    tokens = [len(sequence.tokens) for sequence in sequences]
    _check_repeated(rollouts)
    lengths = np.array(tokens, dtype=np.int64).reshape(len(rollouts), rows)
    for index in np.flatnonzero((lengths == 0).any(axis=1))[:1].tolist():
        raise ConfigError(
            f"rollout {index} of prompt {rollouts[index].prompt_id!r} has no tokens: one that ended before its first "
            "token still holds its prompt; leave it out, or give the prompt"
        )
    _check_prompts(sequences, lengths.ravel())
    if layout == "padded":
        lengths[:] = lengths.max(axis=1, initial=0, keepdims=True)
    return lengths.sum(axis=1), (lengths**2).sum(axis=1)


def check_prompt(sequence: Rollout) -> None:
    """Raise ConfigError where a sequence has no prompt token, or more of them than tokens."""
    length, own = len(sequence.tokens), sequence.prompt_length
    said = f"rollout of prompt {sequence.prompt_id!r}: prompt_length is {own!r}, must be"
    if whole(own) is None or getattr(own, "ndim", False):
        raise ConfigError(f"{said} a whole number; give how many of its {length} tokens belong to the prompt")
    if not 1 <= own <= length:
        raise ConfigError(
            f"{said} from 1 to its {length} tokens; add a BOS where there is no prompt, and shorten prompt_length with "
            "a prompt that was cut"
        )


def _check_prompts(sequences: Sequence[Any], lengths: np.ndarray) -> None:
    given = [sequence.prompt_length for sequence in sequences]
    if set(map(type, given)) <= {int}:
        prompts = np.array(given, dtype=np.float64)  # any whole number has a place in it
        wrong = np.flatnonzero((prompts < 1) | (prompts > lengths)).tolist()
    else:
        wrong = list(range(len(sequences)))
    for index in wrong:
        check_prompt(sequences[index])


def one_number(of: str, value: Any, way_out: str) -> float:
    """Return a number that a rollout or a pair has one of.

    Args:
        of: the thing that the value is ("rollout of prompt 'p': advantage").
        value: a number, or a tensor or an array that is one.
        way_out: what to do in place of it.

    Raises:
        ConfigError: the value is not one finite number of fp32.
    """
    try:
        # A list or a tensor of one number is one of each token, of a rollout that has one token.
        number = math.nan if isinstance(value, str | bytes) or getattr(value, "ndim", None) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < _FP32:
        raise ConfigError(f"{of} is {value!r}, must be one finite number of fp32 (below 3.4e38); {way_out}")
    return number


def _check_repeated(rollouts: Sequence[Unit]) -> None:
    seen = set()
    for index, unit in enumerate(rollouts):
        if unit.rollout_id is None:
            continue
        (turn,) = unit.sequences
        key = unit.prompt_id, unit.rollout_id, turn.prompt_length, tokens_of(turn.tokens)
        if key in seen:
            raise ConfigError(
                f"rollout {index} repeats a turn of rollout {unit.rollout_id!r} of prompt {unit.prompt_id!r}: turns of "
                "one rollout count once together; give every rollout of a plan, of a second epoch too, a name of its "
                "own"
            )
        seen.add(key)


def check_lengths(rollouts: Sequence[Unit], lengths: np.ndarray, max_tokens: int, oversize: str) -> None:
    """Raise ConfigError where a rollout is longer than `max_tokens` and `oversize` is "refuse"."""
    over = np.flatnonzero(lengths > max_tokens) if oversize == "refuse" else np.empty(0, dtype=np.int64)
    if len(over):
        worst = int(over[lengths[over].argmax()])
        raise ConfigError(
            f"rollout {worst} of prompt {rollouts[worst].prompt_id!r} has {lengths[worst]} tokens, more than "
            f"max_tokens = {max_tokens} ({len(over)} of {len(rollouts)} rollouts are too long): raise max_tokens to "
            f"{lengths[worst]}, shorten the rollouts, or give oversize='own' for a micro-batch of their own"
        )
