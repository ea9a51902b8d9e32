"""What `import ds_parity` gives, and that it costs neither torch nor deepspeed."""

import subprocess
import sys

import pytest


def printed(code):
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_and_its_light_rooms_import_neither_torch_nor_deepspeed():
    code = "import sys, ds_parity, ds_parity.config, ds_parity.window, ds_parity.planning, ds_parity.trace\n"
    code += "print(sorted({'torch', 'deepspeed'} & sys.modules.keys()))"
    assert printed(code) == "[]"


def test_losses_are_an_attribute_of_the_package_and_import_torch_alone_when_they_are_used():
    code = "import sys, ds_parity\n"
    code += "print(ds_parity.losses.PolicyGradient.__name__, ds_parity.losses.DirectPreference.__name__)\n"
    code += "print(sorted(name for name in sys.modules if name.startswith(('ds_parity.parity', 'ds_parity.engine'))))\n"
    code += "print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    assert printed(code).splitlines() == ["PolicyGradient DirectPreference", "[]", "True False"]


def test_every_name_of_the_package_is_there():
    import ds_parity

    assert not [name for name in ds_parity.__all__ if not hasattr(ds_parity, name)]


def test_a_name_that_is_not_there_is_an_attribute_error():
    import ds_parity

    with pytest.raises(AttributeError, match="module 'ds_parity' has no attribute 'loses'"):
        _ = ds_parity.loses
