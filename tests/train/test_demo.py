"""The demo: what it plants can be recovered, and what it claims is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

from bunkbed.cli import main
from bunkbed.train.demo.data import plant
from bunkbed.train.demo.twice import DemoResult, Side, _same_bits

SIZE = {"num_users": 3_000, "num_items": 1_000, "num_pairs": 30_000, "num_tests": 500}


def test_planted_data_is_reproducible_and_has_a_ceiling() -> None:
    one, again, other = plant(**SIZE, seed=1), plant(**SIZE, seed=1), plant(**SIZE, seed=2)
    train = one.data.train
    assert np.array_equal(train.users, again.data.train.users) and np.array_equal(train.items, again.data.train.items)
    assert not np.array_equal(train.users[:100], other.data.train.users[:100])
    assert one.optimum["ndcg@10"] > one.popularity["ndcg@10"] + 0.1
    assert one.popularity["ndcg@10"] > one.chance["ndcg@10"]
    assert one.chance["hr@10"] == pytest.approx(0.1, abs=0.04)

    pairs = set(zip(train.users.tolist(), train.items.tolist(), strict=True))
    assert len(pairs) == len(train)
    candidates = one.data.candidates
    assert candidates is not None and len(candidates) == 500
    held_out = set(zip(candidates.users.tolist(), candidates.positives.tolist(), strict=True))
    assert not pairs & held_out
    assert len(np.unique(candidates.users)) == 500
    assert not (candidates.negatives == candidates.positives[:, None]).any()
    counts = np.sort(np.bincount(train.users, minlength=3_000))[::-1]
    assert counts[:300].sum() > 3 * counts[-300:].sum(), "users are skewed"


def result(**changes: object) -> DemoResult:
    side = Side(32 << 20, "uniform", 0.02, [0.7, 0.5], 0.9, 10, 20, {"ndcg@10": 0.4})
    values: dict[str, object] = {
        "table_bytes": 164 << 20,
        "stored_rows": 224_000,
        "budget": side,
        "in_ram": replace(side, step_seconds=0.016, ram_bytes=512 << 20),
        "losses_identical": True,
        "rows_identical": True,
        "optimum": {"ndcg@10": 0.45},
        "popularity": {"ndcg@10": 0.2},
        "chance": {"ndcg@10": 0.05},
        "seconds": 100.0,
    }
    return DemoResult(**{**values, **changes})  # type: ignore[arg-type]


def test_the_headline() -> None:
    assert result().headline() == (
        "table 164.0 MiB, RAM budget 32.0 MiB: 1.25x the time per step of all in RAM, losses identical, "
        "88% of the planted optimum recovered"
    )
    assert "losses DIFFERENT" in result(losses_identical=False).headline()
    assert "losses DIFFERENT" in result(rows_identical=False).headline()


def test_losses_are_compared_by_their_bits() -> None:
    assert _same_bits([0.1, 0.2], [0.1, 0.2])
    assert not _same_bits([0.1, 0.2], [0.1, np.nextafter(0.2, 1)])
    assert not _same_bits([0.1], [0.1, 0.2])
    assert not _same_bits([0.0], [-0.0])
    assert not _same_bits([], [])


def run_demo(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: run_demo(list(arguments), capsys, monkeypatch, tmp_path)


def test_a_small_demo_says_the_headline_first_and_cleans_up(
    demo: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, _ = demo("--scale", "0.02", "--epochs", "2", "--ram", "2MiB")
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("table ") and "RAM budget 2.0 MiB" in first and "losses identical" in first
    assert "every one identical" in out and "stored rows, all identical" in out
    assert " 0 stored rows" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["bunkbed-demo.png"]


def test_a_kept_demo_as_json(demo: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = demo("--scale", "0.01", "--epochs", "2", "--ram", "2MiB", "--out", "kept", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["losses_identical"] is True and found["rows_identical"] is True
    assert len(found["budget"]["losses"]) == len(found["in_ram"]["losses"]) > 0
    assert found["budget"]["losses"] == found["in_ram"]["losses"]
    assert found["table_bytes"] == found["stored_rows"] * 3 * 4 * 64
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["budget", "bunkbed-demo.png", "in-ram"]
    code, _, err = demo("--out", "kept")
    assert (code, err) == (2, "error: kept exists and is not an empty folder; give another --out\n")


def test_a_budget_too_small_says_what_is_needed(demo: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, err = demo("--scale", "0.01", "--ram", "1KiB")
    assert code == 1
    assert "need" in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
