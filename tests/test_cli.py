"""The command line: exit codes, one message for bad input, never a traceback."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.cli import entry
from ds_parity.trace import Header, StepRecord, TraceWriter
from tests.commands import ds_parity, started

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "ds_configs" / "zero2_bf16.json"


def refused(*arguments, **environment):
    """The message of a call that must end in exit code 2 and no traceback."""
    ran = ds_parity(*arguments, **environment)
    assert ran.returncode == 2, ran
    assert "Traceback" not in ran.stdout + ran.stderr
    return ran.stderr


def in_bash(*arguments, **environment):
    """Start the command in a bash: typer takes the shell from the processes above it, whatever started the tests."""
    command = shlex.join([sys.executable, "-m", "ds_parity", *arguments])
    return subprocess.run(
        ["bash", "-c", f"{command}; exit $?"],  # two commands: bash stays, and does not become the first one
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def trace(path, loss=1.0, engine="ds_parity", steps=2):
    header = Header(scenario="s", seed=0, versions={}, device="cpu gloo", ranks=2, config_hash="0" * 64, engine=engine)
    counts = {"passes": 2, "idle_passes": 0, "rollouts": 4, "prompts": 1, "tokens": 100, "total": 4.0}
    with TraceWriter(path, header) as writer:
        for step in range(1, steps + 1):
            writer.write(StepRecord(step=step, **counts, loss=loss, lr=(0.1,), grad_norm=1.0))
    return path


def streamed(redirected, *arguments, **environment):
    """What a command ends in whose streams bash has redirected: exit code and standard error, without a traceback."""
    command = shlex.join([sys.executable, "-m", "ds_parity", *map(str, arguments)])
    ran = subprocess.run(
        ["bash", "-c", f"{command} {redirected}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert "Traceback" not in ran.stdout + ran.stderr
    assert "ignored" not in ran.stderr
    return ran


PRINTING = {"table": ("plan",), "json": ("plan", "--json"), "rewrite": ("rewrite", CONFIG), "help": ("--help",)}


class TestStreams:
    """Standard output may be closed, full, read by nobody, or of an encoding that lacks the signs of a picture."""

    @pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
    def test_a_closed_one_takes_what_is_printed(self, arguments):
        assert streamed(">&-", *arguments).returncode == 0

    @pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
    def test_a_full_one_is_no_verdict(self, arguments):
        ran = streamed(">/dev/full", *arguments)
        assert ran.returncode == 2
        assert "No space left on device; free some space, or write to another disk" in ran.stderr

    @pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "2> >(true)"], ids=["closed", "full", "unread"])
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [(("plan",), 0), (("--help",), 0), (("--nonesuch",), 2), (("plan", "nonesuch.jsonl"), 2), ((), 2)],
        ids=["plan", "help", "no option", "no file", "nothing"],
    )
    def test_standard_error_has_no_part_in_the_exit_code(self, redirected, arguments, code):
        ran = streamed(redirected, *arguments)
        assert ran.returncode == code
        assert bool(ran.stdout) is (arguments in (("plan",), ("--help",), ()))

    def test_two_full_ones_are_no_verdict(self):
        assert streamed(">/dev/full 2>/dev/full", "plan").returncode == 2

    @pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
    def test_one_that_nobody_reads_is_no_difference(self, arguments):
        """Exit code 1 says that something differs: the runs, and not the pipe."""
        ran = streamed("| true", *arguments)
        assert ran.returncode in (0, 2)  # 0: it wrote before the reader had gone
        assert "ds-parity:" not in ran.stderr

    def test_one_of_another_encoding_shows_the_heights_as_digits(self):
        ran = streamed("", "plan", "--max-tokens", "2048", PYTHONIOENCODING="ascii")
        assert ran.returncode == 0
        assert "rank    0 |8" in ran.stdout
        assert "?" not in ran.stdout

    def test_what_has_no_plain_form_is_a_question_mark(self, tmp_path):
        path = tmp_path / "größe.json"
        ran = streamed("", "rewrite", path, PYTHONIOENCODING="ascii")
        assert ran.returncode == 2
        assert "no such file" in ran.stderr


class TestRewrite:
    def test_an_empty_file_is_said_to_be_empty(self, tmp_path):
        path = tmp_path / "empty.json"
        path.write_text(" \n")
        assert f"{path} is empty: a configuration is a JSON object" in refused("rewrite", path)

    def test_what_initialize_would_refuse_is_a_warning_because_an_object_may_replace_the_section(self, tmp_path):
        path = tmp_path / "quoted.json"
        given = json.loads(CONFIG.read_text()) | {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}
        path.write_text(json.dumps(given))
        ran = started("rewrite", path)
        assert (ran.returncode, json.loads(ran.stdout)["optimizer"]["params"]["lr"]) == (0, "1e-3")
        assert "warning: initialize() raises this, unless optimizer= replaces" in ran.stderr
        assert 'optimizer.params.lr = "1e-3": must be a number' in ran.stderr

    def test_what_no_object_replaces_is_refused(self, tmp_path):
        path = tmp_path / "quoted.json"
        path.write_text(json.dumps(json.loads(CONFIG.read_text()) | {"steps_per_print": "10"}))
        assert 'steps_per_print = "10": must be a number other than 0' in refused("rewrite", path)

    def test_prints_plain_json_to_stdout_and_reasons_to_stderr(self):
        ran = started("rewrite", CONFIG, "--ranks", 4)
        plain = json.loads(ran.stdout)
        assert ran.returncode == 0
        assert (plain["train_batch_size"], plain["gradient_accumulation_steps"]) == (12, 3)
        assert "ds_parity" not in plain
        assert "gradient_accumulation_steps: (absent) -> 3" in ran.stderr

    def test_does_not_import_torch(self):
        code = f"import sys; sys.argv = ['ds-parity', 'rewrite', {str(CONFIG)!r}]\n"
        code += "from ds_parity.cli.entry import app\napp(standalone_mode=False)\n"
        code += "assert not {'torch', 'deepspeed'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "which"),
        [
            (("init", ""), "argument 2 is"),
            (("compare", "a.jsonl", " "), "argument 3 is"),
            (("compare", "a.jsonl", "b.jsonl", "--report", ""), "argument 5, behind --report, is"),
            (("verify", "c.json", "--out="), "argument 3, behind --out, is"),
        ],
    )
    def test_an_empty_path_is_not_the_folder_where_one_is(self, tmp_path, monkeypatch, arguments, which):
        monkeypatch.chdir(tmp_path)
        assert f"{which} empty: give a value" in refused(*arguments)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("command", ["verify", "rewrite", "probe"])
    def test_a_missing_file(self, command):
        assert "nowhere.json" in refused(command, "nowhere.json")

    @pytest.mark.parametrize("command", ["verify", "rewrite", "probe"])
    def test_invalid_json_is_located(self, command, tmp_path):
        bad = tmp_path / "bad.json"
        bad.write_text('{\n  "gradient_accumulation_passes": 4,\n  "zero_optimization": {,}\n}')
        assert "line 3" in refused(command, bad)

    @pytest.mark.parametrize("command", ["verify", "probe"])
    def test_a_plain_configuration_has_nothing_to_verify(self, command, tmp_path):
        plain = tmp_path / "plain.json"
        plain.write_text('{"train_batch_size": 4}')
        assert "no gradient_accumulation_passes" in refused(command, plain)

    def test_a_model_that_is_not_there(self, tmp_path):
        message = refused("verify", CONFIG, "--model", "nowhere:build", "--out", tmp_path)
        assert "nowhere:build" in message
        assert "package.module:function" in message

    def test_a_loop_without_a_name(self, tmp_path):
        message = refused("verify", CONFIG, "--train", "loop", "--out", tmp_path)
        assert "'loop' does not name a function" in message
        assert not list(tmp_path.iterdir())  # no rank has started

    def test_rollouts_that_are_not_there(self, tmp_path):
        assert "nowhere.jsonl" in refused("verify", CONFIG, "--rollouts", "nowhere.jsonl", "--out", tmp_path)

    @pytest.mark.parametrize("command", ["verify", "probe"])
    @pytest.mark.parametrize("path", ["gpt2", "/dev/null"])
    def test_a_tokenizer_that_is_none(self, command, path, tmp_path):
        message = refused(command, CONFIG, "--tokenizer", path, "--out", tmp_path)
        assert f"tokenizer {path!r}: " in message
        assert "give a tokenizer.json" in message

    @pytest.mark.parametrize("command", ["verify", "probe"])
    @pytest.mark.parametrize("path", ["gpt2", "", "/dev/null"])
    def test_a_configuration_of_a_model_that_is_none(self, command, path, tmp_path):
        message = refused(command, CONFIG, "--model", f"hf:{path}", "--out", tmp_path)
        assert f"model hf:{path}: " in message

    def test_a_reference_that_is_none(self, tmp_path):
        message = refused("verify", CONFIG, "--against", "hand", "--out", tmp_path)
        assert "--against is 'hand': it must be one of deepspeed, deepspeed-loop, torch" in message

    def test_a_reference_that_a_training_function_has_not(self, tmp_path):
        asked = ["--train", "loop:train", "--against", "deepspeed"]
        assert "a training function calls an engine" in refused("verify", CONFIG, *asked, "--out", tmp_path)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--against", "torch"),
            ("--tokenizer", "nowhere"),
            ("--train", "nowhere:train"),
            ("--model", "nowhere:build"),
            ("--rollouts", "nowhere.jsonl"),
            ("--max-tokens", 8),
            ("--ranks", 4),
            ("--windows", 7),
            ("--seed", 1),
            ("--timeout", 5),
            ("--seed", 0),  # the default, but whoever writes it thinks that it is read
        ],
    )
    def test_what_the_matrix_has_of_its_own(self, option, value, tmp_path):
        message = refused("verify", "--matrix", "no such row", option, value, "--out", tmp_path)
        assert f"{option} is of one configuration: --matrix has references and data of its own" in message
        assert "leave it out, or give a configuration in place of --matrix" in message

    @pytest.mark.parametrize("command", ["verify", "probe", "calibrate"])
    def test_a_seed_that_torch_does_not_take_is_refused_before_ranks_start(self, command):
        assert "--seed" in refused(command, *["config.json"][: command != "calibrate"], "--seed", 2**63)

    def test_several_of_these_are_named_together(self, tmp_path):
        asked = ["--windows", 7, "--train", "nowhere:train"]
        message = refused("verify", *asked, "--matrix", "no such row", "--out", tmp_path)
        assert "--windows and --train are of one configuration" in message

    def test_what_the_matrix_reads_is_not_refused(self, tmp_path):
        message = refused("verify", "--matrix", "no such row", "--json", "--out", tmp_path)
        assert "names no row of the matrix" in message

    def lines(self, folder, lines):
        path = folder / "mine.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    @pytest.mark.parametrize("command", ["verify", "probe"])
    def test_rollouts_whose_rewards_are_equal(self, command, tmp_path):
        line = {"prompt": "2+2=", "completion": "4", "reward": 1.0}
        path = self.lines(tmp_path, [{**line, "prompt": f"{n}"} for n in range(40) for _ in range(3)])
        message = refused(command, CONFIG, "--rollouts", path, "--out", tmp_path)
        assert "mine.jsonl: every prompt's rollouts earned the same reward" in message

    @pytest.mark.parametrize("command", ["verify", "probe"])
    def test_rollouts_that_fill_no_window(self, command, tmp_path):
        path = self.lines(tmp_path, [{"prompt": "2+2=", "completion": "4", "reward": n} for n in range(11)])
        message = refused(command, CONFIG, "--rollouts", path, "--out", tmp_path)
        assert "10 rollouts have an advantage that is not 0, and a window takes 12" in message

    @pytest.mark.parametrize("command", ["verify", "probe", "plan"])
    def test_a_completion_that_is_empty(self, command, tmp_path):
        good = {"prompt": "2+2=", "completion": "4", "reward": 1.0}
        path = self.lines(tmp_path, [good, {**good, "completion": ""}])
        ran = refused(*([command, path] if command == "plan" else [command, CONFIG, "--rollouts", path]))
        assert "mine.jsonl:2: key 'completion' is empty" in ran

    @pytest.mark.parametrize("asked", [[], ["--json"], ["--report", "pictures"]])
    def test_a_plan_without_a_window(self, asked, tmp_path):
        path = self.lines(tmp_path, [{"prompt": "2+2=", "completion": "4", "reward": n} for n in range(3)])
        message = refused("plan", path, "--target", 4, *asked)
        assert "3 rollouts make no window: one takes 4 rollouts" in message
        assert not Path("pictures").exists()

    def test_ranks_below_1(self):
        assert "--ranks" in refused("verify", CONFIG, "--ranks", 0)

    def test_a_launcher_that_is_not_there(self, tmp_path, monkeypatch):
        """A Python without a launcher beside it, and none on PATH."""
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert "no `deepspeed` launcher" in refused("verify", CONFIG, "--out", tmp_path, PATH="/nowhere")

    def test_a_trace_that_is_not_one(self, tmp_path):
        bad = tmp_path / "bad.jsonl"
        bad.write_text("hello\n")
        assert "bad.jsonl" in refused("compare", trace(tmp_path / "a.jsonl"), bad)

    def test_a_trace_that_was_cut_short(self, tmp_path):
        good, cut = trace(tmp_path / "a.jsonl"), trace(tmp_path / "b.jsonl")
        cut.write_bytes(cut.read_bytes()[:-5])
        assert "b.jsonl, line 3: cut short" in refused("compare", good, cut)
        assert "b.jsonl, line 3: cut short" in refused("compare", cut, good)

    def test_an_unknown_tier(self, tmp_path):
        a = trace(tmp_path / "a.jsonl")
        assert "--tier is 'close'" in refused("compare", a, a, "--tier", "close")
        assert "dtype 'close' has no bound" in refused("compare", a, a, "--dtype", "close")


class TestCompare:
    def test_equal_traces_exit_0(self, tmp_path):
        ran = started("compare", trace(tmp_path / "a.jsonl"), trace(tmp_path / "b.jsonl"))
        assert ran.returncode == 0
        assert "PASS: equal" in ran.stdout

    def test_different_traces_exit_1_and_name_the_first_difference(self, tmp_path):
        ran = started("compare", trace(tmp_path / "a.jsonl"), trace(tmp_path / "b.jsonl", loss=1.001))
        assert ran.returncode == 1
        assert "FAIL: the traces differ" in ran.stdout
        assert "step 1, loss" in ran.stdout

    def test_a_difference_of_rounding_is_named_so_with_no_cause_and_the_exit_code_is_that_of_the_tier(self, tmp_path):
        sides = trace(tmp_path / "a.jsonl"), trace(tmp_path / "b.jsonl", loss=1.00000006)
        exact, asked = ds_parity("compare", *sides), ds_parity("compare", *sides, "--tier", "reassociated")
        assert "exact tier (implied by the traces: both are ds_parity, with the same settings)" in exact.stdout
        assert (exact.returncode, asked.returncode) == (1, 0)
        assert "FAIL: equal but for rounding" in exact.stdout
        assert "PASS: equal but for rounding" in asked.stdout
        assert "likely cause" not in exact.stdout

    def test_of_many_steps_the_table_shows_those_that_matter_and_the_verdict_counts_all(self, tmp_path):
        one, other = trace(tmp_path / "a.jsonl", steps=1200), trace(tmp_path / "b.jsonl", loss=2.0, steps=1200)
        told = ds_parity("compare", one, other).stdout
        assert "1170 steps left out between 20 and 1191: 1170 of them differ" in " ".join(
            told.replace("│", " ").split()
        )
        assert "differs: 1200 differences in 1200 steps" in told
        found = json.loads(ds_parity("compare", one, one, "--json").stdout)
        assert (found["steps"], len(found["rows"]), found["hidden"][0]["count"]) == (1200, 20, 1180)

    def test_a_torch_trace_is_compared_within_bounds(self, tmp_path):
        reference = trace(tmp_path / "a.jsonl", engine="torch")
        ran = ds_parity("compare", reference, trace(tmp_path / "b.jsonl", loss=1.0000001), "--json")
        found = json.loads(ran.stdout)
        assert ran.returncode == 0
        assert found["equal"]
        assert found["tier"] == "reassociated"


class TestCompareForeign:
    """Both sides of compare may be another trainer's; the traces of `trace` have a loss and an LR of two steps."""

    def csv(self, path, text="n,train/nll,lr\n0,1.0,0.1\n1,1.0,0.1\n"):
        path.write_text(text)
        return path

    def test_a_mapping_applies_to_whichever_side_is_foreign(self, tmp_path):
        ours, theirs = trace(tmp_path / "a.jsonl"), self.csv(tmp_path / "b.csv")
        maps = ["--map", "loss=train/nll", "--map", "step=n+1"]
        for sides in ((ours, theirs), (theirs, ours)):
            ran = ds_parity("compare", *sides, *maps)
            assert ran.returncode == 0, ran
            assert "reassociated tier" in ran.stdout
            assert "(csv): +1 is added to each of its steps" in ran.stdout
            assert "PASS: equal" in ran.stdout

    def test_a_difference_exits_1_and_json_has_the_notes(self, tmp_path):
        theirs = self.csv(tmp_path / "b.csv", "step,loss\n1,1.0\n2,1.5\n")
        ran = ds_parity("compare", trace(tmp_path / "a.jsonl"), theirs, "--json")
        found = json.loads(ran.stdout)
        assert ran.returncode == 1
        assert (found["tier"], found["differences"][0]["field"]) == ("reassociated", "loss")
        assert any("was read from the candidate (csv)" in note for note in found["notes"])
        assert found["rows"][0]["candidate"]["rollouts"] is None

    def test_each_side_can_be_mapped_by_itself(self, tmp_path):
        one, two = self.csv(tmp_path / "a.csv"), self.csv(tmp_path / "b.csv", "k,x,lr\n1,1.0,0.1\n2,1.0,0.3\n")
        maps = ["--map-reference", "step=n+1", "--map-reference", "loss=train/nll", "--map-candidate", "step=k"]
        ran = ds_parity("compare", one, two, *maps, "--map-candidate", "loss=x", "--map", "lr=")
        assert ran.returncode == 0, ran
        assert "reassociated tier" in ran.stdout

    def test_a_mean_loss_is_held_against_a_mean(self, tmp_path):
        lines = "".join(f"{step},{1 / step!r}\n" for step in range(1, 7))
        ours = self.csv(tmp_path / "a.csv", "step,loss\n" + lines)
        theirs = self.csv(
            tmp_path / "b.csv", f"step,loss\n3,{(1 + 1 / 2 + 1 / 3) / 3!r}\n6,{(1 / 4 + 1 / 5 + 1 / 6) / 3!r}\n"
        )
        assert ds_parity("compare", ours, theirs).returncode == 1
        assert ds_parity("compare", ours, theirs, "--mean-loss").returncode == 0
        rewritten = trace(tmp_path / "c.jsonl")
        assert "both traces are ds_parity's own" in refused("compare", rewritten, rewritten, "--mean-loss")

    def test_a_mapping_that_no_side_takes_is_refused(self, tmp_path):
        ours, theirs = trace(tmp_path / "a.jsonl"), self.csv(tmp_path / "b.csv")
        assert "both traces are in ds_parity's own format" in refused("compare", ours, ours, "--map", "loss=x")
        assert "no column to map (loss)" in refused(
            "compare", ours, theirs, "--map-reference", "loss=x", "--map", "step=n+1"
        )
        assert "--map is 'los=x'" in refused("compare", ours, theirs, "--map", "los=x")

    @pytest.mark.parametrize("content", [b"", b"\x00\x01", b"step,loss\n1,high\n", b'{"step": 1', b"step,loss\n0,1\n"])
    def test_a_file_that_cannot_be_read_is_named(self, tmp_path, content):
        bad = tmp_path / "bad.csv"
        bad.write_bytes(content)
        assert "bad.csv" in refused("compare", trace(tmp_path / "a.jsonl"), bad)


@pytest.mark.ranks
class TestVerify:
    @pytest.mark.slow
    def test_says_pass_exits_0_and_leaves_both_traces(self, tmp_path):
        """With the user's own model and rollouts, whose rewards have no end in binary."""
        (tmp_path / "mine.py").write_text("from ds_parity.parity.data.model import build_tiny as build\n")
        lines = [
            {
                "prompt": f"{n} + {n} = ",
                "completion": f"{2 * n + k} " + "because " * 12,
                "reward": (1e-8, 0.1, 1e3)[k] / (n + 3),
            }
            for n in range(20)
            for k, reward in enumerate((1e-8, 0.1, 1e3))
        ]
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        small = ["--windows", 2, "--model", "mine:build", "--rollouts", tmp_path / "mine.jsonl"]
        ran = started("verify", CONFIG, "--out", tmp_path, *small, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "PASS: every step is equal" in ran.stdout
        for title in ("uniform against deepspeed", "ragged against deepspeed-loop", "ragged against torch"):
            assert title in ran.stdout
        assert {path.name for path in (tmp_path / "ragged").iterdir()} == {
            "ds_parity.jsonl", "deepspeed-loop.jsonl", "torch.jsonl",
        }  # fmt: skip

    @pytest.mark.slow
    def test_a_rank_that_fails_is_one_message_and_exit_2(self, tmp_path):
        """A user's own model that returns no logits."""
        (tmp_path / "broken.py").write_text("def build(seed):\n    return 7\n")
        environment = {"PYTHONPATH": str(tmp_path)}
        message = refused("verify", CONFIG, "--model", "broken:build", "--out", tmp_path / "out", **environment)
        assert "returned int: it must return a torch nn.Module" in message


@pytest.mark.slow
@pytest.mark.ranks
def test_probe_shows_a_faulty_loop_and_exits_1(tmp_path):
    subject = "ds_parity.parity.subjects.controls.boundary.last_backward_only:LastBackwardOnly.run"
    ran = started("probe", ROOT / "ds_configs" / "zero2_fp32.json", "--subject", subject, "--out", tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "rank 1" in ran.stdout
    assert "FAIL" in ran.stdout


@pytest.mark.parametrize(("lr", "code"), [(lambda step: [step * 1e-5], 0), (lambda step: [step * 1e-4], 1)])
def test_learning_rates_that_were_logged_as_lists_are_compared(tmp_path, lr, code):
    for name, rate in (("a", lambda step: step * 1e-5), ("b", lr)):
        rows = [{"step": step, "loss": 1 / (2 + step), "lr": rate(step)} for step in range(1, 9)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = ds_parity("compare", tmp_path / "a", tmp_path / "b")
    assert ran.returncode == code, ran.stdout
    assert "lr is not compared" not in ran.stdout
    assert ("step 1, lr: candidate" in ran.stdout) is bool(code)


def test_a_matrix_without_such_a_row_is_refused_with_the_groups(tmp_path):
    ran = ds_parity("verify", "--matrix", "fp33", "--out", tmp_path)
    assert ran.returncode == 2
    assert "--matrix 'fp33' names no row" in ran.stderr
    assert "precision, offload, communication" in ran.stderr


def test_verify_without_a_configuration_says_what_to_give(tmp_path):
    ran = ds_parity("verify", "--out", tmp_path)
    assert ran.returncode == 2
    assert "give the path of an extended DeepSpeed JSON, or --matrix" in ran.stderr


class TestStart:
    """The command is `ds-parity` where its script is on the path, and `python -m ds_parity` everywhere."""

    def test_the_module_is_the_command(self):
        assert started("--version").stdout == ds_parity("--version").stdout
        assert ds_parity("--version").stdout.startswith("ds-parity 0.")
        assert started("verify").returncode == 2

    def test_a_shells_completion_script_is_printed(self):
        ran = in_bash("--show-completion")
        assert ran.returncode == 0, ran.stderr
        assert "_DS_PARITY_COMPLETE=complete_bash" in ran.stdout
        assert "complete -o default -F" in ran.stdout

    def test_completion_is_installed_for_the_command(self, tmp_path):
        ran = in_bash("--install-completion", HOME=str(tmp_path))
        assert ran.returncode == 0, ran.stderr
        (script,) = tmp_path.glob(".bash_completions/*")
        assert script.name == "ds-parity.sh"
        assert "_DS_PARITY_COMPLETE=complete_bash" in script.read_text()
        assert str(script) in (tmp_path / ".bashrc").read_text()

    @pytest.mark.parametrize(
        ("words", "at", "completed"),
        [
            ("ds-parity ver", "1", ["verify"]),
            ("ds-parity init --st", "2", ["--stage"]),
            ("ds-parity verify --tok", "2", ["--tokenizer"]),
            ("ds-parity probe --tok", "2", ["--tokenizer"]),
            ("ds-parity verify --ag", "2", ["--against"]),
            ("ds-parity verify --against t", "3", ["torch"]),
        ],
    )
    def test_a_command_and_an_option_are_completed(self, words, at, completed):
        asked = {"_DS_PARITY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at}
        assert ds_parity(**asked).stdout.split() == completed


class TestTheMachine:
    """What the machine refuses is no verdict: exit code 1 says that something differs."""

    @pytest.mark.parametrize("option", ["--out"])
    def test_a_folder_that_can_not_be_written(self, option):
        message = refused("verify", CONFIG, option, "/proc/nowhere")
        assert "/proc/nowhere" in message

    def test_a_file_in_the_place_of_a_folder_names_the_way_out(self, tmp_path):
        (tmp_path / "file").touch()
        assert "File exists; --out names a folder, and --report a file" in refused(
            "verify", CONFIG, "--out", str(tmp_path / "file")
        )

    def test_a_fault_of_our_own_is_no_difference(self):
        code = "from ds_parity.cli import entry\ndef broken(*a, **k): raise KeyError('x')\n"
        code += "entry.app = broken\nentry.main()"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 2
        assert "KeyError" in ran.stderr

    def test_no_space_names_the_way_out(self, monkeypatch):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device", "/x/trace.jsonl")

        monkeypatch.setattr(entry, "app", full)
        ran = ds_parity("verify")
        assert ran.returncode == 2
        assert ran.stderr.strip() == (
            "ds-parity: /x/trace.jsonl: No space left on device; free some space, or write to another disk (by --out, "
            "--report or the shell's >)"
        )


class TestProgress:
    SAYS = (
        "import warnings\nfrom ds_parity.cli.console import progress\n"
        "with progress(4) as bar:\n"
        "    for _ in range(3): bar(1, 'uniform; ranks that need cpu_adam wait for {}: delete /a/long/path/lock')\n"
        "    warnings.warn('torch.x is deprecated', FutureWarning)\n"
    )

    def test_a_lock_that_is_waited_for_is_said_once_and_in_full(self):
        long = "a compilation that began before them, on a machine whose terminal has eighty columns"
        ran = subprocess.run(
            [sys.executable, "-c", self.SAYS.format(long)], capture_output=True, text=True, timeout=60,
            env={**os.environ, "COLUMNS": "80"}, check=True,
        )  # fmt: skip
        line = f"uniform: ranks that need cpu_adam wait for {long}: delete /a/long/path/lock"
        assert ran.stderr.splitlines().count(line) == 1
        assert "FutureWarning" not in ran.stderr
