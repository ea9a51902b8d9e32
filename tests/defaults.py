"""Settings of torch that hold for the whole process, put back as they were."""

from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype):
    """Torch's default dtype is this one inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
