"""Releases of DeepSpeed are ordered as Python packages are."""

import pytest

from ds_parity.config.releases import read, release

IN_ORDER = [
    "0.9.5",
    "0.18.3",
    "0.18.4rc1",
    "0.18.4",
    "0.18.9",
    "0.19.0.dev3",
    "0.19.0rc1",
    "0.19.0",
    "0.19.8.dev0",
    "0.19.8a1",
    "0.19.8b2",
    "0.19.8rc1",
    "0.19.8rc2",
    "0.19.8",
    "0.19.10",
    "0.20",
    "1.0",
]


def test_candidates_and_development_versions_come_before_their_release():
    assert [str(one) for one in sorted(map(release, reversed(IN_ORDER)))] == IN_ORDER


@pytest.mark.parametrize(
    "written", ["0.19.8+cu12", "0.19.8+a1b2c3d", "v0.19.8", "0.19.8.post1", "0.19.8.0", " 0.19.8 "]
)
def test_a_build_of_ones_own_and_a_post_release_stand_for_their_release(written):
    assert release(written) == release("0.19.8")
    assert hash(release(written)) == hash(release("0.19.8"))
    assert release(written).final


@pytest.mark.parametrize(("written", "build"), [("0.19.8+cu12", "cu12"), ("0.19.8rc1+abc.d", "abc.d"), ("0.19.8", "")])
def test_a_build_is_known_by_its_name(written, build):
    assert release(written).build == build


@pytest.mark.parametrize("written", ["0.19.8rc1", "0.19.8.dev0", "0.19.8.dev3+abc"])
def test_what_comes_before_a_release_is_not_it(written):
    assert release(written) < release("0.19.8")
    assert not release(written).final


@pytest.mark.parametrize("written", ["nightly", "", "0.19.x", "0..19", "0.19.8 or so"])
def test_what_names_no_release_is_none_and_is_refused_where_one_is_needed(written):
    assert read(written) is None
    with pytest.raises(ValueError, match="is not a version"):
        release(written)
