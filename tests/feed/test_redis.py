"""The recipe of docs/changes.md with a Redis server."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

ROOT = Path(__file__).resolve().parents[2]
redis = pytest.importorskip("redis")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server is installed (Debian: apt-get install redis-server)")
    socket = tmp_path / "redis.sock"
    command = [server, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            found = redis.Redis(unix_socket_path=str(socket))
            for _ in range(200):
                try:
                    found.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            yield found
            found.close()
        finally:
            process.kill()


def push() -> Any:
    """The function of the page."""
    page = (ROOT / "docs" / "changes.md").read_text()
    (code,) = re.findall(r"```python\n(def push\(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"bb": bb}
    exec(compile(code, "docs/changes.md", "exec"), names)
    return names["push"]


def test_redis_has_the_rows_of_each_commit(client: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with bb.create(tmp_path / "t", dim=4, optimizer=bb.SGD(lr=0.5), init=bb.Zeros(), ram="16MiB") as table:
        for _ in range(6):
            table.update(rng.integers(0, 300, 200), rng.standard_normal((200, 4), dtype=np.float32))
            table.delete(rng.integers(0, 300, 60))
            version = table.commit()
            assert push()(tmp_path / "t", client, "item") == version == int(client.get("item-version"))
            stored = {
                int(row): weights.tobytes()
                for ids, rows in table.scan()
                for row, weights in zip(ids, rows, strict=True)
            }
            keys = list(client.scan_iter("item:*"))
            found = dict(zip(keys, client.mget(keys), strict=True))
            assert {int(key.split(b":")[1]): value for key, value in found.items()} == stored
