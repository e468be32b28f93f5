"""The scripts of examples/torch run as they stand, small, in this process: importing torch costs more than they do."""

from __future__ import annotations

import difflib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch", reason="torch is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "torch"

#: Every script, as its README lists them.
SCRIPTS = {
    "after", "before", "click_log", "complex_fb15k237", "dlrm_criteo", "frozen_vectors", "lightning_fit", "next_item",
    "online_days", "online_reader",
    # Several processes, which tests/ranks/test_ranks_examples.py runs:
    "processes", "processes_accelerate", "processes_fsdp", "processes_lightning", "processes_ray",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))  # as `python examples/torch/NAME.py` has it


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run(name, *arguments)``: what the script printed."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *(str(argument) for argument in arguments)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_every_example_is_known_short_and_in_the_readme() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SCRIPTS
    for name in SCRIPTS:
        text = (FOLDER / f"{name}.py").read_text()
        assert text.startswith('"""') and f" examples/torch/{name}.py" in text, name
        assert len(text.splitlines()) < 150, name
        assert f"`{name}.py`" in (FOLDER / "README.md").read_text(), name


def test_the_swap_is_a_handful_of_lines_and_trains_alike(run: Any) -> None:
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    code = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and "The script" not in line]
    assert sum(line[0] == "-" for line in code) <= 8 and sum(line.strip() not in "+-" for line in code) <= 15

    def losses(name: str) -> list[float]:
        return [float(number) for number in re.findall(r"0\.\d+", run(name))]

    start = runpy.run_path(str(FOLDER / "before.py"))["Model"]().state_dict()
    torch.save(start, "model.pt")
    wanted = losses("before")
    torch.save(start, "model.pt")
    ours = losses("after")
    assert wanted[1] < 0.5 * wanted[0] and ours == pytest.approx(wanted, abs=2e-4)
    assert losses("after")[0] < 0.5 * ours[0]  # goes on from the file it wrote, and its tables


def test_the_planted_click_log_is_criteos_and_its_optimum_known(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import click_log

    log, file = click_log.ClickLog(100), tmp_path / "clicks.tsv"
    labels, chances = log.write(file, 3_000, seed=1)
    assert abs(labels.mean() - chances.mean()) < 0.03
    above = chances[labels][:, None] > chances[~labels]
    assert click_log.auc(labels, chances) == pytest.approx(above.mean()) and 0.65 < above.mean() < 0.9

    with file.open("a") as lines:
        lines.write("\t".join(["1", "-2", *[""] * 12, "68fd1e64", *[""] * 25]) + "\n")
    fields = [line.split("\t") for line in file.read_text().splitlines()]
    assert {len(line) for line in fields} == {40} and [line[0] == "1" for line in fields[:-1]] == labels.tolist()
    rows = [size + 1 for size in log.sizes]
    batches = list(click_log.read(file, rows, 512))
    assert [len(batch[0]) for batch in batches] == [512] * 5 + [441]
    clicked, numbers, ids = (np.concatenate([batch[n] for batch in batches], axis=n // 2) for n in range(3))
    assert clicked.tolist() == [float(line[0]) for line in fields]
    given = np.array([[float(text or 0) for text in line[1:14]] for line in fields])
    np.testing.assert_allclose(numbers, np.sign(given) * np.log1p(abs(given)), rtol=1e-6)
    for column, size in enumerate(log.sizes):
        texts = [line[14 + column] for line in fields]
        assert ids[column].tolist() == [int(text, 16) % size if text else size for text in texts]
        assert "" in texts and all(re.fullmatch("[0-9a-f]{8}|", text) for text in texts)

    file.write_text(file.read_text().replace("68fd1e64", "68fd1e6"))
    with pytest.raises(ValueError, match=r"8 hexadecimal digits, got '68fd1e6'"):
        list(click_log.read(file, rows, 512))


def test_dlrm_has_the_same_losses_at_a_tenth_of_the_memory(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import click_log
    import dlrm_criteo

    log, files = click_log.ClickLog(40_000), (tmp_path / "train.tsv", tmp_path / "test.tsv")
    for file, samples in zip(files, (8_000, 1_000), strict=True):
        log.write(file, samples, seed=samples)
    rows = [size + 1 for size in log.sizes]
    found = []
    for ram in ("1GiB", sum(rows) * 64 * 12 // 10):
        budget = bb.Budget(ram)
        losses, auc, model = dlrm_criteo.train(files, 8_000, rows, tmp_path / f"{ram}", budget, dim=64, batch=512)
        tables = [layer.table for layer in model.tables.values()]
        misses = sum(table.stats()["misses"] for table in tables)
        found.append((losses, auc, [table.get(np.arange(table.num_rows)) for table in tables], misses))
        for table in tables:
            table.close()
    (losses, auc, weights, none), (ours, our_auc, our_weights, many) = found
    assert none == 0 and many > 1_000 and len(losses) == 16
    assert ours == losses and our_auc == auc
    for one, other in zip(weights, our_weights, strict=True):
        np.testing.assert_array_equal(one, other)

    out = run("dlrm_criteo", "--samples", 2_000)
    assert "129,806 rows of 75 MB, 7 MB of RAM" in out
    assert re.search(r"mean loss 0\.\d+, .*\nAUC 0\.[4-7]\d+, planted optimum 0\.8\d+, 0\.\d+ short of it", out), out


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning_goes_back_to_the_best_epoch(run: Any) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    out = run("lightning_fit", "--samples", 20_000)
    losses = re.search(r"last epoch (0\.\d+), best (0\.\d+), best loaded (0\.\d+)", out)
    assert losses is not None, out
    last, best, loaded = (float(number) for number in losses.groups())
    assert best == loaded and best < last and best < 0.15


def test_frozen_vectors_are_imported_once_and_stay(run: Any, tmp_path: Path) -> None:
    first = run("frozen_vectors", "--folder", tmp_path)
    assert "imported 20,000 rows of 256 bytes" in first and "rows are the file's: True" in first
    again = run("frozen_vectors", "--folder", tmp_path, "--steps", 10)
    assert "imported" not in again and "rows are the file's: True" in again
    accuracy = re.search(r"accuracy (\d\.\d+)", first)
    assert accuracy is not None and float(accuracy[1]) > 0.9


def test_an_online_reader_sees_whole_commits(run: Any) -> None:
    out = run("online_reader", "--commits", 6, "--steps", 40)
    seen = re.findall(r"epoch (\d+): rows of step (\d+), loss (\d\.\d+), as committed: (\w+)", out)
    assert len(seen) >= 2 and {same for *_, same in seen} == {"True"}, out
    epochs = [int(epoch) for epoch, *_ in seen]
    assert epochs == sorted(set(epochs)) and seen[-1][1] == "240"
    assert all(int(step) % 40 == 0 for _, step, *_ in seen) and float(seen[-1][2]) < 0.55


def test_a_tied_sequence_model_comes_near_the_planted_optimum(run: Any) -> None:
    out = run("next_item", "--epochs", 3)
    rates = re.findall(r"HR@10 (0\.\d+), planted optimum (0\.\d+)", out)
    assert len(rates) == 3 and float(rates[-1][0]) > 0.8 * float(rates[-1][1]), out


@pytest.mark.parametrize("blocks", [(), ("--blocks", 4)])
def test_a_knowledge_graph_is_completed(run: Any, blocks: tuple[Any, ...]) -> None:
    out = run("complex_fb15k237", "--rank", 32, "--epochs", 12, "--batch", 200, *blocks)
    ranks = re.findall(r"(\w+): filtered MRR (\d\.\d+)", out)
    assert [name for name, _ in ranks] == ["valid", "test"] and min(float(rank) for _, rank in ranks) > 0.5, out


def test_filtered_mrr_is_what_its_definition_says(tmp_path: Path) -> None:
    import complex_fb15k237

    entities, relations, rank = 30, 3, 4
    rng = np.random.default_rng(0)
    model = complex_fb15k237.ComplEx(entities, relations, rank, 0.1, tmp_path, "16MiB")
    rows = {}
    for layer in (model.entity, model.relation):
        values = rng.standard_normal((layer.num_embeddings, 2 * rank)).astype(np.float32)
        layer.table.set(np.arange(len(values)), values)
        rows[layer] = values[:, :rank] + 1j * values[:, rank:]
    triples = np.stack([rng.integers(0, 5, 80), rng.integers(0, 6, 80), rng.integers(0, entities, 80)], 1)
    triples = np.unique(triples, axis=0)
    known: dict[tuple[int, int], list[int]] = {}
    for head, relation, tail in triples.tolist():
        known.setdefault((head, relation), []).append(tail)
    assert max(map(len, known.values())) > 3

    inverse = []
    for head, relation, tail in triples.tolist():
        scores = (rows[model.entity][head] * rows[model.relation][relation] * rows[model.entity].conj()).sum(1).real
        others = np.setdiff1d(np.arange(entities), known[head, relation])
        inverse.append(1 / (1 + (scores[others] > scores[tail]).sum()))
    found = complex_fb15k237.mrr(model, triples, known, chunk=7)
    assert found == pytest.approx(np.mean(inverse), abs=1e-6)

    model.entity.table.set(np.arange(entities), np.zeros((entities, 2 * rank), np.float32))  # all are equally good
    ties = [1 / (1 + (entities - len(known[head, relation])) / 2) for head, relation, _ in triples.tolist()]
    assert complex_fb15k237.mrr(model, triples, known) == pytest.approx(np.mean(ties), abs=1e-6)
    for layer in (model.entity, model.relation):
        layer.table.close()


def test_old_items_go_and_the_quality_stays(run: Any) -> None:
    pytest.importorskip("matplotlib")
    out = run("online_days", "--days", 24, "--new", 40, "--interactions", 12000, "--expire", 3, "--picture", "days.svg")
    stays, goes = re.findall(r"AUC (0\.\d+) in the second half, ([\d,]+) item rows", out)
    assert abs(float(stays[0]) - float(goes[0])) < 0.03 and float(stays[0]) > 0.55
    assert int(stays[1].replace(",", "")) == 960 and int(goes[1].replace(",", "")) < 760
    assert "AUC of the day" in Path("days.svg").read_text()
