"""How the faults of DeepSpeed are told, place by place, and kept, version by version."""

import importlib.util
import json

import pytest

from tools import fault_pages, fault_scripts, fault_table, page_tables


@pytest.fixture
def places():
    spec = importlib.util.spec_from_file_location("_places", fault_table.SCRIPTS / "_places.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(places, *values):
    """What comes out of places with these values; right is 1, and the fault is 2."""

    def measure(value):
        if isinstance(value, Exception):
            raise value
        return value

    measures = {f"ZeRO {stage}": (lambda value=value: measure(value)) for stage, value in enumerate(values)}
    return places.tell(measures, said=lambda value: f"it is {value}", right=lambda v: v == 1, fault=lambda v: v == 2)


class TestPlaces:
    def test_what_one_place_raises_does_not_end_the_others(self, places, capsys):
        found = told(places, 1, RuntimeError("no\nstack"), 2, places.NotThere("too old"), 3)
        assert list(found.values()) == [
            "right", "error: RuntimeError: no", "fault", "not there: too old", "otherwise: it is 3",
        ]  # fmt: skip
        assert capsys.readouterr().out.splitlines()[-1] == "FAULT"
        assert places.exit_code(found) == 0

    def test_nan_is_neither_right_nor_the_fault(self, places):
        assert told(places, float("nan"))["ZeRO 0"] == "otherwise: it is nan"

    def test_a_version_without_the_fault_says_so(self, places, capsys):
        assert places.exit_code(told(places, 1, 1)) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "right in this version"

    def test_an_error_alone_is_not_right(self, places, capsys):
        told(places, 1, ValueError("x"))
        assert capsys.readouterr().out.splitlines()[-1] == "no FAULT, but error"


class TestRanksThatEnd:
    @pytest.fixture
    def written(self, tmp_path):
        def write(name, lines):
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
            return tmp_path / name

        return write

    def test_the_place_that_ended_them_is_noted_and_the_scripts_behind_it_are_left(self, written):
        path = written("told.jsonl", [["a", "ZeRO 0", "right"], ["b", "ZeRO 0", "right"], ["b", "ZeRO 1", None]])
        assert fault_table._behind(path, ["a", "b", "c"], "they hang (log: /tmp/x/log.txt)") == ["c"]
        assert fault_table._read(path)["b"] == {"ZeRO 0": "right", "ZeRO 1": "error: the ranks ended: they hang"}

    def test_what_another_rank_raised_is_the_reason(self, written):
        path = written("told.jsonl", [["a", "ZeRO 0", None]])
        written("told.jsonl.1", [["a", "ZeRO 0", "error: IndexError: list index out of range"]])
        fault_table._behind(path, ["a"], "they hang")
        assert fault_table._read(path)["a"]["ZeRO 0"].startswith("error: IndexError: list index out of range (on one")

    def test_a_script_that_measured_nothing_is_not_run_for_ever(self, written):
        path = written("told.jsonl", [])
        assert fault_table._behind(path, ["a", "b"], "no module") == ["b"]


class TestKeeping:
    def test_versions_stand_in_their_order_and_scripts_too(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fault_scripts, "PATH", tmp_path / "measured.json")
        for version, name in (("0.19.10", "b"), ("0.19.8", "b"), ("0.19.8", "a")):
            fault_table.keep(version, "2.13.0", {name: {"ZeRO 0": "right"}}, {name: "abc"})
        kept = json.loads((tmp_path / "measured.json").read_text())
        assert list(kept["versions"]) == list(kept["torch"]) == ["0.19.8", "0.19.10"]
        assert list(kept["versions"]["0.19.8"]) == ["a", "b"]

    def test_a_script_is_run_again_over_what_was_kept(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fault_scripts, "PATH", tmp_path / "measured.json")
        for outcome in ("fault", "right"):
            fault_table.keep("0.19.8", "2.13.0", {"a": {"ZeRO 0": outcome}}, {"a": f"of {outcome}"})
        assert fault_table.kept()["versions"]["0.19.8"]["a"] == {"ZeRO 0": "right"}
        assert fault_scripts.kept()["digests"]["0.19.8"]["a"] == "of right"


class TestDigests:
    @pytest.fixture
    def scripts(self, tmp_path, monkeypatch):
        for name in ("_places", "a", "b"):
            (tmp_path / f"{name}.py").write_text(f'"""What {name} does."""\n\nX = 1\n')
        monkeypatch.setattr(fault_scripts, "SCRIPTS", tmp_path)
        return tmp_path

    def test_what_a_script_runs_changes_it_and_what_it_says_does_not(self, scripts):
        before = fault_scripts.digest("a", scripts)
        (scripts / "a.py").write_text('"""Other words,\n\nin more lines."""\nX = 1\n')
        assert fault_scripts.digest("a", scripts) == before
        (scripts / "a.py").write_text('"""What a does."""\nX = 2\n')
        assert fault_scripts.digest("a", scripts) != before

    def test_what_all_scripts_share_changes_each(self, scripts):
        before = [fault_scripts.digest(name, scripts) for name in "ab"]
        (scripts / "_places.py").write_text("X = 3\n")
        assert not {*before} & {fault_scripts.digest(name, scripts) for name in "ab"}

    def test_what_some_scripts_share_changes_these_alone(self, scripts):
        (scripts / "_shared.py").write_text("X = 1\n")
        (scripts / "a.py").write_text("from _places import X\nfrom _shared import X\n")
        before = [fault_scripts.digest(name, scripts) for name in "ab"]
        (scripts / "_shared.py").write_text("X = 2\n")
        after = [fault_scripts.digest(name, scripts) for name in "ab"]
        assert (after[0] != before[0], after[1] == before[1]) == (True, True)

    def test_a_script_that_was_not_run_or_was_another_one_is_missing(self, monkeypatch):
        known = fault_scripts.kept()
        first, second, *_ = known["versions"]["0.19.8"]
        known["digests"]["0.19.8"] = {name: fault_scripts.digest(name) for name in known["versions"]["0.19.8"]}
        monkeypatch.setattr(fault_scripts, "kept", lambda: known)
        assert fault_scripts.missing("0.19.8") == []
        del known["versions"]["0.19.8"][first]
        known["digests"]["0.19.8"][second] = None
        assert set(fault_scripts.missing("0.19.8")) == {first, second}

    def test_what_was_kept_was_measured_with_the_scripts_as_they_are_or_says_that_it_was_not(self):
        """Where this fails a script has changed: `python -m tools.fault_table --missing`, with every version."""
        kept = fault_scripts.kept()
        changed = [
            (version, name)
            for version, scripts in kept["versions"].items()
            for name in scripts
            # None: it was measured with a script that is not known.
            if kept["digests"][version][name] not in (None, fault_scripts.digest(name))
        ]
        assert changed == []
        assert kept["digests"].keys() == kept["versions"].keys()


@pytest.mark.parametrize(
    ("places", "cell"),
    [
        ({}, "not run"),
        ({"ZeRO 0": "right", "ZeRO 1": "right"}, "right"),
        ({"ZeRO 0": "not there: x"}, "not there"),
        ({"ZeRO 0": "right", "ZeRO 1": "fault"}, "**fault**"),
        ({"ZeRO 0": "fault", "ZeRO 1": "fault"}, "**fault** [1]"),
        ({"ZeRO 0": "right", "ZeRO 1": "error: RuntimeError: y"}, "other [1]"),
    ],
)
def test_a_cell_is_a_word_and_a_note_where_places_differ_from_the_newest_version(places, cell):
    assert page_tables._cell(places, ["ZeRO 1"], {}) == cell


class TestPages:
    def test_a_version_that_was_measured_in_part_does_not_look_complete(self, monkeypatch):
        number = len(fault_scripts.names())
        part = {name: {"ZeRO 0": "right"} for name in fault_scripts.names()[:3]}
        # A script that was started and told nothing was not run.
        part[fault_scripts.names()[3]] = {}
        known = {"torch": {"0.20.0": "2.14.0"}, "versions": {"0.20.0": part}}
        known["digests"] = {"0.20.0": dict.fromkeys(part)}
        known["digests"]["0.20.0"][fault_scripts.names()[0]] = fault_scripts.digest(fault_scripts.names()[0])
        monkeypatch.setattr(fault_scripts, "kept", lambda: known)
        monkeypatch.setattr(fault_pages, "kept", lambda: known)
        monkeypatch.setattr(fault_pages, "measured", lambda: known["versions"])
        assert fault_pages.runs().splitlines()[-1] == f"| 0.20.0 | 3 of {number} | 1 | 2.14.0 |"
        assert fault_pages.short().splitlines()[-1] == f"| scripts run, of {number} | 3 |"
