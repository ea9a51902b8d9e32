"""Tables are put between their marks, and nothing else of a page is touched."""

import pytest

from ds_parity.errors import DsParityError
from tools import update_docs

PAGE = "before\n<!-- matrix: made by `make matrix` -->\nold\n<!-- matrix: end -->\nbehind\n"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(update_docs, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_table_takes_the_place_of_the_one_before(page):
    update_docs.put(page, "matrix", "| new |\n| again |\n")
    assert page.read_text() == PAGE.replace("old\n", "| new |\n| again |\n")
    assert update_docs.shown(page, "matrix") == "| new |\n| again |\n"


@pytest.mark.parametrize("text", ["without marks", PAGE + PAGE])
def test_marks_that_are_not_there_once_are_refused(page, text):
    page.write_text(text)
    with pytest.raises(DsParityError, match="must stand there once each"):
        update_docs.put(page, "matrix", "new\n")
    assert page.read_text() == text


def test_the_readme_shows_the_counts_of_the_matrix_alone(tmp_path):
    source = tmp_path / "matrix.md"
    source.write_text("8 cells: 7 right, 1 refused (deepspeed 0.19.8).\n\n| | ZeRO 0 |\n")
    shown = {path.name: text for path, text in update_docs.made_from_runs("matrix", source)}
    assert shown == {"matrix.md": source.read_text(), "README.md": "8 cells: 7 right, 1 refused.\n"}
