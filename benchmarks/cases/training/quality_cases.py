"""`quality`, `train_speed` and `block_order`, which train on real data, as cases of the suite."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.cases.training import block_order, quality, train_speed
from benchmarks.harness.figures import Figure, Settings


def movielens(settings: Settings) -> list[Figure]:
    """GMF with cross-entropy on MovieLens-1M, within a quarter of the records' bytes and all in RAM."""
    return measure(settings, "ml1m-bce", "hr@10")


def movielens_neumf(settings: Settings) -> list[Figure]:
    """NeuMF on MovieLens-1M, within a quarter of the records' bytes and all in RAM."""
    return measure(settings, "ml1m-neumf", "hr@10")


def gowalla(settings: Settings) -> list[Figure]:
    """MF-BPR on Gowalla, within a quarter of the records' bytes and all in RAM."""
    return measure(settings, "gowalla", "recall@20")


def measure(settings: Settings, name: str, metric: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        arguments = [name, "--dir", str(settings.dir), "--data", str(settings.data), "--seed", str(settings.seed)]
        arguments += ["--json", str(answer), *settings.pick(["--tiny"], ["--epochs", "1"], [])]
        quality.main(arguments)
        found = json.loads(answer.read_text())
    wanted = quality.TARGETS[name][metric] if settings.size == "full" else None
    figures = [
        Figure(
            f"{metric}, {which}",
            found[which]["metrics"][metric],
            note=f"{found[which]['ranking']}; {found[which]['step_ms']:.1f} ms a step",
            at_least=wanted,
        )
        for which in ("roomy", "tight")
    ]
    different = (not found["same_losses"]) + (not found["same_rows"])
    return [*figures, Figure("losses or rows that differ between the budgets", different, at_most=0)]


def training_speed(settings: Settings) -> list[Figure]:
    """Compare pairs a second with plain torch, for both recipes of MovieLens-1M."""
    figures = []
    for name in ("ml1m-bce", "ml1m"):
        arguments = [name, "--dir", str(settings.dir), "--data", str(settings.data)]
        arguments += settings.pick(["--tiny"], ["--rounds", "4"], [])
        found = train_speed.main(arguments)
        ratios = found["ratios"]
        figures.append(
            Figure(
                f"pairs/s of {name}, bunkbed / torch",
                statistics.median(ratios),
                "x",
                min(ratios),
                max(ratios),
                len(ratios),
                at_least=1.5,
                note=f"bunkbed {found['bunkbed']:,.0f}, torch {found['torch']:,.0f} pairs/s",
            )
        )
    return figures


def orders(settings: Settings) -> list[Figure]:
    """Epochs within a budget, by blocks and in uniform order, against all in RAM; the quality of blocks on Gowalla."""
    figures = []
    for name in ("gowalla", "ml1m-bce"):
        arguments = [name, "--dir", str(settings.dir), "--data", str(settings.data), "--orders", "auto", "uniform"]
        arguments += settings.pick(["--tiny"], ["--turns", "2"], ["--turns", "3"])
        if name == "gowalla":
            arguments += ["--quality", settings.pick("2", "5", "20")]
        found = block_order.main(arguments)
        for order, wanted in block_order.WANTED[name].items():
            ratios = found[order]["ratios"]
            note = f"{found[order]['order']}; {statistics.median(found[order]['missed']):,.0f} rows missed an epoch"
            about = statistics.median(ratios), "x", min(ratios), max(ratios), len(ratios)
            figures.append(Figure(f"{name}, {order} / all in RAM", *about, at_most=wanted, note=note))
        if name == "gowalla" and (times := found["uniform"]["of device"]):
            about = statistics.median(times), "x", min(times), max(times), len(times)
            figures.append(Figure("gowalla, uniform / the device's time for its bytes", *about, at_most=1.3))
        if "quality" in found:
            kept = found["quality"][found["auto"]["order"]] / found["quality"]["uniform"]
            figures.append(Figure(f"{name}, {block_order.METRICS[name]}, auto / uniform", kept, at_least=0.98))
    return figures


def bfloat16(settings: Settings) -> list[Figure]:
    """Compare bfloat16 rows with row-wise Adagrad and float32 rows with Adam, on MovieLens-1M."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        arguments = ["ml1m-bf16", "--dir", str(settings.dir), "--data", str(settings.data), "--json", str(answer)]
        quality.main([*arguments, *settings.pick(["--tiny"], ["--epochs", "1"], [])])
        found = json.loads(answer.read_text())
    is_full = settings.size == "full"
    share = found["narrow"]["record_bytes"] / found["wide"]["record_bytes"]
    lost = found["wide"]["metrics"]["hr@10"] - found["narrow"]["metrics"]["hr@10"]
    note = f"{found['narrow']['metrics']['hr@10']:.4f} and {found['wide']['metrics']['hr@10']:.4f}"
    return [
        Figure("HR@10 lost", lost, at_most=0.005 if is_full else None, note=note),
        Figure("bytes of a record, share of float32 Adam's", share, at_most=1 / 3 if is_full else None),
    ]
