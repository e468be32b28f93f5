"""Interactions on disk: the same numbers, splits, batches and trained bits as in memory."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")
pytest.importorskip("duckdb")

import bunkbed as bb
from bunkbed.train.data import interactions as data_module
from bunkbed.train.data import sampling, stream
from bunkbed.train.data import sort as stream_sort
from bunkbed.train.data.interactions import DataError, read_dataset
from bunkbed.train.data.prepare import prepare_dataset
from bunkbed.train.data.sampling import BatchSource, SeenPairs, first_of_order, random_order
from bunkbed.train.data.splits import split
from bunkbed.train.data.store import load_dataset, load_vocabs, open_dataset, save_dataset, seen_items
from bunkbed.train.data.stream import open_split
from bunkbed.train.evaluate import score_blocks
from bunkbed.train.evaluate.evaluator import evaluate_run
from bunkbed.train.loop import Trainer
from bunkbed.train.settings.config import TrainConfig

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make parts so small that a few hundred pairs go through many parts."""
    monkeypatch.setattr(data_module, "_BATCH_PAIRS", 100)
    monkeypatch.setattr(sampling, "_CHUNK", 128)
    monkeypatch.setattr(stream, "_CHUNK", 16)


def interactions(rng, count=700, num_users=60, num_items=80):
    """Pairs of which some repeat, by users of very different numbers of pairs."""
    users = (num_users * rng.random(count) ** 2).astype(np.int64)
    return users * 7 + 10**12, rng.integers(0, num_items, count)


def write_csv(path, users, items):
    path.write_text("user,item\n" + "".join(f"{u},{i}\n" for u, i in zip(users, items, strict=True)))
    return path


@pytest.fixture
def source(tmp_path):
    return write_csv(tmp_path / "pairs.csv", *interactions(np.random.default_rng(0)))


def prepared(folder, path, **options):
    return prepare_dataset(folder, path, ram_bytes=64 * MIB, **options)


def assert_same_dataset(one, other):
    for left, right in ((one.train, other.train), (one.test, other.test)):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            np.testing.assert_array_equal(left.users, right.users)
            np.testing.assert_array_equal(left.items, right.items)
            assert (left.source, left.form, left.duplicates) == (right.source, right.form, right.duplicates)
            assert (left.malformed, left.first_malformed) == (right.malformed, right.first_malformed)
            assert left.empty_users == right.empty_users
            assert (len(left), left.num_users, left.num_items) == (len(right), right.num_users, right.num_items)
    for left, right in ((one.train.user_vocab, other.train.user_vocab), (one.train.item_vocab, other.train.item_vocab)):
        assert left.kind == right.kind
        assert left.array.equals(right.array)
    assert (one.cold_users, one.cold_items) == (other.cold_users, other.cold_items)


def forms(tmp_path):
    """Files of every kind of label, each with the test file that goes with it, if any."""
    users, items = interactions(np.random.default_rng(1))
    write_csv(tmp_path / "ints.csv", users, items)
    write_csv(tmp_path / "more.csv", users[:50] + 21, items[:50] + 3)
    write_csv(tmp_path / "names.csv", [f" u{u} " for u in users], [f"Ä{i}" for i in items])
    write_csv(tmp_path / "mixed.csv", [u if u % 2 else f"0{u}" for u in users], items)
    pq.write_table(pa.table({"user": users, "item": items.astype(np.int32)}), tmp_path / "ints.parquet")
    pq.write_table(pa.table({"user": users * 10**6, "item": items}), tmp_path / "long.parquet")
    pq.write_table(
        pa.table({"user": users.astype(np.uint64) + 2**63, "item": items.astype(str)}), tmp_path / "hashes.parquet"
    )
    names = pa.array([f"u{u}" for u in users[::-1]]).dictionary_encode()[::-1]
    pq.write_table(pa.table({"user": names, "item": items}), tmp_path / "categories.parquet")
    (tmp_path / "lines.txt").write_text("7 8 9 8\n8\n9 1\n7 1 2 3 4 9\n")
    return [
        ("ints.csv", None),
        ("ints.csv", "more.csv"),
        ("ints.parquet", "more.csv"),
        ("names.csv", "more.csv"),
        ("mixed.csv", None),
        ("long.parquet", None),
        ("hashes.parquet", "ints.csv"),
        ("categories.parquet", None),
        ("lines.txt", None),
    ]


def test_a_prepared_dataset_is_the_one_read_into_memory(tmp_path):
    for at, (train, test) in enumerate(forms(tmp_path)):
        files = {"path": tmp_path / train, "test": None if test is None else tmp_path / test}
        expected = read_dataset(**files)
        folder = tmp_path / f"data{at}"
        assert_same_dataset(expected, prepared(folder, **files))
        assert_same_dataset(expected, load_dataset(folder))
        save_dataset(tmp_path / "saved", expected)
        assert (folder / "dataset.json").read_bytes() == (tmp_path / "saved" / "dataset.json").read_bytes()
        names = {path.name for path in folder.iterdir()}
        assert names <= {"dataset.json", "users.parquet", "items.parquet", "train.parquet", "test.parquet"}
    assert (expected.train.duplicates, expected.train.empty_users) == (2, 1)


def test_rows_left_out_are_told_alike(tmp_path):
    table = pa.table({"user": [1, 2, 3, None, 5, 6], "item": ["1", "2", "3", "4", "", "6"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.csv").write_text("\nuser,item,x\n1,2,3\n\n,4,5\n6,7\n2,1,1\n")
    firsts = ["the user of row 3 (from 0) is missing", "line 5: the user is missing (found '')"]
    for at, (name, first) in enumerate(zip(("a.parquet", "a.csv"), firsts, strict=True)):
        files = {"path": tmp_path / name, "test": tmp_path / "a.csv", "strict": False}
        expected = read_dataset(**files)
        assert (expected.train.malformed, expected.train.first_malformed) == (2, first)
        assert_same_dataset(expected, prepared(tmp_path / f"data{at}", **files))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("1,2\n,3\n", "line 2: the user is missing"),
        ("1,2\n2,NaN\n3,4\n", "line 2: the item is missing"),
        ("1,2\n2\n", "line 2: expected 2 columns, found 1"),
        ("user,item\n", "holds no pairs of user and item"),
        ('user,item,x\n1,2,"3\n4,5,6\n', "line 2: a quote is opened and not closed"),
    ],
)
def test_bad_files_say_the_same_and_leave_no_dataset(tmp_path, lines, message, strict=True):
    path = tmp_path / "bad.csv"
    path.write_text(lines)
    with pytest.raises(DataError, match=message) as in_memory:
        read_dataset(path, strict=strict)
    with pytest.raises(DataError) as on_disk:
        prepared(tmp_path / "data", path, strict=strict)
    assert str(on_disk.value) == str(in_memory.value)
    assert not (tmp_path / "data" / "dataset.json").exists()
    assert not (tmp_path / "data" / "preparing").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("user,item\n1,2,3\n,4\n", "all 2 rows are malformed, .* the first: line 2: expected 2 columns, found 3"),
        ("1,2\n" + "1,2,3\n" * 5, "5 of 6 rows are malformed, .* the first: line 2: expected 2 columns, found 3"),
        ('1,2\n3,"4\n5,6\n', "line 2: a quote is opened and not closed"),
    ],
)
def test_files_misread_say_the_same_and_leave_no_dataset(tmp_path, lines, message):
    test_bad_files_say_the_same_and_leave_no_dataset(tmp_path, lines, message, strict=False)


def test_a_bad_row_after_good_batches_says_the_same(tmp_path):
    table = pa.table({"user": [1, 2, 3, None], "item": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for read in (read_dataset, lambda path: prepared(tmp_path / "data", path)):
        with pytest.raises(DataError, match=r"a.parquet row 3: column 'user' is missing \(null\); drop such rows$"):
            read(tmp_path / "a.parquet")


def test_ctrl_c_in_a_query_is_ctrl_c(tmp_path):
    class Interrupted:
        def execute(self, sql):
            raise RuntimeError("Query interrupted")

    with stream_sort.Sorter(tmp_path / "sorting", 64 * MIB) as sorter, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sorter, "_connection", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            sorter.run("SELECT 1")
    assert not (tmp_path / "sorting").exists()


def test_labels_on_disk_answer_as_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("bunkbed.train.data.prepare._ROW_GROUP", 16)
    users, items = interactions(np.random.default_rng(2))
    path = write_csv(tmp_path / "pairs.csv", users, [f"item {i}" for i in items])
    data = read_dataset(path).train
    stored = prepared(tmp_path / "data", path).train
    for vocab, on_disk in ((data.user_vocab, stored.user_vocab), (data.item_vocab, stored.item_vocab)):
        assert len(on_disk._starts) > 3
        for number in (3, len(vocab) - 1):
            assert on_disk.index(vocab.decode([number])[0]) == number
        wanted = [len(vocab) - 1, 0, 17, 17]
        assert on_disk.decode(wanted) == vocab.decode(wanted)
        with pytest.raises(IndexError, match=r"index .* at position 1 is outside"):
            on_disk.decode([0, len(vocab)])
        with pytest.raises(DataError, match="'item 999' is not among the") as error:
            on_disk.index("item 999", what="item")
        if vocab.kind == "str":
            assert "the nearest are item " in str(error.value)


def test_the_first_of_an_order_are_those_of_the_whole():
    for count, first in ((1000, 7), (1000, 1000), (100, 300), (129, 128)):
        np.testing.assert_array_equal(first_of_order(3, 4, 1, count, first), random_order(3, 4, 1, count)[:first])


@pytest.mark.parametrize("valid", ["random", "last", "0.3", "none"])
def test_split_seen_items_and_order_have_the_bits_of_memory(tmp_path, source, monkeypatch, valid):
    monkeypatch.setattr(stream_sort, "_BATCH_ROWS", 2048)
    users, items = interactions(np.random.default_rng(5), count=6000, num_users=90, num_items=400)
    data = read_dataset(write_csv(tmp_path / "many.csv", users, items)).train
    assert len(data) > 2 * 2048  # users are cut by DuckDB's batches
    config = TrainConfig(valid=valid, seed=11, stream=True, eval_users=9, ram="256MiB")
    expected, stored = split(data, config), open_split(data, config, tmp_path / "stream")
    assert (expected.valid is None) == (stored.valid is None) == (valid == "none")
    for left, right in ((expected.train, stored.train), (expected.valid, stored.valid)):
        if left is not None:
            np.testing.assert_array_equal(left.users, right.users)
            np.testing.assert_array_equal(left.items, right.items)
    seen, on_disk = SeenPairs(expected.train.users, expected.train.items, data.num_items), stored.seen()
    rng = np.random.default_rng(6)
    asked_users, asked_items = rng.integers(0, data.num_users, 500), rng.integers(0, data.num_items, 500)
    np.testing.assert_array_equal(seen.contains(asked_users, asked_items), on_disk.contains(asked_users, asked_items))
    assert seen.contains(asked_users, asked_items).any()
    np.testing.assert_array_equal(seen.items_of(3), on_disk.items_of(3))
    for popular, shared in ((False, False), (True, True)):
        options = {"batch_size": 1000, "negatives": 5, "seed": 11, "popular": popular, "shared": shared, "log_q": True}
        memory = BatchSource(expected.train, seen=seen, **options)
        disk = BatchSource(stored.train, seen=on_disk, order=stored.order(config), **options)
        assert memory.steps(1) == disk.steps(1)
        for epoch, step in ((1, 0), (1, memory.steps(1) - 1), (2, 1), (1, 2)):
            left, right = memory.batch(epoch, step), disk.batch(epoch, step)
            np.testing.assert_array_equal(left.users, right.users)
            np.testing.assert_array_equal(left.items, right.items)
            assert right.users.dtype == right.items.dtype == np.int64
            if popular:
                np.testing.assert_array_equal(left.log_q, right.log_q)
                np.testing.assert_array_equal(np.sort(left.seen), np.sort(right.seen))
    assert {path.name for path in (tmp_path / "stream").glob("epoch-*")} == {"epoch-1"}


@pytest.mark.parametrize("valid", ["last", "none", "time:0.7"])
def test_sequences_on_disk_are_those_in_memory(tmp_path, source, valid):
    config = TrainConfig(model="sasrec", loss="softmax", length=3, valid=valid, seed=3, stream=True, eval_users=9)
    expected = split(read_dataset(source).train, config)
    stored = open_split(prepared(tmp_path / "data", source).train, config, tmp_path / "stream")
    memory, disk = expected.sequences(config), stored.sequences(config)
    assert memory.num_windows == disk.num_windows > 100
    assert memory.num_predictions == disk.num_predictions > memory.num_windows
    windows = np.random.default_rng(0).permutation(memory.num_windows)
    for share in (0.0, 0.4, 0.99):
        left, right = memory.cut(windows, 3, share), disk.cut(windows, 3, share)
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one, other)
        items = disk.items(*right[1:])
        assert items.dtype == np.int64
        np.testing.assert_array_equal(memory.items(*left[1:]), items)
    # Files of another length, or without sequences, are made again; those with sequences do for other models.
    train, folder = read_dataset(source).train, tmp_path / "stream"
    longer = replace(config, length=4)
    again = open_split(train, longer, folder).sequences(longer)
    assert again.num_windows == split(train, longer).sequences(longer).num_windows < disk.num_windows
    plain = replace(config, model="mf", loss="bpr", length=None, share_negatives=False)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    open_split(train, plain, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    open_split(train, plain, tmp_path / "other")
    assert open_split(train, config, tmp_path / "other").sequences(config).num_windows == memory.num_windows


def test_files_of_another_split_are_made_again_and_damage_is_told(tmp_path, source):
    data = read_dataset(source).train
    config = TrainConfig(stream=True, eval_users=9)
    first = open_split(data, config, tmp_path / "stream")
    again = open_split(data, replace(config, seed=1), tmp_path / "stream")
    assert len(first.valid) == len(again.valid)
    assert not np.array_equal(first.valid.items, again.valid.items)
    np.testing.assert_array_equal(again.valid.items, split(data, replace(config, seed=1)).valid.items)
    config = replace(config, seed=1)
    names = {path.name for path in (tmp_path / "stream").iterdir()} - {"split.json"}
    assert names == {"seen.items", "seen.starts", "train.items", "train.users", "valid.items", "valid.users"}
    for name in sorted(names):
        path = tmp_path / "stream" / name
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in (content[:-1], bytes(flipped), None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{name}: is damaged; remove the folder"):
                open_split(data, config, tmp_path / "stream")
            path.write_bytes(content)
    # As many pairs of the same users and items, but others.
    moved = data.replace(data.users, np.roll(data.items, 1))
    other = open_split(moved, config, tmp_path / "stream")
    np.testing.assert_array_equal(other.train.items, split(moved, config).train.items)
    with pytest.raises(ValueError, match=r"holds nothing out: no user of .* has enough pairs"):
        lonely = data.replace(np.arange(5), np.arange(5))
        open_split(lonely, config, tmp_path / "lonely")
    assert [path.name for path in tmp_path.glob("lonely*")] == ["lonely.lock"]


def test_a_damaged_order_of_an_epoch_is_made_again(tmp_path, source):
    data = read_dataset(source).train
    config = TrainConfig(stream=True, eval_users=9)
    path = tmp_path / "stream" / "epoch-0"

    def order():
        stored = open_split(data, config, tmp_path / "stream")
        return np.stack(stored.order(config).pairs(0, 0, len(stored.train))[:2])

    expected = order()
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (content, content[:-1], bytes(flipped), b""):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(order(), expected)
        assert path.read_bytes() == content


MF = TrainConfig(dim=8, batch_size=64, epochs=2, lr=0.02, ram="256MiB", negatives=3, threads=1, eval_users=9)
TOWERS = replace(
    MF, model="two-tower", loss="softmax", sampling="popularity", share_negatives=True, negatives=40, bias=True
)
SASREC = replace(MF, model="sasrec", loss="softmax", negatives=20, length=4, valid="last", l2=0.001, eval_users=10**6)


def trained(path, config, data, stop_after=None):
    """Losses, the log's epochs and the test figures of a run, trained in one go or stopped once."""
    with bb.Run(path, ram=config.table_ram_bytes) as run:
        trainer = Trainer(config, data, run)
        if stop_after is not None:
            step = trainer.optimizer.step

            def stop(*args):
                step(*args)
                if len(trainer.losses) + 1 == stop_after:
                    trainer.request_stop()

            trainer.optimizer.step = stop
        trainer.fit()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    epochs = [(line["loss"], line["metrics"]) for line in lines if line["kind"] == "epoch"]
    with bb.Run(path, mode="r", ram="64MiB") as run:
        rows = {name: run.table(name).lookup(np.arange(run.table(name).num_rows)) for name in run.table_names}
        return trainer.losses, epochs, rows, evaluate_run(run, data, config).metrics


@pytest.mark.parametrize(
    "config",
    [
        replace(MF, valid="0.3"),
        replace(MF, ranking="sampled", eval_negatives=20, eval_users=10**6, valid="0.2"),
        TOWERS,
        SASREC,
    ],
    ids=["mf", "sampled", "two-tower", "sasrec"],
)
def test_training_from_disk_has_the_bits_of_memory(tmp_path, monkeypatch, source, config):
    streamed = replace(config, stream=True)
    data = read_dataset(source)
    stored = prepared(tmp_path / "data", source)
    expected = trained(tmp_path / "memory", config, data)
    monkeypatch.setattr(score_blocks, "_MOST_PLACES", 0)
    trained_part = trained(tmp_path / "disk", streamed, stored, stop_after=5)
    # A training that was started on disk may go on in memory.
    found = trained(tmp_path / "disk", *((config, data) if config is TOWERS else (streamed, stored)))
    assert trained_part[0] + found[0] == expected[0]
    assert found[1] == expected[1]
    assert len(expected[1]) == 2 and expected[1][0][1]
    for name, rows in expected[2].items():
        assert rows.tobytes() == found[2][name].tobytes(), name
    if config is TOWERS or config.eval_users > data.num_users:  # in memory `evaluate_run` asks every user
        assert found[3] == expected[3]
    if config is not TOWERS:
        assert not list((tmp_path / "disk" / "stream").glob("epoch-*"))  # done with


def in_the_middle(content):
    """The footer is whole: the damage shows only when rows are read."""
    return content[:4] + b"\xff" * 60 + content[64:]


def in_a_page(content):
    """One bit of the rows of the first column, which may well unpack all the same, to other rows."""
    column = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0).column(0)
    begin = column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset
    at = begin + column.total_compressed_size - 1
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"garbage", lambda content: content[:-20], in_the_middle, in_a_page],
)
@pytest.mark.parametrize("name", ["users", "train"])
def test_a_damaged_file_of_a_saved_dataset_is_named(tmp_path, source, name, damage):
    folder = tmp_path / "data"
    save_dataset(folder, read_dataset(source))
    file = folder / f"{name}.parquet"
    readers = {
        "users": [
            lambda: load_dataset(folder),
            lambda: open_dataset(folder).train.user_vocab.array,
            lambda: load_vocabs(folder)[0].decode([1]),
            lambda: load_vocabs(folder)[0].encode([1]),
        ],
        "train": [
            lambda: load_dataset(folder),
            lambda: open_dataset(folder).train.users,
            lambda: list(open_dataset(folder).train.batches()),
            lambda: seen_items(folder, 1),
        ],
    }[name]
    for reader in readers:
        reader()
    file.write_bytes(damage(file.read_bytes()))
    for reader in readers:
        with pytest.raises(DataError, match=rf"{name}\.parquet: is damaged \(.*put a copy of it back"):
            reader()


def test_a_missing_file_of_a_saved_dataset_is_named(tmp_path, source):
    folder = tmp_path / "data"
    for name in ("users", "train"):
        save_dataset(folder, read_dataset(source))
        (folder / f"{name}.parquet").unlink()
        for reader in (load_dataset, open_dataset, *([load_vocabs] if name == "users" else [])):
            with pytest.raises(DataError, match=rf"holds no saved interactions \({name}\.parquet is missing\)"):
                reader(folder)
