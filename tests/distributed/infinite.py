"""Steps of which one has a gradient that is not finite, on one rank alone: all ranks must skip it."""

import torch

KINDS = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.2},
    "fp16 by autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


def three_steps(engine, parameter, loss, weights, *, infinite):
    """Of each step whether it was skipped, the loss scale, and the weights behind it: the second one is infinite.

    Args:
        engine: that steps with every pass.
        parameter: whose gradient is not finite.
        loss: gives the loss of a micro-batch.
        weights: gives those of the engine, as something that can be compared.
        infinite: whether it is on this rank.
    """

    def step(factor):
        hook = parameter.register_hook(lambda gradient: gradient * factor)
        engine.backward(loss())
        engine.step()
        hook.remove()
        scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        return engine.last_step.skipped, scaler and scaler.get_scale(), weights()

    for _ in range(16):  # until the loss scale of fp16 fits
        begun = step(1.0)
        if not begun[0]:
            break
    found = [begun, step(torch.inf if infinite else 1.0), step(1.0)]
    engine.destroy()
    return found


def assert_all_skip(of_ranks):
    """All ranks skip the second step, and go on alike."""
    first, *others = of_ranks
    assert all(other == first for other in others)
    (_, scale, weights), (skipped, _, weights_there), (skipped_then, scale_then, weights_then) = first
    assert skipped
    assert weights == weights_there != weights_then
    assert not skipped_then
    if scale is not None:
        assert scale_then == scale / 2
