"""The wrapper, thin: DeepSpeed, a window, an exchange of counts."""

from ds_parity.engine.internals.versions import check_deepspeed

check_deepspeed()
