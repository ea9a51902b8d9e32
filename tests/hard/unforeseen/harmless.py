"""What loops do between passes that must change nothing: logs, copies, evaluations, sums over weights."""

import copy
import gc
import pickle

import deepspeed
import torch
import torch.distributed as dist


def do_something_harmless(engine, which, inputs):
    """Do the thing of a number, if there is one; every rank does the same.

    Args:
        engine: that trains.
        which: of the things.
        inputs: of its model, for an evaluation.
    """
    things = (_copies, _shows, _evaluates, _saves, _clears, _asks, _gathers, _collects, _advantages, _norms)
    if which < len(things):
        things[which](engine, inputs)


def _copies(engine, _):
    pickle.loads(pickle.dumps(engine.last_step))
    copy.deepcopy(engine.window)


def _shows(engine, _):
    str(engine), dir(engine)


def _evaluates(engine, inputs):
    engine.module.eval()
    with torch.no_grad():
        engine.module(inputs)
    engine.module.train()


def _saves(engine, _):
    copy.deepcopy(engine.module.state_dict())


def _clears(engine, _):
    engine.optimizer.zero_grad()
    engine.zero_grad()


def _asks(engine, _):
    engine.get_global_grad_norm(), engine.get_lr(), engine.get_mom()


def _gathers(engine, _):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        sum(float(one.sum()) for one in engine.module.parameters())


def _collects(*_):
    gc.collect()


def _advantages(engine, _):
    engine.group_advantages([f"of rank {dist.get_rank()}", "of all"], [1.0, float(dist.get_rank())])


def _norms(engine, _):
    total = torch.zeros(1)
    dist.all_reduce(total)
