"""`bunkbed train` on several processes: the rows of one process, one run folder, stops, other numbers of processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

import torch

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.cli.main import main
from bunkbed.files.run_files import RunFiles
from bunkbed.run.run import Run
from bunkbed.train.data.interactions import Candidates, Dataset, Interactions
from bunkbed.train.data.splits import split
from bunkbed.train.data.store import open_dataset, save_dataset
from bunkbed.train.data.vocab import Vocab
from bunkbed.train.evaluate.evaluator import evaluate_run
from bunkbed.train.evaluate.ranking import full_ranks, sampled_ranks
from bunkbed.train.features.reading import SideFile, store_features
from bunkbed.train.loop import Trainer
from bunkbed.train.models.dense import DENSE_FILE, dense_state
from bunkbed.train.output.events import EpochReport, Event, StepReport
from bunkbed.train.processes.team import Team
from bunkbed.train.settings.config import TrainConfig
from rank_processes import GROUP_SECONDS, message_of, spawn

USERS, ITEMS = 700, 90

MF = TrainConfig(dim=8, batch_size=512, epochs=2, lr=0.02, ram="256MiB", negatives=3, l2=0.001, threads=1)
CONFIGS = {
    "own negatives": MF,
    "gmf with biases": replace(
        MF, model="gmf", loss="bce", bias=True, lr_decay=0.8, ranking="sampled", eval_negatives=20
    ),
    "shared negatives": replace(MF, negatives=30, share_negatives=True, hardness=1.0, eval_users=300),
    "popular negatives": replace(
        MF, loss="softmax", sampling="popularity", negatives=40, share_negatives=True, bias=True
    ),
    "two-tower": replace(MF, model="two-tower", layers="8", loss="softmax", negatives=20, share_negatives=True),
    "blocks": replace(MF, order="blocks:3x2", optimizer="adagrad"),
    "weights": replace(MF, valid="time:0.9"),
    "side features": replace(MF, negatives=30, share_negatives=True),
}


def _data(config: TrainConfig = MF) -> Dataset:
    """Users take items of their kind. The last step of an epoch of 512 pairs has one pair. By time: with weights."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), 9)
    items = np.concatenate([rng.choice(ITEMS // 2, 9, replace=False) * 2 + user % 2 for user in range(USERS)])
    keep = np.ones(len(users), bool)
    keep[rng.choice(len(users), (len(users) - USERS - 1) % 512, replace=False)] = False
    vocabs = Vocab.of(range(USERS)), Vocab.of(range(ITEMS))
    weights = rng.uniform(0, 2, int(keep.sum())).astype(np.float32) if config.valid_first else None
    return Dataset(Interactions(users[keep], items[keep], *vocabs, weights=weights))


def _rows(run: Run) -> dict[str, np.ndarray]:
    """Return weights and slots of each table, as a reader in one process sees them, and the dense weights."""
    found = {}
    for name in run.table_names:
        table = run.table(name)
        for slot in ("weight", *table.slots):
            parts = [(ids.copy(), values.copy()) for ids, (values,) in table.scan_slots((slot,), 1 << 20)]
            ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
            found[f"{name}.{slot}"] = values[np.argsort(ids)]
    weights = dense_state(run.read(DENSE_FILE))["weights"]
    return found | {name: value.numpy() for name, value in weights.items()}


def _add_features(place: Path) -> None:
    """Store features of users and items in the folder of a run that does not exist yet."""
    Run(place, ram="1MiB").close(commit=False)
    save_dataset(place / "data", _data())
    files = {}
    for side, count in (("user", USERS), ("item", ITEMS)):
        path = place.with_name(f"{side}s.csv")
        path.write_text(f"{side},kind,size\n" + "".join(f"{one},k{one % 3},{one % 7}\n" for one in range(count)))
        files[side] = SideFile(path)
    store_features(place / "data", files, {}, lambda: split(_data().train, MF).train)


def _stored(place: Path) -> dict[str, np.ndarray]:
    assert not bb.check(place)
    with Run(place, ram="256MiB", mode="r") as run:
        return _rows(run)


def _assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def _part(rank: int, world: int) -> Team:
    team = Team()
    team.rank, team.world = rank, world
    return team


def _one_process(place: Path, config: TrainConfig, world: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train in one process, with the ranks' parts of each batch one after another; return rows and losses."""
    with Run(place, ram=config.ram) as run:
        trainer = Trainer(config, _data(config), run)
        losses = []
        torch.set_num_threads(1)
        for epoch in range(1, config.epochs + 1):
            trainer._set_lr(epoch)
            for step in range(trainer._source.steps(epoch)):
                loss = 0.0
                for rank in range(world):
                    trainer._source._team = _part(rank, world)
                    batch = trainer._source.batch(epoch, step)
                    parts = batch.users, batch.items, batch.seen, batch.log_q, batch.pair_weights
                    one = trainer.model(*(None if part is None else torch.from_numpy(part) for part in parts))
                    (one * (batch.weight / world)).backward()
                    loss += one.item() * batch.weight
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                losses.append(loss / world)
        trainer._commit()
        trainer._settle()
        return _rows(run), losses


def _trains(
    rank: int, place: str, config: TrainConfig, stop_at: int = 0, stopper: int = 1, *, in_evaluation: bool = False
) -> dict[str, Any]:
    data = open_dataset(Path(place).with_name("data")) if config.stream else _data(config)
    events: list[Event] = []
    with bt.open_run(place, ram=config.table_ram_bytes) as run:
        trainer = Trainer(config, data, run)
        if stop_at and rank == stopper:  # one rank alone is asked to stop, in the middle of a step
            optimizer, step = trainer.optimizer, trainer.optimizer.step

            def stepped() -> None:
                step()
                if trainer.step + 1 == stop_at:
                    trainer.request_stop()

            optimizer.step = stepped  # type: ignore[method-assign]
        if in_evaluation and rank == stopper:
            evaluator, evaluate = trainer._evaluator, trainer._evaluator.evaluate

            def evaluated(*arguments: Any) -> Any:
                trainer.request_stop()
                return evaluate(*arguments)

            evaluator.evaluate = evaluated  # type: ignore[method-assign]
        outcome = trainer.fit(events.append)
        assert run.epoch and not run.is_behind()
        return {
            "losses": trainer.losses,
            "events": events,
            "outcome": outcome,
            "config": trainer.config,
            "rows": {name: len(table) for name, table in run.tables.items()},
        }


@pytest.mark.parametrize(
    "name, world", [*((name, 2) for name in CONFIGS), ("own negatives", 4)], ids=lambda value: str(value)
)
def test_ranks_train_the_rows_of_one_process(name: str, world: int, tmp_path: Path) -> None:
    config = CONFIGS[name]
    if name == "side features":
        for place in ("run", "one"):
            _add_features(tmp_path / place)
    said = spawn(world, _trains, str(tmp_path / "run"), config)
    rows, losses = _one_process(tmp_path / "one", config, world)
    _assert_same(_stored(tmp_path / "run"), rows)
    assert all(sum(one["rows"][table] for one in said) == len(rows[f"{table}.weight"]) for table in ("user", "item"))
    assert all(one["losses"] == said[0]["losses"] for one in said)
    np.testing.assert_allclose(said[0]["losses"], losses, rtol=1e-6)
    assert [one["events"] for one in said[1:]] == [[]] * (world - 1)
    reports = [event for event in said[0]["events"] if isinstance(event, EpochReport)]
    assert [report.epoch for report in reports] == [1, 2]
    with Run(tmp_path / "run", ram="256MiB", mode="r") as run:
        # An evaluation of all ranks has the figures of one process.
        of_all = evaluate_run(run, _data(config), config)
    if not config.eval_users:
        assert reports[-1].metrics == of_all.metrics
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "epoch" for line in lines) == 2
    steps = [line["global_step"] for line in lines if line["kind"] == "step"]
    assert steps == [event.global_step for event in said[0]["events"] if isinstance(event, StepReport)]


def test_ranks_have_the_quality_of_one_process(tmp_path: Path) -> None:
    config = replace(MF, epochs=6, lr=0.1)
    for world, place in ((2, "run"), (1, "one")):
        losses = spawn(world, _trains, str(tmp_path / place), config)[0]["losses"]
        assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    found = []
    for place in ("run", "one"):
        with Run(tmp_path / place, ram="256MiB", mode="r") as run:
            found.append(evaluate_run(run, _data(), config).metrics["ndcg@10"])
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.parametrize("stopper, stop_at", [(1, 5), (0, 1)])
def test_a_stop_of_one_rank_stops_all_and_the_run_goes_on(stopper: int, stop_at: int, tmp_path: Path) -> None:
    whole = spawn(2, _trains, str(tmp_path / "whole"), MF)
    place = str(tmp_path / "run")
    for one in spawn(2, _trains, place, MF, stop_at, stopper):
        assert one["outcome"].interrupted and one["outcome"].step == stop_at
    rest = spawn(2, _trains, place, MF)
    assert rest[0]["losses"] == whole[0]["losses"][stop_at:]
    _assert_same(_stored(tmp_path / "run"), _stored(tmp_path / "whole"))


def _stops_in_an_evaluation(rank: int, place: str) -> dict[str, Any]:
    return _trains(rank, place, MF, in_evaluation=True)


def test_a_stop_of_one_rank_stops_an_evaluation_of_all(tmp_path: Path) -> None:
    whole = spawn(2, _trains, str(tmp_path / "whole"), MF)
    for one in spawn(2, _stops_in_an_evaluation, str(tmp_path / "run")):
        assert one["outcome"].interrupted and (one["outcome"].epoch, one["outcome"].step) == (0, 11)
    rest = spawn(2, _trains, str(tmp_path / "run"), MF)
    assert rest[0]["losses"] == whole[0]["losses"][11:]
    _assert_same(_stored(tmp_path / "run"), _stored(tmp_path / "whole"))


def _fails_once(rank: int, place: str) -> list[Any]:
    publish = RunFiles.publish

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with bt.open_run(place, ram=MF.ram) as run:
        trainer = Trainer(MF, _data(), run)
        RunFiles.publish = fail  # type: ignore[method-assign]  # of the commit after epoch 1
        message = message_of(trainer.fit)
        RunFiles.publish = publish  # type: ignore[method-assign]
        found = [message, trainer.step, run.epoch]
        assert not trainer.fit().interrupted
        return [*found, trainer.losses]


def test_a_commit_that_fails_ends_all_ranks_at_one_step_and_they_go_on(tmp_path: Path) -> None:
    whole = spawn(2, _trains, str(tmp_path / "whole"), MF)
    first, second = spawn(2, _fails_once, str(tmp_path / "run"))
    assert all("No space left on device" in one[0] for one in (first, second))
    assert first[1:] == second[1:] and 11 <= first[1] <= 22 and first[2] == 0
    assert first[3] == whole[0]["losses"]
    _assert_same(_stored(tmp_path / "run"), _stored(tmp_path / "whole"))


def test_a_run_of_ranks_goes_on_in_one_process(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    spawn(2, _trains, place, MF, 3)
    (done,) = spawn(1, _trains, place, MF)
    assert done["outcome"].epoch == 2 and not done["outcome"].interrupted
    assert np.mean(done["losses"][-5:]) < np.mean(done["losses"][:5])
    with Run(place, mode="r") as run:
        assert run.table("user").num_shards == 2 and run.meta["progress"]["epoch"] == 2


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    spawn(1, _trains, place, MF, 3, 0)
    for message in spawn(2, _refused, place):
        assert f"divide it with: bunkbed reshard {place} --shards 2" in message
    bb.reshard(place, shards=2)
    before = _stored(tmp_path / "run")
    done = spawn(2, _trains, place, MF, 4)[0]
    assert done["outcome"].step == 4 and any(
        (_stored(tmp_path / "run")[name] != rows).any() for name, rows in before.items()
    )
    for message in spawn(3, _refused, place):
        assert f"divide it with: bunkbed reshard {place} --shards 3" in message
    bb.reshard(place, shards=3)
    for one in spawn(3, _trains, place, MF):
        assert one["outcome"].epoch == 2 and len(one["losses"]) == 18


def _refused(rank: int, place: str) -> str:
    return message_of(lambda: _trains(rank, place, MF))


def test_ranks_train_from_disk_with_the_bits_of_memory(tmp_path: Path) -> None:
    save_dataset(tmp_path / "data", _data())
    config = replace(MF, epochs=3, eval_users=50)
    memory = spawn(2, _trains, str(tmp_path / "memory"), config)
    streamed = spawn(2, _trains, str(tmp_path / "streamed"), replace(config, stream=True))
    assert streamed[0]["losses"] == memory[0]["losses"]
    _assert_same(_stored(tmp_path / "streamed"), _stored(tmp_path / "memory"))
    assert not list((tmp_path / "streamed" / "stream").glob("epoch-*"))  # removed at the end
    for one in ("memory", "streamed"):
        reports = (tmp_path / one / "metrics.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["kind"] == "epoch" for line in reports) == 3


class _Table:
    def __init__(self, rows: int) -> None:
        self._rows = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)

    def lookup(self, ids: np.ndarray, *, touch: bool = True) -> np.ndarray:
        return self._rows[ids]


def _ranks_items(rank: int, place: str) -> list[Any]:
    from bunkbed.train.models.scorer import Scorer

    with bt.open_run(place, ram="64MiB") as run:
        team, scorer = Team.of(run), Scorer(_Table(USERS), _Table(ITEMS))
        data = _data().train
        held = data.replace(data.users[::9], data.items[::9])
        few = data.replace(data.users[:3], data.items[:3])  # of one user: only rank 0 has work
        negatives = np.random.default_rng(1).integers(0, ITEMS, (len(held), 30))
        candidates = Candidates(held.users, held.items, negatives)
        found = []
        for each in (ALL, team):
            found.append(
                [
                    *full_ranks(scorer, held, data, team=each),
                    *full_ranks(scorer, few, data, team=each),
                    *full_ranks(scorer, data.replace(data.users[:0], data.items[:0]), data, team=each),
                    *sampled_ranks(scorer, candidates, team=each),
                    *sampled_ranks(scorer, Candidates(held.users[:1], held.items[:1], negatives[:1]), team=each),
                ]
            )
        return found


ALL = Team()


def test_ranks_share_an_evaluation(tmp_path: Path) -> None:
    for alone, together in spawn(3, _ranks_items, str(tmp_path / "run")):
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, other)


def _first(rank: int, place: str) -> list[Any]:
    with bt.open_run(place, ram="64MiB") as run:
        team = Team.of(run)
        done = []

        def work() -> int:
            time.sleep(0.3)
            return done.append(rank) or 7

        def fails() -> None:
            raise ValueError("no such file")

        shares = [team.share(10), team.share(1), team.share(600, 256)]
        return [
            team.first("working", work),
            done,
            message_of(lambda: team.first("failing", fails)),
            team.first("working", work),
            shares,
            message_of(lambda: team.require_same("Trainer", lr=rank)),
        ]


def test_rank_0_works_and_the_others_wait(tmp_path: Path) -> None:
    first, second = spawn(2, _first, str(tmp_path / "run"))
    assert first[:2] == [7, [0, 0]] and second[:2] == [7, []]
    assert first[2] == "ValueError: no such file" and "rank 0 failed in failing: ValueError: no such file" in second[2]
    assert first[3] == second[3] == 7
    assert first[4] == [(0, 5), (0, 1), (0, 512)] and second[4] == [(5, 10), (1, 1), (512, 600)]
    assert first[5] == second[5] == "ValueError: Trainer: lr must be equal on all ranks, got rank 0: 0; rank 1: 1"


def _dies(rank: int, place: str) -> str:
    run = bt.open_run(place, ram="64MiB")
    team, connect = Team.of(run), run.ranks.store

    def late(prefix: str) -> Any:
        time.sleep(rank)  # rank 0 would be dead
        return connect(prefix)

    run.ranks.store = late  # type: ignore[method-assign]
    return message_of(lambda: team.first("working", lambda: os.kill(os.getpid(), signal.SIGKILL)))


def test_the_others_hear_that_rank_0_died_at_its_work(tmp_path: Path) -> None:
    began = time.monotonic()
    _, message = spawn(2, _dies, str(tmp_path / "run"), dying=0)
    assert message.startswith("RanksError") and "working" in message and "start all ranks again" in message
    assert time.monotonic() - began < GROUP_SECONDS


def _other_options(rank: int, place: str) -> str:
    with bt.open_run(place, ram="64MiB") as run:
        return message_of(lambda: Trainer(replace(MF, batch_size=64 + rank), _data(), run))


def test_options_that_differ_among_ranks_are_refused(tmp_path: Path) -> None:
    for message in spawn(2, _other_options, str(tmp_path / "run")):
        assert message == "ValueError: Trainer: batch_size must be equal on all ranks, got rank 0: 64; rank 1: 65"


# ---- The command

SMALL = ("--dim", "8", "--ram", "64MiB", "--threads", "1", "--batch-size", "512", "--negatives", "2")


def _torchrun(folder: Path, *arguments: str, world: int = 2) -> subprocess.Popen[str]:
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"),
            *("-m", "bunkbed", "train", *arguments),
        ],
        cwd=folder,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = started.communicate(timeout=120)
    return started.returncode, out, err


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    data = _data().train
    lines = [f"u{user},i{item}\n" for user, item in zip(data.users.tolist(), data.items.tolist(), strict=True)]
    path = tmp_path / "ratings.csv"
    path.write_text("user,item\n" + "".join(lines))
    return path


def _command(rank: int, folder: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run the command as torchrun starts it."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MPLBACKEND": "agg"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def _lr_decay(run: Path) -> str:
    return str(json.loads((run / "config.json").read_text())["train"]["lr_decay"])


@pytest.mark.parametrize("stream", [False, True], ids=["memory", "stream"])
def test_the_command_trains_one_run(stream: bool, ratings: Path, tmp_path: Path) -> None:
    options = [*SMALL, "--test", str(ratings), *(["--stream", "--eval-users", "200"] if stream else [])]
    said = spawn(2, _command, str(tmp_path), [str(ratings), "--out", "a", "--epochs", "2", *options])
    assert said[1] == (0, "", "")
    code, out, err = said[0]
    assert (code, err) == (0, "")
    for line in ("ratings.csv  5,821 pairs of 700", "tables ", "epoch 2/2 done", "best ", "test ", "run ", "picture "):
        assert sum(each.startswith(line) for each in out.splitlines()) == 1, out
    assert not bb.check(tmp_path / "a") and (tmp_path / "a" / "training.png").exists()
    with Run(tmp_path / "a", mode="r") as run:
        assert run.table("user").num_shards == 2 and run.meta["progress"]["epoch"] == 2
    said = spawn(2, _command, str(tmp_path), ["--resume", "a", "--epochs", "3"])
    assert said[1] == (0, "", "") and "resuming a after epoch 2" in said[0][1]
    with Run(tmp_path / "a", mode="r") as run:
        assert run.meta["progress"]["epoch"] == 3
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2, 3]


def test_the_command_trains_again_on_all_pairs(ratings: Path, tmp_path: Path) -> None:
    shutil.copy(ratings, tmp_path / "copy.csv")
    (tmp_path / ".a.refit").mkdir()
    (tmp_path / ".a.refit" / "config.json").write_text("of a run that was removed")
    said = spawn(2, _command, str(tmp_path), [str(ratings), "--out", "a", "--epochs", "2", "--refit", *SMALL])
    assert said[1] == (0, "", "") and said[0][0] == 0, said
    again = next(line for line in said[0][1].splitlines() if line.startswith("again"))
    assert again.startswith("again   on all 5,821 pairs, from new rows, for ")
    assert not (tmp_path / ".a.refit").exists() and (tmp_path / "a" / "choice.jsonl").exists()
    rows = []
    epochs = json.loads((tmp_path / "a" / "config.json").read_text())["train"]["epochs"]
    plain = ["--valid", "none", "--epochs", f"{epochs}", "--lr-decay", _lr_decay(tmp_path / "a")]
    said = spawn(2, _command, str(tmp_path), [str(ratings), "--out", "b", *plain, *SMALL])
    assert said[0][0] == 0, said
    for name in ("a", "b"):
        assert not bb.check(tmp_path / name)
        with Run(tmp_path / name, mode="r") as run:
            assert run.table("user").num_shards == 2 and run.meta["progress"]["epoch"] == epochs
            rows.append(
                [run.table(one).lookup(np.arange(run.table(one).num_rows)).tobytes() for one in ("user", "item")]
            )
    assert rows[0] == rows[1]


def test_all_ranks_hear_why_the_second_training_cannot_begin(ratings: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = [str(ratings), "--out", "a", "--epochs", "1", *SMALL]
    assert spawn(2, _command, str(tmp_path), first)[0][0] == 0
    (tmp_path / ".a.refit").symlink_to("elsewhere")
    for ended, out, err in spawn(2, _command, str(tmp_path), ["--resume", "a", "--refit"]):
        assert ended == 1 and ".a.refit is a symbolic link" in err, out + err
    assert not any((tmp_path / "elsewhere").iterdir()) and not bb.check(tmp_path / "a")
    (tmp_path / ".a.refit").unlink()
    assert spawn(2, _command, str(tmp_path), ["--resume", "a", "--refit"])[0][0] == 0


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["none.csv"], 1, "none.csv: no such file"),
        (["ratings.csv", "--ram", "1KiB"], 1, "need"),
        (["ratings.csv", "--device-cache", "1MiB"], 1, "device_cache"),
        (["ratings.csv", "--dim", "0"], 2, "option dim must be at least 1, got 0"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_no_folder(
    arguments: list[str], code: int, message: str, ratings: Path, tmp_path: Path
) -> None:
    for rank, (ended, out, err) in enumerate(spawn(2, _command, str(tmp_path), [*arguments, "--out", "a"])):
        assert ended == code and err.count("\n") == 1, out + err
        assert message in err or (rank and "rank 0 failed in reading the interactions" in err)
    assert not (tmp_path / "a").exists()


def test_a_signal_to_torchrun_stops_the_ranks_after_their_step(ratings: Path, tmp_path: Path) -> None:
    started = _torchrun(tmp_path, str(ratings), "--out", "a", "--epochs", "100000", *SMALL)
    log = tmp_path / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, out, _ = _ended(started)
    assert "everything is committed" in out
    with Run(tmp_path / "a", mode="r") as run:
        step = run.meta["progress"]["global_step"]
    epoch = step // 11 + 2
    code, out, err = _ended(_torchrun(tmp_path, "--resume", "a", "--epochs", str(epoch)))
    assert code == 0 and f"step {step:,}" in out, out + err
