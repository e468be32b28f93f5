"""The loop: what it commits, that it goes on with the same bits, and what it reports."""

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("duckdb")

import bunkbed as bb
from bunkbed.files.run_files import RunFiles
from bunkbed.train.data.interactions import Candidates, Dataset, Interactions, Vocab
from bunkbed.train.evaluate.evaluator import evaluate_run
from bunkbed.train.evaluate.recommend import recommend
from bunkbed.train.loop import Trainer, _Session
from bunkbed.train.models.dense import DENSE_FILE, dense_state
from bunkbed.train.models.scorer import scorer_of_run
from bunkbed.train.output.events import EpochReport, EvalReport, StepReport
from bunkbed.train.settings.config import TrainConfig

NUM_USERS, NUM_ITEMS, PER_USER = 150, 90, 9

MF = TrainConfig(dim=8, batch_size=64, epochs=3, lr=0.02, ram="16MiB", negatives=3, l2=0.001, threads=1)
GMF = TrainConfig(
    model="gmf",
    loss="bce",
    bias=True,
    dim=8,
    batch_size=100,
    epochs=3,
    lr=0.05,
    lr_decay=0.8,
    ram="16MiB",
    ranking="sampled",
    eval_negatives=20,
    threads=1,
)

SHARED = TrainConfig(
    dim=8,
    batch_size=64,
    epochs=3,
    lr=0.02,
    ram="16MiB",
    negatives=30,
    share_negatives=True,
    hardness=1.0,
    threads=1,
    eval_users=40,
)
NEUMF = TrainConfig(
    model="neumf", layers="16,8", loss="bce", dim=8, batch_size=64, epochs=3, lr=0.03, ram="16MiB", l2=0.001, threads=1
)
TOWERS = TrainConfig(
    model="two-tower",
    loss="softmax",
    sampling="popularity",
    dim=8,
    bias=True,
    batch_size=64,
    epochs=3,
    lr=0.03,
    ram="16MiB",
    negatives=40,
    share_negatives=True,
    l2=0.001,
    threads=1,
)
CCL = replace(SHARED, loss="ccl", hardness=0.0, margin=0.3)
SASREC = TrainConfig(
    model="sasrec",
    loss="softmax",
    length=4,
    dim=8,
    batch_size=64,
    epochs=3,
    lr=0.03,
    ram="16MiB",
    negatives=40,
    l2=0.001,
    threads=1,
)
MODELS = {"mf": MF, "gmf": GMF, "shared": SHARED, "neumf": NEUMF, "two-tower": TOWERS, "ccl": CCL}
CONFIGS = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
CONFIGS_AND_SASREC = pytest.mark.parametrize("config", [*MODELS.values(), SASREC], ids=[*MODELS, "sasrec"])


def dataset(seed=0, num_users=NUM_USERS, num_items=NUM_ITEMS):
    """Planted preferences: every user takes the items that please it most, give or take some noise."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(num_users, 4)) @ rng.normal(size=(4, num_items))
    taste += 0.5 * rng.gumbel(size=taste.shape)
    items = np.argsort(-taste, axis=1)[:, : PER_USER + 1].astype(np.int64)
    users = np.arange(num_users)

    def pairs(chosen):
        return Interactions(
            np.repeat(users, chosen.shape[1]),
            chosen.reshape(-1).copy(),
            Vocab.of(list(range(num_users))),
            Vocab.of(list(range(num_items))),
        )

    return Dataset(train=pairs(items[:, :-1]), test=pairs(items[:, -1:]))


DATA = dataset()


def train(path, config, *, data=DATA, stop_after=None, commit=True, on_event=None):
    """Train one session in its own run object; request its stop after `stop_after` steps."""
    run = bb.Run(path, ram=config.ram)
    trainer = Trainer(config, data, run)
    if stop_after is not None:
        backward = trainer.optimizer.step

        def step(*args):
            result = backward(*args)
            if len(trainer.losses) + 1 == stop_after:
                trainer.request_stop()
            return result

        trainer.optimizer.step = step
    try:
        outcome = trainer.fit(on_event)
    finally:
        run.close(commit=False)
    return trainer, outcome


def stored(table, slot):
    """Return the ids of the stored rows, ascending, and the values of one slot, as columns."""
    chunks = [(ids.copy(), values.copy()) for ids, values in table.scan(slot=slot)]
    ids, values = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.argsort(ids)
    assert len(np.unique(ids)) == len(ids)
    return np.column_stack([ids[order].astype(np.float64), values[order].astype(np.float64)])


def contents(path, snapshot=None):
    """Every bit a run holds: slots of all rows, and the dense state."""
    with bb.Run(path, mode="r", **({} if snapshot is None else {"snapshot": snapshot})) as run:
        result = {}
        for name in run.table_names:
            table = run.table(name)
            result[name] = [stored(table, slot) for slot in ("weight", "exp_avg", "exp_avg_sq")]
            result[name].append(np.array([table.step]))
        dense = dense_state(run.read(DENSE_FILE))
        result["weights"] = [value.numpy() for value in dense["weights"].values()]
        state = dense["optimizer"]["state"].values() if dense["optimizer"] else []
        result["dense optimizer"] = [entry[key].numpy() for entry in state for key in sorted(entry)]
        return result


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert len(one[name]) == len(other[name])
        for left, right in zip(one[name], other[name], strict=True):
            assert left.tobytes() == right.tobytes(), name


def log(path):
    """Lines of epochs, without what a clock or a cache decides."""
    entries = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    keys = ("epoch", "global_step", "loss", "metrics", "is_best")
    return [{key: entry[key] for key in keys} for entry in entries if entry["kind"] == "epoch"]


@CONFIGS
def test_training_learns_the_planted_preferences(tmp_path, config):
    trainer, outcome = train(tmp_path / "run", config)
    assert (outcome.epoch, outcome.step) == (3, 3 * trainer.steps_per_epoch)
    assert not outcome.interrupted and not outcome.stopped_early
    with bb.Run(tmp_path / "run", mode="r") as run:
        result = evaluate_run(run, DATA, config)
    assert (result.split, result.num_users) == ("test", NUM_USERS)
    assert result.ranking == f"full ranking of 90 items, less those trained on; {NUM_USERS} users; split given"
    # Chance is 10 of the 81 items a user has not.
    assert result.metrics["hr@10"] > 1.6 * 10 / 81


@CONFIGS_AND_SASREC
@pytest.mark.parametrize("stop_after", [1, 5, "epoch", "epoch + 3"])
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, config, stop_after):
    whole, outcome = train(tmp_path / "whole", config)
    steps = whole.steps_per_epoch
    stop_after = {"epoch": steps, "epoch + 3": steps + 3}.get(stop_after, stop_after)
    first, stopped = train(tmp_path / "parts", config, stop_after=stop_after)
    assert stopped.interrupted and stopped.step == stop_after == len(first.losses)
    second, resumed = train(tmp_path / "parts", config)
    assert not resumed.interrupted
    assert first.samples_users == second.samples_users == (config.eval_users < NUM_USERS)
    assert first.losses + second.losses == whole.losses
    assert (resumed.best_epoch, resumed.best) == (outcome.best_epoch, outcome.best)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))
    assert_same_bits(contents(tmp_path / "parts", "best"), contents(tmp_path / "whole", "best"))


def test_a_killed_run_goes_on_from_its_last_commit(tmp_path, monkeypatch):
    whole, _ = train(tmp_path / "whole", MF)
    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    commit = run.begin_commit

    def crash(**arguments):
        if trainer.epoch == 2:  # the log has its line already
            raise RuntimeError("power loss")
        return commit(**arguments)

    monkeypatch.setattr(run, "begin_commit", crash)
    with pytest.raises(RuntimeError, match="power loss"):
        trainer.fit()
    run.close(commit=False)
    assert len(log(tmp_path / "parts")) == 2
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "global_st')  # torn
    again, outcome = train(tmp_path / "parts", MF)
    # The second epoch was done and lost; it is done again.
    assert again.losses == whole.losses[whole.steps_per_epoch :]
    assert outcome.step == len(whole.losses)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_steps_go_on_while_a_commit_is_made_durable(tmp_path, monkeypatch):
    whole, _ = train(tmp_path / "whole", MF)
    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    has_gone_on, steps_at_publish = threading.Event(), []
    step, publish = trainer.optimizer.step, RunFiles.publish

    def step_and_tell(*arguments):
        step(*arguments)
        if trainer.step >= trainer.steps_per_epoch + 2:
            has_gone_on.set()

    def publish_late(files, manifest):
        assert has_gone_on.wait(60), "training waits for the commit"
        steps_at_publish.append(trainer.step)
        publish(files, manifest)

    monkeypatch.setattr(trainer.optimizer, "step", step_and_tell)
    monkeypatch.setattr(RunFiles, "publish", publish_late)
    outcome = trainer.fit()
    assert steps_at_publish[0] > trainer.steps_per_epoch
    # What is committed is the end of the epoch, and all of it when fit() returns.
    assert run.epoch == len(steps_at_publish) == 3
    assert outcome.step == len(whole.losses) and trainer.losses == whole.losses
    run.close(commit=False)
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))
    assert_same_bits(contents(tmp_path / "parts", "best"), contents(tmp_path / "whole", "best"))


@pytest.mark.parametrize("failing", [1, 3])
def test_a_commit_that_fails_ends_training_with_its_error(tmp_path, monkeypatch, failing):
    train(tmp_path / "whole", MF)
    publish, calls = RunFiles.publish, []

    def publish_or_fail(files, manifest):
        calls.append(manifest.epoch)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        publish(files, manifest)

    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    with monkeypatch.context() as patched:
        patched.setattr(RunFiles, "publish", publish_or_fail)
        with pytest.raises(OSError, match="No space left"):
            Trainer(MF, DATA, run).fit()
    run.close(commit=False)
    train(tmp_path / "parts", MF)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_a_failed_commit_is_told_at_the_next_step(tmp_path, monkeypatch):
    whole, _ = train(tmp_path / "whole", MF)
    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    step = trainer.optimizer.step
    told_after = trainer.steps_per_epoch + 3

    def step_and_wait(*arguments):
        step(*arguments)
        if len(trainer.losses) + 1 == told_after:  # the loop counts this step when it returns
            deadline = time.monotonic() + 60
            while not trainer._pending.done:
                assert time.monotonic() < deadline
                time.sleep(0.001)

    def fail(files, manifest):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.optimizer, "step", step_and_wait)
        patched.setattr(RunFiles, "publish", fail)
        with pytest.raises(OSError, match="No space left"):
            trainer.fit()
    assert trainer.steps_per_epoch <= trainer.step <= told_after  # not at the end of the epoch
    assert trainer.step == len(trainer.losses)
    assert run.epoch == 0
    assert not trainer.fit().interrupted
    run.close(commit=False)
    assert trainer.losses == whole.losses
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_a_commit_that_failed_beside_another_error_is_made_again(tmp_path, monkeypatch):
    """As where another rank sees first that a commit failed: this one has its error still before it."""
    whole, _ = train(tmp_path / "whole", MF)
    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    step = trainer.optimizer.step

    def end_after_the_commit(*arguments):
        if len(trainer.losses) < trainer.steps_per_epoch + 3:
            return step(*arguments)
        deadline = time.monotonic() + 60
        while not trainer._pending.done:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        raise RuntimeError("another rank failed")

    def fail(files, manifest):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.optimizer, "step", end_after_the_commit)
        patched.setattr(_Session, "_must_stop", lambda session: False)
        patched.setattr(RunFiles, "publish", fail)
        with pytest.raises(RuntimeError, match="another rank failed"):
            trainer.fit()
    assert trainer._pending is not None and run.epoch == 0
    assert not trainer.fit().interrupted
    run.close(commit=False)
    assert trainer.losses == whole.losses
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_a_second_fit_commits_what_the_first_could_not(tmp_path, monkeypatch):
    whole, _ = train(tmp_path / "whole", MF)
    publish, calls = RunFiles.publish, []

    def fail_the_last(files, manifest):
        calls.append(manifest.epoch)
        if len(calls) == MF.epochs:
            raise OSError(28, "No space left on device")
        publish(files, manifest)

    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    with monkeypatch.context() as patched:
        patched.setattr(RunFiles, "publish", fail_the_last)
        with pytest.raises(OSError, match="No space left"):
            trainer.fit()
    assert run.epoch == MF.epochs - 1 and trainer.losses == whole.losses
    outcome = trainer.fit()  # no step is left to do
    assert (outcome.epoch, outcome.step, run.epoch) == (MF.epochs, len(whole.losses), MF.epochs)
    trainer.fit()
    assert run.epoch == MF.epochs  # nothing is owed any more
    run.close(commit=False)
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_a_stop_during_the_evaluation_is_obeyed_and_resumed(tmp_path):
    whole, _ = train(tmp_path / "whole", MF)
    run = bb.Run(tmp_path / "parts", ram=MF.ram)
    trainer = Trainer(MF, DATA, run)
    outcome = trainer.fit(lambda event: trainer.request_stop() if isinstance(event, EvalReport) else None)
    run.close(commit=False)
    assert outcome.interrupted and (outcome.epoch, outcome.step) == (0, trainer.steps_per_epoch)
    second, _ = train(tmp_path / "parts", MF)
    assert trainer.losses + second.losses == whole.losses
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


def test_each_request_stops_one_fit(tmp_path):
    whole, _ = train(tmp_path / "whole", MF)
    with bb.Run(tmp_path / "run", ram=MF.ram) as run:
        trainer = Trainer(MF, DATA, run)
        trainer.request_stop()
        assert trainer.fit().interrupted and trainer.step == 0
        assert not trainer.fit().interrupted
    assert trainer.losses == whole.losses


def test_a_finished_run_can_be_given_more_epochs(tmp_path):
    whole, _ = train(tmp_path / "whole", MF)
    two, _ = train(tmp_path / "parts", TrainConfig(**{**MF.to_dict(), "epochs": 2}))
    one, _ = train(tmp_path / "parts", MF)
    assert two.losses + one.losses == whole.losses
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))
    none, outcome = train(tmp_path / "parts", MF)
    assert none.losses == [] and outcome.epoch == 3


def test_losses_and_rows_are_the_same_for_every_budget(tmp_path):
    data = dataset(num_users=3000, num_items=600)
    config = TrainConfig(dim=16, batch_size=256, epochs=2, lr=0.02, threads=1, eval_users=200, order="uniform")
    roomy, _ = train(tmp_path / "roomy", config, data=data)
    reports = []
    tight_config = TrainConfig(**{**config.to_dict(), "ram": TIGHT_RAM})
    tight, _ = train(tmp_path / "tight", tight_config, data=data, on_event=reports.append)
    assert tight.losses == roomy.losses
    assert_same_bits(contents(tmp_path / "tight"), contents(tmp_path / "roomy"))
    epochs = [report for report in reports if isinstance(report, EpochReport)]
    assert epochs[-1].disk_read_bytes > 0 and epochs[-1].unique_hit_rate < 0.9
    assert sum(epochs[-1].records_by_path.values()) > 0 and epochs[-1].wanted_bytes > 0
    assert 0 < epochs[-1].stall_s < epochs[-1].seconds
    for report in reports:
        if isinstance(report, StepReport | EpochReport):
            assert 0 <= report.unique_hit_rate <= 1
            assert 0 < report.ram_bytes <= report.ram_budget_bytes == bb.Budget(TIGHT_RAM).total_bytes


@pytest.mark.parametrize("stop_after", [3, "epoch + 1"])
def test_an_interrupted_run_with_a_window_ends_with_the_bits_of_one_without(tmp_path, stop_after):
    # Up to 32 batches are pulled ahead of the step; where training stops, they must have left no trace.
    data = dataset(num_users=3000, num_items=600)
    config = TrainConfig(
        dim=16, batch_size=256, epochs=2, lr=0.02, threads=1, eval_users=200, ram=TIGHT_RAM, lookahead=0
    )
    whole, _ = train(tmp_path / "whole", config, data=data)
    stop_after = whole.steps_per_epoch + 1 if stop_after == "epoch + 1" else stop_after
    windowed = TrainConfig(**{**config.to_dict(), "lookahead": 3, "window": 32})
    first, stopped = train(tmp_path / "parts", windowed, data=data, stop_after=stop_after)
    assert stopped.interrupted and stopped.step == stop_after
    second, _ = train(tmp_path / "parts", TrainConfig(**{**config.to_dict(), "lookahead": None}), data=data)
    assert first.losses + second.losses == whole.losses
    assert_same_bits(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


# 3,600 records of 192 bytes are 675 KiB.
TIGHT_RAM = "512KiB"


def test_patience_stops_early_and_the_best_epoch_is_kept(tmp_path):
    # Far too high a rate on far too few pairs: it is best at once and then gets worse.
    config = TrainConfig(**{**MF.to_dict(), "lr": 0.3, "epochs": 30, "patience": 2, "metric": "hr@10"})
    reports = []
    _, outcome = train(tmp_path / "run", config, on_event=reports.append)
    epochs = [report for report in reports if isinstance(report, EpochReport)]
    values = [report.metrics["hr@10"] for report in epochs]
    assert outcome.stopped_early and outcome.epoch == len(epochs) < 30
    assert outcome.epoch == outcome.best_epoch + 2
    assert values[outcome.best_epoch - 1] == max(values) == outcome.best["hr@10"]
    assert [report.is_best for report in epochs][-2:] == [False, False]
    with bb.Run(tmp_path / "run", mode="r", snapshot="best") as run:
        best = evaluate_run(run, Dataset(train=DATA.train), config)
    assert (best.split, best.metrics) == ("validation", outcome.best)
    again, outcome_again = train(tmp_path / "run", config)
    assert again.losses == [] and outcome_again.stopped_early
    assert again.stopped_early
    # More patience goes on as if it had been there from the start; none at all goes on to the last epoch.
    patient = TrainConfig(**{**config.to_dict(), "patience": 4})
    more, outcome_more = train(tmp_path / "run", patient)
    whole, outcome_whole = train(tmp_path / "patient", patient)
    assert more.losses == whole.losses[-len(more.losses) :] and outcome_more.epoch == outcome_whole.epoch
    assert len(more.losses) == (outcome_more.epoch - outcome.epoch) * more.steps_per_epoch > 0
    assert_same_bits(contents(tmp_path / "run"), contents(tmp_path / "patient"))
    endless = TrainConfig(**{**config.to_dict(), "patience": 0, "epochs": outcome_more.epoch + 3})
    _, outcome_endless = train(tmp_path / "run", endless)
    assert outcome_endless.epoch == outcome_more.epoch + 3 and not outcome_endless.stopped_early
    # Interrupted between the best epoch and the end, it still knows which was best and how long ago.
    stop_after = (outcome.best_epoch + 1) * again.steps_per_epoch + 2
    train(tmp_path / "parts", config, stop_after=stop_after)
    _, resumed = train(tmp_path / "parts", config)
    assert (resumed.best_epoch, resumed.best, resumed.epoch) == (outcome.best_epoch, outcome.best, outcome.epoch)
    assert_same_bits(contents(tmp_path / "parts", "best"), contents(tmp_path / "patient", "best"))


def test_without_validation_every_pair_trains_and_nothing_is_chosen(tmp_path):
    config = TrainConfig(**{**MF.to_dict(), "valid": "none"})
    trainer, outcome = train(tmp_path / "run", config)
    assert trainer.num_pairs == len(DATA.train)
    assert outcome.best_epoch is None and outcome.best == {}
    with (
        bb.Run(tmp_path / "run", mode="r") as run,
        pytest.raises(ValueError, match="nothing is held out to evaluate on: train with --valid random"),
    ):
        evaluate_run(run, Dataset(train=DATA.train), config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"lr": 0.5},
            r"option lr=0\.5 differs from 0\.02, with which the run was started; only ram, epochs, patience,",
        ),
        ({"seed": 1}, r"option seed=1 differs from 0, with which the run was started"),
        ({"model": "gmf"}, r"option model='gmf' differs from 'mf'"),
    ],
)
def test_resuming_with_another_option_is_an_error(tmp_path, changed, message):
    train(tmp_path / "run", TrainConfig(**{**MF.to_dict(), "epochs": 1}))
    with bb.Run(tmp_path / "run", ram="16MiB") as run, pytest.raises(ValueError, match=message):
        Trainer(TrainConfig(**{**MF.to_dict(), **changed}), DATA, run)


def test_a_run_of_something_else_is_an_error(tmp_path):
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        run.commit(meta={"step": 3})
        with pytest.raises(ValueError, match="the run was not made by bunkbed train: its last commit has no progress"):
            Trainer(MF, DATA, run)


def test_a_loss_that_is_no_number_stops_training(tmp_path):
    config = TrainConfig(**{**MF.to_dict(), "optimizer": "sgd", "lr": 1e25, "l2": 1.0})
    with pytest.raises((FloatingPointError, ValueError), match=r"smaller --lr|gradient"):
        train(tmp_path / "run", config)


def test_reports_add_up(tmp_path):
    reports = []
    trainer, outcome = train(tmp_path / "run", GMF, on_event=reports.append)
    epochs = [report for report in reports if isinstance(report, EpochReport)]
    assert [report.epoch for report in epochs] == [1, 2, 3]
    steps = trainer.steps_per_epoch
    for number, report in enumerate(epochs, start=1):
        assert report.global_step == number * steps
        assert report.loss == pytest.approx(np.mean(trainer.losses[(number - 1) * steps : number * steps]))
        assert (
            report.ranking == f"sampled ranking: 20 negatives for each held-out item; {NUM_USERS} users; split random"
        )
        assert set(report.metrics) == {
            "hr@10",
            "ndcg@10",
            "recall@10",
            "hr@20",
            "ndcg@20",
            "recall@20",
            "mrr",
        }
    assert trainer.step_seconds <= outcome.seconds
    assert [entry["loss"] for entry in log(tmp_path / "run")] == [report.loss for report in epochs]


def test_evaluation_follows_the_data_it_is_given(tmp_path):
    train(tmp_path / "run", MF)
    rng = np.random.default_rng(1)
    test = DATA.test
    candidates = Candidates(test.users, test.items, rng.integers(0, NUM_ITEMS, (NUM_USERS, 12)))
    with bb.Run(tmp_path / "run", mode="r") as run:
        given = evaluate_run(run, Dataset(DATA.train, candidates=candidates), MF)
        assert (given.split, given.ranking) == (
            "test candidates",
            f"sampled ranking: 12 negatives for each held-out item; {NUM_USERS} users; split given",
        )
        full = evaluate_run(run, Dataset(DATA.train, candidates=candidates), MF, ranking="full")
        assert full == evaluate_run(run, DATA, MF)
        drawn = evaluate_run(run, DATA, MF, ranking="sampled", ks=[3])
        assert (drawn.split, drawn.ranking) == (
            "test",
            f"sampled ranking: 99 negatives for each held-out item; {NUM_USERS} users; split given",
        )
        assert set(drawn.metrics) == {"hr@3", "ndcg@3", "recall@3", "mrr"}
        own = evaluate_run(run, Dataset(DATA.train), MF)
        assert own.split == "validation"
        with pytest.raises(ValueError, match="ranking must be full or sampled, got 'half'"):
            evaluate_run(run, DATA, MF, ranking="half")


@CONFIGS
def test_recommendations_are_the_best_unseen_items(tmp_path, config):
    train(tmp_path / "run", config)
    with bb.Run(tmp_path / "run", mode="r") as run:
        scorer = scorer_of_run(run, config)
        everything = np.arange(NUM_ITEMS)
        scores = scorer.pair_scores(scorer.queries(np.array([17])), everything[None])[0].numpy()
        exclude = DATA.train.items[DATA.train.users == 17]
        items, values = recommend(run, config, 17, 5, exclude)
        order = [item for item in np.argsort(-scores, kind="stable") if item not in exclude]
        assert items.tolist() == order[:5]
        np.testing.assert_allclose(values, scores[order[:5]], rtol=1e-6)
        assert len(recommend(run, config, 17, 1000, exclude)[0]) == NUM_ITEMS - len(exclude)
        assert len(recommend(run, config, 17, 1000)[0]) == NUM_ITEMS
        with pytest.raises(ValueError, match="k must be at least 1, got 0"):
            recommend(run, config, 17, 0)
        with pytest.raises(IndexError, match="150"):
            recommend(run, config, NUM_USERS, 5)
