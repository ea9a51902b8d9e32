"""offload_states() is refused where DeepSpeed itself would end in an assertion, by the release that is installed."""

from types import SimpleNamespace

import pytest
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from ds_parity.config.releases import release
from ds_parity.engine import proxying
from ds_parity.engine.internals import installed
from ds_parity.errors import ConfigError


def proxy(*, parameters=None, states=None, wrapper=True):
    """A proxy of an engine whose configuration offloads parameters, or optimizer states, and what moved it."""
    moved = []
    names = ("offload_states", "reload_states")
    devices = {"zero_offload_param": parameters, "zero_offload_optimizer": states}
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(**dict.fromkeys(names if wrapper else ())),
        zero_optimization_stage=lambda: 3,
        **{name: lambda on=on: on and SimpleNamespace(device=on) for name, on in devices.items()},
        **{name: lambda name=name, **given: moved.append((name, given)) for name in names},
    )
    return SimpleNamespace(__wrapped__=engine), moved


def call(name, on):
    proxying.METHODS[name](on, **({"pin_memory": False} if name == "offload_states" else {}))


@pytest.fixture
def with_release(monkeypatch):
    """A function that has the engine believe that another DeepSpeed is installed."""
    return lambda name: monkeypatch.setattr(installed, "installed", lambda: name and release(name))


@pytest.mark.parametrize("device", ["cpu", "nvme", OffloadDeviceEnum.cpu])
@pytest.mark.parametrize("version", ["0.18.4", "0.19.8", None])
def test_offloaded_parameters_are_refused_on_every_release(with_release, version, device):
    with_release(version)
    engine, moved = proxy(parameters=device)
    shown = getattr(device, "value", device)
    wanted = rf"offload_states\(\) with zero_optimization\.offload_param\.device = {shown}: .*leave the call out"
    with pytest.raises(ConfigError, match=wanted):
        call("offload_states", engine)
    assert not moved


@pytest.mark.parametrize("version", ["0.18.4", "0.18.9"])
def test_offloaded_optimizer_states_are_refused_before_0_19(with_release, version):
    with_release(version)
    engine, moved = proxy(states="cpu")
    wanted = (
        rf"offload_states\(\) with zero_optimization\.offload_optimizer\.device = cpu: DeepSpeed {version} is wrong on "
        r"offload_states\(\) with offloaded optimizer states: .*use DeepSpeed 0\.19\.0 or newer; or leave the call out"
    )
    with pytest.raises(ConfigError, match=wanted):
        call("offload_states", engine)
    assert not moved


@pytest.mark.parametrize("version", ["0.19.0", "0.19.8", None])
def test_offloaded_optimizer_states_are_left_to_later_releases(with_release, version):
    with_release(version)
    engine, moved = proxy(states="cpu")
    call("offload_states", engine)
    assert moved == [("offload_states", {"pin_memory": False})]


@pytest.mark.parametrize("offloaded", [{}, {"parameters": "none", "states": "none"}])
def test_states_on_the_accelerator_are_moved_on_every_release(with_release, offloaded):
    with_release("0.18.4")
    engine, moved = proxy(**offloaded)
    call("offload_states", engine)
    assert [name for name, _ in moved] == ["offload_states"]


@pytest.mark.parametrize("offloaded", [{"parameters": "cpu"}, {"states": "cpu"}])
def test_states_may_come_back_where_none_could_leave(with_release, offloaded):
    """A loop may call reload_states() before each pass; DeepSpeed has nothing to do in it then."""
    with_release("0.18.4")
    engine, moved = proxy(**offloaded)
    call("reload_states", engine)
    assert moved == [("reload_states", {})]


@pytest.mark.parametrize("name", ["offload_states", "reload_states"])
def test_an_optimizer_without_states_to_move_is_refused(with_release, name):
    with_release("0.19.8")
    engine, moved = proxy(wrapper=False)
    with pytest.raises(ConfigError, match="which has no states that DeepSpeed could move"):
        call(name, engine)
    assert not moved
