"""When the windows of a program close, by the counts of all ranks' micro-batches: what both of its oracles share."""

import copy


def weighs(program, piece):
    """What the loss of a micro-batch weighs."""
    units = {"rollout": piece.rollouts, "target": piece.rollouts, "token": piece.tokens, "weight": piece.weight}
    return units.get(program.weight, int(piece.active))


class Windows:
    """Closes the windows of a program; a subclass says what the step of one is, in `_settle`.

    Attributes:
        program: what is run: its `caller`, `target`, `overshoot`, `last`, `prompts`, `weight` and `across` are read.
        open: by pass of the open window, the micro-batches of all ranks; None for an idle one.
        records: of all windows that were closed.
    """

    def __init__(self, program):
        self.program = program
        self.records, self.open = [], []
        self._steps, self._progress, self._consumed, self._origin = 0, 0, 0, 0
        self._begin()

    def closes_with(self, pieces):
        """Whether a pass closes its window by its counts."""
        return self._consumed + self._units([*self.open, pieces]) >= self._closes_at

    def passed(self, pieces):
        """Take a pass in; return whether it closes its window by its counts."""
        closes = self.closes_with(pieces)
        self.open.append(pieces)
        if closes:
            self.close()
        return closes

    def close(self, *, drop=False):
        """End the window: take its step, or none."""
        pieces, units = [one for own in self.open for one in own if one is not None], self._units(self.open)
        applied = self._settle(pieces, drop=drop)
        if applied:
            self._steps, self._progress = self._steps + 1, self._progress + units
        self._consumed += units
        if self.program.caller or self._consumed < self._closes_at:
            self._origin = self._consumed
        self._begin()

    def finish(self):
        """Settle an open window; the next data begins with a whole one."""
        if self.open:
            self.close(drop=self.program.last == "drop")
        self._origin = self._consumed
        self._begin()

    def kept(self):
        """All that a checkpoint has to keep."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name not in ("records", "program")})

    def load(self, kept):
        """Go back to there."""
        vars(self).update(copy.deepcopy(kept))

    def go_on_as(self, program):
        """Go on between two windows as another program over the same model, whose boundary is another."""
        self.program = program
        self._begin()

    def _settle(self, pieces, *, drop):
        """Record the window of these micro-batches, and return whether its step was applied."""
        raise NotImplementedError

    def _begin(self):
        self.open = []
        target, carried = self.program.target, self.program.overshoot == "carry" and not self.program.caller
        surplus = (self._consumed - self._origin) % target if carried else 0
        self._closes_at = self._consumed + target - surplus

    def _units(self, passes):
        name = "prompts" if self.program.prompts else "rollouts"
        return sum(getattr(one, name) for own in passes for one in own if one is not None)

    def _total(self, pieces):
        program, total = self.program, sum(weighs(self.program, one) for one in pieces)
        constants = {"target": program.target, "divided": 1 if program.across == "sum" else program.ranks}
        return constants.get(program.weight, total) if total else 0
