"""The wrapper, thin: DeepSpeed, a window, an exchange of counts."""

from ds_parity.engine.internals.installed import check_deepspeed

check_deepspeed()

# Below the check, because the guards of a release that nobody has read import DeepSpeed.
from ds_parity.engine.internals import unread  # noqa: E402

unread.say()
