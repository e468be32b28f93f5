"""SASRec: the encoder, the windows of a step, what a run ranks and recommends by, and the options it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("duckdb")

import bunkbed as bb  # noqa: E402
from bunkbed.cli.main import main  # noqa: E402
from bunkbed.serve.settings import ServeSettings  # noqa: E402
from bunkbed.serve.source import Source  # noqa: E402
from bunkbed.train.data.interactions import Dataset, Interactions, Vocab, read_dataset  # noqa: E402
from bunkbed.train.data.sampling import SeenPairs  # noqa: E402
from bunkbed.train.data.sequences import Sequences, SequenceSource, permuted  # noqa: E402
from bunkbed.train.data.splits import split  # noqa: E402
from bunkbed.train.evaluate.evaluator import evaluate_run  # noqa: E402
from bunkbed.train.loop import Trainer  # noqa: E402
from bunkbed.train.models.encoder import Encoder  # noqa: E402
from bunkbed.train.models.heads import make_head  # noqa: E402
from bunkbed.train.models.scorer import EncodedUsers, scorer_of_run  # noqa: E402
from bunkbed.train.settings.auto import decide  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402
from bunkbed.train.trained import Recommender  # noqa: E402

NUM_USERS, NUM_ITEMS = 120, 60

SASREC = TrainConfig(
    model="sasrec", loss="softmax", length=6, dim=16, batch_size=64, negatives=15, epochs=2, lr=0.01, threads=1,
    ram="16MiB", split="last",
)  # fmt: skip


def pairs(users: Any, items: Any, num_users: int = NUM_USERS) -> Interactions:
    users, items = (np.asarray(each, dtype=np.int64) for each in (users, items))
    return Interactions(users, items, Vocab.of(list(range(num_users))), Vocab.of(list(range(NUM_ITEMS))))


def mixed(seed: int = 0) -> Interactions:
    """Users of 0 to 24 items; the pairs of different users alternate."""
    rng = np.random.default_rng(seed)
    walks = [rng.permutation(NUM_ITEMS)[: rng.integers(0, 25)] for _ in range(NUM_USERS)]
    rows = [(place, user, item) for user, walk in enumerate(walks) for place, item in enumerate(walk)]
    rows.sort(key=lambda row: row[0])
    return pairs([user for _, user, _ in rows], [item for _, _, item in rows])


def chain(num_users: int = 300, seed: int = 0) -> Dataset:
    """After an item n comes n + 7 with probability .9; the last item of each user is the test."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for user in range(num_users):
        walk = [int(rng.integers(NUM_ITEMS))]
        while len(walk) < 12:
            following = (walk[-1] + 7) % NUM_ITEMS
            if following in walk or rng.random() > 0.9:
                following = int(rng.choice(np.setdiff1d(np.arange(NUM_ITEMS), walk)))
            walk.append(following)
        train += [(user, item) for item in walk[:-1]]
        test.append((user, walk[-1]))
    (users, items), (their_users, their_items) = np.array(train).T, np.array(test).T
    return Dataset(pairs(users, items, num_users), pairs(their_users, their_items, num_users), split="last")


# ---- The encoder


def encoder(dropout: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    return Encoder(16, 8, dropout, 0.1)


def test_an_output_depends_on_the_items_before_it_alone() -> None:
    rows, lengths = torch.randn(8 + 3, 16), torch.tensor([8, 3])
    outputs = encoder()(rows, lengths)
    for changed in range(8):
        other = rows.clone()
        other[changed] = torch.randn(16)
        found = encoder()(other, lengths)
        assert torch.equal(found[:changed], outputs[:changed]), changed
        assert torch.equal(found[8:], outputs[8:]), changed
        assert (found[changed:8] - outputs[changed:8]).abs().amax(1).min() > 1e-3, changed


def test_dropout_is_a_function_of_the_seed() -> None:
    rows, lengths = torch.randn(5, 16), torch.tensor([5])
    drops = encoder(0.5)
    first, again, other = (drops(rows, lengths, noise=noise) for noise in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any(1).all()
    torch.testing.assert_close(drops(rows, lengths), encoder()(rows, lengths))


class Rows:
    """A table of items in memory."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def lookup(self, ids: Any, *, touch: bool = True) -> Any:
        return self.values[ids]


def test_users_are_encoded_by_their_last_items_alone_as_with_others() -> None:
    found, config = mixed(), replace(SASREC, dim=64)
    head: Any = make_head(config)
    rows = np.random.default_rng(0).normal(size=(NUM_ITEMS, 64)).astype(np.float32)
    items: dict[int, list[int]] = {user: [] for user in range(NUM_USERS)}
    for user, item in zip(found.users.tolist(), found.items.tolist(), strict=True):
        items[user].append(item)

    def known(users: Any) -> Any:
        mine = np.isin(found.users, users)
        return found.users[mine], found.items[mine]

    users = EncodedUsers(Rows(rows), head, known)
    asked = np.random.default_rng(1).permutation(np.repeat(np.arange(NUM_USERS), 2))
    together = users.lookup(asked)
    for place, user in enumerate(asked.tolist()):
        last = items[user][-6:]
        if not last:
            assert not together[place].any() and not users.lookup(np.array([user])).any()
            continue
        assert users.lookup(np.array([user]))[0].tobytes() == together[place].tobytes(), user
        output = head.encoder(torch.from_numpy(rows[last]), torch.tensor([len(last)]))[-1]
        np.testing.assert_allclose(together[place], output.detach().numpy(), rtol=1e-4, atol=1e-5)


# ---- The windows


def source(found: Interactions, config: TrainConfig, *, seen: bool = True, popular: bool = False) -> SequenceSource:
    return SequenceSource(
        found,
        Sequences.of(found, config.length_or_default),
        length=config.length_or_default,
        batch_size=config.step_pairs,
        seed=config.seed,
        negatives=config.negatives,
        seen=SeenPairs(found.users, found.items, found.num_items) if seen else None,
        popular=popular,
    )


def walks(found: Interactions) -> list[list[int]]:
    return [found.items[found.users == user].tolist() for user in range(found.num_users)]


def test_an_epoch_has_each_item_after_the_one_before_it_once() -> None:
    found = mixed()
    sequences = walks(found)
    wanted = sorted((user, walk[at]) for user, walk in enumerate(sequences) for at in range(1, len(walk)))
    batches, cuts = source(found, SASREC), []
    for epoch in (1, 2, 3):
        predicted, starts, users = [], [], []
        for step in range(batches.steps(epoch)):
            batch = batches.batch(epoch, step)
            ends = np.cumsum(batch.lengths + 1)
            assert 0 < batch.step_pairs == batch.lengths.sum() < 2 * SASREC.step_pairs
            for user, first, last in zip(batch.users.tolist(), ends - batch.lengths - 1, ends, strict=True):
                window, walk = batch.items[first:last].tolist(), sequences[user]
                at = walk.index(window[0])
                assert walk[at : at + len(window)] == window and 2 <= len(window) <= 7
                predicted += [(user, item) for item in window[1:]]
                starts.append((user, at))
            users += batch.users.tolist()
        assert sorted(predicted) == wanted
        cuts.append((sorted(starts), users))
    assert batches.num_pairs == len(wanted)
    assert cuts[0][0] != cuts[1][0] and cuts[0][1] != cuts[1][1], "cuts and order differ between epochs"
    assert max(len(walk) for walk in sequences) > 2 * 6, "some users have several windows"


@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize("popular", [True, False])
def test_negatives_are_shared_and_what_a_user_has_does_not_compete(rejects: bool, popular: bool) -> None:
    found = mixed()
    has = set(zip(found.users.tolist(), found.items.tolist(), strict=True))
    batch = source(found, SASREC, seen=rejects, popular=popular).batch(1, 0)
    total = int((batch.lengths + 1).sum())
    negatives = batch.items[total:]
    targets = np.delete(batch.items[:total], np.cumsum(batch.lengths + 1) - batch.lengths - 1)
    assert len(np.unique(negatives)) == len(negatives) and (popular or len(negatives) == 15)
    owners = np.repeat(batch.users, batch.lengths).tolist()
    expected = [
        place * len(negatives) + column
        for place, (owner, target) in enumerate(zip(owners, targets.tolist(), strict=True))
        for column, item in enumerate(negatives.tolist())
        if (((owner, item) in has) if rejects else item == target)
    ]
    assert batch.seen is not None and sorted(batch.seen.tolist()) == expected and expected
    if not popular:
        assert batch.log_q is None
        return
    counts = np.bincount(found.items, minlength=NUM_ITEMS) + 1
    log_q = np.log(counts / counts.sum())
    assert batch.log_q is not None and len(batch.log_q) == len(targets) + len(negatives)
    np.testing.assert_allclose(batch.log_q[: len(targets)], log_q[targets], rtol=1e-5)
    drawn = np.exp(log_q[negatives] - batch.log_q[len(targets) :])  # how often each was drawn
    np.testing.assert_allclose(drawn, np.rint(drawn), rtol=1e-4)
    assert round(drawn.sum()) == SASREC.negatives


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
def test_a_permutation_has_every_place_once(count: int) -> None:
    places = np.arange(count)
    orders = [permuted(places, count, np.arange(key, key + 6, dtype=np.uint64)) for key in (0, 100)]
    for order in orders:
        assert sorted(order.tolist()) == places.tolist()
        assert permuted(places[::2], count, np.arange(6, dtype=np.uint64)).tolist() == orders[0][::2].tolist()
    if count == 1000:
        assert not np.array_equal(*orders)
        for order in orders:
            assert abs(np.corrcoef(places, order)[0, 1]) < 0.1


# ---- The run


def trained(path: Path, config: TrainConfig, data: Dataset) -> Trainer:
    with bb.Run(path, ram=config.ram) as run:
        trainer = Trainer(config, data, run)
        trainer.fit()
    return trainer


def test_losses_and_rows_are_the_same_for_every_budget_with_and_without_lookahead(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = 400, 3000
    users, items = np.repeat(np.arange(sizes[0]), 12), rng.integers(0, sizes[1], 12 * sizes[0])
    keep = np.unique(users * sizes[1] + items, return_index=True)[1]
    vocabs = Vocab.of(list(range(sizes[0]))), Vocab.of(list(range(sizes[1])))
    data = Dataset(Interactions(users[keep], items[keep], *vocabs))
    found = []
    for ram, lookahead in (("16MiB", None), ("16MiB", 0), ("512KiB", None), ("512KiB", 0), ("700KiB", 3)):
        config = replace(SASREC, split="random", valid="last", ram=ram, lookahead=lookahead, length=5, l2=0.01)
        path = tmp_path / f"{ram}-{lookahead}"
        losses = trained(path, config, data).losses
        with bb.Run(path, mode="r") as run:
            assert run.table_names == ["item"] or tuple(run.table_names) == ("item",)
            rows = run.table("item").lookup(np.arange(sizes[1]))
            found.append((losses, rows.tobytes(), evaluate_run(run, data, config).metrics))
    assert all(other == found[0] for other in found[1:])
    lines = [json.loads(line) for line in (tmp_path / "512KiB-0" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["disk_read_bytes"] > 0 and lines[-1]["unique_hit_rate"] < 0.9


def test_advice_names_no_order_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bunkbed.train.advice.SLOW", 0.0)
    with bb.Run(tmp_path / "run", ram=SASREC.ram) as run:
        found = Trainer(SASREC, chain(), run).advice()
    assert found is not None and found.changes
    assert not any("--order" in change.options for change in found.changes)


def test_it_learns_a_chain_that_mf_cannot(tmp_path: Path) -> None:
    data = chain()
    found = {}
    for config in (replace(SASREC, epochs=8), TrainConfig(dim=16, split="last", epochs=8, lr=0.02, threads=1)):
        trained(tmp_path / config.model, config, data)
        with bb.Run(tmp_path / config.model, mode="r") as run:
            found[config.model] = evaluate_run(run, data, config).metrics["ndcg@10"]
    assert found["sasrec"] > 0.6 > 2 * found["mf"], found


def test_what_comes_after_a_held_out_pair_is_not_used(tmp_path: Path) -> None:
    """The validation is ranked by the training pairs, the test also by the validation pairs."""
    data = chain()
    trainer = trained(tmp_path / "run", SASREC, data)
    parts = split(data.train, SASREC)
    assert trainer.num_pairs == len(parts.train) - NUM_USERS - 180  # 300 users
    with bb.Run(tmp_path / "run", mode="r") as run:
        head: Any = make_head(SASREC)
        head.load_state_dict(scorer_of_run(run, SASREC, known=lambda users: (users[:0], users[:0]))._head.state_dict())
        rows = torch.from_numpy(run.table("item").lookup(np.arange(NUM_ITEMS)))
        assert parts.valid is not None and data.test is not None
        for known, held, asked in (
            (parts.train, parts.valid, Dataset(data.train, split="last")),
            (data.train, data.test, data),
        ):
            gains = []
            for user, item in zip(held.users.tolist(), held.items.tolist(), strict=True):
                history = known.items[known.users == user]
                output = head.encoder(rows[history[-6:]], torch.tensor([6]))[-1]
                scores = (rows @ output).detach().numpy()
                scores[np.setdiff1d(history, [item])] = -np.inf
                rank = 1 + int((scores > scores[item]).sum())
                gains.append(1 / np.log2(rank + 1) if rank <= 10 else 0.0)
            assert evaluate_run(run, asked, SASREC).metrics["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-6)


def written(path: Path, data: Dataset) -> Path:
    assert data.test is not None
    users, items = (
        np.concatenate([getattr(data.train, name), getattr(data.test, name)]).tolist() for name in ("users", "items")
    )
    lines = [f"u{user},i{item},{time}\n" for time, (user, item) in enumerate(zip(users, items, strict=True))]
    path.write_text("user,item,time\n" + "".join(np.random.default_rng(0).permutation(lines)))
    return path


def cli(*arguments: object) -> int:
    """Run a command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line without other options than those of its size."""
    folder = tmp_path_factory.mktemp("sasrec")
    file = written(folder / "walks.csv", chain(num_users=80))
    options = {"time-col": "time", "model": "sasrec", "dim": 16, "epochs": 2, "threads": 1, "ram": "16MiB"}
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert cli("train", file, *given, "--out", folder / "run", "--json") == 0
    return folder


def test_recommend_leaves_out_what_the_user_has(run: Path) -> None:
    data = read_dataset(run / "walks.csv", time_col="time")
    with Recommender.load(run / "run") as model:
        for user in ("u3", "u17"):
            index = data.train.user_vocab.index(user)
            has = set(data.train.item_vocab.decode(data.train.items[data.train.users == index]))
            best = model.recommend(user, k=NUM_ITEMS)
            assert {item for item, _ in best} == set(data.train.item_vocab.decode(range(data.num_items))) - has
            every = model.recommend(user, k=NUM_ITEMS, include_seen=True)
            assert len(every) == data.num_items and [pair for pair in every if pair[0] not in has] == best
            assert len(has) == 12 and model.num_seen(user) == 12
            # Its last item, which the run has held out, says what comes next.
            assert model.recommend(user, 3, items=[item for item, _ in best]) == best[:3]


def test_a_history_is_ranked_as_the_user_with_these_items(run: Path, tmp_path: Path) -> None:
    data = read_dataset(run / "walks.csv", time_col="time")
    lines = []
    for user in ("u3", "u17", "u40"):
        mine = data.train.items[data.train.users == data.train.user_vocab.index(user)]
        lines += [f"new {user},{item}\n" for item in data.train.item_vocab.decode(mine)]
    (tmp_path / "new.csv").write_text("user,item\n" + "".join(lines))
    (tmp_path / "users.txt").write_text("u3\nu17\nu40\n")
    found = []
    for name, given in (("users", "users.txt"), ("history", "new.csv")):
        out = tmp_path / f"{name}.parquet"
        arguments = ["recommend", str(run / "run"), f"--{name}", str(tmp_path / given), "-k", "5", "--out", str(out)]
        assert cli(*arguments) == 0
        table = pq.read_table(out)
        found.append([table[column].to_pylist() for column in ("user", "rank", "item", "score")])
    assert [f"new {user}" for user in found[0][0]] == found[1][0]
    assert found[0][1:] == found[1][1:] and len(found[0][0]) == 15
    with Recommender.load(run / "run") as model:
        assert model.recommend("u3", 5) == list(zip(found[0][2][:5], found[0][3][:5], strict=True))
        batches = [batch.to_pydict() for batch in model.recommend_many(5)]
    mine = [at for at, user in enumerate(batches[0]["user"]) if user == "u3"]
    assert len(set(batches[0]["user"])) == 80 and [batches[0]["score"][at] for at in mine] == found[0][3][:5]


def test_it_is_served(run: Path) -> None:
    served = Source(ServeSettings(str(run / "run"), ram=64 << 20))
    try:
        found = served.recommend(["u17", "u3"], 5, False, None)
        with Recommender.load(run / "run") as model:
            assert found.columns["score"][5:].tolist() == [score for _, score in model.recommend("u3", 5)]
        assert list(served.tables) == ["item"]
        assert len(served.lookup(None, None, ["i3"]).columns["row"]) == 1
    finally:
        served.close()


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "RUN"],
        ["report", "RUN"],
        ["compare", "RUN"],
        ["neighbors", "RUN", "--id", "i3"],
        ["recommend", "RUN", "--user", "u3", "-k", "3"],
        ["train", "--resume", "RUN", "--epochs", "3"],
    ],
)
def test_the_other_commands_take_its_run(run: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(*(word.replace("RUN", str(run / "run")) for word in command)) == 0, capsys.readouterr().err


# ---- Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "bpr"}, "option model=sasrec needs loss softmax, got loss 'bpr'"),
        ({"bias": True}, "option model=sasrec has no bias"),
        ({"order": "blocks"}, "option order='blocks' is not for model sasrec"),
        ({"order": "blocks:3"}, "option order='blocks:3' is not for model sasrec"),
        ({"valid": "random"}, "option valid='random' would train on what comes after"),
        ({"valid": "0.1"}, r"option valid='0\.1' would train on what comes after"),
        ({"dropout": 1.0}, "option dropout must be at least 0 and below 1, got 1"),
        ({"length": 0}, "option length must be at least 1, got 0"),
        ({"model": "mf", "length": 5}, "option length=5 needs model sasrec, got model 'mf'"),
        ({"model": "mf", "dropout": 0.1}, r"option dropout=0\.1 needs model sasrec, got model 'mf'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"model": "sasrec", "loss": "softmax", **options})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--loss", "bpr"], "option model=sasrec needs loss softmax, got loss 'bpr'"),
        (["--order", "blocks"], "option order='blocks' is not for model sasrec"),
        (["--no-share-negatives"], "option share_negatives=False is not for model sasrec"),
        (["--valid", "random"], "option valid='random' would train on what comes after"),
    ],
)
def test_the_command_refuses_them_too(
    run: Path, tmp_path: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("train", run / "walks.csv", "--model", "sasrec", *given, "--out", tmp_path / "run") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_without_times_it_says_what_the_order_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--dim", "8", "--epochs", "1", "--threads", "1", "--ram", "16MiB"]
    assert cli("train", run / "walks.csv", "--model", "sasrec", *size, "--out", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "sequences in the order of the file; --time-col orders them by time" in printed
    assert "users; split last" in printed and "sasrec, softmax, dim 8" in printed


def test_dropout_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="option dropout must be a number, got 'much'"):
        TrainConfig(model="sasrec", loss="softmax", dropout="much")  # type: ignore[arg-type]


def test_the_validation_is_the_last_pair_without_times_too() -> None:
    assert (TrainConfig(model="sasrec", loss="softmax").valid, TrainConfig().valid) == ("last", "random")
    few = decide({"model": "sasrec", "loss": "softmax", "negatives": 8}, "default", pairs=1000, items=100)[0]
    assert few.share_negatives and (few.l2, few.epochs, few.lr) == (0.0, 30, 0.003)
    with pytest.raises(ValueError, match="option share_negatives=False is not for model sasrec"):
        decide({"model": "sasrec", "loss": "softmax", "share_negatives": False}, "default", pairs=1000, items=100)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bunkbed.train.loop.Team.of", lambda run: SimpleNamespace(world=2))
    message = "option model=sasrec trains in one process; start it without torchrun"
    with bb.Run(tmp_path / "run", ram="16MiB") as opened, pytest.raises(ValueError, match=message):
        Trainer(SASREC, chain(), opened)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: replace(data, train=pairs([0, 1, 2], [3, 4, 5])),
            "no user of the data has two pairs to train on",
        ),
        (
            lambda data: replace(data, train=replace(data.train, weights=np.ones(len(data.train), np.float32))),
            "option model=sasrec has no weights of pairs; select pairs by their rating with --min-rating",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Dataset], Dataset], message: str) -> None:
    config = replace(SASREC, valid="none")
    with bb.Run(tmp_path / "run", ram="16MiB") as opened, pytest.raises(ValueError, match=message):
        Trainer(config, change(chain()), opened)
