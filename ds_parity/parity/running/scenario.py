"""A scenario: configuration, model, rollouts, ranks and steps, from which every rank builds the same run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ds_parity.config import Settings, parse, refuse_misspelt
from ds_parity.config.autotp import autotp_size
from ds_parity.config.features import Wanted
from ds_parity.errors import ConfigError
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.rollouts import informative, line_turns, load_rollouts, shorten
from ds_parity.parity.data.several_terms import SeveralTerms
from ds_parity.parity.data.tokenizing import tokens_of
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.layouts import (
    Layout,
    collate_layout,
    cut_by,
    full_layout,
    of_one_unit,
    planned_layout,
    ragged_layout,
    uniform_layout,
    weighed,
)
from ds_parity.parity.running.policies import build_policy
from ds_parity.parity.running.shapes import hollow, in_whole_windows, leveled, sloped, streamed, uneven
from ds_parity.planning import Plan, plan
from ds_parity.planning.rollout import MicroBatch, Rollout

# Loss tokens of every rollout in uniform windows that are weighed by tokens.
_LEVEL = 64

# The bundled loss of a micro-batch where its weight says nothing of it: what it is a mean over.
_MEANS = {"weight": "rollout", "divided": "token"}

# A prime, so that the draws of two seeds that people choose are not each other's.
_DRAWS_APART = 7919

# Windows without an idle pass that a `seldom` scenario begins with.
_FULL = 2

# Shapes of loop that end windows by themselves: they exist with `ds_parity.boundary` `caller` alone.
_OF_CALLERS = ("announced", "uneven")

_CHOICES = {
    "shape": ("uniform", "ragged", "overshoot", "rising", "falling", "planned", "hollow", "full", "seldom"),
    "drive": ("loop", "passes", "announced", "uneven"),
    "collation": ("padded", "packed"),
}


@dataclass(frozen=True)
class Scenario:
    """What is run, in plain values that travel to the ranks as JSON.

    Attributes:
        name: also the folder of its traces.
        config: the extended DeepSpeed configuration.
        ranks: data-parallel ranks.
        shape: how rollouts are cut into micro-batches: `uniform` (one in each micro-batch), `ragged` (0 to 5, windows
            that hold the same rollouts on any number of ranks), `overshoot` (ragged, passes that go beyond the target),
            `rising` and `falling` (ragged, the first pass of a window far shorter, or far longer, than the others),
            `planned` (by `plan`: the same windows as `ragged`, micro-batches of at most `micro_batch_tokens`),
            `hollow` (ragged, and the second window has no loss tokens), `full` (every rank has rollouts in every pass),
            or `seldom` (the first two windows full, and the others ragged).
        windows: how many windows' worth of rollouts there are (>= 1).
        seed: of the model's weights, of the choice of rollouts and of the raggedness.
        draw: which raggedness of that seed (>= 0).
        drive: `loop` (counts given to every backward), `passes` (the engine reads the stream), or, where the caller
            ends windows, `announced` (a loop that announces each window's last backward) or `uneven` (ranks leave idle
            passes out, and so run other numbers of backwards).
        max_tokens: rollouts are shortened to this length (>= 2), None: as they are.
        model: `package.module:function`, called with a seed, returns an `nn.Module` from token ids to logits.
            Or `hf:` and the path of a config.json of transformers.
        rollouts: a JSON Lines file of the user's own, None: the bundled ones.
        tokenizer: a folder or a tokenizer.json that makes tokens of their text, None: they are read as bytes.
        short: rollouts that the last window of `ragged` and `overshoot` lacks (0 to target - 1); it stays open.
        objective: `policy_gradient` or `nll`.
        setup: `package.module:function`, called with the model, returns keywords of `initialize` (parameters, a
            client's optimizer, a client's scheduler), None: all parameters of the model.
        context: `package.module:function`, called with a copy of the configuration, returns a context manager in which
            engines build their model (`deepspeed.zero.Init`). References in plain torch build theirs outside of it.
            None: no context.
        built: `package.module:function`, called with every engine once it is built (`engine.compile()`), None: nothing.
        between: `package.module:function`, called with every engine after each window (`engine.offload_states()`),
            None: nothing. References in plain torch have no engine, and call neither.
        sequence_parallel: ranks that share a micro-batch, each with a slice of its tokens (>= 1): `ranks` times as many
            processes run.
        collation: `padded` or `packed`.
        micro_batch_tokens: the most tokens in a planned micro-batch (>= 1).
        turns: planned rollouts are cut into one sequence for each turn (a line of the completion).
        train: `package.module:function` that is called with the engine and its micro-batches and trains; it alone then
            calls the model. None: the bundled loss and loop.
    """

    name: str
    config: dict[str, Any]
    ranks: int = 2
    shape: str = "ragged"
    windows: int = 4
    seed: int = 0
    draw: int = 0
    drive: str = "loop"
    max_tokens: int | None = None
    model: str = "ds_parity.parity.data.model:build"
    rollouts: str | None = None
    tokenizer: str | None = None
    short: int = 0
    objective: str = "policy_gradient"
    setup: str | None = None
    context: str | None = None
    built: str | None = None
    between: str | None = None
    sequence_parallel: int = 1
    collation: Literal["padded", "packed"] = "padded"
    micro_batch_tokens: int = 1024
    turns: bool = False
    train: str | None = None

    def __post_init__(self) -> None:
        # Every command that starts ranks makes a scenario first, and none may judge a key that DeepSpeed ignores.
        refuse_misspelt(self.config)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"scenario {self.name!r}: {name} is {getattr(self, name)!r}, it must be in {known}")
        if self.drive in _OF_CALLERS and not _by_caller(self.config):
            raise ConfigError(
                f"scenario {self.name!r}: drive is {self.drive!r}, a loop that ends windows by itself: set "
                "ds_parity.boundary to 'caller', or choose 'loop' or 'passes'"
            )
        if self.train is not None and _by_caller(self.config):
            raise ConfigError(
                f"scenario {self.name!r}: a training function with ds_parity.boundary 'caller' ends windows where no "
                "reference knows of it; leave train out, or choose boundary 'rollouts'"
            )
        if self.drive == "passes" and not self._totals_known():
            raise ConfigError(
                f"scenario {self.name!r}: drive is 'passes' and the terms of ds_parity.terms have several units, whose "
                "totals must be known beforehand: set ds_parity.lookahead to 'window', or choose drive 'loop'"
            )
        if self._sums_own_weights():
            raise ConfigError(
                f"scenario {self.name!r}: ds_parity.loss_reduction 'sum' where micro-batches bring their own weights: "
                "the bundled loss does not know them, and is a mean; choose 'mean', or give a training function"
            )
        if self.turns and self.shape != "planned":
            raise ConfigError(f"scenario {self.name!r}: turns in {self.shape!r} windows, must be in 'planned' ones")
        if self.collation == "packed" and self.sequence_parallel > 1:
            raise ConfigError(
                f"scenario {self.name!r}: packed rollouts over {self.sequence_parallel} sequence-parallel ranks: the "
                "bundled attention takes whole rows there; choose collation 'padded'"
            )

        if (shared := autotp_size(self.config)) > 1:
            self._refuse_undivided(shared)

    def _refuse_undivided(self, shared: int) -> None:
        if self.sequence_parallel > 1:
            raise ConfigError(
                f"scenario {self.name!r}: tensor_parallel.autotp_size = {shared} and sequence_parallel "
                f"{self.sequence_parallel}: DeepSpeed forgets the groups of one of them; choose one"
            )
        if self.model.startswith("ds_parity.parity.data.model:"):
            raise ConfigError(
                f"scenario {self.name!r}: tensor_parallel.autotp_size = {shared} with the bundled decoder, which "
                "AutoTP has no plan for; give a model of transformers (--model hf:config.json), or one of your own"
            )

    @property
    def settings(self) -> Settings:
        """The extra keys.

        Raises:
            ConfigError: they are absent or can't be right.
        """
        settings = parse(self.config)
        if settings is None:
            raise ConfigError(
                f"scenario {self.name!r}: the configuration has no gradient_accumulation_passes, so there is "
                "nothing to compare with bare DeepSpeed; add the key (or ds_parity.boundary 'caller')"
            )
        return settings

    def _sums_own_weights(self) -> bool:
        if "loss_reduction" not in self.config.get("ds_parity", {}) or self.train is not None:
            return False
        settings = parse(self.config)
        if settings is None or settings.loss_reduction == "mean":
            return False
        return "weight" in (settings.loss_weight, *(term.weight for term in (settings.terms or {}).values()))

    def _totals_known(self) -> bool:
        settings = parse(self.config)
        return settings is None or of_one_unit(settings) or settings.lookahead == "window"

    @property
    def sharing(self) -> int:
        """Ranks that share a micro-batch, by sequence parallelism or by the configuration's AutoTP."""
        return self.sequence_parallel * autotp_size(self.config)

    @property
    def processes(self) -> int:
        """How many processes run it: the data-parallel ranks, and those that share their micro-batches."""
        return self.ranks * self.sharing

    @property
    def dtype(self) -> str:
        """The type that the model computes in: fp32, bf16 or fp16."""
        return Wanted(self.config).autocast or self.storage

    @property
    def storage(self) -> str:
        """The type that the model's weights are kept in: fp32, bf16 or fp16."""
        return Wanted(self.config).half or "fp32"

    def layout(self) -> Layout:
        """Return layout[pass][rank], a tuple of rollouts.

        Raises:
            ConfigError: there are too few rollouts, or uniform windows can't be formed.
        """
        settings = cut_by(self.settings)
        if self.shape == "uniform":
            return self._uniform(settings)
        if self.shape == "planned":
            return planned_layout(self._plan(settings))
        if not 0 <= self.short < settings.target:
            raise ConfigError(f"short is {self.short}: it must be from 0 to the target less 1, {settings.target - 1}")
        least = self.ranks if self.shape == "full" else 1
        pool = self._pool(max(settings.target, least) * (self.windows + 1))
        windows = self.windows - bool(self.short)
        if self.shape == "seldom":
            full = min(_FULL, windows)
            layout = full_layout(pool, self.ranks, settings.target, full, self._raggedness, exact=True)
            pool = pool[settings.target * full :]
            layout += self._ragged(settings.target, windows - full, pool, self._raggedness)
        else:
            layout = self._ragged(settings.target, windows, pool, self._raggedness)
        if self.short:
            left = pool[settings.target * (self.windows - 1) : settings.target * self.windows - self.short]
            layout += self._ragged(settings.target, 1, left, self._raggedness + 1, same_windows=False)
        if self.shape in ("rising", "falling"):
            layout = sloped(layout, settings.target, rising=self.shape == "rising")
        if self.shape == "hollow":
            layout = hollow(layout, settings.target)
        if self.drive == "uneven":
            layout = uneven(layout, settings.target)
        layout = self._as_it_may_end(layout, settings)
        return streamed(layout, self.ranks) if self.drive == "passes" else layout

    def _as_it_may_end(self, layout: Layout, settings: Settings) -> Layout:
        if settings.last_window == "step" or self.settings.by_caller:
            return layout
        # The references step what is open at the end of the data, which ds_parity drops or refuses there.
        whole = in_whole_windows(layout, settings)
        if not whole:
            raise ConfigError(
                f"scenario {self.name!r}: its {self.windows} windows of rollouts close none of {settings.target} "
                f"{settings.count}s, and ds_parity.last_window is {settings.last_window!r}; ask for more windows"
            )
        return whole

    def batches(self) -> tuple[tuple[MicroBatch, ...], ...]:
        """Return the collated layout, on the host."""
        passes = collate_layout(self.layout(), self.collation)
        return weighed(passes, self.settings)

    def build(self) -> nn.Module:
        """Return the model with its loss on top, weights drawn from the seed."""
        policy = build_policy(self.model, self.seed, self.tokenizer)
        if self.train is not None:
            return policy
        settings = self.settings
        if settings.terms is not None:
            units = {name: term.weight for name, term in settings.terms.items()}
            return SeveralTerms(policy, units, settings.loss_reduction, self.objective)
        unit = _MEANS.get(settings.loss_weight, settings.loss_weight)
        return PolicyGradient(policy, unit, settings.loss_reduction, self.objective)

    def build_for_engine(self) -> nn.Module:
        """Return what `build` does, built where an engine's model is to be built."""
        with nullcontext() if self.context is None else resolve(self.context)(copy.deepcopy(self.config)):
            return self.build()

    def keywords(self, module: nn.Module) -> dict[str, Any]:
        """Return what `initialize` is given beside the model and the configuration."""
        if self.setup is None:
            return {"model_parameters": module.parameters()}
        return dict(resolve(self.setup)(module))

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Scenario:
        """Build a scenario from what `to_json` returned."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    @property
    def largest_token(self) -> int:
        """The greatest token id of all rollouts that the scenario may take."""
        return max(max(rollout.tokens) for rollout in _rollouts(self.rollouts, self.tokenizer))

    @property
    def _raggedness(self) -> int:
        return self.seed + _DRAWS_APART * self.draw

    def _ragged(
        self, target: int, windows: int, pool: tuple[Rollout, ...], seed: int, same_windows: bool | None = None
    ) -> Layout:
        same = self.shape != "overshoot" if same_windows is None else same_windows
        # The last window of `overshoot` may have gone to the one before it.
        if self.shape == "full":
            exact = self.settings.overshoot == "error"
            return full_layout(pool, self.ranks, target, windows, seed, exact=exact)
        rollouts = pool[: target * windows]
        return ragged_layout(rollouts, self.ranks, target, windows, seed, same_windows=same) if windows else ()

    def _plan(self, settings: Settings) -> Plan:
        if self.turns and settings.loss_weight != "token":
            raise ConfigError(
                f"scenario {self.name!r}: turns with loss_weight {settings.loss_weight!r}: the bundled loss is a "
                "mean over whole rollouts there; choose 'token'"
            )
        a_prompt = 4 if settings.count == "prompt" else 1  # the bundled rollouts have four solutions a prompt
        pool: Iterable[Rollout] = self._pool(settings.target * self.windows * a_prompt)
        planned = plan(
            line_turns(pool) if self.turns else pool,
            dp_world_size=self.ranks,
            target=settings.target,
            max_tokens=self.micro_batch_tokens,
            count=settings.count,
            layout=self.collation,
            oversize="own",
        )
        if len(planned.windows) < self.windows:
            raise ConfigError(
                f"scenario {self.name!r}: the rollouts fill {len(planned.windows)} planned windows, {self.windows} "
                "were asked for; give more rollouts, or ask for fewer windows"
            )
        return planned

    def _uniform(self, settings: Settings) -> Layout:
        passes, left = divmod(settings.passes, self.ranks)
        if left:
            raise ConfigError(
                f"uniform windows need passes that the ranks divide: {settings.passes} passes on "
                f"{self.ranks} ranks leave a remainder of {left}; choose another number of ranks"
            )
        tokens = _LEVEL if settings.loss_weight in ("token", "divided") else None
        per_batch = settings.target // settings.passes
        pool = self._pool(settings.target * self.windows, tokens)
        rows = uniform_layout(self.ranks * per_batch, passes * self.windows, pool)
        return tuple(
            tuple(
                tuple(one for cell in row[at : at + per_batch] for one in cell) for at in range(0, len(row), per_batch)
            )
            for row in rows
        )

    def _pool(self, wanted: int, tokens: int | None = None) -> tuple[Rollout, ...]:
        every = _rollouts(self.rollouts, self.tokenizer)
        self._refuse_too_few(every)
        if tokens is not None:
            every = leveled(every, tokens)
        start = (self.seed * 97) % max(1, len(every) - wanted + 1)
        chosen = every[start : start + wanted]
        return chosen if self.max_tokens is None else shorten(chosen, self.max_tokens)

    def _refuse_too_few(self, every: tuple[Rollout, ...]) -> None:
        settings, where = cut_by(self.settings), self.rollouts or "the bundled rollouts"
        if not every:
            raise ConfigError(
                f"{where}: every prompt's rollouts earned the same reward, so all advantages are 0 and nothing has a "
                "policy gradient; give rollouts whose rewards differ within a prompt, or an advantage in each line"
            )
        by_prompt = settings.count == "prompt"
        counted = len({rollout.prompt_id for rollout in every}) if by_prompt else len(every)
        if counted < settings.target:
            raise ConfigError(
                f"{where}: {counted} {settings.count}s have an advantage that is not 0, and a window takes "
                f"{settings.target}, so no window closes; give more rollouts, or fewer gradient_accumulation_passes"
            )


def _by_caller(config: Mapping[str, Any]) -> bool:
    settings = parse(config)
    return settings is not None and settings.by_caller


@lru_cache(maxsize=4)
def _rollouts(path: str | None, tokenizer: str | None) -> tuple[Rollout, ...]:
    # Groups whose solutions all earned alike have no gradient, and only dilute a comparison.
    return _on_a_grid(informative(load_rollouts(None if path is None else Path(path), tokens_of(tokenizer))))


def _on_a_grid(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """Round rewards to 28 bits of the largest: engines then have the same mean of them, in whichever order they add.

    A sum of 2**24 such numbers is exact in fp64. Advantages are those of the rewards as they were.
    """
    largest = max((abs(one.reward) for one in rollouts), default=0.0)
    step = math.ldexp(1.0, math.frexp(largest)[1] - 28) or math.ulp(0.0)
    return tuple(replace(one, reward=round(one.reward / step) * step) for one in rollouts)
