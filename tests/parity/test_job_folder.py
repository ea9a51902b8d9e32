"""A job takes the files of an earlier job out of its folder, and leaves what is the user's."""

import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity.running.job_folder import emptied

OWN = ("job.json", "log.txt", "rank0.jsonl", "rank17.jsonl")


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"import_from": [], "calls": []}' if name == "job.json" else "mine")


def test_a_folder_that_is_not_there_is_made(tmp_path):
    assert emptied(tmp_path / "out" / "ranks").is_dir()


@pytest.mark.parametrize("earlier", [OWN, ()])
def test_what_no_job_writes_stays(tmp_path, earlier):
    mine = ["analysis.py", "rank0.jsonl.bak", "ranks.jsonl", "sub/log.txt"]
    put(tmp_path, *mine, *earlier)
    assert files(emptied(tmp_path)) == sorted(mine)


@pytest.mark.parametrize("name", OWN[1:])
def test_a_file_of_the_users_with_the_name_of_a_jobs_is_refused(tmp_path, name):
    put(tmp_path, "notes.md", name)
    with pytest.raises(HarnessError, match=rf"{name} is there already, and no run of ds-parity has left it.*--out"):
        emptied(tmp_path)
    assert files(tmp_path) == sorted(["notes.md", name])


@pytest.mark.parametrize("text", ["mine", "[]", '{"calls": 3}', "\0"])
def test_a_file_of_the_users_with_the_name_of_the_calls_is_refused(tmp_path, text):
    put(tmp_path, "log.txt")
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(HarnessError, match=r"job\.json is there already"):
        emptied(tmp_path)
    assert files(tmp_path) == ["job.json", "log.txt"]


@pytest.mark.parametrize("name", OWN)
def test_a_folder_of_the_users_with_the_name_of_a_jobs_file_is_refused(tmp_path, name):
    put(tmp_path, *(one for one in OWN if one != name), f"{name}/mine.txt")
    with pytest.raises(HarnessError, match=rf"{name} is there already"):
        emptied(tmp_path)
    assert (tmp_path / name / "mine.txt").is_file()
