"""The extra keys of the DeepSpeed JSON: what they mean, and the strict reading of them."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_parity.config.faults import ABSENT, Fault, nearest, refuse
from ds_parity.errors import ConfigError

PASSES: Final = "gradient_accumulation_passes"
MICRO: Final = "train_micro_batch_size_per_gpu"
BATCH: Final = "train_batch_size"
STEPS: Final = "gradient_accumulation_steps"
SECTION: Final = "ds_parity"
AUTO: Final = "auto"

# Counts travel between ranks as int64: with this bound passes x micro-batch can't overflow there.
MAX_COUNT: Final = 2**31 - 1
COUNT_RULE: Final = f"must be a whole number from 1 to {MAX_COUNT}"
# Each exchange has as many places as passes are looked ahead, whether they are filled or not. With 4,096 it takes about
# 35 ms and 200 kB from each rank (measured on 2 ranks, 7 to 14 us a place); with a million, 10 s or more.
MAX_LOOKAHEAD: Final = 4096
# Torch counts milliseconds, and gloo nanoseconds in 64 bits: from the first to a year.
MIN_SECONDS: Final = 0.001
MAX_SECONDS: Final = 31_536_000
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]

# DeepSpeed's own keys that read much like ds_parity's. A key that is closer to one of these is no misspelling.
_DEEPSPEED_NEIGHBOURS: Final = frozenset({STEPS, MICRO, BATCH, "managed_gradient_accumulation"})


class TermSettings(BaseModel):
    """One term of the loss, as the configuration has it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    weight: Literal["rollout", "token", "pass", "target", "weight"] = "rollout"
    coefficient: float = Field(default=1.0, allow_inf_nan=False)


class Settings(BaseModel):
    """The extra keys, checked. Frozen; `gradient_accumulation_passes`, or `boundary: caller`, switches ds_parity on."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    gradient_accumulation_passes: Count | None = Field(
        default=None,
        description="The target is this key × `train_micro_batch_size_per_gpu`: the number of rollouts (or prompts, "
        "see `count`) that one optimizer step consumes on all data-parallel ranks together. If "
        "micro-batches contain more or fewer, a window has fewer or more passes. Without this key "
        "DeepSpeed's own engine is returned, unless `ds_parity.boundary` is `caller`, where the key may "
        "be left out.",
    )
    train_micro_batch_size_per_gpu: Count | Literal["auto"] = Field(
        description="DeepSpeed's key: the nominal number of rollouts in a micro-batch of one rank. `auto` if the "
        "Trainer of transformers fills it in. It may be left out if `train_batch_size` is given, and is "
        "then `train_batch_size` / `gradient_accumulation_passes`."
    )
    boundary: Literal["rollouts", "caller"] = Field(
        default="rollouts",
        description="What ends a window. `rollouts`: its counts reach the target. `caller`: the caller calls "
        "`step()`, after any number of `backward()` calls.",
    )
    count: Literal["rollout", "prompt"] = Field(
        default="rollout", description="What the target counts: rollouts, or prompts whose rollouts are complete."
    )
    overshoot: Literal["carry", "reset", "error"] = Field(
        default="carry",
        description="What happens to a surplus over the target. `carry`: it counts for the next window of the same "
        "data. `reset`: it is not counted. `error`: it is a `WindowError`.",
    )
    loss_reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="How the loss of a micro-batch was reduced: the mean over its units of weight, or their sum.",
    )
    loss_weight: Literal["rollout", "token", "pass", "target", "weight", "divided"] = Field(
        default="rollout",
        description="The unit that a step averages over. `rollout`, `token`, `pass`: each of these has the same "
        "weight. `target`: the sum is divided by the constant target (Dr. GRPO, PipelineRL). `weight`: "
        "each micro-batch brings its own weight, `backward(loss, weight=...)`. `divided`: the caller has "
        "already divided every loss by the denominator of the step.",
    )
    across_ranks: Literal["sum", "mean"] | None = Field(
        default=None,
        description="Only with `loss_weight: divided`: how the losses of the ranks combine. `sum`: they add up, "
        "because each was divided by a denominator of all ranks. `mean`: they are averaged, because each "
        "was divided by a denominator of its own rank, or was multiplied by the number of ranks.",
    )
    terms: Annotated[dict[str, TermSettings], Field(min_length=1, max_length=100)] | None = Field(
        default=None,
        description="The terms of the loss by name, each with the unit of its own mean and a coefficient. Example: "
        '{"policy": {"weight": "token"}, "kl": {"weight": "rollout", "coefficient": 0.05}} for '
        '`backward({"policy": a, "kl": b})`. It replaces `loss_weight`.',
    )
    lr_progress: Literal["optimizer_step", "rollout"] = Field(
        default="optimizer_step",
        description="What moves the learning-rate scheduler: each optimizer step moves it by one step, or it stands "
        "at rollouts consumed / target, with `count` `prompt` at prompts / target: exactly there if its rates are a "
        "function of its step (all of DeepSpeed's, LambdaLR), at the last whole step if not. A skipped step counts "
        "none.",
    )
    last_window: Literal["step", "drop", "error"] = Field(
        default="step",
        description="What happens to an unfinished window at the end of the data. `step`: it becomes a step, divided "
        "by what it contains. `drop`: it is discarded. `error`: it is a `WindowError`.",
    )
    lookahead: Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)] | Literal["window"] = Field(
        default=0,
        description="The number of passes that are read ahead, and whose counts are exchanged together: 0 to 4096. "
        "Each exchange costs as much as this number of passes, even if fewer remain. `window`: `passes()` "
        "reads until this rank's micro-batches would fill a window, so the "
        "window's total is always known.",
    )
    exchange_timeout: float = Field(
        default=600.0,
        ge=MIN_SECONDS,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="The number of seconds that each wait for other ranks may take in a pass: for their counts, and "
        "in DeepSpeed's own collective operations over gloo. Those over NCCL keep NCCL's limit.",
    )
    trace: Annotated[str, Field(pattern=r"^[^\x00]+$")] | None = Field(
        default=None, description="The path of a trace to write (JSON Lines), or null for none."
    )

    @property
    def target(self) -> int:
        """What closes a window, summed over all data-parallel ranks: passes x micro-batch size.

        Where the caller closes windows it is nominal, and 0 where `gradient_accumulation_passes` is left out.

        Raises:
            ConfigError: the micro-batch size is still "auto".
        """
        if self.gradient_accumulation_passes is None:
            return 0
        if isinstance(self.train_micro_batch_size_per_gpu, int):
            return self.gradient_accumulation_passes * self.train_micro_batch_size_per_gpu
        raise ConfigError(
            f'{MICRO} = "auto": the target, {PASSES} ({self.gradient_accumulation_passes}) x {MICRO}, is not known '
            f"until something fills it in; write a whole number, or let the Hugging Face Trainer start DeepSpeed, "
            f"which puts its per_device_train_batch_size there"
        )

    @property
    def passes(self) -> int:
        """`gradient_accumulation_passes`; 0 where the caller closes windows and it is left out."""
        return self.gradient_accumulation_passes or 0

    @property
    def by_caller(self) -> bool:
        """Whether the caller's `step()` closes a window, and not its counts."""
        return self.boundary == "caller"

    @property
    def fingerprint(self) -> int:
        """24 bits that agree on two ranks exactly where their settings do; `trace` may differ, and is left out."""
        canonical = json.dumps(self.model_dump(exclude={"trace"}), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:3], "big")


_TOP_LEVEL: Final = (PASSES, MICRO)
_WHOLE: Final = (PASSES, MICRO, "lookahead")
SECTION_FIELDS: Final = tuple(name for name in Settings.model_fields if name not in _TOP_LEVEL)
_RULES: Final[Mapping[str, str]] = {
    PASSES: COUNT_RULE,
    MICRO: f'{COUNT_RULE}, or "auto"',
    "lookahead": f'must be a whole number from 0 to {MAX_LOOKAHEAD}, or "window"',
    "terms": 'must be an object of terms by name, each {"weight": "rollout", "token", "pass", "target" or "weight", '
    '"coefficient": a finite number}',
    "exchange_timeout": f"must be a finite number of seconds, greater than 0 (at least {MIN_SECONDS}) and at most "
    f"{MAX_SECONDS} (a year)",
    "trace": "must be the path of a file, without a NUL byte, or null",
}


def key_path(field: str) -> str:
    """Return the path of a field of `Settings` in the JSON, such as `ds_parity.overshoot`."""
    return field if field in _TOP_LEVEL else f"{SECTION}.{field}"


def parse(config: Mapping[str, Any]) -> Settings | None:
    """Read the extra keys of a configuration.

    Args:
        config: an extended configuration, as `load_config` reads it.

    Returns:
        The settings; None where `gradient_accumulation_passes` is absent, and `ds_parity.boundary` is not `caller`.

    Raises:
        ConfigError: one message for all faults of the extra keys, each with its path, value, rule and way out.
    """
    if not isinstance(config, Mapping):
        refuse([Fault("config", config, "must be an object of keys and values", "load_config reads one from a file")])
    faults = _misspelt(config)
    if PASSES in config or _by_caller(config):
        return _read(config, faults)
    if SECTION in config and not faults:
        way_out = (
            f'add for example "{PASSES}": 64, or "{SECTION}": {{"boundary": "caller"}} where your step() ends each '
            "window, or remove the section for plain DeepSpeed"
        )
        faults.append(Fault(SECTION, config[SECTION], f"has no effect without {PASSES}", way_out))
    refuse(faults)
    return None


def _by_caller(config: Mapping[str, Any]) -> bool:
    section = config.get(SECTION)
    return isinstance(section, Mapping) and section.get("boundary") == "caller"


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number that counts something: an int, at least 1, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def _misspelt(config: Mapping[str, Any]) -> list[Fault]:
    """Return the keys that DeepSpeed would ignore in silence, though somebody meant one of ds_parity's."""
    own = {PASSES, SECTION}
    known = own | _DEEPSPEED_NEIGHBOURS
    faults = []
    for key in config:
        meant = None if key in known else nearest(key, known)
        if meant in own:
            faults.append(Fault(key, config[key], "DeepSpeed ignores it in silence", f'did you mean "{meant}"?'))
        elif key in SECTION_FIELDS and (PASSES in config or _by_caller(config)):
            way_out = f'move it into the section: "{SECTION}": {{"{key}": ...}}'
            faults.append(Fault(key, config[key], "DeepSpeed ignores it at the top level", way_out))
    return faults


def _read(config: Mapping[str, Any], faults: list[Fault]) -> Settings:
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        way_out = f'write for example "{SECTION}": {{"overshoot": "carry"}}, or leave it out for the defaults'
        faults.append(Fault(SECTION, section, "must be an object", way_out))
        section = {}
    faults += [_unknown(key, value) for key, value in section.items() if key not in SECTION_FIELDS]
    values = {key: value for key, value in section.items() if key in SECTION_FIELDS}
    values |= {MICRO: _micro(config, faults)}
    if PASSES in config:
        values[PASSES] = config[PASSES]
        if config[PASSES] is None and not _by_caller(config):
            faults.append(_wrong(PASSES, None))
    faults += [*_of_divided(values), *_of_terms(values), *_of_no_use(values)]
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_input=False))
        refuse([*faults, *(_wrong(name, values[name]) for name in wrong)])
        raise  # not reached: pydantic names at least one field
    refuse(faults)
    return settings


def _micro(config: Mapping[str, Any], faults: list[Fault]) -> Any:
    """Return the micro-batch size as given, or computed from train_batch_size; "auto" where a fault is added."""
    if config.get(MICRO) is not None:
        return config[MICRO]
    passes, batch = config.get(PASSES), config.get(BATCH)
    if passes is not None and not is_count(passes):
        return AUTO
    if passes is None or not is_count(batch):
        rule = f"nothing says how many rollouts a micro-batch holds ({BATCH} is no whole number either)"
        if passes is None:
            rule = f"nothing says how many rollouts a micro-batch holds where {PASSES} is left out"
        faults.append(Fault(MICRO, config.get(MICRO, ABSENT), rule, f'add for example "{MICRO}": 1'))
        return AUTO
    if batch % passes:
        division = f"{batch} / {passes} = {batch / passes:.4g}"
        rule = f"must be a multiple of {PASSES} ({passes}) where {MICRO} is absent: {division}"
        way_out = f"write {BATCH}: {max(1, batch // passes) * passes}, or give {MICRO} and leave {BATCH} out"
        faults.append(Fault(BATCH, batch, rule, way_out))
        return AUTO
    return batch // passes


def _of_no_use(values: Mapping[str, Any]) -> list[Fault]:
    """Return the keys that mean nothing where the caller closes windows, or need a target that nobody gives."""
    if values.get("boundary") != "caller":
        return []
    faults = []
    if "overshoot" in values:
        rule = "has no meaning with ds_parity.boundary caller: a window has no surplus where step() ends it"
        faults.append(Fault(f"{SECTION}.overshoot", values["overshoot"], rule, "leave it out"))
    if values.get("lookahead") == "window":
        rule = "reads until a window is full, and with ds_parity.boundary caller step() ends it, wherever that is"
        faults.append(Fault(f"{SECTION}.lookahead", "window", rule, "call engine.expect(...) before each window"))
    if values.get(PASSES) is None:
        rule, way_out = (
            f"needs a nominal target, and with ds_parity.boundary caller only {PASSES} gives one",
            f'add for example "{PASSES}": 64',
        )
        for key, value in (("lr_progress", "rollout"), ("loss_weight", "target")):
            if values.get(key) == value:
                faults.append(Fault(f"{SECTION}.{key}", value, rule, way_out))
        terms = values.get("terms")
        named = terms.values() if isinstance(terms, Mapping) else ()
        if any(isinstance(one, Mapping) and one.get("weight") == "target" for one in named):
            faults.append(Fault(f"{SECTION}.terms", terms, f"a weight of target {rule}", way_out))
    return faults


def _of_divided(values: Mapping[str, Any]) -> list[Fault]:
    """Return what is missing beside losses that their caller divides, or means nothing there."""
    across, reduction = f"{SECTION}.across_ranks", f"{SECTION}.loss_reduction"
    if values.get("loss_weight") != "divided":
        if values.get("across_ranks") is None:
            return []
        rule = "has a meaning with ds_parity.loss_weight divided alone: elsewhere the step has one denominator"
        return [Fault(across, values["across_ranks"], rule, "leave it out")]
    faults = []
    if values.get("across_ranks") is None:
        rule = "must be said with ds_parity.loss_weight divided: nothing shows what the caller has divided by"
        way_out = (
            '"sum" where it is a denominator of all ranks, "mean" where it is one of each rank, or multiplied by them'
        )
        faults.append(Fault(across, values.get("across_ranks", ABSENT), rule, way_out))
    if "loss_reduction" in values:
        rule = "has no meaning with ds_parity.loss_weight divided: passes add up as they are"
        faults.append(Fault(reduction, values["loss_reduction"], rule, "leave it out"))
    return faults


def _of_terms(values: Mapping[str, Any]) -> list[Fault]:
    """Return what contradicts several terms of the loss."""
    if values.get("terms") is None or "loss_weight" not in values:
        return []
    rule = "is said by each term of ds_parity.terms for itself"
    return [Fault(f"{SECTION}.loss_weight", values["loss_weight"], rule, "leave it out")]


def _unknown(key: Any, value: Any) -> Fault:
    if key in (*_TOP_LEVEL, BATCH, STEPS):
        return Fault(f"{SECTION}.{key}", value, "belongs at the top level", f"move it out of {SECTION}")
    return Fault(f"{SECTION}.{key}", value, "is not a key of this section", _did_you_mean(key, SECTION_FIELDS))


def _wrong(name: str, value: Any) -> Fault:
    if name == PASSES and value == AUTO:
        rule = "nothing can fill it in: neither DeepSpeed nor the Hugging Face Trainer has an argument for it"
        return Fault(PASSES, value, rule, f'write the number, for example "{PASSES}": 64')
    choices = _choices(Settings.model_fields[name].annotation)
    if name in _RULES:
        return Fault(key_path(name), value, _RULES[name], _number_way_out(name, value))
    rule = f"must be one of {', '.join(_quoted(choices))}"
    return Fault(key_path(name), value, rule, _did_you_mean(value, choices))


def _choices(annotation: Any) -> tuple[str, ...]:
    # Of `Literal[...]`, and of `Literal[...] | None`.
    parts = get_args(annotation)
    return tuple(word for part in parts for word in (get_args(part) or (part,)) if isinstance(word, str))


def _did_you_mean(word: Any, options: Collection[str]) -> str:
    meant = nearest(word, options, cutoff=0.6)
    return f'did you mean "{meant}"?' if meant else f"choose from {', '.join(_quoted(options))}, or leave it out"


def _number_way_out(name: str, value: Any) -> str:
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        return f"write {int(value)} without the quotes"
    if isinstance(value, float) and value.is_integer() and name in _WHOLE:
        return f"write {int(value)} without the decimal point" if is_count(int(value)) else "write a whole number"
    most = {"lookahead": MAX_LOOKAHEAD, "exchange_timeout": MAX_SECONDS}.get(name)
    if most is not None and isinstance(value, int | float) and most < value < math.inf:
        return f"write {most} or less"
    if name in _TOP_LEVEL:
        return f'write for example "{name}": {64 if name == PASSES else 1}'
    return f"leave it out for the default, {json.dumps(Settings.model_fields[name].default)}"


def _quoted(words: Collection[str]) -> list[str]:
    return [f'"{word}"' for word in words]
