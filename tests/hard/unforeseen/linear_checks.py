"""Compares an engine with the account of its program: the record of a step, weights, and gradients before a step."""

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad


def wrong_step(engine, account):
    """Say what is wrong of the step that was taken last."""
    program, right, last = account.program, account.records[-1], engine.last_step
    wrong = []
    got = {name: getattr(last, name) for name in ("rollouts", "prompts", "tokens", "skipped")}
    got["micro_batches"] = last.micro_batches_on(program.ranks)
    wrong += [f"{name} is {one}, and should be {right[name]}" for name, one in got.items() if one != right[name]]
    if any(not abs(one - other) <= 1e-9 * abs(other) for one, other in zip(last.lr, right["rates"], strict=True)):
        wrong.append(f"the rates are {last.lr}, and should be {right['rates']}")
    if right["loss"] is not None:
        loss, off = right["loss"]
        if last.loss is None or not abs(last.loss - loss) <= off:
            wrong.append(f"the loss is {last.loss}, and should be {loss} +- {off}")
    norm, off = right["norm"], max(1e-4, account.low)
    # Without clipping torch's own optimizer has none.
    if None not in (norm, last.grad_norm) and not abs(last.grad_norm - norm) <= off * norm + 1e-5:
        wrong.append(f"the norm is {last.grad_norm}, and should be {norm}")
    return [f"step {last.step}: {one}" for one in wrong + wrong_weights(engine, account)]


def wrong_weights(engine, account):
    """Say which weights are farther from the account's than its bounds; the shares of those that were added there."""
    program, wrong = account.program, []
    for name, parameter in engine.module.named_parameters():
        read = safe_get_full_fp32_param(parameter) if program.readable else parameter.detach()
        if read is None:
            continue  # ZeRO 3 gives none of a frozen one
        got, right = _flat(read), account.weights[name]
        bound = account.bounds[name] + 1e-5 * right.abs() + 2e-6
        if program.half and not program.readable:
            bound = bound + right.abs() * 2.0**-8
        over = (got - right).abs() - bound
        if not bool((over <= 0).all()):
            i = int(over.argmax())
            far = f"{name}[{i}] is {got[i]:.6f}, and should be {right[i]:.6f} +- {bound[i]:.6f}"
            shares = _shares_of(account, name, i)
            wrong.append(f"{far}, as {int((over > 0).sum())} of {len(got)}; the step's shares by seed: {shares}")
        if program.half and program.readable and program.stage < 3:
            copied = (_flat(parameter.detach()) - got).abs() <= got.abs() * 2.0**-7 + 1e-6
            if not bool(copied.all()):
                wrong.append(f"the 16-bit copy of {name} is not the optimizer's")
    return wrong


def _shares_of(account, name, index):
    """The shares of the step's micro-batches that touch a weight."""
    shares = account.records[-1]["shares"]
    return {seed: share for seed, share, touched in shares if (name[:-7], index) in {one[:2] for one in touched}}


def gradient(engine, program, name):
    """The gradient that the coming step would take for a parameter, before the window's correction; None for none."""
    parameter = dict(engine.module.named_parameters())[name]
    read = safe_get_full_grad(parameter) if program.stage else parameter.grad
    return None if read is None else read.detach().clone()


def wrong_gradient(engine, account, name):
    """Say so where what a loop reads between the boundary's backward and its step is not the step's gradient."""
    program, right = account.program, account.records[-1]["gradients"][name]
    read = gradient(engine, program, name)
    if read is None:
        return []
    got = _flat(read) * engine.window.correction
    over = (got - right).abs() - (3 * account.low * (right.abs() + 0.01) + 1e-6)
    i = int(over.argmax())
    if bool((over <= 0).all()):
        return []
    return [f"safe_get_full_grad of {name}[{i}] gives {got[i]}, and the step's gradient is {right[i]}"]


def differing_weights(engine):
    """Say so where the weights of ranks differ by a bit; collective."""
    if int(engine.zero_optimization_stage()) == 3:
        return []  # each rank has gathered those of all
    least = torch.cat([one.detach().flatten() for one in engine.module.parameters()])
    most = least.clone()
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return [] if torch.equal(least, most) else ["the weights of ranks differ"]


def _flat(tensor):
    return tensor.detach().double().cpu().reshape(-1).clone()
