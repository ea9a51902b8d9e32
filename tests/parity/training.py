"""Training functions as users write them, for the tests of `--train`; ranks import them by name."""

import torch


def nll(engine, micro_batches):
    """The mean negative log likelihood over loss tokens, from the model's logits."""
    for batch in micro_batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["loss_mask"]
        logp = engine(ids)[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        engine.backward(-(logp * mask).sum() / mask.sum().clamp(min=1))
        engine.record("tokens", mask.sum())
        engine.step()


def nothing(engine, micro_batches):
    """A function that never steps."""


def halved(engine, micro_batches):
    """Another loss for our engine than for the reference: what a port gets wrong."""
    half = 0.5 if hasattr(engine, "last_step") else 1.0
    for batch in micro_batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["loss_mask"]
        logp = engine(ids)[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        engine.backward(-half * (logp * mask).sum() / torch.clamp(mask.sum(), min=1))
        engine.step()


def by_rollouts(engine, micro_batches):
    """The mean over rollouts of their own means, whatever the configuration says."""
    for batch in micro_batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["loss_mask"]
        logp = engine(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        engine.backward(-((logp * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean())
        engine.step()


def summed(engine, micro_batches):
    """The sum over loss tokens."""
    for batch in micro_batches:
        ids, mask = batch.inputs["input_ids"].to(engine.device), batch.inputs["loss_mask"].to(engine.device)
        logp = engine(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        engine.backward(-(logp * mask).sum())
        engine.step()


def two_terms(engine, micro_batches):
    """A mean over tokens and one over rollouts; the terms of a configuration have these names."""
    for batch in micro_batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["loss_mask"]
        logp = engine(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        by_token = -(logp * mask).sum() / mask.sum().clamp(min=1)
        by_rollout = -((logp * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        engine.backward({"a": by_token, "b": by_rollout})
        engine.step()


def reads_the_window(engine, micro_batches):
    """Uses what plain torch does not have."""
    for batch in micro_batches:
        engine.backward(engine(batch.inputs["input_ids"]).sum() / engine.window.target)
        engine.step()


def steps_twice(engine, micro_batches):
    """Calls step() once more than the order of calls allows."""
    for batch in micro_batches:
        engine.backward(engine(batch.inputs["input_ids"]).mean())
        engine.step()
        engine.step()


def leaves_all_out(engine, micro_batches):
    """Takes micro-batches and runs none."""
    for _ in micro_batches:
        pass
