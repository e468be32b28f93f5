"""A process that ends with daemon threads inside the core keeps its exit status, and its tables their last commits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb

ROWS = 40_000
#: Each update adds 1 to every row, so all rows of a commit are equal.
SCRIPT = """
import sys, threading, time, warnings
import numpy as np
import bunkbed as bb

warnings.simplefilter("ignore", bb.UncommittedWarning)
kind, path = sys.argv[1:]
rows = 40_000
ids, grads = np.arange(rows), np.full((rows, 4), -1, np.float32)
facts = dict(dim=4, num_rows=rows, optimizer=bb.SGD(lr=1.0), init=bb.Zeros())
commit = None
if kind.startswith("sharded"):
    table = bb.ShardedTable.create(path, shards=2, ram="16MiB", **facts)
elif kind.startswith("run"):
    run = bb.Run(path, ram="16MiB")
    table = run.table("user", create=facts)
    commit, begin_commit = run.commit, run.begin_commit
elif kind.startswith("layer"):
    import torch
    import bunkbed.torch as bt

    layer = bt.Embedding(rows, 4, path=path, ram="16MiB", optimizer=bb.SGD(lr=1.0), init=bb.Zeros())
    table, optimizer = layer.table, bt.Optimizer(layer)
else:
    table = bb.create(path, ram="4MiB", **facts)
if commit is None:
    commit, begin_commit = table.commit, table.begin_commit
table.update(ids, grads)
commit()

def alone(work):
    with alone_lock:
        work()

alone_lock = threading.Lock()
calls = {
    "lookup": [lambda: table.lookup(ids)],
    "update": [lambda: table.update(ids, grads)],
    "commit": [lambda: table.update(ids, grads), lambda: alone(commit)],
    "begin": [lambda: table.update(ids, grads), lambda: alone(begin_commit)],
    "read": [lambda: table.get(ids), lambda: table.contains(ids), lambda: table.stage(ids)],
    "bags": [lambda: table.lookup_bags(ids, ids[::8])],
    "scan": [lambda: list(table.scan(chunk=500)), lambda: table.topk(grads[0], 3)],
    "open": [lambda: bb.open(path, mode="r", ram="8MiB").close(), lambda: bb.check(path), table.stats],
}
for call in calls[kind.rpartition("-")[2]]:
    for _ in range(2):
        def loop(call=call):
            while True:
                call()
        threading.Thread(target=loop, daemon=True).start()
time.sleep(0.15)
sys.exit(7)
"""
#: No thread calls torch: a process that ends while a daemon thread is inside it is aborted by torch, a layer or none.
KINDS = [
    *("lookup", "update", "commit", "begin", "read", "bags", "scan", "open"),
    *("sharded-lookup", "sharded-begin", "run-commit", "run-begin", "layer-update"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_in_the_core_do_not_abort_a_process_that_ends(kind: str, tmp_path: Path) -> None:
    if kind.startswith("layer"):
        pytest.importorskip("torch")
    script, path = tmp_path / "script.py", tmp_path / "table"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, script, kind, path], env=dict(os.environ), capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr[-2000:]  # neither aborted nor killed
    assert bb.check(path) == []
    if kind.startswith("run"):
        with bb.Run(path, mode="r", ram="16MiB") as run:
            counts = run.table("user").lookup(np.arange(ROWS))
    else:
        with bb.open(path, mode="r", ram="16MiB") as table:
            counts = table.lookup(np.arange(ROWS))
    assert counts.min() == counts.max() >= 1


FORKED = """
import os, sys, threading, time
import numpy as np
import bunkbed as bb

table = bb.create(None, dim=4, num_rows=40_000, init=bb.Zeros())
def look():
    while True:
        table.lookup(np.arange(40_000))
for _ in range(3):
    threading.Thread(target=look, daemon=True).start()
time.sleep(0.1)
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
sys.exit(7)
"""


def test_a_child_does_not_wait_for_its_parents_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FORKED))
    done = subprocess.run([sys.executable, "-W", "ignore", script], timeout=100, check=False, capture_output=True)
    assert done.returncode == 7, done.stderr[-2000:]
