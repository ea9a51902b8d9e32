"""Runs a program with linear losses: what trainers do beside a plain loop, and what goes wrong in them on the way.

Every window is compared with the account (linear_account.py), weight by weight.
"""

import contextlib
import dataclasses
import itertools

import torch
from deepspeed.utils import safe_set_full_grad

import ds_parity
from tests.hard.unforeseen.harmless import do_something_harmless
from tests.hard.unforeseen.linear_account import Account
from tests.hard.unforeseen.linear_checks import gradient, wrong_gradient, wrong_step
from tests.hard.unforeseen.linear_model import FAILS, NAMES, Touch, scalars
from tests.hard.unforeseen.linear_programs import WAYS, built
from tests.hard.unforeseen.players import TYPES, Player


class AccidentError(Exception):
    """What a loop raises by itself."""


class LinearPlayer(Player):
    """Plays a program with linear losses on this rank."""

    def __init__(self, program, folder):
        super().__init__(program, folder)
        self._uses, self._way, self._said = NAMES, "plain", False

    def _table(self):
        others = [self._freeze, self._hook, self._offload, self._accident, self._left, self._refused]
        return [*super()._table(), *others]

    def _built(self, seed=None):
        self._hooks = {}
        return built(self.program, seed)

    def _oracle(self):
        return Account(self.program)

    # Acts.

    def _passes(self):
        """Terms of several units need whole windows, which passes() knows where nothing is open."""
        program, one_row = self.program, self.program.alike
        if (program.terms and self.right.open) or (not one_row and (program.caller or program.last == "error")):
            return
        yield from super()._passes()

    def _options(self):
        options = {**super()._options(), "prefetch": self._chance.choice((0, 0, 1, 3))}
        return options if self.program.alike else {**options, "lookahead": "window", "finish": True}

    def _run_through(self, columns):
        if self.program.alike:
            yield from super()._run_through(columns)
        elif not self.right.open:
            yield from self._promised_window()

    def _promised_window(self):
        """A window whose totals are said before; that of several units, with terms."""
        columns, right = [], self.right
        while not (columns and right.closes_with([one for column in columns for one in column])):
            columns += [tuple(own[0] for own in self._rows([1] * self.program.ranks))]
        self._promise([column[self._rank] for column in columns])
        yield from super()._run_through(columns)

    def _caller(self):
        if self.program.alike or not self.right.open:
            yield from super()._caller()

    def _styles(self):
        program = self.program
        styles = ["plain", "plain", "announced", "ahead", "coalesced", "one forward", "no_sync"]
        if program.stage == 0 or (program.stage == 1 and program.precision == "bf16-fp32acc"):
            styles.remove("coalesced")  # DeepSpeed has none there
        if program.stage > 1 or (program.stage == 1 and program.overlap):
            styles.remove("no_sync")
        if program.stage == 3 or program.terms:
            styles.remove("one forward")
        return styles

    def _promises(self, rows):
        return not self.program.alike or super()._promises(rows)

    def _styled(self, style, own):
        if style == "one forward":
            # Several micro-batches run through the model together, and each loss has a backward of its own.
            values = scalars(self.engine([one.groups[0] for one in own])) if own else []
            for number, (piece, value) in enumerate(zip(own, values, strict=True)):
                more = number + 1 < len(own)
                self.engine.backward(value * piece.factor(self.program), retain_graph=more, **self._counts(piece))
                yield
        elif style == "no_sync":
            for number, piece in enumerate(own):
                last = number + 1 == len(own)
                with contextlib.nullcontext() if last else self.engine.no_sync():
                    self._backward(piece)
                yield
        else:
            yield from super()._styled(style, own)

    def _promise(self, pieces):
        said = {name: sum(getattr(one, name) for one in pieces) for name in ("rollouts", "prompts", "tokens")}
        if self.program.weight == "weight":
            said["weight"] = sum(one.weight for one in pieces)
        terms = [name for name, (unit, _) in self.program.terms.items() if unit == "weight"]
        own = dict.fromkeys(terms, sum(one.weight for one in pieces))
        self.log.append(f"promised {said} {own}")
        self.engine.expect(passes=sum(one.active for one in pieces), **said, **({"weight": own} if own else {}))

    def _save(self):
        """Also loaded where the caller ends windows and did not, or the other way round; another target is refused."""
        if self.right.open or self._chance.random() < 0.6:
            super()._save()
            self._settle_requirements()
            return
        tag, program = f"saved{next(self._seeds)}", self.program
        self.engine.save_checkpoint(self.folder, tag=tag)
        self.engine.destroy()
        if program.target and self._chance.random() < 0.5:
            self.program = dataclasses.replace(program, target=program.target + program.ranks)
            self.engine = self._built(seed=3)
            self.log.append("loaded towards another target")
            with contextlib.suppress(ds_parity.CheckpointError):
                self.engine.load_checkpoint(self.folder, tag=tag)
                self.wrong.append("another target was not refused")
            self.engine.destroy()
            self.program = program
        elif program.target and not program.prompts and program.lookahead != "window" and program.door != "framework":
            self.program = dataclasses.replace(program, caller=not program.caller)
            self.log.append(f"goes on with caller={self.program.caller}")
            self._saved = None  # of the other boundary
        self.engine = self._built(seed=3)
        self.engine.load_checkpoint(self.folder, tag=tag)
        self.right.go_on_as(self.program)
        self._settle_requirements()

    def _back(self):
        if self._saved is not None:
            self._require(self._saved[1]["frozen"])  # as it was then, which ZeRO 2 and 3 ask for
        super()._back()

    def _rate(self):
        """By group."""
        if not self.program.schedule and len(self.engine.optimizer.param_groups) == self.program.groups:
            self.right.rates = [self._chance.choice((64.0, 32.0, 8.0)) for _ in self.right.rates]
            self.log.append(f"rates {self.right.rates}")
            for group, rate in zip(self.engine.optimizer.param_groups, self.right.rates, strict=True):
                group["lr"] = rate

    def _freeze(self):
        """Freeze a parameter, or train it again; DeepSpeed goes on moving one with momentum."""
        most = 1 if self.program.terms else 3
        if self.right.open or self.program.momentum:
            return
        name = self._chance.choice([one for one in sorted(self.right.weights) if not one.startswith("spare")])
        if len(self.right.frozen | {name}) <= most:
            self.log.append(f"frozen {self.right.frozen ^ {name}}")
            self._require(self.right.frozen ^ {name})

    def _require(self, frozen):
        self.right.frozen = set(frozen)
        self._settle_requirements()

    def _settle_requirements(self):
        for name, one in self.engine.module.named_parameters():
            if one.requires_grad != (name not in self.right.frozen):
                one.requires_grad_(name not in self.right.frozen)
            if name in self.right.factors and name not in self._hooks and one.requires_grad:
                self._hooks[name] = one.register_hook(_halved)

    def _hook(self):
        """A hook of the loop's own on a parameter's gradient, or none any more."""
        name = self._chance.choice(sorted(self.right.weights))
        if self.right.open or name in self.right.frozen:
            return
        self.log.append(f"hook on {name}")
        if name in self.right.factors:
            del self.right.factors[name]
            self._hooks.pop(name).remove()
        else:
            self.right.factors[name] = 0.5
            self._settle_requirements()

    def _offload(self):
        if not self.right.open and self.program.stage in (1, 2):
            self.log.append("offload")
            with contextlib.suppress(ds_parity.ConfigError):
                self.engine.offload_states()
                self.engine.reload_states()

    def _accident(self):
        """A backward that raises midway on every rank: refused from then on, until a new engine has a checkpoint."""
        if self._saved is None or not self.program.alike or not self._require_all():
            return
        self.log.append("an accident in a backward")
        piece = dataclasses.replace(self._rows([1])[0][0], uses=NAMES, rollouts=1, tokens=1, nan=False, way="plain")
        parameter = dict(self.engine.module.named_parameters())["r77.weight"]
        handle = parameter.register_hook(_raising)
        for what in ("the accident", "a backward behind it"):
            try:
                self._say(closes=False)
                self._backward(piece)
                self.wrong.append(f"{what} raised nothing")
            except (AccidentError, ds_parity.DsParityError) as error:
                self.log.append(f"{what}: {type(error).__name__}: {str(error)[:60]}")
            handle.remove()
        self.engine.destroy()
        self.engine = self._built(seed=3)
        self._back()

    def _require_all(self):
        if self.right.open or self.program.momentum:
            return False
        self._require(())
        return True

    def _left(self):
        """A loop over passes() that raises between a forward and its backward, or whose stream does, on every rank."""
        program, chance = self.program, self._chance
        if self._uneven or not program.alike or program.caller or self.right.open or program.last == "error":
            return
        behind, by_stream = chance.randint(0, 2), chance.random() < 0.4
        rows = self._rows([4] * program.ranks, idle=0.1, alike=True)
        self.log.append(f"passes, left by an error of {'the stream' if by_stream else 'the loop'} behind {behind}")
        options = {"lookahead": chance.choice((0, 1, 3)), "skip_idle": False, "prefetch": chance.choice((0, 0, 2))}
        stream = self._stream(rows)
        if by_stream:
            stream = _broken(stream, behind)
        columns = zip(*rows, strict=True)
        with contextlib.suppress(AccidentError):
            for number, batch in enumerate(self.engine.passes(stream, **options)):
                if number == behind:
                    self._loss(batch.inputs["piece"])
                    raise AccidentError
                self._run(batch)
                self._takes_pass(next(columns))
                yield
        if by_stream and behind and chance.random() < 0.5 and self._saved is not None:
            self._back()
        else:
            self._finish()

    def _takes_pass(self, pieces):
        closes = self.right.passed(pieces)
        self.engine.step()
        if closes:
            self._compare()

    # What acts are made of.

    def _allowed(self):
        if self.program.door == "initialize":
            return ()
        return ("divided", "the batch", *(("a step",) if self.program.door == "framework" else ()))

    def _idle(self):
        return Touch(3, self._uses, self._terms, way=self._way)

    @property
    def _terms(self):
        return max(1, len(self.program.terms))

    def _rows(self, lengths, idle=0.25, nan=0.0, *, alike=False):
        program, longest = self.program, max(lengths, default=0)
        drawn = [(self._drawn_uses(), self._chance.choice(WAYS)) for _ in range(longest)]
        if not program.free and alike and drawn:
            drawn = [drawn[0]] * longest
        self._uses, self._way = drawn[0] if drawn else (self._uses, self._way)
        rows = []
        for length in lengths:
            own = [(self._drawn_uses(), self._chance.choice(WAYS)) for _ in range(length)] if program.free else drawn
            rows.append([self._drawn_touch(uses, way, idle, nan) for uses, way in own[:length]])
        return rows

    def _drawn_uses(self):
        chance, program = self._chance, self.program
        # With overlap_comm ZeRO 1 needs in a window's last pass what the window has used. A term needs something.
        if program.terms or self.right.frozen or (program.stage == 1 and program.overlap) or chance.random() < 0.5:
            return NAMES
        return tuple(sorted(chance.sample(NAMES, chance.randint(1, len(NAMES)))))

    def _drawn_touch(self, uses, way, idle, nan):
        chance, program = self._chance, self.program
        counts = {"rollouts": chance.randint(1, 3), "prompts": chance.randint(0, 2), "tokens": chance.randint(1, 9)}
        # In fp16 a gradient that is divided by far more, or less, than its window's total is out of range.
        weight = chance.choice((0.0, 0.5, 1.0, 2.25, 3.0) if self.right.least else (0.0, 0.5, 1.0, 300.0, 1e-3))
        weight = max(weight, 0.5) if program.terms else weight if program.weight == "weight" else 0.0
        seed, empty, bad = next(self._seeds), chance.random() < idle, chance.random() < nan
        if empty:
            return Touch(seed, uses, self._terms, way=way, nan=chance.random() < 0.3)
        return Touch(seed, uses, self._terms, **counts, weight=weight, nan=bad, way=way)

    def _batch(self, piece):
        return ds_parity.MicroBatch({"piece": piece}, **piece.counts(self.program))

    def _run(self, batch):
        self.engine.backward(self._loss(batch.inputs["piece"]))

    def _before_pass(self, pieces):
        self._used = [name for name in NAMES if all(name in one.uses for one in pieces)]
        self._say(closes=self.right.closes_with(pieces))

    def _say(self, *, closes):
        """Say where the window ends, as a framework does."""
        self._said = closes
        if self.program.door == "framework":
            self.engine.set_gradient_accumulation_boundary(closes)

    def _ends(self):
        return (self.program.door != "framework" or self._said) and super()._ends()

    def _step(self):
        if self._ends() or self.program.door != "framework" or self._chance.random() < 0.5:
            super()._step()

    def _backward(self, piece):
        if not piece.active and self._chance_of_rank().random() < 0.5:
            self.engine.idle(self._loss(piece))
            return
        if self._chance_of_rank().random() < 0.3:
            self.engine.record("seed", float(piece.seed), weight=2.0)
        self.engine.backward(self._loss(piece), retain_graph=piece.way == "retained", **self._counts(piece))

    def _counts(self, piece):
        kind = TYPES[self.program.given]
        return {name: one if name == "weight" else kind(one) for name, one in piece.counts(self.program).items()}

    def _loss(self, piece):
        if piece.way == "zeroes":
            self.engine.optimizer.zero_grad()
            self.engine.zero_grad()
        values = self._values(piece)
        if piece.way == "evaluates":
            self._evaluate()
        if piece.nan:
            values = [one * (torch.inf if piece.seed % 2 else torch.nan) for one in values]
        if self.program.terms:
            return dict(zip(self.program.terms, values, strict=True))
        loss = sum(values) * piece.factor(self.program)
        return loss.double() if piece.way == "fp64" else loss.reshape(1) if piece.way == "one element" else loss

    def _values(self, piece):
        if piece.way == "fails first":
            with contextlib.suppress(ZeroDivisionError):
                self.engine([*piece.groups, [*piece.groups[0], FAILS]])
        if piece.way == "module":
            return scalars(self.engine.module(piece.groups))
        values = scalars(self.engine(piece.groups))
        if piece.way == "two forwards":
            again = scalars(self.engine(piece.groups))
            values = [0.25 * one + 0.75 * other for one, other in zip(values, again, strict=True)]
        return values

    def _evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            self.engine(self._idle().groups)
        self.engine.train()

    def _before_step(self):
        """At a boundary, halve a gradient as a trainer's own clipping of one layer would."""
        name, program = self._of_boundary(0.2), self.program
        refused = program.stage == 0 or (program.stage == 1 and program.precision == "bf16-fp32acc")
        if name is None or refused:
            return
        read = gradient(self.engine, self.program, name)
        if read is None:
            return
        self.log.append(f"halves the gradient of {name}")
        self.right.changed[name] = 0.5
        safe_set_full_grad(dict(self.engine.module.named_parameters())[name], read * 0.5)

    def _reads(self):
        name = self._of_boundary(0.3)
        if name is not None and self.right.records[-1]["norm"] is not None:
            self.wrong += wrong_gradient(self.engine, self.right, name)

    def _of_boundary(self, often):
        """A parameter whose gradient is read here, or None."""
        program = self.program
        drawn, name = self._chance.random(), self._chance.choice(NAMES) + ".weight"
        # DeepSpeed gives it as it is scaled, or another's: tools/deepspeed_faults/round_robin_fp32_param.py.
        unreadable = "fp16" in program.precision or program.zero.get("round_robin_gradients")
        # With CPU offload DeepSpeed gives an old one of a parameter that the boundary's pass did not use.
        old = "offload_optimizer" in program.zero and name.removesuffix(".weight") not in self._used
        if unreadable or old or drawn > often or name in self.right.frozen or not self._ends():
            return None
        return name

    def _behind_step(self):
        do_something_harmless(self.engine, self._chance.randrange(14), self._idle().groups)

    def _compare(self):
        self._uneven = False
        if len(self.right.records) > self._compared:
            self._compared = len(self.right.records)
            self.wrong += wrong_step(self.engine, self.right)


def _broken(stream, behind):
    yield from itertools.islice(stream, behind)
    raise AccidentError


def _halved(one):
    return one * 0.5


def _raising(one):
    raise AccidentError
