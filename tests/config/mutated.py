"""Configurations that went wrong: those that people write, with a few mutations each, and what must come of them."""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from ds_parity.config import load_config, rewrite
from ds_parity.config.settings import AUTO, BATCH, MICRO, PASSES, SECTION, STEPS
from ds_parity.errors import ConfigError

CORPUS = sorted(
    path
    for folder in (Path(__file__).parent / "corpus", Path(__file__).parents[2] / "ds_configs")
    for path in folder.glob("*.json")
)
SOURCES = [load_config(path) for path in CORPUS]
RANKS = (1, 2, 3, 4, 8, 1024)

# Values that somebody wrote where something else belongs, or that come from another program.
NUMBERS = [0, 1, -1, 2, 7, 2**31 - 1, 2**31, 10**400, 0.0, 0.5, -0.0, 1e-300, 1e308, 8.0, math.inf, math.nan]
WORDS = ["", "auto", "Auto", "none", "8", "1e5", "true", "fp16", "fp32", "torch.float16", "sum", "\x00", "ü" * 300]
REST = [[], {}, [1], {"enabled": True}, {"enabled": "auto"}, {"stage": 3}, [[[]]], (1, 2), b"8", {1, 2}, object, 3 + 4j]
STRANGE = [None, True, False, *NUMBERS, *WORDS, *REST]
# Keys of DeepSpeed, and of ds_parity, that may be put anywhere; and what is no key.
KEYS = [
    *(PASSES, SECTION, MICRO, BATCH, STEPS, "gradient_acumulation_passes", "ds-parity", "count", "trace", "lookahead"),
    *("gradient_clipping", "fp16", "bf16", "bfloat16", "zero_optimization", "stage", "enabled", "elasticity"),
    *("managed_gradient_accumulation", "gradient_allreduce_op", "gradient_predivide_factor", "sequence_parallel_size"),
    *("prescale_gradients", "communication_data_type", "optimizer", "type", "offload_optimizer", "zenflow", "compile"),
    *(
        "torch_autocast",
        "dtype",
        "compute_grad_norm",
        "hybrid_engine",
        "elastic_checkpoint",
        "data_types",
        "autotuning",
    ),
    *("", 8, None, True),
]


def sections(config):
    """Every mapping in a configuration, with its path."""
    mappings, waiting = [], [((), config)]
    while waiting:
        path, node = waiting.pop()
        mappings.append((path, node))
        waiting += [((*path, key), value) for key, value in node.items() if isinstance(value, dict)]
    return mappings


@dataclass
class Mutated:
    """A configuration, for how many ranks, and the paths of what was changed in it."""

    config: dict
    ranks: int
    touched: list = field(default_factory=list)


def mutate(random):
    """Return a configuration of the corpus with one to four things wrong, or merely changed.

    Args:
        random: a `random.Random`, or hypothesis's own.
    """
    made = Mutated(copy.deepcopy(random.choice(SOURCES)), random.choice(RANKS))
    for _ in range(random.randint(1, 4)):
        path, section = random.choice(sections(made.config))
        how = random.choice(_MUTATIONS)
        made.touched += [(*path, key) for key in how(random, section)]
    return made


def mutants():
    """A hypothesis strategy of `mutate`."""
    return st.randoms(use_true_random=False).map(mutate)


def _key(random, section):
    return random.choice(sorted(section, key=str)) if section else random.choice(KEYS)


def _take_out(random, section):
    key = _key(random, section)
    section.pop(key, None)
    return [key]


def _change(random, section):
    key = _key(random, section)
    section[key] = copy.copy(random.choice(STRANGE))
    return [key]


def _nudge(random, section):
    numbers = [key for key, value in section.items() if isinstance(value, int | float) and abs(value) < 1e300]
    if not numbers:
        return []
    key = random.choice(sorted(numbers, key=str))
    section[key] = random.choice(
        (section[key] + 1, section[key] * 2, -section[key], float(section[key]), str(section[key]))
    )
    return [key]


def _put_in(random, section):
    key = random.choice(KEYS)
    section[key] = copy.deepcopy(random.choice([*STRANGE, *random.choice(SOURCES).values()]))
    return [key]


def _misspell(random, section):
    key = _key(random, section)
    if not isinstance(key, str) or len(key) < 2 or key not in section:
        return []
    at = random.randrange(len(key) - 1)
    wrong = random.choice((key[:at] + key[at + 1 :], key[:at] + key[at + 1] + key[at] + key[at + 2 :], key.upper()))
    section[wrong] = section.pop(key)
    return [key, wrong]


def _bury(random, section):
    key = _key(random, section)
    section[key] = {key: section.get(key)}
    return [key]


_MUTATIONS = (_take_out, _change, _change, _nudge, _put_in, _misspell, _bury)


def outcome(made):
    """Rewrite, and return what came of it: a Rewrite, or a ConfigError. Anything else that is raised is a fault.

    Raises:
        AssertionError: the answer is not what was promised.
    """
    before = repr(made.config)
    result = _answer(made)
    assert repr(made.config) == before, "the input was changed"
    if isinstance(result, ConfigError):
        assert _names_one(str(result), made.touched), (str(result), made.touched)
    else:
        _is_fixed_point(made, result)
    return result


def _answer(made):
    try:
        return rewrite(made.config, made.ranks)
    except ConfigError as error:
        return error


def _names_one(message, touched):
    # What is wrong may be another key than what was touched only where the two must agree.
    batch = {PASSES, MICRO, BATCH, STEPS}
    named = {str(part) for path in touched for part in path}
    return any(key in message for key in named | (batch if named & batch else set()))


def _is_fixed_point(made, result):
    assert not {PASSES, SECTION} & result.config.keys()
    extras = {key: made.config[key] for key in (PASSES, SECTION) if key in made.config}
    again = rewrite({**result.config, **extras}, made.ranks)
    assert repr(again.config) == repr({**result.config}), (again.config, result.config)
    assert again.settings == result.settings


def filled_in(config):
    """A configuration whose batch is "auto", as the Hugging Face Trainer hands it on: with a micro-batch of 1."""
    if config.get(MICRO) != AUTO:
        return config
    rest = {key: value for key, value in config.items() if key not in (BATCH, STEPS) or value != AUTO}
    return {**rest, MICRO: 1}


def plain(config, ranks):
    """The configuration that DeepSpeed would get without ds_parity: none of its keys, a batch that fits any ranks."""
    left_out = (PASSES, SECTION, MICRO, BATCH, STEPS)
    return {**{key: value for key, value in config.items() if key not in left_out}, BATCH: ranks}
