"""What a built page would load from the network is found; links that a reader may follow are left alone."""

import pytest

from tools.check_site import remote_loads


@pytest.mark.parametrize(
    "loaded",
    [
        '<script src="https://unpkg.com/one.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
        '<img src="//images.example.org/one.png">',
        '<iframe src="http://example.org"></iframe>',
    ],
)
def test_what_is_loaded_is_found(tmp_path, loaded):
    (tmp_path / "index.html").write_text(f"<html>{loaded}</html>")
    assert len(remote_loads(tmp_path)) == 1


@pytest.mark.parametrize("style", ['@import "https://example.org/one.css";', "a { background: url(//example.org/b) }"])
def test_what_a_style_loads_is_found(tmp_path, style):
    (tmp_path / "one.css").write_text(style)
    assert len(remote_loads(tmp_path)) == 1


def test_links_and_files_of_the_site_are_left_alone(tmp_path):
    page = '<a href="https://example.org">there</a><script src="assets/one.js"></script><link rel="next" href="//x/y">'
    (tmp_path / "index.html").write_text(page)
    assert remote_loads(tmp_path) == []
