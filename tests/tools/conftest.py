"""Scripts of tools/ find their parts beside them, as they do when they are started; and a Redis of the tests' own."""

import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_parity.parity.running.launch import free_port

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@contextmanager
def served(folder, port=None, *, keeps=False):
    """A redis-server on a free port: its process and its address; `keeps`: it writes down every command."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt install redis-server)")
    port = port or free_port()
    options = ["--port", str(port), "--dir", str(folder), "--save", "", "--appendonly", "yes" if keeps else "no"]
    options += ["--appendfsync", "always"] if keeps else []
    with (folder / "redis.log").open("a") as log:
        process = subprocess.Popen(["redis-server", "--bind", "127.0.0.1", *options], stdout=log)
    try:
        address = f"redis://127.0.0.1:{port}"
        _until_it_answers(address, process)
        yield process, address
    finally:
        process.terminate()
        process.wait()


def _until_it_answers(address, process):
    redis = pytest.importorskip("redis", reason="takes the extra online")
    limit = time.monotonic() + 20
    while True:
        try:
            redis.Redis.from_url(address).ping()
            return
        except redis.exceptions.ConnectionError:
            assert process.poll() is None, "redis-server has ended"
            assert time.monotonic() < limit, "redis-server did not come up"
            time.sleep(0.05)


@pytest.fixture
def redis_server(tmp_path):
    """The address of a redis-server that ends with the test."""
    with served(tmp_path) as (_, address):
        yield address
