"""Reports through the command line: files where they were asked for, and refusals before anything long is run."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from base64 import b64decode
from pathlib import Path

import pytest

from ds_parity import cli
from ds_parity.errors import ConfigError, HarnessError
from ds_parity.parity.report import check, write
from ds_parity.parity.verification import verify as harness
from ds_parity.trace import Trace, TraceWriter, read_trace
from tests.parity.report.reported import Page, contents, record, trace, weights

CONFIG = Path(__file__).parents[3] / "ds_configs" / "zero2_bf16.json"


def left(path, held):
    """A trace as a file."""
    with TraceWriter(path, held.header) as writer:
        for step in held.steps:
            writer.write(step)
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command line in this process; returns exit code, standard output and standard error."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["ds-parity", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return ended.value.code, told.out, " ".join(told.err.split())

    return called


@pytest.fixture
def traces(tmp_path):
    return left(tmp_path / "a.jsonl", trace()), left(tmp_path / "b.jsonl", trace(4, {3: {"loss": 0.75}}))


@pytest.fixture
def ran(monkeypatch):
    """Lets `verify` run without ranks: what they would leave is made by hand. Returns the jobs that were run."""
    jobs = []

    def run(job, progress):
        jobs.append(job)
        for one in job.calls:
            scenario, engine = one.arguments["scenario"], one.arguments["engine"]
            odd = {2: {"grad_norm": 2.5}} if (scenario["name"], engine) == ("ragged", "deepspeed-loop") else {}
            header = {"scenario": scenario["name"], "engine": engine, "ranks": 1 if engine == "torch" else 2}
            left(Path(one.arguments["folder"]) / scenario["name"] / f"{engine}.jsonl", trace(3, odd, **header))
        return [{"accelerator": "cpu, made by hand"}]

    monkeypatch.setattr(harness, "run_job", run)
    return jobs


def test_a_verdict_stands_where_known_faults_cannot_be_computed(monkeypatch, tmp_path):
    def run(job, progress=None):
        for one in job.calls:
            scenario, engine = one.arguments["scenario"], one.arguments["engine"]
            odd = {2: {"grad_norm": 2.5}} if (scenario["name"], engine) == ("ragged", "torch") else {}
            header = {"scenario": scenario["name"], "engine": engine, "ranks": 1 if engine == "torch" else 2}
            path = left(Path(one.arguments["folder"]) / scenario["name"] / f"{engine}.jsonl", trace(3, odd, **header))
            if job.folder.name == "explaining":
                path.write_text("cut")
                raise HarnessError("rank 0 failed")
        return [{"accelerator": "cpu, made by hand"}]

    monkeypatch.setattr(harness, "run_job", run)
    verified = harness.verify(json.loads(CONFIG.read_text()), tmp_path)
    assert [one.title for one in verified.outcomes if not one.comparison.equal] == ["ragged against torch"]
    assert [str(one) for one in verified.left_out] == [
        "ragged against known faults: they can't be computed: rank 0 failed"
    ]
    assert len(read_trace(tmp_path / "ragged" / "torch.jsonl").steps) == 3


@pytest.mark.parametrize(
    ("said", "hint"),
    [("rank 1 failed in 'uniform: deepspeed': E: it can't", True), ("rank 1 failed in 'uniform: ds_parity': E", False)],
)
def test_where_bare_deepspeed_cannot_train_the_way_out_is_another_reference(monkeypatch, tmp_path, said, hint):
    def run(job, progress=None):
        raise HarnessError(said)

    monkeypatch.setattr(harness, "run_job", run)
    with pytest.raises(HarnessError, match=said) as raised:
        harness.verify(json.loads(CONFIG.read_text()), tmp_path)
    assert ("give --against torch" in str(raised.value)) is hint


def test_a_name_of_a_reference_is_one_name_and_no_windows_are_none(tmp_path):
    with pytest.raises(ConfigError, match="--against is 'plain': it must be"):
        harness.verify(json.loads(CONFIG.read_text()), str(tmp_path), against="plain")
    with pytest.raises(ConfigError, match="windows = 0: must be at least 1"):
        harness.verify(json.loads(CONFIG.read_text()), str(tmp_path), windows=0)


class TestCompare:
    def test_leaves_a_page_and_the_same_pictures_beside_it(self, call, traces, tmp_path):
        code, out, err = call("compare", *traces, "--report", tmp_path / "new" / "report")
        assert code == 1
        assert "FAIL: the traces differ" in out
        assert f"report: {tmp_path / 'new' / 'report' / 'report.html'}" in err
        names = [f"1-ragged-ds-parity-{name}.png" for name in ("curves", "differences", "windows")]
        assert sorted(path.name for path in (tmp_path / "new" / "report").iterdir()) == [*names, "report.html"]
        page = Page((tmp_path / "new" / "report" / "report.html").read_text(encoding="utf-8"))
        assert f"FAIL: differs from {traces[0]} in 1 of 4 steps, first at step 3, in the loss" in page.text
        inline = [b64decode(source.partition(",")[2]) for source in page.attributes("src")]
        assert inline == [(tmp_path / "new" / "report" / name).read_bytes() for name in names]
        assert all(png.startswith(b"\x89PNG") for png in inline)

    def test_leaves_junit_xml_with_or_without_a_page(self, call, traces, tmp_path):
        code, _, err = call("compare", *traces, "--junit", tmp_path / "ci" / "parity.xml")
        (case,) = ET.parse(tmp_path / "ci" / "parity.xml").getroot().iter("testcase")
        assert code == 1
        assert (case.get("classname"), case.get("name")) == ("ragged", str(traces[0]))
        assert case.find("failure") is not None
        assert not list(tmp_path.rglob("*.html"))
        assert str(tmp_path / "ci" / "parity.xml") in err

    def test_equal_traces_leave_a_page_that_passes_and_exit_0(self, call, traces, tmp_path):
        code, _, _ = call("compare", traces[0], traces[0], "--report", tmp_path / "r", "--junit", tmp_path / "j.xml")
        assert code == 0
        assert 'class="verdict good">PASS: ' in (tmp_path / "r" / "report.html").read_text()
        assert ET.parse(tmp_path / "j.xml").getroot().find("testsuite").get("failures") == "0"

    def test_json_stays_alone_on_standard_output(self, call, traces, tmp_path):
        _, out, _ = call("compare", *traces, "--json", "--report", tmp_path / "r")
        assert json.loads(out)["equal"] is False
        assert (tmp_path / "r" / "report.html").exists()

    def test_an_earlier_report_is_written_over(self, call, traces, tmp_path):
        call("compare", *traces, "--report", tmp_path, "--junit", tmp_path / "j.xml")
        call("compare", traces[0], traces[0], "--report", tmp_path, "--junit", tmp_path / "j.xml")
        assert "PASS: " in (tmp_path / "report.html").read_text()
        assert ET.parse(tmp_path / "j.xml").getroot().find("testsuite").get("failures") == "0"

    def test_a_path_with_markup_and_letters_that_are_not_utf8_is_harmless(self, call, tmp_path):
        folder = tmp_path / "<script>x\udcff"
        path = left(folder / "a.jsonl", trace(2, scenario="<script>"))
        code, _, _ = call("compare", path, path, "--json", "--report", tmp_path / "r", "--junit", tmp_path / "j.xml")
        page = Page((tmp_path / "r" / "report.html").read_text(encoding="utf-8"))
        assert code == 0
        # The values of two pictures, and what draws them: none of it comes from the path.
        assert page.named("script") == [{"type": "application/json", "class": "values"}] * 2 + [{}] * 2
        assert "\\udcff" in page.text
        assert "\\udcff" in ET.parse(tmp_path / "j.xml").getroot().find(".//testcase").get("name")

    def test_a_path_that_looks_like_markup_of_the_terminal_is_shown_as_it_is(self, call, tmp_path):
        path = left(tmp_path / "[/bold]" / "a.jsonl", trace(2))
        code, out, _ = call("compare", path, path, "--junit", tmp_path / "j.xml")
        assert code == 0
        assert f"{path} against {path}" in out.replace("\n", "")

    @pytest.mark.parametrize("content", [b'{"stage": 2}', b"step,loss\n1,2.0\n", b"\xef\xbb\xbf[]"])
    def test_junit_does_not_replace_what_is_no_xml(self, call, traces, tmp_path, content):
        """The trace that is compared, say."""
        path = tmp_path / "kept"
        path.write_bytes(content)
        code, out, err = call("compare", traces[0], traces[0], "--junit", path)
        assert (code, out) == (2, "")
        assert "it is there already and is no XML: what it contains would be lost" in err
        assert path.read_bytes() == content

    def test_what_is_not_finite_is_a_string_of_json(self, call, tmp_path):
        path = left(tmp_path / "a.jsonl", trace(3, {2: {"loss": math.nan, "grad_norm": math.inf}}))
        code, out, _ = call("compare", path, path, "--json")
        told = json.loads(out, parse_constant=pytest.fail)
        assert code == 1
        assert [told["rows"][1]["candidate"][name] for name in ("loss", "grad_norm")] == ["NaN", "Infinity"]

    def test_pyplot_is_not_touched_and_torch_not_loaded(self, traces, tmp_path):
        code = (
            f"import sys\npath = {str(traces[0])!r}\n"
            f"sys.argv = ['x', 'compare', path, path, '--report', {str(tmp_path)!r}]\n"
            "from ds_parity.cli.entry import app\napp(standalone_mode=False)\n"
            "assert 'matplotlib' in sys.modules\nassert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


class TestVerify:
    def test_leaves_a_section_a_reference_and_both_configurations(self, call, ran, tmp_path):
        options = ["--out", tmp_path / "out", "--report", tmp_path / "r", "--junit", tmp_path / "j.xml"]
        code, out, _ = call("verify", CONFIG, *options)
        assert code == 1
        assert "FAIL: the runs differ" in out
        page = Page((tmp_path / "r" / "report.html").read_text())
        assert (
            "FAIL: 1 of 3 comparisons differs: ragged differs from DeepSpeed in a hand-written loop in 1 of 3"
            in page.text
        )
        assert page.table("comparison")[1:] == [
            [
                "ragged",
                "differs from DeepSpeed in a hand-written loop in 1 of 3 steps, first at step 2, in the gradient norm",
            ],
            ["uniform", "equal to DeepSpeed, bit for bit, in 3 of 3 steps"],
            ["ragged", "equal to PyTorch without DeepSpeed, up to rounding, in 3 of 3 steps"],
        ]
        # Two pictures a comparison, and a third where there is a difference.
        assert len(page.attributes("src")) == len(list((tmp_path / "r").glob("*.png"))) == 7
        assert "ran on cpu, made by hand" in page.text
        assert ["gradient_accumulation_steps", "(absent)", "6"] in [row[:3] for row in page.table("key")]
        rows = page.table("trace")[1:]
        of_references = [row[2] for row in rows[::2]]
        assert of_references == ["deepspeed-loop", "deepspeed", "torch"]
        assert {row[2] for row in rows[1::2]} == {"ds_parity"}
        assert [row[0] for row in rows[4:]] == [
            str(tmp_path / "out" / "ragged" / f"{engine}.jsonl") for engine in ("torch", "ds_parity")
        ]
        assert all(Path(row[0]).exists() for row in rows)

    def test_junit_has_a_case_a_reference(self, call, ran, tmp_path):
        call("verify", CONFIG, "--out", tmp_path / "out", "--junit", tmp_path / "j.xml")
        cases = list(ET.parse(tmp_path / "j.xml").getroot().iter("testcase"))
        assert [(case.get("classname"), case.get("name"), case.find("failure") is None) for case in cases] == [
            ("uniform", "deepspeed", True), ("ragged", "deepspeed-loop", False), ("ragged", "torch", True),
        ]  # fmt: skip

    def test_what_the_ranks_cannot_divide_is_skipped_with_the_reason(self, call, ran, tmp_path):
        options = ["--ranks", 5, "--out", tmp_path / "out", "--report", tmp_path / "r", "--junit", tmp_path / "j.xml"]
        code, out, _ = call("verify", CONFIG, *options, "--json")
        assert code == 1
        (reason,) = json.loads(out)["left_out"]
        assert reason.startswith("uniform against deepspeed: uniform windows need passes that the ranks divide")
        skipped = ET.parse(tmp_path / "j.xml").getroot().findall(".//testcase[skipped]")
        assert [(case.get("classname"), case.get("name")) for case in skipped] == [("uniform", "deepspeed")]
        assert (
            "left out, against DeepSpeed: uniform windows need passes"
            in Page((tmp_path / "r" / "report.html").read_text()).text
        )

    def test_the_verdict_is_out_before_the_report_is_written(self, call, ran, monkeypatch, tmp_path):
        """A disk that fills up while ranks train must not take the verdict along."""

        def full(self, text, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        code, out, err = call("verify", CONFIG, "--out", tmp_path / "out", "--report", tmp_path / "r")
        assert code == 2
        assert "FAIL: the runs differ" in out
        assert "can't be written (No space left on device)" in err

    def test_judging_traces_that_are_not_there_is_a_message(self, tmp_path):
        from ds_parity.config import load_config
        from ds_parity.errors import TraceError

        runs, left_out = harness.scenarios(load_config(CONFIG), 2)
        with pytest.raises(TraceError, match=r"deepspeed\.jsonl: can't read the trace"):
            harness.judge(runs, left_out, tmp_path, "cpu")

    def test_with_the_matrix_reports_are_refused(self, call, tmp_path):
        code, _, err = call("verify", "--matrix", "--junit", tmp_path / "j.xml")
        assert code == 2
        assert "--junit is of one configuration: --matrix leaves its matrix.html in --out" in err


@pytest.fixture
def a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("keep me")
    return path


class TestRefusals:
    @pytest.mark.parametrize("command", ["verify", "compare"])
    @pytest.mark.parametrize(
        ("option", "path"),
        [
            ("--report", "file"),
            ("--report", "file/deeper"),
            ("--report", "/dev/null/x"),
            ("--junit", "folder"),
            ("--junit", "file/j.xml"),
            ("--junit", "/dev/null/j.xml"),
        ],
    )
    def test_what_cannot_be_written_is_a_message_before_ranks_are_started(
        self, call, ran, traces, a_file, tmp_path, command, option, path
    ):
        (tmp_path / "folder").mkdir()
        wanted = ["verify", CONFIG, "--out", tmp_path / "out"] if command == "verify" else ["compare", *traces]
        code, out, err = call(*wanted, option, tmp_path / path)
        assert code == 2
        assert f"{option} {tmp_path / path}: can't be written" in err
        assert (ran, out) == ([], "")
        assert a_file.read_text() == "keep me"

    def test_a_folder_that_cannot_be_written_to(self, tmp_path, monkeypatch):
        """Root may write anywhere, so the system's answer is made up."""

        def denied(*arguments, **options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.TemporaryFile", denied)
        for folder, junit in ((tmp_path, None), (None, tmp_path / "j.xml")):
            with pytest.raises(ConfigError, match=r"can't be written \(Permission denied\)"):
                check(folder, junit)

    def test_a_page_whose_name_is_taken_by_a_folder(self, tmp_path):
        (tmp_path / "report.html").mkdir()
        with pytest.raises(ConfigError, match="it is a folder"):
            check(tmp_path, None)

    def test_a_page_of_somebody_elses(self, tmp_path):
        (tmp_path / "report.html").write_text("<!doctype html><title>mine</title>")
        with pytest.raises(
            ConfigError, match=r"--report .*: can't be written \(report.html is there already and is no"
        ):
            check(tmp_path, None)

    def test_a_page_of_before_may_go(self, call, traces, tmp_path):
        for _ in range(2):
            assert call("compare", *traces, "--report", tmp_path)[0] == 1
        assert "<title>ds-parity" in (tmp_path / "report.html").read_text()

    def test_one_path_for_the_page_and_the_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--junit .* \(the page of --report is written there\)"):
            check(tmp_path / "r", tmp_path / "r" / "." / "report.html")

    def test_a_path_with_a_null(self):
        with pytest.raises(ConfigError, match="null"):
            check(Path("a\0b"), None)

    def test_without_matplotlib_a_page_is_refused_with_the_command_that_installs_it(
        self, call, ran, monkeypatch, tmp_path
    ):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        code, _, err = call("verify", CONFIG, "--out", tmp_path / "out", "--report", tmp_path / "r")
        assert code == 2
        assert "pip install 'ds_parity[report]'" in err
        assert ran == []
        assert not (tmp_path / "r").exists()

    def test_without_matplotlib_junit_xml_is_written_all_the_same(self, call, monkeypatch, traces, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert call("compare", *traces, "--junit", tmp_path / "j.xml")[0] == 1
        assert (tmp_path / "j.xml").exists()

    def test_checking_leaves_no_files_behind(self, tmp_path):
        check(tmp_path / "r", tmp_path / "ci" / "j.xml")
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_nothing_is_written_that_was_not_asked_for(tmp_path):
    assert write(contents(), None, None) == ()
    assert list(tmp_path.iterdir()) == []


def test_odd_numbers_and_lengths_end_in_a_report(tmp_path):
    """The least and the greatest floats, counts and steps, no groups and many, beside steps without anything."""
    numbers = (0.0, -0.0, 5e-324, 1.7e308, -1.7e308, float("nan"), float("inf"), 1e100, 1.0)
    steps = [
        record(
            2**62 + 2 * at,
            rollouts=2**62,
            loss=number,
            lr=(number,) * at,
            grad_norm=None if at % 2 else number,
            weights=weights("c", number),
        )
        for at, number in enumerate(numbers)
    ]
    from tests.parity.report.reported import compared

    odd, other = Trace(trace().header, tuple(steps)), Trace(trace().header, tuple(steps[::2]))
    write(contents(compared(odd, other), compared(other, trace())), tmp_path, tmp_path / "j.xml")
    assert len(list(tmp_path.glob("*.png"))) == 6
    assert "FAIL: 2 of 2 comparisons differ" in (tmp_path / "report.html").read_text()
