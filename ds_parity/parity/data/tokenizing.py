"""Text to token ids: UTF-8 bytes, or a tokenizer of the user's own, from a folder or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_parity.errors import ConfigError

BOS = 256
EOS = 257
PAD = 258
VOCAB = 260  # 256 bytes, three special tokens and one that is never used, to make it even

_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Tokens:
    """How the text of rollouts becomes tokens.

    Attributes:
        encode: called with a text, and with whether it is a prompt; returns ids. A prompt begins as the tokenizer says,
            and a completion is its own tokens alone.
        end: the token behind every completion; None: there is none.
        size: ids are in [0, size).
    """

    encode: Callable[[str, bool], Sequence[int]]
    end: int | None
    size: int

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        tokens = tuple(self.encode(text, True))
        # Tokenizers that end every text would end the rollout before its completion.
        return tokens[:-1] if self.end is not None and len(tokens) > 1 and tokens[-1] == self.end else tokens

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a completion."""
        tokens = tuple(self.encode(text, False))
        return tokens if self.end is None else (*tokens, self.end)


def _bytes(text: str, is_prompt: bool) -> tuple[int, ...]:
    return (BOS, *text.encode()) if is_prompt else tuple(text.encode())


BYTES = Tokens(_bytes, EOS, VOCAB)


def refuse_unknown_tokenizer(path: str) -> None:
    """Refuse a tokenizer that no rank could load, before any rank is started; nothing is loaded.

    Raises:
        ConfigError: there is no such file or folder, or transformers is not installed.
    """
    place = Path(path)
    if not path or not place.exists():
        raise ConfigError(
            f"tokenizer {path!r}: there is no such file or folder; give a {_FILE}, or a folder that save_pretrained() "
            "wrote: nothing is downloaded"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"tokenizer {path!r}: transformers is not installed, and it is read with it: pip install transformers, or "
            "leave the tokenizer out, and text is read as bytes"
        )


@lru_cache(maxsize=4)
def tokens_of(path: str | None) -> Tokens:
    """Return what makes tokens of text: a user's own tokenizer, or bytes where there is none.

    Args:
        path: a folder as `save_pretrained` writes it, or a tokenizer.json. The end of a completion is the tokenizer's
            end-of-sequence token, which a tokenizer.json by itself does not name.

    Raises:
        ConfigError: it can't be read.
    """
    if path is None:
        return BYTES
    refuse_unknown_tokenizer(path)
    place = Path(path)
    # A tokenizer.json does not say which of its tokens ends a text; what lies beside it does.
    folder = place if place.is_dir() else place.parent if (place.parent / "tokenizer_config.json").exists() else None
    try:
        return _of_folder(folder) if folder is not None and (place.is_dir() or place.name == _FILE) else _of_file(place)
    except Exception as error:  # whatever transformers and the readers below it raise
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer {path!r}: can't be read ({type(error).__name__}: {message}); give a {_FILE}, or a folder that "
            "save_pretrained() wrote"
        ) from error


def _of_folder(folder: Path) -> Tokens:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(text: str, is_prompt: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=is_prompt)["input_ids"])

    return Tokens(encode, tokenizer.eos_token_id, len(tokenizer))


def _of_file(path: Path) -> Tokens:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))

    def encode(text: str, is_prompt: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=is_prompt).ids)

    return Tokens(encode, None, tokenizer.get_vocab_size())
