"""What ranks are told where one of them can't save."""

import pytest

from ds_parity.engine.saving import Saving, agreed, name_latest
from ds_parity.errors import CheckpointError


def saving(folder="folder", tag="a"):
    return Saving(str(folder), tag, names_latest=True, without_frozen=False)


def test_a_tag_without_letters_in_the_locale_is_told_to_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    (tmp_path / "latest").write_text("before")
    with pytest.raises(CheckpointError, match=r"rank 0 could not write the file latest \(UnicodeEncodeError"):
        name_latest(saving(tmp_path, "\udcff"), lambda value: [value, None])
    assert (tmp_path / "latest").read_text() == "before"


def test_what_the_error_tells_to_mend_names_the_client_state(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    with pytest.raises(CheckpointError, match="a client state that can't be pickled"):
        name_latest(saving(), lambda _: ["PicklingError: a lambda"])


@pytest.mark.parametrize("tag", ["", " "])
def test_an_empty_tag_of_any_rank_is_refused(tag):
    with pytest.raises(CheckpointError, match="rank 1 gives an empty tag"):
        agreed([saving(), saving(tag=tag)])


def test_the_identity_is_that_of_the_first_rank():
    both = [saving(), saving()]
    assert agreed(both) == both[0].identity
