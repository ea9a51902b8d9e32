"""Rollouts to train on, the bundled GSM8K solutions or a user's own: byte tokens and group-relative advantages."""

import difflib
import json
import lzma
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ds_parity.errors import ConfigError
from ds_parity.parity.data.tokenizing import BOS, BYTES, EOS, PAD, VOCAB, Tokens
from ds_parity.planning.advantages import group_advantages
from ds_parity.planning.rollout import Rollout
from ds_parity.planning.turns import by_turn
from ds_parity.values import Repeated, object_of

_NEWLINE = 10

__all__ = ["BOS", "EOS", "PAD", "VOCAB", "informative", "line_turns", "load_rollouts", "shorten"]

_KEYS = ("prompt_id", "prompt", "completion", "reward", "advantage")


class _Sample(NamedTuple):
    """One line as it was read; `advantage` is None where the group decides.

    `where` is the line, as it is named in errors.
    """

    prompt_id: str
    prompt: str
    completion: str
    reward: float
    advantage: float | None
    where: str


def load_rollouts(path: Path | None = None, tokens: Tokens = BYTES) -> tuple[Rollout, ...]:
    """Read rollouts in file order, with their advantages.

    Args:
        path: a file of JSON lines `{"prompt_id"?: str, "prompt": str, "completion": str, "reward": number,
            "advantage"?: number}`; without `prompt_id`, equal prompts form a group; without `advantage`, it is the
            reward's place in its group (`group_advantages`). Blank lines and further keys are passed over. None takes
            the bundled set: 1,319 GSM8K questions with four solutions each, reward 1 (right) or 0.
        tokens: what makes tokens of the text; by default BOS, the prompt's UTF-8 bytes, the completion's bytes and EOS,
            all in [0, VOCAB).

    Returns:
        The rollouts; each has a prompt token and a loss token.

    Raises:
        ConfigError: the file can't be read or is empty, or a line breaks the form or gives a key more than once; names
            file, line, key and rule.
    """
    samples = tuple(_bundled() if path is None else _read(path))
    relative = group_advantages([sample.prompt_id for sample in samples], [sample.reward for sample in samples])
    return tuple(_rollout(sample, default, tokens) for sample, default in zip(samples, relative, strict=True))


def informative(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """Return, in order, the rollouts whose advantage is not 0: those that have a policy gradient."""
    return tuple(rollout for rollout in rollouts if rollout.advantage != 0)


def shorten(rollouts: Iterable[Rollout], max_tokens: int) -> tuple[Rollout, ...]:
    """Trim each rollout to at most `max_tokens` tokens, for models with a short context.

    The prompt loses tokens from its left (its first token, BOS, stays); only where that is not enough does the
    completion lose tokens at its end. At least one loss token is left.

    Raises:
        ConfigError: `max_tokens` is below 2, the room for BOS and one loss token.
    """
    if max_tokens < 2:
        raise ConfigError(f"max_tokens = {max_tokens}: BOS and one loss token need at least 2; give 2 or more")
    return tuple(_shortened(rollout, max_tokens) for rollout in rollouts)


def line_turns(rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
    """Yield each rollout as one sequence per turn; its turns are the lines of its completion, the last one with EOS."""
    for number, rollout in enumerate(rollouts):
        breaks = (
            at + 1 for at in range(rollout.prompt_length, len(rollout.tokens) - 2) if rollout.tokens[at] == _NEWLINE
        )
        edges = [rollout.prompt_length, *breaks, len(rollout.tokens)]
        yield from by_turn(rollout, list(pairwise(edges)), f"{rollout.prompt_id}/{number}")


def _shortened(rollout: Rollout, max_tokens: int) -> Rollout:
    surplus = len(rollout.tokens) - max_tokens
    if surplus <= 0:
        return rollout
    kept = max(rollout.prompt_length - surplus, min(rollout.prompt_length, 1))
    start = rollout.prompt_length - kept + 1
    return replace(rollout, tokens=(rollout.tokens[:1] + rollout.tokens[start:])[:max_tokens], prompt_length=kept)


def _rollout(sample: _Sample, default: float, tokens: Tokens) -> Rollout:
    prompt, completion = tokens.prompt(sample.prompt), tokens.completion(sample.completion)
    for name, ids in (("prompt", prompt), ("completion", completion)):
        if not ids:
            raise ConfigError(
                f"{sample.where}: the tokenizer makes no tokens of the {name} {getattr(sample, name)!r}, and a rollout "
                "needs one of each; leave the line out"
            )
    return Rollout(
        prompt_id=sample.prompt_id,
        tokens=(*prompt, *completion),
        prompt_length=len(prompt),
        reward=sample.reward,
        advantage=default if sample.advantage is None else sample.advantage,
    )


def _bundled() -> Iterator[_Sample]:
    packed = (resources.files("ds_parity.parity") / "data" / "gsm8k_rollouts.jsonl.xz").read_bytes()
    for index, line in enumerate(lzma.decompress(packed).splitlines()):
        record = json.loads(line)
        for solution, correct in zip(record["solutions"], record["is_correct"], strict=True):
            name = f"gsm8k-{index:04d}"
            yield _Sample(name, record["question"], solution, float(correct), None, f"bundled rollout {name}")


def _read(path: Path) -> Iterator[_Sample]:
    """Yield a user's samples; the file is split at newlines alone, since JSON strings may hold other separators."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror or error}); give a file of JSON lines") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path}: holds no rollouts; give at least one line with the keys prompt, completion, reward")
    for number, line in numbered:
        yield _sample(line, f"{path}:{number}")


def _sample(line: bytes, where: str) -> _Sample:
    try:
        record = json.loads(line, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); each line holds one JSON object") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON {type(record).__name__}; each line holds one JSON object")
    if isinstance(record, Repeated):
        raise ConfigError(
            f"{where}: key {record.twice[0]!r} is given more than once: which of them would count is not defined; keep "
            "one"
        )
    _refuse_near_misses(record, where)
    prompt, completion = _text(record, "prompt", where), _text(record, "completion", where)
    if not completion:
        raise ConfigError(
            f"{where}: key 'completion' is empty: the policy wrote nothing there, and nothing can be learned from it; "
            "leave the line out"
        )
    return _Sample(
        prompt_id=_text(record, "prompt_id", where) if "prompt_id" in record else prompt,
        prompt=prompt,
        completion=completion,
        reward=_number(record, "reward", where),
        advantage=_number(record, "advantage", where) if "advantage" in record else None,
        where=where,
    )


def _refuse_near_misses(record: dict[str, Any], where: str) -> None:
    """Raise where an unknown key looks like a known one that the line lacks: it would be passed over in silence."""
    missing = [key for key in _KEYS if key not in record]
    for key in record.keys() - set(_KEYS):
        for meant in difflib.get_close_matches(key, missing, n=1, cutoff=0.85):
            raise ConfigError(f"{where}: key {key!r} is unknown; did you mean {meant!r}? Rename or remove it")


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = _present(record, key, where)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: key {key!r} is {value!r}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: key {key!r} is not Unicode text ({error}); mend its escapes") from error
    return value


def _number(record: dict[str, Any], key: str, where: str) -> float:
    value = _present(record, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: key {key!r} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{where}: key {key!r} is {number}; it must be a finite number")
    return number


def _present(record: dict[str, Any], key: str, where: str) -> Any:
    if key not in record:
        raise ConfigError(f"{where}: key {key!r} is missing; a line needs prompt, completion and reward")
    return record[key]
