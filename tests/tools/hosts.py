"""Two hosts on one machine: network namespaces, each with an sshd of its own, and a cable between them."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

NAMES, ADDRESSES = ("ds-parity-a", "ds-parity-b"), ("10.77.0.1", "10.77.0.2")
SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
StrictModes no
UsePAM no
"""
CLIENT = """
Host *
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
TOOLS = ("ip", "sshd", "ssh", "pdsh", "ssh-keygen")


class Hosts:
    """As a context manager: the hosts are there inside it. Only root can make them.

    Attributes:
        options: of the `deepspeed` launcher; a rank a host.
        environment: lets pdsh find its way in.
    """

    def __init__(self, folder):
        self.folder, self.hostfile = folder, folder / "hostfile"
        self.options = ["--hostfile", str(self.hostfile), "--no_ssh_check", "--master_addr", ADDRESSES[0]]
        self.environment = {"PDSH_SSH_ARGS_APPEND": f"-F {folder}/ssh_config"}
        self._running = []

    def __enter__(self):
        try:
            self._network()
            self._doors()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self._running:
            for child in psutil.Process(process.pid).children(recursive=True):  # what was started by ssh
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.terminate()
            process.wait()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def inside(self, number, *command):
        """A command as it is to be run on one of the hosts."""
        return ["ip", "netns", "exec", NAMES[number], *command]

    def ranks(self, number):
        """The processes of the ranks on one of the hosts."""
        below = psutil.Process(self._running[number].pid).children(recursive=True)
        return [process for process in below if any(word.startswith("--local_rank=") for word in process.cmdline()[2:])]

    def _network(self):
        for name in NAMES:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _run("ip", "-n", name, *words.split())

    def _doors(self):
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        (self.folder / "ssh_config").write_text(CLIENT.format(folder=self.folder))
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            settings = self.folder / f"{name}.conf"
            settings.write_text(SSHD.format(folder=self.folder, address=address, name=name))
            self._running.append(subprocess.Popen(self.inside(number, "/usr/sbin/sshd", "-D", "-f", str(settings))))
        for address in ADDRESSES:
            self._reach(address)

    def _reach(self, address):
        for _ in range(50):
            command = self.inside(0, "ssh", "-F", str(self.folder / "ssh_config"), address, "true")
            if subprocess.run(command, check=False, env={**os.environ, **self.environment}).returncode == 0:
                return
            time.sleep(0.2)
        raise RuntimeError(f"no sshd answers at {address}")


def _run(*command):
    subprocess.run(command, check=True)
