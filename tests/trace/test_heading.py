"""Line 1 of a trace: what a run was, and with which versions and configuration it was made."""

from importlib.metadata import version

from ds_parity.trace.heading import header


def line(**changed):
    given = {"config": {"a": 1, "b": {"c": True}}, "engine": "ds_parity", "ranks": 2, "device": "cpu gloo", "seed": 3}
    return header("toy", **given | changed)


def test_a_header_says_what_it_was_given_and_the_versions_that_are_installed():
    made = line()
    assert (made.scenario, made.seed, made.ranks, made.device, made.engine) == ("toy", 3, 2, "cpu gloo", "ds_parity")
    assert made.versions == {name: version(name) for name in ("ds_parity", "deepspeed", "torch")}


def test_the_hash_depends_on_what_the_configuration_holds_and_not_on_the_order_of_its_keys():
    assert line(config={"b": {"c": True}, "a": 1}).config_hash == line().config_hash
    assert line(config={"a": 1, "b": {"c": False}}).config_hash != line().config_hash
