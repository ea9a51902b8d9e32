"""Ids by which rollouts are put together: by their value, whatever library has made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ds_parity.errors import ConfigError
from ds_parity.planning.rollout import PreferencePair, Rollout, Unit


def plain(value: Any) -> Any:
    """Return what a tensor, an array or a number of one of these libraries stands for, and anything else as it is.

    A tensor is equal to itself alone as a key, so that each rollout would be a group of its own.
    """
    # Torch's and numpy's alike; this room imports neither.
    if type(value) is tuple:
        return tuple(plain(part) for part in value)
    return value.tolist() if hasattr(value, "tolist") else value


def refuse_what_is_no_key(said: str, key: Any) -> None:
    """Raise where rollouts can't be put together by an id.

    Args:
        said: which one it is, and what, up to the comma.
        key: the id, `plain`.

    Raises:
        ConfigError: it is no key of a dict, or not equal to itself (NaN).
    """
    try:
        hash(key)
    except TypeError:
        raise ConfigError(
            f"{said}, which can be no key of a dict: rollouts are put together by it; give a text or a number, or "
            "where it is a list of messages or token ids, their text or tuple(ids)"
        ) from None
    if key != key:  # noqa: PLR0124  (as NaN)
        raise ConfigError(f"{said}, which is not equal to itself: no two rollouts would be of one prompt; number them")


def refuse_two_kinds(prompt_ids: Iterable[Any]) -> None:
    """Raise ConfigError where one id comes as a text and as something else (a number): it would be two prompts.

    Ranks that read their ids from files of other kinds (a JSON's keys are texts) give one so.

    Args:
        prompt_ids: all of them, `plain`.
    """
    known = set(prompt_ids)
    texts = {key for key in known if isinstance(key, str)}
    if len(texts) in (0, len(known)):
        return
    longest = max(map(len, texts))
    for key in known - texts:
        if (written := _written(key, longest)) in texts:
            raise ConfigError(
                f"prompt ids are {key!r} ({type(key).__name__}) and {written!r} (a text), which are two, though they "
                "read alike: give all of them as one kind, on every rank"
            )


def _written(key: Any, longest: int) -> str | None:
    """Return the text of a key; None where it has none, or one that is longer than any it could be compared with."""
    if key is None or (isinstance(key, tuple) and _least_length(key) > longest):
        return None
    try:
        return str(key)
    except Exception:  # of a class that says so
        return None


def _least_length(key: tuple[Any, ...]) -> int:
    return sum(len(part) if isinstance(part, str) else 1 for part in key)


def by_value(units: Iterable[Unit]) -> list[Unit]:
    """Return the units, those anew whose ids are tensors or arrays, with what these stand for."""
    return [_by_value(unit) if _has_others(unit.prompt_id) or _has_others(unit.rollout_id) else unit for unit in units]


def tokens_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return tokens as they can be compared; they may be a list, an array or a tensor."""
    return tokens if type(tokens) is tuple else tuple(plain(tokens))


def _has_others(key: Any) -> bool:
    # Of a million rollouts nearly all have a text or a number.
    kind = type(key)
    if kind is str or kind is int or key is None:
        return False
    return any(map(_has_others, key)) if kind is tuple else hasattr(key, "tolist")


def _by_value(unit: Unit) -> Unit:
    if isinstance(unit, PreferencePair):
        return replace(unit, chosen=_with_plain_ids(unit.chosen), rejected=_with_plain_ids(unit.rejected))
    return _with_plain_ids(unit)


def _with_plain_ids(rollout: Rollout) -> Rollout:
    return replace(rollout, prompt_id=plain(rollout.prompt_id), rollout_id=plain(rollout.rollout_id))
