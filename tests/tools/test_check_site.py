"""What a built page would load from the network is found; links that a reader may follow are left alone."""

import pytest

from tools.check_site import main, remote_loads

LOADED = [
    '<script src="https://unpkg.com/one.js"></script>',
    '<script src="//unpkg.com/one.js"></script>',
    '<script src=" HTTPS://unpkg.com/one.js"></script>',
    '<script src="https:&#47;/unpkg.com/one.js"></script>',
    '<script type="module">import one from "https://unpkg.com/one.js"</script>',
    "<script>import('https://unpkg.com/one.js')</script>",
    '<script>fetch("https://example.org/one.json")</script>',
    "<script>window.fetch(`//example.org/one.json`, {})</script>",
    '<script>const x = new XMLHttpRequest(); x.open("GET", "https://example.org")</script>',
    '<script>navigator.sendBeacon("https://example.org/count")</script>',
    '<script>new WebSocket("wss://example.org")</script>',
    '<script>new EventSource("https://example.org")</script>',
    '<script>new Worker("https://example.org/one.js"); importScripts()</script>',
    '<script>importScripts("https://example.org/one.js")</script>',
    '<script>image.src = "https://example.org/one.png"</script>',
    '<script>image.setAttribute("src", "https://example.org/one.png")</script>',
    '<link rel="stylesheet" href="https://fonts.example.org/css">',
    '<link rel="preconnect" href="https://fonts.example.org">',
    '<link rel="dns-prefetch" href="//fonts.example.org">',
    '<link rel="alternate stylesheet" href="https://example.org/dark.css">',
    '<link href="https://example.org/what">',
    '<link rel="preload" as="image" href="one.png" imagesrcset="one.png 1x, https://example.org/two.png 2x">',
    '<img src="//images.example.org/one.png">',
    '<img src="one.png" srcset="one.png 1x, https://images.example.org/two.png 2x">',
    '<picture><source srcset="one.png, //images.example.org/two.png 2x"></picture>',
    '<video poster="https://example.org/one.png"></video>',
    '<video src="https://example.org/one.mp4"></video>',
    '<audio src="https://example.org/one.ogg"></audio>',
    '<track src="https://example.org/one.vtt">',
    '<embed src="https://example.org/one.pdf">',
    '<object data="https://example.org/one.pdf"></object>',
    '<input type="image" src="https://example.org/one.png">',
    '<iframe src="http://example.org"></iframe>',
    '<iframe srcdoc="&lt;script src=https://example.org/one.js>&lt;/script>"></iframe>',
    '<svg><image href="https://example.org/one.png"/></svg>',
    '<svg><use xlink:href="https://example.org/one.svg#a"/></svg>',
    '<a href="https://example.org" ping="https://example.org/count">there</a>',
    '<body background="https://example.org/one.png">',
    '<base href="https://example.org/">',
    '<meta http-equiv="refresh" content="0; url=https://example.org">',
    '<p style="background: url(https://example.org/one.png)"></p>',
    '<style>@import "https://example.org/one.css";</style>',
    "<style>a { background: url('https://example.org/one.png') }</style>",
]


@pytest.mark.parametrize("loaded", LOADED)
def test_what_a_page_loads_is_found(tmp_path, loaded):
    (tmp_path / "index.html").write_text(f"<html>{loaded}</html>")
    assert len(remote_loads(tmp_path)) == 1


@pytest.mark.parametrize(
    "style",
    [
        '@import "https://example.org/one.css";',
        '@import"https://example.org/one.css";',
        "@import url(https://example.org/one.css);",
        "a { background: url(//example.org/b) }",
        'a { background: URL( "HTTPS://example.org/b" ) }',
        'a { background: image-set("https://example.org/b" 1x) }',
        "@font-face { src: local(a), url(https://example.org/b) }",
    ],
)
def test_what_a_style_loads_is_found(tmp_path, style):
    (tmp_path / "one.css").write_text(style)
    assert len(remote_loads(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one.js", 'fetch("https://example.org/one.json")'),
        ("one.mjs", 'import "https://example.org/one.js"'),
        ("one.svg", '<svg xmlns="http://www.w3.org/2000/svg"><image href="https://example.org/one.png"/></svg>'),
        (
            "one.svg",
            '<svg xmlns="http://www.w3.org/2000/svg"><style>a { fill: url(https://example.org/b) }</style></svg>',
        ),
    ],
)
def test_what_scripts_and_pictures_of_the_site_load_is_found(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(remote_loads(tmp_path)) == 1


def test_links_and_files_of_the_site_are_left_alone(tmp_path):
    page = """<a href="https://example.org">x</a><script src="assets/one.js"></script><link rel="next" href="//x/y">
    <link rel="canonical" href="https://example.org/"><link rel="stylesheet" href="one.css"><img srcset="a 1x, b 2x">
    <!-- <script src="https://example.org"></script> --><code>fetch("https://example.org")</code>
    <script>const there = "https://example.org"; fetch("assets/one.json"); // see https://example.org</script>
    <style>a { fill: url(#head) } @namespace url("http://www.w3.org/1999/xhtml"); /* url(https://example.org) */</style>
    <meta name="description" content="see https://example.org"><img src="data:image/png;base64,//8=">
    <svg xmlns="http://www.w3.org/2000/svg"><a href="https://example.org"></a></svg>"""
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "one.css").write_text("a { background: url(data:image/png;base64,//8=) } b { src: url(../one.woff2) }")
    assert remote_loads(tmp_path) == []


def test_the_command_fails_where_something_is_loaded_or_nothing_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_site.py", str(tmp_path)])
    assert main() == 2
    (tmp_path / "index.html").write_text("<p>text</p>")
    assert main() == 0
    (tmp_path / "index.html").write_text(LOADED[0])
    assert main() == 1
    assert "https://unpkg.com/one.js" in capsys.readouterr().out
