"""`train --order`: who decides, what is stored, and advice before a slow run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--dim", "16", "--threads", "1", "--batch-size", "1024", "--negatives", "2", "--valid", "none")
TIGHT = ("--ram", "576KiB")


@pytest.fixture(autouse=True)
def no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No rates of this machine are stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 3000, 60_000), rng.integers(0, 700, 60_000)
    path = tmp_path / "ratings.csv"
    lines = [f"{user},{item}\n" for user, item in zip(users.tolist(), items.tolist(), strict=True)]
    path.write_text("user,item\n" + "".join(lines))
    return path


def order_of(folder: str) -> str:
    stored = json.loads(Path(folder, "config.json").read_text())["train"]
    assert stored["batch_size"] == 1024
    return str(stored["order"])


def files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_auto_decides_once_and_another_order_is_refused(cli: Run, ratings: Path) -> None:
    code, out, _ = cli("train", "ratings.csv", *SMALL, *TIGHT, "--epochs", "1", "--out", "runs/a")
    order = order_of("runs/a")
    users, items = order.removeprefix("blocks:").split("x")
    assert code == 0 and int(users) > int(items) > 1
    assert f"order   pairs by {users} blocks of users and {items} of items ({order})" in out
    assert "slow: " not in out
    assert cli("train", "--resume", "runs/a", "--epochs", "2", "--ram", "64MiB")[0] == 0
    assert order_of("runs/a") == order
    assert cli("train", "--resume", "runs/a", "--epochs", "3", "--order", "auto")[0] == 0
    assert cli("train", "--resume", "runs/a", "--epochs", "4", "--order", "blocks")[0] == 0
    assert order_of("runs/a") == order
    before = files("runs/a")
    for other in ("uniform", "blocks:3"):
        code, out, err = cli("train", "--resume", "runs/a", "--epochs", "5", "--order", other)
        assert (code, out) == (2, "")
        assert f"--order {other} cannot change on resuming: runs/a was started with {order}; start a new run" in err
    code, _, err = cli("train", "--resume", "runs/a", "--order", "sideways")
    assert code == 2 and "option order must be auto, uniform, blocks" in err
    assert files("runs/a") == before


def test_enough_ram_is_uniform_order(cli: Run, ratings: Path) -> None:
    code, out, _ = cli("train", "ratings.csv", *SMALL, "--ram", "64MiB", "--epochs", "1", "--out", "runs/a")
    assert code == 0 and order_of("runs/a") == "uniform"
    assert "order   pairs" not in out and "slow: " not in out


def test_blocks_that_cannot_be_leave_no_run(cli: Run, ratings: Path) -> None:
    code, _, err = cli("train", "ratings.csv", *SMALL, "--order", "blocks:5000x2", "--out", "runs/a")
    assert code != 0 and "option order has 5000 blocks of users, but there are" in err
    assert not Path("runs/a").exists()


def test_a_slow_run_says_so_before_the_first_step(cli: Run, ratings: Path) -> None:
    options = ("--order", "uniform", *TIGHT, "--epochs", "1")
    code, out, _ = cli("train", "ratings.csv", *SMALL, *options, "--out", "runs/a")
    assert code == 0
    assert out.index("slow: about ") < out.index("--order blocks: about ") < out.index("epoch 1/1")
    code, out, err = cli("train", "ratings.csv", *SMALL, *options, "--out", "runs/b", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["kind"] for line in lines] == ["auto", "advice", "epoch", "outcome"]
    assert lines[1]["slowdown"] > 5 and not lines[1]["is_measured"]
    assert {change["options"].split()[0] for change in lines[1]["changes"]} >= {"--order", "--dtype", "--ram"}
    assert "slow: about " in err
    code, out, _ = cli("train", "--resume", "runs/a", "--epochs", "2")
    assert "slow: about " in out and "--order" not in out and "  --ram " in out
