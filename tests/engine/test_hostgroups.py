"""The groups in which ranks talk on the host: how many connections they open, and what is said where they can't."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from math import ceil, log2
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.ranks import hostgroups
from ds_parity.engine.ranks.hostgroups import everybody, group_of
from ds_parity.engine.ranks.hostsum import HostSum
from ds_parity.engine.ranks.wire import Place
from ds_parity.errors import ConfigError

ROOT = Path(__file__).parents[2]
PLACE = Place("runs a pass", engine=1)
LAZY = "TORCH_GLOO_LAZY_INIT"


def sockets():
    """How many sockets this process has open."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(link.is_symlink() and link.readlink().name.startswith("socket") for link in links)


def connect(rank, ranks, store):
    """How many sockets a rank has opened for sums of both lengths and a gather."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=100)
    # The group of all ranks is of another kind where there are accelerators; here it must not be counted.
    os.environ[LAZY] = "1"
    backend = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=backend, rank=rank, world_size=ranks, timeout=limit)
    del os.environ[LAZY]
    before = sockets()
    group = everybody()
    assert group_of(dist.group.WORLD) is group is everybody()
    assert LAZY not in os.environ, "other groups are made as they were"
    over = HostSum(group, 100.0)
    for length in (9, 3000):
        ones = torch.full((length,), rank)
        assert over.start(ones, PLACE).wait().tolist() == [sum(range(ranks))] * length
    assert over.gather({"rank": rank}, PLACE) == [{"rank": other} for other in range(ranks)]
    over.start(ones, PLACE).wait()
    return sockets() - before


def forked(ranks, folder):
    """Run `connect` on ranks that are forked from here."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                (folder / str(rank)).write_text(json.dumps(connect(rank, ranks, str(folder / "store"))))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


# Of 24 ranks each talks to 5 in a sum, and to 1 more where they are beyond 16: far fewer than 23.
RANKS = (2, 5, 24)


@pytest.fixture(scope="module")
def connected(tmp_path_factory):
    """What each number of ranks has left, in processes that import no DeepSpeed.

    All are forked from one process, which has no threads: torch is loaded once.
    """
    folder = tmp_path_factory.mktemp("connected")
    for ranks in RANKS:
        (folder / str(ranks)).mkdir()
    imports = "from pathlib import Path; from tests.engine.test_hostgroups import forked"
    code = f"{imports}; assert not any(any(forked(n, Path({str(folder)!r}, str(n)))) for n in {RANKS})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)
    return folder


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_opens_a_connection_for_each_round_and_two_for_a_gather_and_not_one_for_each_rank(ranks, connected):
    partners = ceil(log2(ranks)) + 1  # a rank beyond the power of two is one more
    opened = [json.loads((connected / str(ranks) / str(rank)).read_text()) for rank in range(ranks)]
    # A gather connects each rank with two others at most, and one socket listens.
    assert 1 <= min(opened) <= max(opened) <= partners + 2 + 1


def test_where_the_interface_is_not_there_the_error_names_the_variable_and_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(hostgroups, "_GROUPS", {})
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "doesnotexist")
        with pytest.raises(ConfigError) as caught:
            everybody()
    finally:
        dist.destroy_process_group()
    message = str(caught.value)
    assert message.startswith("ranks can't be connected over gloo (")
    assert "beside NCCL too" in message
    assert "GLOO_SOCKET_IFNAME names ('doesnotexist' on this rank)" in message
    assert "'ip -br address'" in message


def test_the_variable_that_torch_reads_is_put_back(monkeypatch):
    monkeypatch.setenv(LAZY, "0")
    with hostgroups._connected_when_needed():
        assert os.environ[LAZY] == "1"
    assert os.environ[LAZY] == "0"
