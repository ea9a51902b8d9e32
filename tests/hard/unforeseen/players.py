"""Runs a program on an engine: what it calls next is drawn alike on every rank, and each window is compared."""

import contextlib
import itertools
import random

import numpy as np
import torch
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import distance, weights_of
from tests.hard.unforeseen.programs import Layers, Piece, Right, configuration, falling, optimizer_of
from tests.hard.unforeseen.windows import weighs

IDLE, IDLE_NAN = Piece(7), Piece(7, nan=True)
# fp32 beside fp64, over some 20 steps of Adam.
APART, OFF, OFF_NORM = 3e-5, 2e-5, 1e-4
TYPES = {"int": int, "tensor": torch.tensor, "numpy": np.int32}


def built(program, seed=0):
    """An engine of a program."""
    model = Layers(program.kind, seed)
    optimizer = optimizer_of(program, model)
    given = {}
    if program.schedule == "object":
        given["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    elif program.schedule == "callable":
        given["lr_scheduler"] = lambda wrapped: torch.optim.lr_scheduler.LambdaLR(wrapped, falling)
    return ds_parity.initialize(model=model, optimizer=optimizer, config=configuration(program), **given)[0]


class Player:
    """Plays a program on this rank.

    Attributes:
        wrong: what was not as it should be.
        log: what was done.
        takes_turns: others play between its passes.
    """

    takes_turns = False

    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.engine, self.right = self._built(), self._oracle()
        self.wrong, self.log = [], []
        self._chance, self._seeds = random.Random(7 * program.seed + 1), itertools.count(100)
        self._rank, self._compared, self._saved, self._uneven = dist.get_rank(), 0, None, False

    def play(self, number=10):
        """Play so many acts, and settle what is left open; return what was wrong."""
        for _ in self.acts(number):
            pass
        return self.wrong

    def acts(self, number):
        """Play likewise, and yield between passes, where another player may have its turn."""
        for _ in range(number):
            if not self.wrong:
                yield from self._chance.choice(self._table())() or ()
                yield
        if not self.wrong and self.program.last != "error":
            self._finish()

    def _table(self):
        own = [self._caller] * 6 if self.program.caller else [self._loop] * 4
        others = [self._save] * 2 + [self._refused] * 2 + [self._rate, self._finish, self._evaluate, self._back]
        return [self._passes] * 3 + own + others

    def _built(self, seed=0):
        return built(self.program, seed)

    def _oracle(self):
        return Right(self.program)

    # Acts: what they are made of is drawn on every rank alike. Those that yield let others have a turn between passes.

    def _passes(self):
        """A stream on each rank, of other lengths, by passes(); left behind some window, or in one."""
        if self._uneven:
            return  # refused: it says which pass each rank is in
        chance, program, engine = self._chance, self.program, self.engine
        nan = 0.03 if chance.random() < 0.2 else 0.0
        lengths = [chance.randint(0, 5) for _ in range(program.ranks)]
        streams = self._rows(lengths, idle=0.1, nan=nan, alike=True)
        columns, options = _columns(streams), self._options()
        leaves_behind = chance.choice((None, None, 1, 2))  # so many windows
        handed_all = program.stage > 1 or not options["skip_idle"]
        whole = "window" in (options["lookahead"], options["lookahead"] is None and program.lookahead)
        leaves_in = chance.choice((None, None, None, 2)) if handed_all and not whole else None
        ends = [chance.random() < 0.4 for _ in columns]
        self.log.append(f"passes of {lengths}, {options}, left behind {leaves_behind} or in {leaves_in}, ends {ends}")
        left, closed = iter(columns), 0
        for number, batch in enumerate(engine.passes(self._stream(streams), idle=self._batch(self._idle()), **options)):
            self._run(batch)
            closed += self._in_callers_window(left, ends[number]) if program.caller else self._counted(left)
            if handed_all:
                yield
            if program.caller:
                continue
            if closed == leaves_behind or (engine.window.passes and number + 1 == leaves_in):
                self._taken(itertools.islice(left, self._passes_ahead()))
                return
        if not program.caller and self._taken(left):
            self.wrong.append("a window was not closed")
        if options["finish"]:
            self._settled_by_finish()

    def _options(self):
        chance, program = self._chance, self.program
        return {
            "lookahead": chance.choice([None, 0, 1, 2, 5] + ([] if program.caller else ["window"])),
            "finish": chance.random() < 0.4 and program.last != "error",
            "skip_idle": chance.random() < 0.7,
        }

    def _in_callers_window(self, left, ends):
        self.right.open.append(next(left))
        if ends:
            self._step_of_caller()
        return 0

    def _counted(self, left):
        """End a pass; whether that has closed a window."""
        before = self.engine.window.index
        self.engine.step()
        closed = self.engine.window.index > before
        if closed:
            self._closes_behind(left)
        return closed

    def _passes_ahead(self):
        """How many passes the oracle lacks of the open window: one that was left has run more than it was told of."""
        return self.engine.window.passes - len(self.right.open)

    def _closes_behind(self, left):
        """Tell the oracle of the passes up to the next boundary: some of them were skipped here."""
        if not any(self.right.passed(pieces) for pieces in left):
            self.wrong.append("a window was closed too early")
        else:
            self._compare()

    def _taken(self, left):
        # Every pass is told, whichever of them closes a window.
        return sum(self.right.passed(pieces) for pieces in left) > 0

    def _loop(self):
        """A loop with idle() where a rank has nothing."""
        passes = self._chance.randint(1, 6)
        nan = 0.03 if self._chance.random() < 0.2 else 0.0
        self.log.append(f"a loop of {passes}")
        yield from self._run_through(_columns(self._rows([passes] * self.program.ranks, nan=nan)))

    def _run_through(self, columns):
        for pieces in columns:
            self._before_pass(pieces)
            self._backward(pieces[self._rank])
            self._before_step()
            closes = self.right.passed(pieces)
            if self._ends() != closes:
                self.wrong.append("it is another boundary")
            self._reads()
            self._step()
            if closes:
                self._compare()
            self._behind_step()
            yield

    def _caller(self):
        """A window of the caller's, on ZeRO 0 and 1 of other lengths; announced, coalesced, promised, or left open."""
        chance, program = self._chance, self.program
        lengths = self._lengths()
        style = chance.choice(self._styles())
        if program.stage == 1 and program.overlap and (self.right.open or min(lengths) < max(lengths)):
            style = "plain"  # the last pass must use what the window has used, on every rank
        nan = 0.03 if chance.random() < 0.2 else 0.0
        rows = self._rows(lengths, nan=nan)
        promised = not self.right.open and self._promises(rows)
        self.log.append(f"a window of {lengths}, {style}{', promised' if promised else ''}")
        own = rows[self._rank]
        if promised:
            self._promise([one for one in own if one is not None])
        for _ in self._styled(style, own):
            if min(lengths) == max(lengths):  # else ranks would go on with other engines
                yield
        self.right.open += _columns(rows)
        self._uneven = self._uneven or min(lengths) < max(lengths)
        # In an engine's first window ranks go on to another engine only where all have run a backward.
        stays_open = min(lengths) == max(lengths) or not self.takes_turns
        if style in ("plain", "ahead") and not promised and chance.random() < 0.15 and stays_open:
            return
        if style in ("plain", "ahead") and chance.random() < 0.1 and program.last != "error":
            self._finish()
            return
        self._step_of_caller()
        self._behind_step()

    def _styles(self):
        return ("plain", "plain", "announced", "coalesced" if self.program.stage else "plain", "ahead")

    def _promises(self, rows):
        return self._chance.random() < 0.25

    def _lengths(self):
        chance, program = self._chance, self.program
        longest = chance.randint(1, 4)
        if program.stage > 1 or chance.random() < 0.4:
            return [longest] * program.ranks
        lengths = [chance.randint(0, longest) for _ in range(program.ranks)]
        return lengths if any(lengths) else [1, *lengths[1:]]

    def _styled(self, style, own):
        engine = self.engine
        if style == "ahead":
            losses = [self._loss(piece or IDLE_NAN) for piece in own]
            for piece, loss in zip(own, losses, strict=True):
                engine.backward(loss, **self._counts(piece)) if piece else engine.idle(loss)
                yield
            return
        with engine.coalesce_grad_reduction() if style == "coalesced" else contextlib.nullcontext():
            for number, piece in enumerate(own):
                if style == "announced" and number + 1 == len(own):
                    engine.set_gradient_accumulation_boundary(True)
                self._backward(piece)
                yield
        if style == "announced" and not own:
            engine.set_gradient_accumulation_boundary(True)

    def _promise(self, pieces):
        said = {name: sum(getattr(one, name) for one in pieces) for name in ("rollouts", "tokens")}
        if self.program.weight == "weight":
            said["weight"] = sum(one.weight for one in pieces)
        self.engine.expect(passes=sum(one.active for one in pieces), **said)

    def _save(self):
        """A checkpoint that is loaded at once, here or into a new engine, or later; refused in a window."""
        if self.right.open:
            with contextlib.suppress(ds_parity.CheckpointError):
                self.engine.save_checkpoint(self.folder, tag="refused")
                self.wrong.append("an open window was saved")
            return
        then, tag = self._chance.choice(("here", "new", "later")), f"saved{next(self._seeds)}"
        self.log.append(f"saved, to be loaded {then}")
        self.engine.save_checkpoint(self.folder, tag=tag)
        if then == "later":
            self._saved = tag, self.right.kept()
            return
        if then == "new":
            self.engine.destroy()
            self.engine = self._built(seed=3)
        self.engine.load_checkpoint(self.folder, tag=tag)

    def _back(self):
        """The checkpoint that was to be loaded later, also inside a window."""
        if self._saved is not None:
            self.log.append("loaded")
            self.engine.load_checkpoint(self.folder, tag=self._saved[0])
            self.right.load(self._saved[1])
            self._uneven = False

    def _rate(self):
        if not self.program.schedule:
            self.right.rate = self._chance.choice((0.01, 0.03, 0.07))
            for group in self.engine.optimizer.param_groups:
                group["lr"] = self.right.rate

    def _finish(self):
        self.log.append("finish")
        if self.program.last == "error" and self.right.open:
            with contextlib.suppress(ds_parity.WindowError):
                self.engine.finish()
                self.wrong.append("finish() was not refused")
            return
        self.engine.finish()
        self._settled_by_finish()

    def _settled_by_finish(self):
        ended = bool(self.right.open)
        self.right.finish()
        if ended:
            self._compare()

    def _evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            self.engine(**self._idle().inputs)
        self.engine.train()

    def _refused(self):
        """A call that can't be right, on all ranks, behind which the loop goes on."""
        engine, some = self.engine, self._idle()
        calls = {
            "no loss": lambda: engine.backward(torch.ones(2, requires_grad=True) * 2, **self._counts(some)),
            "negative": lambda: engine.backward(self._loss(some), rollouts=-1),
            "a fraction": lambda: engine.backward(self._loss(some), rollouts=1.5),
            "divided": lambda: engine.backward(self._loss(some), scale_wrt_gas=False),
            "no graph": lambda: engine.backward(_without_graph(self._loss(some)), **self._counts(some)),
            "the batch": lambda: engine.set_train_batch_size(8),
            **({} if self.program.caller else {"a step": engine.step}),
            **({"the optimizer": engine.optimizer.step} if self.program.stage else {}),
        }
        for name in self._allowed():
            calls.pop(name, None)
        name = self._chance.choice(list(calls))
        self.log.append(f"refused: {name}")
        with contextlib.suppress(ds_parity.WindowError):
            calls[name]()
            self.wrong.append(f"{name} was not refused")

    def _allowed(self):
        """Of these calls, those that are allowed in this program."""
        return ()

    # What acts are made of.

    def _idle(self):
        return IDLE

    def _before_pass(self, pieces):
        """Called before a pass of these micro-batches."""

    def _ends(self):
        """Whether the engine says that the pass that has run ends its window."""
        return self.engine.is_gradient_accumulation_boundary()

    def _step(self):
        self.engine.step()

    def _before_step(self):
        """Called between a pass's backward and its step, before the oracle takes the pass in."""

    def _reads(self):
        """Called there, behind that."""

    def _behind_step(self):
        """Called between passes."""

    def _drawn_piece(self, idle=0.25, nan=0.0):
        chance, program = self._chance, self.program
        if chance.random() < idle:
            return None
        over_rollouts = program.summed or program.weight in ("rollout", "target")
        tokens = 0 if program.weight != "divided" and chance.random() < 0.08 else chance.randint(1, 9)
        rollouts = chance.randint(1 if over_rollouts or not tokens else 0, 3)
        own = chance.choice((0.0, 0.5, 1.0, 2.25, 1e-3, 300.0)) if program.weight == "weight" else 0.0
        prompts = chance.randint(0, 2)
        return Piece(next(self._seeds), chance.randint(1, 4), rollouts, prompts, tokens, own, chance.random() < nan)

    def _rows(self, lengths, idle=0.25, nan=0.0, *, alike=False):
        """Draw by rank so many micro-batches; `alike`: a rank's may stand in for it in any pass."""
        return [[self._drawn_piece(idle, nan) for _ in range(length)] for length in lengths]

    def _stream(self, streams):
        # One that contains nothing is an idle pass, too; its seed is drawn on every rank.
        batches = [[self._batch(one or Piece(next(self._seeds), 2)) for one in own] for own in streams]
        return iter(batches[self._rank])

    def _batch(self, piece):
        own = {"weight": piece.weight} if self.program.weight == "weight" else {}
        counts = {name: getattr(piece, name) for name in ("rollouts", "prompts", "tokens")}
        return ds_parity.MicroBatch(piece.inputs, **counts, **own)

    def _run(self, batch):
        """The backward of a micro-batch of passes()."""
        loss = self._loss_of(batch.inputs)
        if self.program.summed:
            loss = loss * {"rollout": batch.rollouts, "token": batch.tokens}[self.program.weight]
        self.engine.backward(loss)

    def _backward(self, piece):
        if piece is None:
            self.engine.idle(self._loss(self._chance_of_rank().choice((IDLE, IDLE_NAN))))
            return
        if self._chance_of_rank().random() < 0.3:
            self.engine.record("seed", float(piece.seed), weight=2.0)
        self.engine.backward(self._loss(piece), retain_graph=self.program.loss == "retained", **self._counts(piece))

    def _chance_of_rank(self):
        return random.Random(1000 * self.engine.micro_steps + self._rank)

    def _loss(self, piece):
        loss = self._loss_of(piece.inputs)
        return loss * weighs(self.program, piece) if self.program.summed and piece.active else loss

    def _loss_of(self, inputs):
        kind, engine = self.program.loss, self.engine
        if kind == "zeroes":
            engine.optimizer.zero_grad()
        loss = engine.module(**inputs) if kind == "module" else engine(**inputs)
        if kind == "two-forwards":
            loss = 0.25 * loss + 0.75 * engine(**inputs)
        if kind == "evaluates":
            self._evaluate()
        return loss.double() if kind == "fp64" else loss.reshape(1) if kind == "shape-1" else loss

    def _counts(self, piece):
        kind = TYPES[self.program.given]
        counts = {name: kind(getattr(piece, name)) for name in ("rollouts", "prompts", "tokens")}
        return {**counts, **({"weight": piece.weight} if self.program.weight == "weight" else {})}

    def _step_of_caller(self):
        self.engine.step()
        self.right.close()
        self._compare()

    def _compare(self):
        """Compare the window that was closed last."""
        self._uneven = False
        if len(self.right.records) == self._compared:
            return
        self._compared, right, last = len(self.right.records), self.right.records[-1], self.engine.last_step
        got = {
            **{name: getattr(last, name) for name in ("rollouts", "prompts", "tokens", "total", "loss", "skipped")},
            "micro_batches": last.micro_batches_on(self.program.ranks),
            "norm": last.grad_norm,
            "rate": last.lr[0],
        }
        for name, value in right.items():
            if value is not None and not _close(got[name], value, OFF_NORM if name == "norm" else OFF):
                self.wrong.append(f"step {last.step}: {name} is {got[name]}, and should be {value}")
        apart = distance(weights_of(self.engine), self.right.weights())
        if not apart <= APART:
            self.wrong.append(f"step {last.step}: weights are {apart:.3g} apart")


def _columns(rows):
    """By pass, what each rank has; None where it has run out."""
    return [tuple(own[i] if i < len(own) else None for own in rows) for i in range(max(map(len, rows)))]


def _without_graph(loss):
    return {name: one.detach() for name, one in loss.items()} if isinstance(loss, dict) else loss.detach()


def _close(got, right, off):
    if isinstance(right, bool) or not isinstance(right, float):
        return got == right
    return got is not None and abs(got - right) <= off * max(1.0, abs(right))
