"""Runs a drawn trainer beside plain torch in fp64: what a loop does between windows, both do."""

import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

from tests.hard.unforeseen.cells import weights_of
from tests.hard.unforeseen.drawn_trainers import SHAPES, Matrices, built, exact, falling, group_of

WINDOWS = 8
INFINITE = 1e7  # a factor that no fp16 gradient survives
ROUNDS = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 1e-2}  # distances from the oracle, in shares of the way


def sample(seed, rank, index, size):
    """What a rank has in a pass: multiples of a quarter."""
    chance = torch.Generator().manual_seed(1_000_003 * seed + 7919 * rank + index)
    return tuple(
        {name: torch.randint(-4, 5, (size, shape[side]), generator=chance) / 4.0 for name, shape in SHAPES.items()}
        for side in (1, 0)
    )


class TrainerPlayer:
    """Plays a trainer on this rank.

    Attributes:
        wrong: what was not as it should be.
        log: the acts that were done, with their windows.
    """

    def __init__(self, trainer, folder):
        self.trainer, self._folder = trainer, folder
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._model = Matrices(trainer.seed, **trainer.model).double()
        self._named = dict(self._model.named_parameters())
        self._start = {name: one.detach().clone() for name, one in self._named.items()}
        self._optimizer, scheduled = exact(trainer, self._model)
        self.engine = built(trainer, trainer.seed)
        if trainer.stage == 0 and trainer.half:
            self._begin_with_zeros()
        self._schedule = scheduled(self._optimizer) if scheduled else None
        self.wrong, self.log = [], []
        self._window = self._index = self._skipped = self._count = 0
        self._position, self._frozen, self._closes_at = 0.0, None, trainer.target

    def play(self):
        """Play all windows; return what was wrong."""
        for self._window in range(WINDOWS):
            items, infinite = self._passes()
            self._compare_step(*self._step(items, infinite=infinite))
            if self._window < WINDOWS - 1:
                self._thaw()
                act = self.trainer.acts[self._window]
                if act and getattr(self, f"_{act}")() is not False:
                    self.log.append((self._window, act))
        self.engine.finish()
        self._compare_weights()
        return self.wrong

    # Passes of the engine, and the step of the oracle.

    def _passes(self):
        """Run a window; return its micro-batches (rank, index, size, weight), and whether one was not finite."""
        items, infinite, number, last = [], False, 0, False
        length = 1 + (self.trainer.seed + self._window) % 3
        while not last:
            idle = (self._window + number) % self._ranks if self.trainer.idles and number % 2 else None
            sizes = [0 if rank == idle else self._size(rank) for rank in range(self._ranks)]
            self._count += sum(sizes)
            by_rollouts = self.trainer.boundary == "rollouts"
            last = self._count >= self._closes_at if by_rollouts else number == length - 1
            if self.trainer.boundary == "announced":
                self.engine.set_gradient_accumulation_boundary(last)
            here = self._is_infinite(number, last=last)
            self._pass(sizes, infinite=here)
            infinite |= here
            items += [(rank, self._index, size, self._weight(rank, size)) for rank, size in enumerate(sizes) if size]
            self._index, number = self._index + 1, number + 1
            if by_rollouts:
                self.engine.step()
        if not by_rollouts:
            self.engine.step()
        elif self._count >= self._closes_at:
            self._closes_at += self.trainer.target * (1 + (self._count - self._closes_at) // self.trainer.target)
        return items, infinite

    def _pass(self, sizes, *, infinite):
        size = sizes[self._rank]
        loss = self._loss(self.engine, self._rank, self._index, max(1, size))
        struck = (self.trainer.seed + self._window) % self._ranks
        struck = struck if sizes[struck] else (struck + 1) % self._ranks
        if infinite and self._rank == struck:
            loss = loss * INFINITE
        if size:
            self.engine.backward(loss, rollouts=size, tokens=self._tokens(self._rank, size))
        else:
            self.engine.idle(loss * float("inf") if self.trainer.infinite == "idle" else loss)

    def _is_infinite(self, number, *, last):
        if self._window not in (1 - self.trainer.seed % 2, 4):
            return False
        places = {"first": number == 0, "mid": last or number == 1, "last": last}
        return places.get(self.trainer.infinite, False)

    def _size(self, rank):
        return 1 + (self._index * 7 + rank * 3 + self.trainer.seed) % 3

    def _tokens(self, rank, size):
        return 2 * size + (self._index + rank) % 3

    def _weight(self, rank, size):
        return size if self.trainer.weight == "rollout" else self._tokens(rank, size)

    def _loss(self, model, rank, index, size):
        xs, ys = sample(self.trainer.seed, rank, index, size)
        if model is self._model:
            xs = {name: one.double() for name, one in xs.items()}
        factor = 2.0**-8 if self.trainer.precision == "autocast-fp16" else 0.25 if self.trainer.scaled else 1.0
        return factor * model(xs, ys).mean()

    def _step(self, items, *, infinite):
        """Take the oracle's step; return its norm, None for a skipped one, and its rates."""
        whole = sum(weight for *_, weight in items)
        self._optimizer.zero_grad()
        for rank, index, size, weight in items:
            (weight / whole * self._loss(self._model, rank, index, size)).backward()
        for one in self._named.values():
            if one.grad is None and (one.requires_grad or self.trainer.stage or self.trainer.half):
                one.grad = torch.zeros_like(one)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if infinite:
            self._skipped += 1
            return None, rates
        self._position += sum(size for _, _, size, _ in items) / self.trainer.target
        gradients = [one.grad for one in self._named.values() if one.grad is not None]
        norm = float(sum(one.pow(2).sum() for one in gradients) ** 0.5)
        for one in gradients if self.trainer.clip else ():
            one.mul_(min(1.0, self.trainer.clip / (norm + 1e-6)))
        self._optimizer.step()
        self._move_rates()
        return norm, rates

    def _move_rates(self):
        if self._schedule is None:
            return
        if not self.trainer.by_rollouts:
            self._schedule.step()
        elif self.trainer.schedule == "falling":
            for group, rate in zip(self._optimizer.param_groups, self._schedule.base_lrs, strict=True):
                group["lr"] = rate * falling(self._position)
        else:
            self._schedule.step(self._position - 1)

    def _begin_with_zeros(self):
        """DeepSpeed's 16-bit optimizers of ZeRO 0 make their states by a step over zeros."""
        for one in self._named.values():
            one.grad = torch.zeros_like(one)
        self._optimizer.step()

    # Comparisons.

    def _bound(self):
        kinds = [self.trainer.precision, self.trainer.more.get("communication_data_type", "fp32")]
        named = [next(kind for kind in ("bf16", "fp16", "fp32") if kind in one) for one in kinds]
        return max(ROUNDS[one] for one in named)

    def _compare_step(self, norm, rates):
        last = self.engine.last_step
        if any(
            not abs(one - float(right)) <= 1e-5 * abs(float(right)) + 1e-9
            for one, right in zip(last.lr, rates, strict=True)
        ):
            self.wrong.append(f"step {last.step}: the rates are {last.lr}, and should be {rates}")
        if bool(last.skipped) != (norm is None):
            self.wrong.append(f"step {last.step}: skipped is {last.skipped}, and the norm should be {norm}")
        off = 1e-4 if self._bound() <= ROUNDS["fp32"] else 0.03
        if None not in (norm, last.grad_norm) and not abs(last.grad_norm - norm) <= off * norm:
            self.wrong.append(f"step {last.step}: the norm is {last.grad_norm}, and should be {norm}")

    def _compare_weights(self):
        """Compare the model's weights, but for their rounding, and those of the optimizer."""
        trainer = self.trainer
        rounds = (2.0**-8 if "bf16" in trainer.precision else 2.0**-11) if trainer.half else 0.0
        found = {"model": self._far(weights_of(self.engine), rounds)}
        if trainer.stage and trainer.half and not trainer.turns:
            own = {name: safe_get_full_fp32_param(one) for name, one in self.engine.module.named_parameters()}
            found["optimizer"] = self._far(own, 0.0)
        for of, far in found.items():
            if not far <= self._bound():
                self.wrong.append(f"the {of}'s weights are off by {far:.2e} of the way")
        if self.engine.skipped_steps != self._skipped:
            self.wrong.append(f"{self.engine.skipped_steps} steps were skipped, and {self._skipped} should be")

    def _far(self, weights, rounds):
        off = way = 0.0
        for name, one in self._named.items():
            right, start = one.detach().reshape(-1), self._start[name].reshape(-1)
            apart = (weights[name].double().reshape(-1) - right).abs() - rounds * right.abs()
            off, way = off + float(apart.clamp(min=0).pow(2).sum()), way + float((right - start).pow(2).sum())
        return (off / way) ** 0.5

    # Acts between windows; one that does not fit this trainer returns False.

    @property
    def _both(self):
        return self.engine.optimizer, self._optimizer

    @property
    def _writable(self):
        return self.trainer.stage in (1, 2) and not self.trainer.turns

    @property
    def _linked(self):
        """Whether DeepSpeed finds every parameter's states: with groups the first's alone, and none once loaded."""
        trainer, renewed = self.trainer, any(act in ("load", "another_engine") for _, act in self.log)
        return not trainer.groups and "betas" in trainer.options and not self._skipped and not renewed

    def _rates(self):
        if self.trainer.schedule:
            return False
        for optimizer in self._both:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        return True

    def _no_rate(self):
        if self.trainer.schedule:
            return False
        for optimizer in self._both:
            optimizer.param_groups[0]["lr"] = 0.0
        return True

    def _decay(self):
        if "weight_decay" not in self.trainer.options:
            return False
        for optimizer in self._both:
            for group in optimizer.param_groups:
                group["weight_decay"] = group["weight_decay"] * 2 + 0.01
        return True

    def _betas(self):
        if "betas" not in self.trainer.options or "cycle" in self.trainer.schedule.lower():
            return False
        for optimizer in self._both:
            for group in optimizer.param_groups:
                group["betas"] = (group["betas"][0] * 0.9, group["betas"][1] * 0.95)
        return True

    def _read(self):
        if not self.trainer.stage:
            return False
        for one in self.engine.module.parameters():
            safe_get_full_fp32_param(one)
            if self._linked:
                safe_get_full_optimizer_state(one, "exp_avg")
        return True

    def _write_weights(self):
        if not self._writable:
            return False
        for name, one in self.engine.module.named_parameters():
            self._named[name].data.mul_(0.5)
            safe_set_full_fp32_param(one, self._named[name].detach().float())
        return True

    def _write_states(self):
        if not (self._writable and self._linked):
            return False
        for name, one in self.engine.module.named_parameters():
            state = self._optimizer.state[self._named[name]]["exp_avg"].mul_(0.5)
            safe_set_full_optimizer_state(one, state.float(), "exp_avg")
        return True

    def _halve(self):
        """Write the model's weights in place, which are the optimizer's on ZeRO 0 in fp32 alone."""
        if self.trainer.stage or self.trainer.half:
            return False
        for one in (*self.engine.module.parameters(), *self._named.values()):
            one.data.mul_(0.5)
        return True

    def _load(self):
        self.engine.save_checkpoint(self._folder, f"window{self._window}")
        self.engine.load_checkpoint(self._folder, f"window{self._window}")

    def _another_engine(self):
        self.engine.save_checkpoint(self._folder, f"window{self._window}")
        self.engine.destroy()
        self.engine = built(self.trainer, self.trainer.seed + 1)
        self.engine.load_checkpoint(self._folder, f"window{self._window}")

    def _evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            self._loss(self.engine, self._rank, 999, 2)
        self.engine.train()

    def _freeze(self):
        """Freeze a group for a window, its rate at zero."""
        trainer = self.trainer
        if trainer.schedule or not trainer.groups or (trainer.stage == 0 and not trainer.half):
            return False
        which = trainer.seed % 3
        self._frozen = which, self._optimizer.param_groups[which]["lr"]
        self._train_group(which, 0.0, trained=False)
        return True

    def _thaw(self):
        if self._frozen:
            self._train_group(*self._frozen, trained=True)
            self._frozen = None

    def _train_group(self, which, rate, *, trained):
        for model in (self.engine.module, self._model):
            for name, one in model.named_parameters():
                if group_of(name) == which:
                    one.requires_grad_(trained)
        for optimizer in self._both:
            optimizer.param_groups[which]["lr"] = rate
