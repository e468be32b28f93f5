"""The order of pairs by blocks: what a batch holds, that bits depend on nothing else, and who decides."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("duckdb")

import bunkbed as bb
from bunkbed.train.block_choice import decided
from bunkbed.train.data.blocks import PairBlocks, pair_blocks
from bunkbed.train.data.interactions import Dataset, Interactions, Vocab
from bunkbed.train.data.sampling import BatchSource, SeenPairs
from bunkbed.train.data.splits import split
from bunkbed.train.data.stream import open_split
from bunkbed.train.loop import Trainer
from bunkbed.train.output.events import EpochReport
from bunkbed.train.settings.config import TrainConfig

NUM_USERS, NUM_ITEMS = 600, 400
BLOCKS = (4, 3)
TIGHT, TIGHTER = "512KiB", "450KiB"


def interactions(num_users=NUM_USERS, num_items=NUM_ITEMS, count=6000):
    """Pairs of which no two are equal; low numbers have more; the last 20 users and items have none."""
    rng = np.random.default_rng(3)
    users = ((num_users - 20) * rng.random(count) ** 1.5).astype(np.int64)
    items = ((num_items - 20) * rng.random(count) ** 1.5).astype(np.int64)
    users, items = np.unique(np.stack([users, items]), axis=1)
    mixed = rng.permutation(len(users))
    labels = [Vocab.of(list(range(count))) for count in (num_users, num_items)]
    return Interactions(users[mixed].copy(), items[mixed].copy(), *labels, source="pairs.csv")


PAIRS = interactions()


def source(pairs=PAIRS, *, blocks=BLOCKS, seed=7, batch_size=128, negatives=3, reject=True, **options):
    seen = SeenPairs(pairs.users, pairs.items, pairs.num_items) if reject else None
    made = None if blocks is None else PairBlocks(pairs.num_users, pairs.num_items, blocks, seed)
    return BatchSource(
        pairs, batch_size=batch_size, negatives=negatives, seed=seed, seen=seen, blocks=made, **options
    ), made


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("popular", [False, True])
def test_an_epoch_visits_every_pair_once_with_negatives_of_the_resident_block(shared, popular):
    batches, blocks = source(shared=shared, popular=popular, negatives=20 if shared else 3)
    has = set(zip(PAIRS.users.tolist(), PAIRS.items.tolist(), strict=True))
    of_block = [set(blocks.members(2, block).tolist()) for block in range(BLOCKS[1])]
    assert sorted(item for members in of_block for item in members) == list(range(NUM_ITEMS))
    visited, resident = [], []
    for batch in batches.batches(2):
        count = len(batch.users)
        positives = batch.items[:count] if shared else batch.items[:, 0]
        negatives = batch.items[count:] if shared else batch.items[:, 1:]
        (block,) = [at for at, members in enumerate(of_block) if int(positives[0]) in members]
        assert {*positives.tolist(), *negatives.ravel().tolist()} <= of_block[block]
        if not shared:
            owners = np.repeat(batch.users, negatives.shape[1]).tolist()
            assert not set(zip(owners, negatives.ravel().tolist(), strict=True)) & has
        visited += zip(batch.users.tolist(), positives.tolist(), strict=True)
        resident.append(block)
    assert sorted(visited) == sorted(has) and len(visited) == len(PAIRS)
    assert len(resident) == batches.steps(2) and resident == sorted(resident)
    # Items that no pair has are negatives too.
    drawn = np.concatenate([batch.items.ravel() for epoch in range(6) for batch in batches.batches(epoch)])
    assert drawn.max() >= NUM_ITEMS - 20


def test_one_block_changes_at_a_time():
    batches, blocks = source(batch_size=1, negatives=1)
    made = list(batches.batches(1))
    users, items = (np.concatenate(parts) for parts in ([b.users for b in made], [b.items[:, 0] for b in made]))
    places = blocks.places(users, items, 1)
    assert (np.diff(places.astype(int)) >= 0).all() and set(places.tolist()) == set(range(12))
    user_block = blocks._users.of(users, 1)
    changes = [int(block) for block, before in zip(user_block[1:], user_block[:-1], strict=True) if block != before]
    assert [int(user_block[0]), *changes] == [0, 1, 2, 3, 2, 1, 0, 1, 2, 3]


def test_blocks_are_regrouped_in_every_epoch_and_by_seed():
    blocks, other = (PairBlocks(NUM_USERS, NUM_ITEMS, BLOCKS, seed) for seed in (7, 8))
    first = blocks.members(1, 0).tolist()
    assert first != blocks.members(2, 0).tolist() and first != other.members(1, 0).tolist()
    sizes = [len(blocks.members(epoch, block)) for epoch in range(20) for block in range(3)]
    assert 0 < blocks.least_members() <= min(sizes)


def test_pairs_within_a_block_are_mixed():
    batches, _ = source(batch_size=len(PAIRS), blocks=(1, 3))
    items = batches.batch(1, 0).items[:, 0]
    assert abs(np.corrcoef(np.arange(len(items)), items)[0, 1]) < 0.1


def test_one_block_is_the_uniform_order():
    (one, _), (uniform, _) = source(blocks=(1, 1)), source(blocks=None)
    for left, right in zip(one.batches(1), uniform.batches(1), strict=True):
        np.testing.assert_array_equal(left.users, right.users)
        np.testing.assert_array_equal(left.items, right.items)


def test_popular_negatives_of_a_block_come_as_often_as_the_batch_says():
    batches, blocks = source(popular=True, log_q=True, reject=False, negatives=400)
    members = blocks.members(1, 0)
    drawn = np.concatenate([batches.batch(1, step).items[:, 1:].ravel() for step in range(8)])
    weights = 1 + np.bincount(PAIRS.items, minlength=NUM_ITEMS)[members]
    expected = weights / weights.sum()
    found = np.bincount(drawn, minlength=NUM_ITEMS)[members] / len(drawn)
    np.testing.assert_allclose(found, expected, atol=6 * np.sqrt(expected.max() / len(drawn)))
    batch = batches.batch(1, 0)
    likely = dict(zip(members.tolist(), np.log(expected), strict=True))
    np.testing.assert_allclose(batch.log_q.ravel(), [likely[item] for item in batch.items.ravel().tolist()], rtol=1e-5)
    shared, _ = source(popular=True, log_q=True, reject=False, negatives=400, shared=True)
    batch = shared.batch(1, 0)
    negatives, count = batch.items[len(batch.users) :], len(batch.users)
    counts = np.exp([likely[item] for item in negatives.tolist()] - batch.log_q[count:])
    np.testing.assert_allclose(counts, np.rint(counts), rtol=1e-4)
    assert round(counts.sum()) == 400


def test_a_user_with_a_whole_block_gets_any_item_of_it():
    lacks = 5  # the only item that user 0 does not have
    items = np.delete(np.arange(NUM_ITEMS), lacks)
    users = np.concatenate([np.zeros(len(items), np.int64), np.arange(1, NUM_USERS)])
    items = np.concatenate([items, np.arange(1, NUM_USERS) % NUM_ITEMS])
    batches, blocks = source(PAIRS.replace(users, items), negatives=5)
    of_block = [set(blocks.members(1, block).tolist()) for block in range(BLOCKS[1])]
    seen = 0
    for batch in batches.batches(1):
        mine = batch.users == 0
        (members,) = [members for members in of_block if int(batch.items[0, 0]) in members]
        negatives = set(batch.items[mine, 1:].ravel().tolist())
        seen += int(mine.sum())
        assert negatives <= ({lacks} if lacks in members else members)
    assert seen == NUM_ITEMS - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (601, 2)}, "option order has 601 blocks of users, but there are 600 users"),
        ({"blocks": (2, 401)}, "option order has 401 blocks of items, but there are 400 items"),
        (
            {"blocks": (2, 8), "shared": True, "negatives": 60},
            r"option negatives=60 is more than the \d+ items that the smallest of the item blocks has in some epoch",
        ),
        ({"blocks": (2, 400)}, "is more than the 0 items"),
    ],
)
def test_blocks_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        source(**options)


@pytest.mark.parametrize("value", ["random", "blocks:", "blocks:0", "blocks:4x", "blocks:4x0", "Blocks", "", 4, None])
def test_an_order_of_another_form_is_named(value):
    with pytest.raises(ValueError, match="option order must be auto, uniform, blocks, blocks:P such as blocks:4"):
        TrainConfig(order=value)


def test_the_blocks_of_an_order():
    given = {"auto": None, "uniform": None, "blocks": None, "blocks:4": (4, 4), "blocks:12x5": (12, 5)}
    assert {order: TrainConfig(order=order).blocks for order in given} == given
    assert [TrainConfig(order=order).is_order_decided for order in given] == [False, True, False, True, True]


@pytest.mark.parametrize("order", ["uniform", "blocks:4x3"])
def test_batches_from_disk_are_those_of_memory(tmp_path, order):
    config = TrainConfig(order=order, seed=11, stream=True, eval_users=9, ram="256MiB", valid="0.2")
    expected, stored = split(PAIRS, config), open_split(PAIRS, config, tmp_path / "stream")
    options = {"batch_size": 500, "negatives": 5, "seed": 11, "seen": None}
    memory, disk = (
        BatchSource(part.train, order=part.order(config), blocks=pair_blocks(config, part.train), **options)
        for part in (expected, stored)
    )
    for epoch in (1, 2):
        assert memory.steps(epoch) == disk.steps(epoch)
        for step in (0, memory.steps(epoch) - 1, 2, 1):
            left, right = memory.batch(epoch, step), disk.batch(epoch, step)
            np.testing.assert_array_equal(left.users, right.users)
            np.testing.assert_array_equal(left.items, right.items)
    name = "epoch-2" if order == "uniform" else "epoch-2-4x3"
    assert [path.name for path in (tmp_path / "stream").glob("epoch-*")] == [name]


# ---- Training

DATA = Dataset(train=interactions(3000, 600, 14_000))
CONFIG = TrainConfig(
    dim=16, batch_size=512, epochs=2, lr=0.02, threads=1, valid="none", eval_users=9, negatives=2, ram="256MiB"
)
ORDERS = pytest.mark.parametrize("order", ["uniform", "blocks:6x4"])


def train(path, config, *, ram=None, stop_after=None, on_event=None):
    """Losses of one session, and the trainer; `stop_after` steps it is stopped. `ram` of the tables."""
    with bb.Run(path, ram=ram or config.table_ram_bytes) as run:
        trainer = Trainer(config, DATA, run)
        step = trainer.optimizer.step

        def step_and_stop(*args):
            step(*args)
            if len(trainer.losses) + 1 == stop_after:
                trainer.request_stop()

        trainer.optimizer.step = step_and_stop
        trainer.fit(on_event)
    return trainer


def rows(path):
    with bb.Run(path, mode="r", ram="64MiB") as run:
        tables = [run.table(name) for name in run.table_names]
        return {
            (table.name, slot): table.get(np.arange(table.num_rows), slot=slot).tobytes()
            for table in tables
            for slot in ("weight", *table.slots)
        }


@ORDERS
@pytest.mark.parametrize("model", [{}, {"loss": "softmax", "sampling": "popularity", "share_negatives": True}])
def test_bits_are_equal_for_every_budget_with_and_without_lookahead_in_memory_and_streamed(tmp_path, order, model):
    config = replace(CONFIG, order=order, **{"negatives": 30, **model} if model else {})
    whole, expected = train(tmp_path / "whole", config), None
    for at, (ram, changed) in enumerate(
        [
            (None, {"lookahead": 0}),
            (TIGHT, {}),
            (TIGHT, {"lookahead": 0}),
            (TIGHTER, {"lookahead": 3, "window": 32}),
            (TIGHT, {"stream": True}),
        ]
    ):
        epochs = []
        other = train(tmp_path / str(at), replace(config, **changed), ram=ram, on_event=epochs.append)
        assert other.losses == whole.losses
        expected = expected or rows(tmp_path / "whole")
        assert rows(tmp_path / str(at)) == expected
        if ram is not None:
            last = [report for report in epochs if isinstance(report, EpochReport)][-1]
            assert last.disk_read_bytes > 0 and last.unique_hit_rate < 0.98
    assert len(whole.losses) == sum(whole._source.steps(epoch) for epoch in (1, 2))


@ORDERS
@pytest.mark.parametrize("streams", [(False, False), (True, True), (True, False)])
def test_a_run_stopped_within_an_epoch_ends_with_the_bits_of_one_never_stopped(tmp_path, order, streams):
    config = replace(CONFIG, order=order)
    whole = train(tmp_path / "whole", config, ram=TIGHT)
    first, second = (replace(config, stream=stream) for stream in streams)
    stop_after = whole._source.steps(1) + 7
    one = train(tmp_path / "parts", first, ram=TIGHT, stop_after=stop_after)
    assert len(one.losses) == stop_after
    two = train(tmp_path / "parts", replace(second, order="auto"))
    assert two.config.order == order
    assert one.losses + two.losses == whole.losses
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_auto_decides_once_and_the_run_stores_it(tmp_path):
    auto = replace(CONFIG, order="auto", epochs=1)
    assert train(tmp_path / "roomy", auto).config.order == "uniform"
    tight = train(tmp_path / "tight", auto, ram=TIGHT)
    users, items = tight.config.blocks
    assert users > items > 1
    with bb.Run(tmp_path / "tight", mode="r") as run:
        assert run.meta["config"]["order"] == tight.config.order == f"blocks:{users}x{items}"
        # Two blocks of users fit in their cache, and one of items.
        frames = {name: run.table(name).num_rows for name in run.table_names}
    assert frames == {"user": 3000, "item": 600}
    # More RAM later does not change it, and neither does another --order that leaves it open.
    for order in ("auto", "blocks", tight.config.order):
        assert train(tmp_path / "tight", replace(auto, order=order, epochs=2)).config.order == tight.config.order
    before = rows(tmp_path / "tight"), json.loads((tmp_path / "tight" / "metrics.jsonl").read_text().splitlines()[-1])
    for order in ("uniform", "blocks:2", f"blocks:{users}x{items + 1}"):
        with pytest.raises(ValueError, match=f"option order='{order}' differs from 'blocks:{users}x{items}', with"):
            train(tmp_path / "tight", replace(auto, order=order, epochs=3))
    with pytest.raises(ValueError, match="option order='blocks' differs from 'uniform', with which the run was"):
        train(tmp_path / "roomy", replace(auto, order="blocks"))
    after = rows(tmp_path / "tight"), json.loads((tmp_path / "tight" / "metrics.jsonl").read_text().splitlines()[-1])
    assert after == before


def test_the_batch_size_is_decided_with_the_order(tmp_path):
    sizes = {"uniform": 4096, "blocks:1x1": 4096, "blocks:9x6": 2048}
    assert {order: TrainConfig(order=order).step_pairs for order in sizes} == sizes
    config = replace(CONFIG, order="auto", batch_size=None, epochs=1)
    assert train(tmp_path / "roomy", config).config.batch_size == 4096
    one = train(tmp_path / "tight", config, ram=TIGHT)
    assert one.config.batch_size == 2048
    assert len(one.losses) == one._source.steps(1) > len(DATA.train) / 4096 + 2
    assert train(tmp_path / "tight", replace(config, epochs=2)).config.batch_size == 2048
    with pytest.raises(ValueError, match="option batch_size=4096 differs from 2048"):
        train(tmp_path / "tight", replace(config, epochs=3, batch_size=4096))


def test_auto_fits_the_caches(tmp_path):
    for ram in (TIGHTER, TIGHT, "700KiB"):
        with bb.Run(tmp_path / ram, ram=ram) as run:
            users, items = Trainer(replace(CONFIG, order="blocks"), DATA, run).config.blocks
            frames = {name: table.stats()["frame_capacity"] for name, table in run.tables.items()}
        assert 2 * 3000 / users <= frames["user"] and 600 / items <= frames["item"]
        assert users == 1 or 2 * 3000 / (users - 1) > 0.8 * frames["user"]
        assert items == 1 or 600 / (items - 1) > 0.8 * frames["item"]


def test_blocks_in_enough_ram_are_one_of_each(tmp_path):
    assert train(tmp_path / "run", replace(CONFIG, order="blocks", epochs=1)).config.order == "blocks:1x1"


def test_auto_leaves_enough_items_to_share(tmp_path):
    config = replace(CONFIG, order="auto", share_negatives=True, negatives=250, epochs=1)
    users, items = train(tmp_path / "run", config, ram=TIGHTER).config.blocks
    assert PairBlocks(3000, 600, (users, items), 0).least_members() >= 250
    assert users > 1 and items == 2
    # Of the items that are drawn, half here, each block has enough, too.
    drawn = np.arange(300)
    with bb.Run(tmp_path / "run", ram=TIGHTER) as run:
        tables = {name: run.table(name) for name in run.table_names}
        of_all, of_drawn = (decided(config, tables, drawn=each).blocks for each in (None, drawn))
        assert (of_all[1], of_drawn[1]) == (2, 1)
    members = [PairBlocks(3000, 600, (2, 2), 0).members(epoch, block) for epoch in range(20) for block in range(2)]
    least = PairBlocks(3000, 600, (2, 2), 0).least_members(drawn)
    assert 0 < least <= min(len(np.intersect1d(one, drawn)) for one in members)


def test_a_run_of_a_release_without_orders_was_uniform(tmp_path):
    trainer = train(tmp_path / "run", replace(CONFIG, order="uniform", epochs=1))
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        meta = run.meta
        del meta["config"]["order"]
        run.commit(files={"dense.pt": run.read("dense.pt")}, meta=meta)
    assert train(tmp_path / "run", replace(trainer.config, order="auto"), ram=TIGHT).config.order == "uniform"
    with pytest.raises(ValueError, match="option order='blocks:2' differs from 'uniform'"):
        train(tmp_path / "run", replace(trainer.config, order="blocks:2"))
