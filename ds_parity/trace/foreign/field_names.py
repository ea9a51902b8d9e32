"""Which column is which field of a step: as `--map` says, and otherwise by the names that trainers are known to use."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace.foreign.column_kinds import ColumnKinds
from ds_parity.trace.foreign.source import Source

COUNTS = ("passes", "idle_passes", "rollouts", "prompts", "tokens")
NAMES = ("step", "loss", "lr", "grad_norm", "loss_scale", *COUNTS, "total")

# Counts are read where they are mapped only: a trainer's `tokens` may be those of the step, or of all steps so far.
_KNOWN = {
    "step": {"step", "global_step", "iteration", "iter", "train_step", "optimizer_step"},
    "loss": {"loss", "train_loss", "training_loss", "lm_loss"},
    "lr": {"lr", "learning_rate"},
    "grad_norm": {"grad_norm", "gradient_norm"},
}
_WANDB_STEPS = ("_step", "Step")  # of the calls of wandb.log: taken only where a trainer logs no step of its own
_OF_WANDB = ("_step", "_runtime", "_timestamp")
_SUMMARY = "train/train_loss"  # transformers' mean over the whole run, logged at its end
_SHOWN = 30

Maps = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """The columns that hold a step's fields; `shift` is added to each step."""

    of: dict[str, tuple[str, ...]]
    shift: int
    notes: tuple[str, ...]


def parse_maps(options: Iterable[str]) -> Maps:
    """Field to columns, from `name=column` options. `lr` may be given once a parameter group; `name=` omits a field.

    Raises:
        ConfigError: an option without `=`, another name, or a second column where a step has one value.
    """
    maps: dict[str, tuple[str, ...]] = {}
    for option in options:
        name, separator, column = option.partition("=")
        if not separator or name not in NAMES:
            raise ConfigError(
                f"--map is {option!r}: it must be NAME=COLUMN, for example loss=train/loss, where NAME is one of "
                f"{', '.join(NAMES)}"
            )
        if name in maps and name != "lr":
            raise ConfigError(f"--map {name}= is given twice, {maps[name][0]!r} and {column!r}: only lr has several")
        maps[name] = (*maps.get(name, ()), *[column] * bool(column))
    return maps


def choose(source: Source, kinds: ColumnKinds, maps: Maps) -> ChosenColumns:
    """The columns of a step's fields.

    Args:
        source: for its names in messages.
        kinds: the columns that hold a value somewhere.
        maps: what was asked for; every other field is looked for under known names.

    Raises:
        TraceError: a column that was asked for is absent or can't be read; several have a known name; none has one.
    """
    maps = {"step": (source.step,), **maps} if source.step else maps
    shift = 0
    of: dict[str, tuple[str, ...]] = {}
    if maps.get("step"):
        column, shift = _shifted(maps["step"][0], kinds.readable("step"))
        maps = {**maps, "step": (column,)}
    for name, wanted in maps.items():
        of[name] = tuple(_asked(source, name, column, kinds) for column in wanted)
    guessed = {name: guess for name in _KNOWN if name not in of if (guess := _guess(source, name, kinds))}
    of |= {name: (column,) for name, column in guessed.items()}
    passed_over = tuple(_passed_over(of, kinds))
    of = {name: chosen for name, chosen in of.items() if chosen}
    _require(source, of, kinds, passed_over)
    _refuse_shared(source, of)
    return ChosenColumns(of, shift, (*_notes(guessed, kinds.single, shift), *passed_over))


def _shifted(wanted: str, columns: Iterable[str]) -> tuple[str, int]:
    """A column of steps and what is added to it, from `column`, `column+1` or `column-1`."""
    match = re.fullmatch(r"(.+)([+-]\d{1,15})", wanted)
    if match is None or wanted in columns:
        return wanted, 0
    return match[1], int(match[2])


def _asked(source: Source, name: str, wanted: str, kinds: ColumnKinds) -> str:
    columns, unreadable = kinds.readable(name), kinds.unreadable(name)
    fitting = [wanted] if wanted in columns else [column for column in columns if _metric(column) == wanted]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise TraceError(_ambiguous(source, name, fitting))
    if wanted in unreadable:
        rule = (
            "an LR is a number, or a list with one for each parameter group" if name == "lr" else "it must be a number"
        )
        raise TraceError(
            f"{source.path}: {name} was mapped to {wanted!r}, which holds {unreadable[wanted]}: {rule}; log it so, or "
            f"write --map {name}= to leave it out"
        )
    raise TraceError(f"{source.path}: {name} was mapped to {wanted!r}, but {_listed(columns)}")


def _known_as(name: str, columns: Iterable[str]) -> list[str]:
    return [column for column in columns if column not in (*_WANDB_STEPS, _SUMMARY) and _plain(column) in _KNOWN[name]]


def _passed_over(of: Maps, kinds: ColumnKinds) -> Iterator[str]:
    """What would be read if it were no objects and lists: columns that were chosen, and those of known names."""
    for name in dict.fromkeys((*_KNOWN, *of)):
        unreadable = kinds.unreadable(name)
        for column in of[name] if name in of else _known_as(name, unreadable):
            if column in unreadable:
                where = " in some rows" if name in of else ""
                yield f"the column {column!r} holds {unreadable[column]}{where}, which are not read"


def _guess(source: Source, name: str, kinds: ColumnKinds) -> str | None:
    columns = kinds.readable(name)
    fitting = _known_as(name, columns)
    if name == "step" and not fitting:
        fitting = [column for column in _WANDB_STEPS if column in columns]
    if len(fitting) > 1:
        raise TraceError(_ambiguous(source, name, fitting))
    return fitting[0] if fitting else None


def _metric(column: str) -> str:
    """The metric of a column that Weights & Biases names `run - metric`; of any other, its name."""
    return column.rpartition(" - ")[2]


def _plain(column: str) -> str:
    """A column's name as trainers agree on it: `train/learning-rate`, `Learning Rate` are both learning_rate."""
    name = re.sub(r"[ \-]+", "_", _metric(column).lower()).replace(".", "/")
    return re.sub(r"^(train|training|trainer)/", "", name)


def _require(source: Source, of: Maps, kinds: ColumnKinds, passed_over: Iterable[str]) -> None:
    there = "; ".join((_listed(kinds.readable("lr")), *passed_over))
    if "step" not in of:
        raise TraceError(f"{source.path}: no column of steps, and {there}; write --map step=COLUMN")
    if len(of) == 1:
        raise TraceError(
            f"{source.path}: no column of numbers goes by a known name of loss, lr or grad_norm, and {there}; write "
            "--map loss=COLUMN"
        )


def _refuse_shared(source: Source, of: Maps) -> None:
    user: dict[str, str] = {}
    for name, wanted in of.items():
        for column in wanted:
            if user.setdefault(column, name) != name:
                raise TraceError(
                    f"{source.path}: {column!r} is both {user[column]} and {name}: a column is one of them"
                )


def _ambiguous(source: Source, name: str, fitting: list[str]) -> str:
    ways = " or ".join(f"--map '{name}={column}'" for column in fitting[:_SHOWN])
    return f"{source.path}: {len(fitting)} columns could be {name}: write {ways}"


def _listed(columns: Iterable[str]) -> str:
    names = [repr(column) for column in columns]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the columns that hold values are {', '.join(names[:_SHOWN]) or 'none'}{more}"


def _of_wandb(column: str) -> bool:
    """Whether Weights & Biases names a column so: those of every row, and those of a chart's export (`run - loss`)."""
    return column in _OF_WANDB or " - " in column


def _notes(guessed: Mapping[str, str], columns: Iterable[str], shift: int) -> Iterable[str]:
    other = [f"{name} is {column!r}" for name, column in guessed.items() if column != name]
    if other:
        yield f"by their names, {', '.join(other)}"
    if guessed.get("step") in _WANDB_STEPS and any(_of_wandb(column) for column in columns):
        yield f"{guessed['step']!r} counts the calls of wandb.log: map step to another column if a step takes several"
    if shift:
        yield f"{shift:+d} is added to each of its steps, as asked for"
