"""`ds-parity doctor`: what it says of an installation and a machine on which something is wrong."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from ds_parity.parity.doctor import asking, examination, machine
from ds_parity.parity.doctor.findings import Finding, State
from tests.commands import ds_parity, started

ROOT = Path(__file__).parents[2]


def named(found):
    return {finding.name: finding for finding in found}


def compiled(root, operator, torch):
    path = root / operator / "build.ninja"
    path.parent.mkdir(parents=True)
    path.write_text(f"common_cflags = -DX -isystem {torch}/include -isystem {torch}/include/torch/csrc\n")


class TestCompilers:
    def test_no_compiler_and_no_ninja(self, tmp_path):
        found = named(machine.compilers({"PATH": str(tmp_path)}))
        assert found["compiler"].state is State.BITES
        assert "there is no C++ compiler (c++ is not on PATH)" in found["compiler"].said
        assert "install g++" in found["compiler"].way_out
        assert found["ninja"].state is State.BITES

    def test_one_that_cxx_names_and_is_not_there(self):
        assert "nowhere-g++" in named(machine.compilers({**os.environ, "CXX": "nowhere-g++ -O2"}))["compiler"].said

    @pytest.mark.parametrize(
        ("script", "why"), [("#!/bin/sh\necho no licence >&2\nexit 3\n", "3: no licence"), ("", "")]
    )
    def test_one_that_does_not_run(self, tmp_path, script, why):
        (tmp_path / "c++").write_text(script)
        (tmp_path / "c++").chmod(0o755)
        found = named(machine.compilers({"PATH": str(tmp_path)}))["compiler"]
        assert found.state is State.BITES
        assert "the C++ compiler c++ does not run" in found.said
        assert why in found.said
        assert "install g++" in found.way_out

    @pytest.mark.timeout(20)
    def test_one_that_starts_a_server_is_not_waited_for(self, tmp_path):
        (tmp_path / "c++").write_text("#!/bin/sh\nsleep 30 &\n")
        (tmp_path / "c++").chmod(0o755)
        assert named(machine.compilers({"PATH": str(tmp_path)}))["compiler"].state is State.FINE

    def test_on_a_full_disk_it_is_asked_all_the_same(self, tmp_path, monkeypatch):
        def full(*_, **__):
            raise FileNotFoundError("No usable temporary directory found")

        monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
        for code, state in ((0, State.FINE), (3, State.BITES)):
            (tmp_path / "c++").write_text(f"#!/bin/sh\necho no >&2\nexit {code}\n")
            (tmp_path / "c++").chmod(0o755)
            assert named(machine.compilers({"PATH": str(tmp_path)}))["compiler"].state is state

    def test_one_that_is_there(self, tmp_path):
        for name in ("c++", "ninja"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        assert [finding.state for finding in machine.compilers({"PATH": str(tmp_path)})] == [State.FINE, State.FINE]


class TestCache:
    def test_a_folder_that_can_not_be_written(self):
        found = named(machine.cache({"TORCH_EXTENSIONS_DIR": "/proc/operators"}))
        assert found["cache"].state is State.BITES
        assert "/proc/operators, which can't be written" in found["cache"].said
        assert "TORCH_EXTENSIONS_DIR" in found["cache"].way_out

    def test_a_folder_that_is_not_there_yet(self, tmp_path):
        found = list(machine.cache({"TORCH_EXTENSIONS_DIR": str(tmp_path / "a" / "b")}))
        assert [finding.state for finding in found] == [State.FINE]
        assert list(tmp_path.iterdir()) == []

    def test_operators_of_two_environments(self, tmp_path):
        import torch

        compiled(tmp_path, "fused_adam", Path(torch.__file__).parent)
        compiled(tmp_path, "cpu_adam", "/venvs/other/lib/python3.11/site-packages/torch")
        found = named(machine.cache({"TORCH_EXTENSIONS_DIR": str(tmp_path)}))["shared cache"]
        assert found.state is State.BITES
        assert found.said.startswith(
            f"cpu_adam in {tmp_path} was compiled with another environment's torch, /venvs/other"
        )


class TestLocks:
    def lock(self, root, seconds_ago=0.0):
        path = root / "cpu_adam" / "lock"
        path.parent.mkdir()
        path.touch()
        os.utime(path, (time.time() - seconds_ago,) * 2)
        return path

    def test_of_a_compile_that_was_killed(self, tmp_path):
        """Who wrote it, since when, and what to do."""
        path = self.lock(tmp_path, seconds_ago=3 * 3600 + 5)
        (found,) = machine.held({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert (found.name, found.state) == ("lock of cpu_adam", State.BITES)
        assert f"{path}, written by " in found.said
        assert "3 hours ago, is held by no process of this machine: its compile was killed" in found.said
        assert found.way_out.endswith(f"rm {path}")

    def test_of_a_compile_that_runs(self, tmp_path):
        """Torch keeps the file open while it compiles, and so does this process."""
        code = "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); print(1, flush=True); time.sleep(60)"
        path = self.lock(tmp_path)
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            link = tmp_path.with_name("link")
            link.symlink_to(tmp_path)
            findings = [*machine.held({"TORCH_EXTENSIONS_DIR": str(tmp_path)})]
            findings += machine.held({"TORCH_EXTENSIONS_DIR": str(link)})
            holder.kill()
        assert [found.state for found in findings] == [State.PERHAPS] * 2
        assert all(f"is held by process {holder.pid}" in found.said for found in findings)

    def test_none(self, tmp_path):
        assert list(machine.held({"TORCH_EXTENSIONS_DIR": str(tmp_path)})) == []

    def test_nothing_is_built_behind_one_that_nobody_removes(self, tmp_path):
        """Torch would wait for it for ever."""
        self.lock(tmp_path)
        environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
        (found,) = examination._built(list(machine.held(environment)), ["CPUAdamBuilder"], environment)
        assert found.state is State.BITES
        assert found.said.startswith("CPUAdamBuilder not built: a lock lies beside the operators")


class TestBuilding:
    def test_an_operator_that_can_not_be_compiled_says_why(self, tmp_path):
        """No compiler, and a folder in which nothing is compiled yet."""
        for name in ("sh", "ninja", "which"):
            (tmp_path / name).symlink_to(shutil.which(name))
        environment = {**os.environ, "PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
        (found,) = asking.built(["ShareMemCommBuilder"], environment, 120.0)
        assert found.state is State.BITES
        assert found.said.startswith("ShareMemCommBuilder was not built: ")
        assert "not found" in found.said


class TestSharedMemory:
    usage = namedtuple("usage", "total used free")

    def test_full(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: self.usage(10**9, 10**9, 10**6))
        (tmp_path / "deepspeed_allreduce_buffer_0_x_1_0").write_bytes(b"0" * 2_000_000)
        (found,) = machine.shared_memory(2, tmp_path)
        assert found.state is State.BITES
        assert "1 MB of" in found.said
        assert "1 buffers of DeepSpeed's take 2 MB" in found.said
        assert "2 ranks on a CPU need 132 MB" in found.said
        assert "--shm-size" in found.way_out

    def test_not_mounted(self, tmp_path):
        assert next(machine.shared_memory(2, tmp_path / "shm")).state is State.UNKNOWN


class TestPackages:
    @pytest.mark.parametrize("name", ["torch", "deepspeed"])
    def test_one_that_is_missing(self, name):
        code = f"import sys; sys.modules[{name!r}] = None\nfrom ds_parity.cli import main; main()"
        ran = subprocess.run(
            [sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False
        )
        told = json.loads(ran.stdout)
        assert (ran.returncode, told["code"]) == (2, 2), ran.stderr
        found = {finding["name"]: finding for finding in told["installation"]}
        assert found[name]["said"].startswith(f"{name} is not installed for ")
        assert found[name]["way_out"].startswith(f"pip install {name}")
        assert "Traceback" not in ran.stderr

    def test_a_deepspeed_that_can_not_be_imported(self, tmp_path):
        (tmp_path / "deepspeed").mkdir()
        (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('libcudart.so.11: no such file')\n")
        finding, facts = asking.accelerator({**os.environ, "PYTHONPATH": str(tmp_path)})
        assert (finding.state, facts) == (State.UNKNOWN, {})
        assert "libcudart.so.11" in finding.said

    @pytest.mark.parametrize(("devices", "state"), [(0, State.BITES), (2, State.FINE)])
    def test_an_accelerator_without_a_device_bites(self, monkeypatch, devices, state):
        facts = {"accelerator": "cuda", "devices": devices, "backend": "nccl"}
        monkeypatch.setattr(asking, "ask", lambda *_: [asking.Reply((facts,), 0, "")])
        finding, told = asking.accelerator({})
        assert (finding.state, told) == (state, facts)
        assert ("CUDA_VISIBLE_DEVICES" in finding.way_out) is (devices == 0)


class TestRanks:
    """Two that talk are in `TestCommand`: each pair loads torch twice."""

    @pytest.mark.slow
    def test_a_port_that_is_taken(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            found = asking.ranks_talk(os.environ, port=other.getsockname()[1], limit=20.0)
        assert found.state is State.UNKNOWN
        assert "2 ranks can't talk over gloo" in found.said
        assert found.way_out

    def test_no_port_at_all(self, monkeypatch):
        def forbidden(*arguments):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(socket, "socket", forbidden)
        found = asking.ranks_talk(os.environ)
        assert found.state is State.UNKNOWN
        assert "no port can be opened on 127.0.0.1 (Operation not permitted)" in found.said

    @pytest.mark.slow
    def test_an_interface_that_is_not_there(self):
        found = asking.ranks_talk({**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"})
        assert found.state is State.UNKNOWN
        assert "nowhere0" in found.said
        assert "GLOO_SOCKET_IFNAME is nowhere0" in found.way_out


class TestExitCodes:
    @pytest.mark.parametrize(
        ("installed", "faulty", "code"),
        [
            ([State.FINE, State.PERHAPS], [], 0),
            ([State.FINE], [State.PERHAPS, State.FINE], 0),
            ([State.BITES], [], 1),
            ([State.FINE], [State.BITES, State.UNKNOWN], 1),
            ([State.FINE], [State.PERHAPS, State.UNKNOWN], 2),
            ([State.BITES, State.UNKNOWN], [State.BITES], 2),
        ],
    )
    def test_follow_from_what_was_found(self, installed, faulty, code):
        parts = [tuple(Finding("x", state, "said") for state in states) for states in (installed, faulty)]
        assert examination.Examination(*parts).code == code


class TestCommand:
    def test_a_configuration_that_a_fault_bites(self, tmp_path):
        path = tmp_path / "fp16.json"
        path.write_text('{"train_batch_size": 2, "fp16": {"enabled": true}}')
        ran = started("doctor", path, TORCH_EXTENSIONS_DIR=str(tmp_path / "operators"))
        assert ran.returncode == 1, ran
        assert "BITES tools/deepspeed_faults/fp16_zero0_unscaled_loss.py: the loss is not scaled" in ran.stdout
        assert "-> use ZeRO 1, 2 or 3, or bf16" in ran.stdout
        assert "ok 2 ranks talk over gloo" in ran.stdout

    def test_a_misspelt_key(self, tmp_path):
        path = tmp_path / "misspelt.json"
        path.write_text('{"zero_optimisation": {"stage": 3}}')
        ran = ds_parity("doctor", path)
        assert ran.returncode == 2
        assert 'did you mean "zero_optimization"?' in ran.stderr

    def test_starts_without_torch_and_deepspeed(self):
        code = "import sys; import ds_parity.cli, ds_parity.parity.doctor\n"
        code += "assert not {'torch', 'deepspeed'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "abc"}}}, "optimizer.params.lr"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params"),
    ],
)
def test_what_initialize_refuses_to_hand_on_is_refused_here(section, key):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": 4, **section}
    assert [one.name for one in examination.refused(config)] == [key]
    right = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    assert not list(examination.refused({**config, **right}))
