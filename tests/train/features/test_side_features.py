"""Side features: the vectors in training and ranking, items without pairs, the command, and `--more`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

import bunkbed as bb  # noqa: E402
from bunkbed.train import Recommender  # noqa: E402
from bunkbed.train.data.interactions import Dataset, Interactions  # noqa: E402
from bunkbed.train.data.splits import split  # noqa: E402
from bunkbed.train.data.store import load_dataset, open_dataset, save_dataset  # noqa: E402
from bunkbed.train.data.vocab import DataError  # noqa: E402
from bunkbed.train.features.features import load_features, read_names  # noqa: E402
from bunkbed.train.features.reading import SideFile, store_features  # noqa: E402
from bunkbed.train.loop import Trainer  # noqa: E402
from bunkbed.train.models.featured import FeaturedRows  # noqa: E402
from bunkbed.train.models.scorer import scorer_of_run  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402
from feature_cases import COLD, ITEMS, USERS, interactions, item_file, kind_of, matrix, read, user_file  # noqa: E402

Run = Callable[..., tuple[int, str, str]]

CONFIG = TrainConfig(
    dim=8, batch_size=64, epochs=2, lr=0.05, ram="64MiB", negatives=5, l2=0.001, threads=1, order="uniform"
)
SHARED = replace(CONFIG, negatives=12, share_negatives=True)
CONFIGS = {
    "own negatives": CONFIG,
    "shared negatives": replace(SHARED, bias=True, hardness=1.0),
    "popular negatives": replace(SHARED, loss="softmax", sampling="popularity"),
    "popular own negatives": replace(CONFIG, loss="softmax", sampling="popularity"),
    "blocks": replace(CONFIG, order="blocks:2x2"),
    "blocks of popular items": replace(SHARED, loss="softmax", sampling="popularity", negatives=6, order="blocks:2x2"),
    "neumf": replace(CONFIG, model="neumf", loss="bce"),
    "ccl": replace(SHARED, loss="ccl"),
    "sasrec": replace(SHARED, model="sasrec", loss="softmax", length=4, valid="last", negatives=10),
    "sasrec, popular": replace(
        SHARED, model="sasrec", loss="softmax", length=4, valid="last", negatives=10, sampling="popularity"
    ),
}


def trained_pairs(data: Path, config: TrainConfig = CONFIG) -> Callable[[], Interactions]:
    """Return what `store_features` asks for the pairs that are trained on."""
    return lambda: split(load_dataset(data).train, config).train


def stored(folder: Path, *sides: str, stream: bool = False, config: TrainConfig = CONFIG) -> Dataset:
    """Make a run in `folder`, with a dataset with features of `sides`."""
    bb.Run(folder, ram="1MiB").close(commit=False)
    data = folder / "data"
    save_dataset(data, interactions())
    made = {"item": item_file, "user": user_file}
    store_features(data, {side: SideFile(made[side](folder)) for side in sides}, {}, trained_pairs(data, config))
    return (open_dataset if stream else load_dataset)(data)


def trained(folder: Path, config: TrainConfig, *sides: str, stop_at: int = 0) -> Trainer:
    """Train a run, after a stop and another start if `stop_at` is a step."""
    sides = ("item",) if config.is_sequential else sides or ("user", "item")
    data = stored(folder, *sides, stream=config.stream, config=config)
    losses: list[float] = []
    for _ in range(2 if stop_at else 1):
        with bb.Run(folder, ram=config.table_ram_bytes) as run:
            trainer = Trainer(config, data, run)
            if stop_at and not losses:
                step = trainer.optimizer.step

                def counted(trainer: Trainer = trainer, step: Callable[[], None] = step) -> None:
                    step()
                    if trainer.step + 1 == stop_at:
                        trainer.request_stop()

                trainer.optimizer.step = counted  # type: ignore[method-assign]
            trainer.fit()
            losses += trainer.losses
    trainer.losses = losses
    return trainer


def rows_of(folder: Path) -> dict[str, bytes]:
    found = {}
    with bb.Run(folder, ram="64MiB", mode="r") as run:
        for name in run.table_names:
            table = run.table(name)
            for slot in ("weight", *table.slots):
                found[f"{name}.{slot}"] = table.get(np.arange(table.num_rows), slot).tobytes()
    return found


def test_a_step_is_that_of_torch(tmp_path: Path) -> None:
    """One step of SGD on own rows and features, by torch's own layers."""
    config = replace(CONFIG, optimizer="sgd", lr=0.5, l2=0.0)
    data = stored(tmp_path, "user", "item")
    sides = {"user": (data.num_users, USERS + 2), "item": (data.num_items, ITEMS)}
    with bb.Run(tmp_path, ram="64MiB") as run:
        trainer = Trainer(config, data, run)
        weights, dense = {}, {}
        for side, (count, expected) in sides.items():
            assert count == expected
            dense[side] = torch.from_numpy(matrix(tmp_path / "data", side)[0]).float()
            for name in (side, f"{side}_feature"):
                table = run.table(name)
                table.set(
                    np.arange(table.num_rows), np.random.default_rng(1).normal(size=(table.num_rows, 8)).astype("f4")
                )
                weights[name] = torch.from_numpy(table.lookup(np.arange(table.num_rows))).requires_grad_()
        batch = trainer._source.batch(1, 0)
        users, items = torch.from_numpy(batch.users), torch.from_numpy(batch.items)
        vectors = {side: weights[side] + dense[side] @ weights[f"{side}_feature"] for side in sides}
        scores = (vectors["user"][users][:, None] * vectors["item"][items]).sum(-1)
        expected_loss = torch.nn.functional.softplus(scores[:, 1:] - scores[:, :1]).mean()
        expected_loss.backward()
        wanted = trainer.model.wanted((users, items))  # what is read ahead of the step
        read = {layer.table.name: np.unique(ids.numpy()).tolist() for layer, ids in wanted.items()}
        assert read == {
            "user": np.unique(batch.users).tolist(),
            "user_feature": np.flatnonzero(dense["user"][users].any(0)).tolist(),
            "item": np.unique(batch.items).tolist(),
            "item_feature": np.flatnonzero(dense["item"][items.reshape(-1)].any(0)).tolist(),
        }
        loss = trainer.model(users, items)
        loss.backward()
        trainer.optimizer.step()
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
        for name, weight in weights.items():
            after = run.table(name).lookup(np.arange(len(weight)))
            expected_rows = (weight - 0.5 * weight.grad).detach().numpy()
            np.testing.assert_allclose(after, expected_rows, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_items_without_pairs_are_never_drawn_and_keep_their_rows(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    trainer = trained(tmp_path, config)
    cold = np.arange(ITEMS - COLD, ITEMS)
    drawn = [trainer._source.batch(epoch, step) for epoch in (1, 2) for step in range(trainer._source.steps(epoch))]
    items = np.unique(np.concatenate([batch.items.ravel() for batch in drawn]))
    assert not np.isin(cold, items).any() and len(items) == ITEMS - COLD
    assert all(batch.log_q is None or np.isfinite(batch.log_q).all() for batch in drawn)
    with bb.Run(tmp_path, ram="64MiB", mode="r") as run:
        table = run.table("item")
        ids, _ = next(iter(table.scan_slots(("weight",), 1 << 20)))
        assert not np.isin(cold, ids).any()  # no step has written one


def test_items_of_the_validation_alone_are_never_drawn(tmp_path: Path) -> None:
    """Item 31 has one pair, which is held out. Item 39 has no pair and no feature: it is drawn as without features."""
    bb.Run(tmp_path, ram="1MiB").close(commit=False)
    pairs, config = interactions().train, replace(CONFIG, valid="last")
    keep = pairs.items != 31
    users, items = np.append(pairs.users[keep], 0), np.append(pairs.items[keep], 31)
    save_dataset(tmp_path / "data", Dataset(pairs.replace(users, items)))
    path = item_file(tmp_path)
    path.write_text(path.read_text().replace("39,k3,0,x|y\n", "39,,,\n"))
    data = tmp_path / "data"
    store_features(data, {"item": SideFile(path)}, {}, trained_pairs(data, config))
    assert np.flatnonzero(~load_features(data)["item"].has_row).tolist() == list(range(31, 39))
    with bb.Run(tmp_path, ram="64MiB") as run:
        source = Trainer(config, load_dataset(data), run)._source
        drawn = np.unique(np.concatenate([source.batch(1, step).items.ravel() for step in range(source.steps(1))]))
    assert drawn.tolist() == [*range(31), 39]


def test_the_probabilities_of_popular_items_are_those_of_drawing(tmp_path: Path) -> None:
    trainer = trained(tmp_path, CONFIGS["popular own negatives"])
    pool = trainer._source._items
    inside = np.arange(ITEMS - COLD)
    log_q = pool.log_q(inside)
    assert log_q is not None and np.exp(log_q.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    random = np.random.Philox(key=[1, 2])
    counts = np.bincount(pool.draw(random, 200_000), minlength=ITEMS)
    np.testing.assert_allclose(counts[inside] / 200_000, np.exp(log_q), atol=3e-3)
    assert not counts[ITEMS - COLD :].any()


@pytest.mark.parametrize("name", ["own negatives", "sasrec"])
def test_vectors_of_ranking(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own row plus features, features alone without pairs; the same bits alone and with others, and as in training."""
    trained(tmp_path, CONFIGS[name])
    with bb.Run(tmp_path, ram="64MiB", mode="r") as run:
        rows, values = (
            run.table(table).lookup(np.arange(run.table(table).num_rows)) for table in ("item", "item_feature")
        )
        features = load_features(tmp_path / "data")["item"]
        every = FeaturedRows(run.table("item"), run.table("item_feature"), features)
        ids = np.arange(ITEMS)
        together = every.lookup(ids)
        alone = np.concatenate([every.lookup(ids[one : one + 1]) for one in range(ITEMS)])
        assert together.tobytes() == alone.tobytes()
        assert every.lookup(ids.reshape(-1, 4)).tobytes() == together.tobytes()
        monkeypatch.setattr("bunkbed.train.models.featured._CHUNK", 7)
        assert every.lookup(ids).tobytes() == together.tobytes()
        rows[ITEMS - COLD :] = 0
        np.testing.assert_allclose(together, rows + matrix(tmp_path / "data", "item")[0] @ values, rtol=1e-4, atol=1e-6)
        assert np.abs(values).min(axis=1).max() > 0
        known = lambda users: (np.repeat(users, 2), np.tile(np.array([1, 2]), len(users)))  # noqa: E731
        scorer = scorer_of_run(run, CONFIGS[name], known=known)
        assert scorer.vectors(ids).numpy().tobytes() == together.tobytes()
        queries = scorer.queries(np.array([0, 5]))
        assert torch.equal(scorer.queries(np.array([5])), queries[1:])


def test_an_id_without_features_and_an_empty_chunk(tmp_path: Path) -> None:
    read(tmp_path, "id,a\n1,x\n2,x\n")
    features = load_features(tmp_path / "data")["item"]
    rows = bb.create(None, dim=2, num_rows=3, init=bb.Normal(), seed=1)
    values = bb.create(None, dim=2, num_rows=1, init=bb.Normal(), seed=2)
    found = FeaturedRows(rows, values, features).lookup(np.array([2, 0]))
    assert found[0].tolist() == rows.lookup(np.array([2]))[0].tolist()
    assert found[1].tolist() == (rows.lookup(np.array([0])) + values.lookup(np.array([0])))[0].tolist()
    assert FeaturedRows(rows, values, features).lookup(np.empty(0, np.int64)).shape == (0, 2)


@pytest.mark.parametrize("name", ["own negatives", "shared negatives", "sasrec", "blocks"])
def test_bits_do_not_depend_on_memory_lookahead_and_stops(name: str, tmp_path: Path) -> None:
    config = replace(CONFIGS[name], dim=32)
    first = trained(tmp_path / "a", config)
    expected = rows_of(tmp_path / "a")
    assert any(key.startswith("item_feature") for key in expected)
    variants = {
        "small": (replace(config, ram="1MiB"), 0),
        "lookahead": (replace(config, ram="2MiB", lookahead=3, window=4), 0),
        "stream": (replace(config, stream=True, eval_users=1000), 0),
        "stopped": (config, 3),
        "device cache": (replace(config, ram="8MiB", device_cache="40KiB"), 0),
        "no rows on the device": (replace(config, device_cache=0), 0),
    }
    for place, (variant, stop_at) in variants.items():
        other = trained(tmp_path / place, variant, stop_at=stop_at)
        assert other.losses == first.losses, place
        assert rows_of(tmp_path / place) == expected, place


def test_features_of_other_data_are_refused(tmp_path: Path) -> None:
    data = stored(tmp_path, "item")
    with bb.Run(tmp_path, ram="64MiB") as run:
        with pytest.raises(ValueError, match="has features of 40 items, and the data 32"):
            Trainer(CONFIG, interactions(), run)
        Trainer(replace(CONFIG, epochs=1), data, run).fit()
    (tmp_path / "data" / "features.json").unlink()
    with bb.Run(tmp_path, ram="64MiB", mode="r") as run, pytest.raises(DataError, match="features of items, which the"):
        scorer_of_run(run, CONFIG)  # and no ranking by own rows alone
    with bb.Run(tmp_path, ram="64MiB") as run, pytest.raises(ValueError, match="tables of features of"):
        Trainer(CONFIG, data, run)
    data = stored(tmp_path / "b", "user")
    with pytest.raises(ValueError, match="sasrec has no rows of users"), bb.Run(tmp_path / "b", ram="64MiB") as run:
        Trainer(CONFIGS["sasrec"], data, run)


# --- the command ---

SMALL = (
    "--dim", "8", "--threads", "1", "--batch-size", "64", "--epochs", "6", "--lr", "0.05", "--negatives", "16",
    "--share-negatives",
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``pairs.csv``, ``items.csv`` with eight items without pairs, ``users.csv`` with two such users."""
    monkeypatch.chdir(tmp_path)
    data = interactions().train
    lines = [f"{user},{item}\n" for user, item in zip(data.users.tolist(), data.items.tolist(), strict=True)]
    (tmp_path / "pairs.csv").write_text("user,item\n" + "".join(lines))
    item_file(tmp_path)
    user_file(tmp_path)
    return tmp_path


SIDES = ("--item-features", "items.csv", "--user-features", "users.csv")


def test_items_and_users_without_pairs_get_what_their_features_say(cli: Run, files: Path) -> None:
    code, out, err = cli("train", "pairs.csv", *SMALL, *SIDES, "--out", "run")
    assert (code, err) == (0, "")
    said = out.splitlines()
    assert "users.csv  62 users (column 'user') with 4 features: kind (4 values)" in said
    assert "2 users have no interactions; those with features are ranked by these" in said
    assert (
        "items.csv  40 items (column 'item') with 7 features: kind (4 values), size (number), tags (2 values)" in said
    )
    assert "8 items have no interactions; those with features are ranked by these" in said
    cold = list(range(ITEMS - COLD, ITEMS))
    with Recommender.load("run") as model:
        for user in (1, 6, USERS, USERS + 1):  # the last two have no pair
            best = [item for item, _ in model.recommend(user, k=2, items=cold)]
            assert {kind_of(int(item)) for item in best} == {kind_of(user)}
    assert cli("recommend", "run", "--all", "-k", "2", "--out", "all.csv")[0] == 0
    assert len((files / "all.csv").read_text().splitlines()) == 1 + 2 * (USERS + 2)
    (files / "new.csv").write_text("user,item\nn,1\nn,5\nn,9\n")
    assert cli("recommend", "run", "--history", "new.csv", "-k", "3", "--out", "new_best.csv")[0] == 0
    rows = [line.split(",") for line in (files / "new_best.csv").read_text().splitlines()[1:]]
    assert {kind_of(int(row[2])) for row in rows} == {1}
    for command in ("eval", "report", "info", "check"):
        assert cli(command, "run")[0] == 0, command
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "1", "--out", "plain")[0] == 0
    code, out, _ = cli("compare", "run", "plain")
    assert code == 0 and "features item items.csv and user users.csv" in out and "features -" in out
    code, out, err = cli("neighbors", "run", "--id", "1", "-k", "3")
    assert code == 0 and "without their features" in err
    assert "without their features" not in cli("neighbors", "run", "--table", "item_feature", "--id", "1")[2]


def test_more_items_without_pairs_than_with(cli: Run, files: Path) -> None:
    """Negatives are decided by the items that are drawn."""
    with (files / "items.csv").open("a") as file:
        file.write("".join(f"{item},k{kind_of(item)},1,y\n" for item in range(ITEMS, 2000)))
    options = ("--dim", "8", "--epochs", "1", "--threads", "1")
    code, out, err = cli("train", "pairs.csv", *options, "--item-features", "items.csv", "--out", "run")
    assert (code, err) == (0, "") and "negatives 8 (a quarter of the items)" in out


@pytest.mark.parametrize("stream", [False, True])
def test_the_command_knows_which_pairs_are_held_out(stream: bool, cli: Run, files: Path) -> None:
    """Items 32 and, with `--more`, 33 have one pair, which is the validation of a user."""
    with (files / "pairs.csv").open("a") as file:
        file.write("0,32\n")
    more = ("--stream", "--eval-users", "100") if stream else ()
    command = ("train", "pairs.csv", *SMALL, *more, "--epochs", "1", "--valid", "last", *SIDES, "--out", "run")
    assert cli(*command)[0] == 0
    assert np.flatnonzero(~load_features(files / "run" / "data")["item"].has_row).tolist() == list(range(32, 40))
    (files / "more.csv").write_text("user,item\n1,33\n")
    assert cli("train", "--resume", "run", "--more", "more.csv", "--epochs", "1")[0] == 0
    assert np.flatnonzero(~load_features(files / "run" / "data")["item"].has_row).tolist() == list(range(32, 40))


def test_files_of_features_that_are_refused_leave_no_folder(cli: Run, files: Path) -> None:
    (files / "bad.csv").write_text("item,kind\n1,a\n1,b\n")
    for stream in ((), ("--stream",)):
        code, _, err = cli("train", "pairs.csv", *SMALL, *stream, "--item-features", "bad.csv", "--out", "run")
        assert code == 1 and "bad.csv line 3: the item '1' is there a second time" in err
        assert not (files / "run").exists()
    code, _, err = cli("train", "pairs.csv", "--feature-kinds", "a=skip", "--out", "run")
    assert code == 2 and "--feature-kinds is of columns of --user-features FILE and --item-features FILE" in err
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "1", "--out", "run")[0] == 0
    code, _, err = cli("train", "--resume", "run", "--item-features", "items.csv")
    assert code == 2 and "--item-features cannot change on resuming" in err


@pytest.mark.parametrize("stream", [False, True])
def test_a_start_that_was_killed_reads_the_features_when_it_is_resumed(stream: bool, cli: Run, files: Path) -> None:
    more = ("--stream", "--eval-users", "100") if stream else ()
    assert cli("train", "pairs.csv", *SMALL, *SIDES, *more, "--out", "one")[0] == 0
    stored_config = json.loads((files / "one" / "config.json").read_text())
    assert stored_config["features"]["item_features"] == str(files / "items.csv")
    killed = f"""
import os, signal
from bunkbed.cli.main import main
from bunkbed.cli.shared import train_features
train_features.store_features = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main({["train", "pairs.csv", *SMALL, *SIDES, *more, "--out", "two"]!r})
"""
    ended = subprocess.run([sys.executable, "-c", killed], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL and (files / "two" / "data" / "dataset.json").exists(), ended.stderr
    assert cli("train", "--resume", "two")[0] == 0
    assert rows_of(files / "two") == rows_of(files / "one")


@pytest.mark.parametrize("again", [False, True], ids=["features stay", "another file"])
def test_more_keeps_the_features_that_are_trained(again: bool, cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, *SIDES, "--out", "run")[0] == 0
    before, names = load_features(files / "run" / "data")["item"], read_names(files / "run" / "data", "item")
    with Recommender.load("run") as model:  # the best epoch, where the round starts
        values = model.run.table("item_feature").lookup(np.arange(len(names)))
    (files / "more.csv").write_text("user,item\n1,39\n5,77\n99,39\n9,77\n")
    text = (files / "items.csv").read_text().replace("0,k0,0,y\n", "0,k0,2,y|z\n", 1)
    (files / "later.csv").write_text(text + "77,k9,1,z\n78,k9,3,\n")
    sides = ("--item-features", "later.csv") if again else ()
    code, out, err = cli("train", "--resume", "run", "--more", "more.csv", *sides, "--epochs", "1", "--lr", "1e-9")
    assert (code, err) == (0, "")
    data = files / "run" / "data"
    after, grown = load_features(data), load_dataset(data)
    assert len(after["item"]) == grown.num_items and len(after["user"]) == grown.num_users == USERS + 3
    found = matrix(data, "item")
    new = grown.train.item_vocab.index(77)
    assert found[1][: len(names)] == names
    if again:
        assert found[1][len(names) :] == [("kind", "k9"), ("tags", "z")]
        assert "later.csv  42 items (column 'item') with 9 features" in out
        sizes = np.arange(ITEMS) % 3  # of the first file: its mean and deviation stay
        row = dict(zip(found[1], found[0][new], strict=True))
        expected = {("kind", "k9"): 1.0, ("tags", "z"): 1.0, ("size", ""): (1 - sizes.mean()) / sizes.std()}
        assert row == pytest.approx({name: expected.get(name, 0.0) for name in found[1]}, rel=1e-6)
        first = dict(zip(found[1], found[0][grown.train.item_vocab.index(0)], strict=True))
        assert first[("tags", "z")] == first[("tags", "y")] == first[("kind", "k0")] == 1 and first[("tags", "x")] == 0
        assert first[("size", "")] == pytest.approx((2 - sizes.mean()) / sizes.std(), rel=1e-6)
    else:
        assert not found[0][new].any()
        np.testing.assert_array_equal(found[0][: len(before)], matrix_of(before))
    user = matrix(data, "user")[0][grown.train.user_vocab.index(99)]
    assert user.tolist() == [1, 0, 0, 0, 0]  # what all users have
    assert after["item"].has_row[[grown.train.item_vocab.index(label) for label in (39, 38)]].tolist() == [
        True,
        False,
    ]
    with bb.Run("run", ram="64MiB", mode="r") as run:
        table = run.table("item_feature")
        assert table.num_rows == len(found[1])
        np.testing.assert_allclose(table.lookup(np.arange(len(names))), values, atol=1e-6)
    assert cli("recommend", "run", "--user", "99")[0] == 0


def test_more_remembers_the_kinds_that_were_given(cli: Run, files: Path) -> None:
    short = (*SMALL, "--epochs", "1", "--item-features", "items.csv", "--feature-kinds", "size=skip,tags=category")
    assert cli("train", "pairs.csv", *short, "--out", "run")[0] == 0
    names = read_names(files / "run" / "data", "item")
    (files / "more.csv").write_text("user,item\n1,39\n")
    assert cli("train", "--resume", "run", "--more", "more.csv", "--item-features", "items.csv")[0] == 0
    assert read_names(files / "run" / "data", "item") == names and ("tags", "x|y") in names


def matrix_of(features: Any) -> np.ndarray[Any, Any]:
    found = np.zeros((len(features), features.num_features))
    for one in range(len(features)):
        bags = features.bags(np.array([one]))
        np.add.at(found[one], bags.features, bags.weights)
    return found


def test_more_refuses_features_that_the_run_does_not_have(cli: Run, files: Path) -> None:
    assert cli("train", "pairs.csv", *SMALL, "--epochs", "1", "--out", "run")[0] == 0
    (files / "more.csv").write_text("user,item\n1,39\n")
    round_ = ("train", "--resume", "run", "--more", "more.csv")
    code, _, err = cli(*round_, "--item-features", "items.csv")
    assert code == 1 and "items.csv: the run has no features of items; start a new run with them" in err
    code, _, err = cli(*round_, "--feature-kinds", "kind=skip")
    assert code == 2 and "give one" in err
    assert len(load_dataset("run/data").train) == len(interactions().train)
