"""Text and records that are taken in bulk: the same rows, words and errors as one by one, wherever a file is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.common.words import Words
from bunkbed.io.formats import text_rows
from bunkbed.io.formats.text_rows import count_lines, parse

FORMATS = {"word2vec": "rows.vec", "word2vec-binary": "rows.bin", "projector": "rows.projector"}
DIM = 5
ROWS = 2_000


def any_rows(seed: int, count: int = ROWS) -> np.ndarray:
    """Finite float32 of every kind: of ordinary size, denormal, extreme, and of which float64 makes another one."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, DIM)).astype(np.float32)
    bits = rng.integers(0, 1 << 32, (count // 2, DIM), np.uint32)
    rows[::2] = np.where(bits >> 23 & 0xFF == 0xFF, bits & 0x807FFFFF, bits).view(np.float32)
    rows[1] = [0.0, -0.0, 1e-45, 3.4028235e38, -1.17549435e-38]
    rows[3] = np.array([0x15AE43FD, 0x95AE43FD, 1, 0x807FFFFF, 0xFF7FFFFF], np.uint32).view(np.float32)
    return rows


def same_bits(got: np.ndarray, wanted: np.ndarray) -> bool:
    return np.array_equal(got.view(np.uint32), wanted.view(np.uint32))


@pytest.fixture
def other() -> Iterator[bb.Table]:
    with bb.create(None, dim=DIM, num_rows=4 * ROWS) as made:
        yield made


def stored(order: np.ndarray) -> bb.Table:
    """Rows of ids 3, 6, 9 .. in a log of that order."""
    table = bb.create(None, dim=DIM, num_rows=4 * ROWS, optimizer=bb.SGD())
    rows = any_rows(0)
    for part in np.array_split(order, 4):
        table.set(3 * part + 3, rows[part])
    return table


def files_of(path: Path) -> dict[str, bytes]:
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_of_any_order_gives_the_same_file_whole_and_by_ascending_id(
    other: bb.Table, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffled = np.random.default_rng(1).permutation(ROWS)
    late = np.concatenate([np.arange(1, ROWS), [0]])  # it shows at the end only
    halves = np.roll(np.arange(ROWS), ROWS // 2)  # it shows between two chunks only
    made = []
    looked_up: list[int] = []
    seen: list[tuple[int, int]] = []
    for at, order in enumerate((np.arange(ROWS), shuffled, late, halves)):
        looked_up.clear()
        seen.clear()
        with stored(order) as table:
            scanned = np.concatenate([ids for ids, _ in table.scan(chunk=250)])
            assert bool((np.diff(scanned) > 0).all()) == (at == 0)

            def look_up(ids: np.ndarray, lookup: Any = table.lookup, **how: Any) -> np.ndarray:
                looked_up.append(len(ids))
                rows: np.ndarray = lookup(ids, **how)
                return rows

            monkeypatch.setattr(table, "lookup", look_up)
            file = tmp_path / str(at) / FORMATS[format]
            file.parent.mkdir()
            bb.export_rows(table, file, format=format, chunk=250, progress=lambda *done: seen.append(done))
        assert bool(looked_up) == (at > 0)  # a log in order is scanned and no more
        assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1] == (ROWS, ROWS)
        made.append(files_of(file))
    assert made[0] == made[1] == made[2] == made[3]
    assert bb.import_rows(other, file, format=format, ids="word", chunk=271) == ROWS
    assert same_bits(other.lookup(3 * np.arange(ROWS) + 3), any_rows(0))
    assert len(other) == ROWS


@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_threads_and_any_chunk_write_the_same_bytes(tmp_path: Path, format: str) -> None:
    threads = bb.get_num_threads()
    made = []
    try:
        with stored(np.arange(ROWS)) as table:
            for at, (count, chunk) in enumerate(((1, None), (3, None), (2, 1), (3, 777))):
                bb.set_num_threads(count)
                file = tmp_path / str(at) / FORMATS[format]
                file.parent.mkdir()
                bb.export_rows(table, file, format=format, chunk=chunk)
                made.append(files_of(file))
    finally:
        bb.set_num_threads(threads)
    assert made[0] == made[1] == made[2] == made[3]


def words_of_all_kinds(count: int) -> list[bytes]:
    """Different words of any bytes but the white space that a format means something by."""
    rng = np.random.default_rng(2)
    plain = bytes(set(range(256)) - set(b" \t\n\v\f\r\x00\x1c\x1d\x1e\x1f\x85\xa0"))
    made = []
    for at, length in enumerate(rng.integers(0, 20, count)):
        made.append(b"%d|" % at + bytes(rng.choice(list(plain), length).tolist()))
    made[5] = "6|wörd-日本".encode()
    made[6] = b"x" * 3_000
    return made


@pytest.mark.parametrize("block", [16, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_records_of_others_wherever_their_bytes_are_cut(
    other: bb.Table, tmp_path: Path, block: int, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_BLOCK", block)
    rows, words = any_rows(3, 600), words_of_all_kinds(600)
    file, vocab = tmp_path / "rows.bin", tmp_path / "words"
    parts = [word + b" " + row.tobytes() + end for word, row in zip(words, rows, strict=True)]
    file.write_bytes(b"600 %d\n" % DIM + b"".join(parts))
    bb.import_rows(other, file, format="word2vec-binary", vocab=vocab, chunk=97)
    assert vocab.read_bytes() == b"".join(word + b"\n" for word in words)
    assert same_bits(other.lookup(np.arange(600)), rows)
    again = tmp_path / "again.bin"
    bb.export_rows(other, again, format="word2vec-binary", vocab=vocab)
    assert again.read_bytes().replace(b"\n", b"") == file.read_bytes().replace(b"\n", b"")


@pytest.mark.parametrize("block", [16, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b" \n", b"\r\n"])
def test_text_of_others_wherever_it_is_cut(
    other: bb.Table, tmp_path: Path, block: int, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_BLOCK", block)
    rows, words = any_rows(4, 600), words_of_all_kinds(600)
    numbers = [b" ".join(b"%.9g" % value for value in row.tolist()) for row in rows]
    file, vocab = tmp_path / "rows.vec", tmp_path / "words"
    lines = [word + b" " + line + end for word, line in zip(words, numbers, strict=True)]
    file.write_bytes(b"600 %d\n" % DIM + b"".join(lines)[: -len(end)])
    bb.import_rows(other, file, vocab=vocab, chunk=97)
    assert vocab.read_bytes() == b"".join(word + b"\n" for word in words)
    assert same_bits(other.lookup(np.arange(600)), rows)
    folder = tmp_path / "rows.projector"
    folder.mkdir()
    (folder / "tensors.tsv").write_bytes(b"".join(line.replace(b" ", b"\t") + end for line in numbers))
    titles = [b"\t".join([b"a", word, b"c"]) + end.strip(b" ") for word in words]
    (folder / "metadata.tsv").write_bytes(b"one\ttitle\tthree\n" + b"".join(titles))
    with bb.create(None, dim=DIM, num_rows=600) as table:
        bb.import_rows(table, folder, ids="title", vocab=vocab, chunk=97)
        assert same_bits(table.lookup(np.arange(600)), rows)
    assert count_lines(file) == 601 and count_lines(folder / "tensors.tsv") == 600


#: What NumPy makes of one number; None: it is none.
NUMBERS = {
    b"+1": 1.0,
    b"-.5e-3": -0.0005,
    b"5.": 5.0,
    b"1E5": 1e5,
    b"1e+05": 1e5,
    b"007": 7.0,
    b"-0": -0.0,
    b"1e-45": 1e-45,
    b"1e-46": 0.0,
    b"-1e-50": -0.0,
    b"1e-400": 0.0,
    b"3.4028235e38": 3.4028235e38,
    b"1e39": np.inf,
    b"-1e400": -np.inf,
    b"nan": np.nan,
    b"-Infinity": -np.inf,
    b"1_0": None,
    b"0x10": None,
    b"1,2": None,
    b"1e": None,
    b"1-2": None,
    b".": None,
    b"-": None,
    b"x": None,
    b"1\x002": None,
    b"\xff1": None,
    "١".encode(): None,
}


def parsed(*lines: bytes) -> np.ndarray:
    ends = np.cumsum([len(line) for line in lines])
    text = np.frombuffer(b"".join(lines), np.uint8)
    return parse(text, np.concatenate(([0], ends[:-1])), ends, 2, Path("rows"), 5)


@pytest.mark.parametrize("number", NUMBERS)
def test_odd_numbers_are_what_numpy_makes_of_them(number: bytes) -> None:
    wanted = NUMBERS[number]
    if wanted is None:
        with pytest.raises(ValueError, match=r"rows: line 6 holds '.*', which is no number; nothing was changed"):
            parsed(b"1 2\n", b"3 " + number + b"\n", b"3\n")
        return
    got = parsed(b"1 2\r\n", b" 3\t" + number + b"  \n", b"3 4")
    assert same_bits(got, np.array([[1, 2], [3, wanted], [3, 4]], np.float32))
    assert same_bits(got[1, 1:], np.fromstring(number, np.float32, sep=" "))


def test_decimals_are_rounded_once() -> None:
    """Just below the middle of two float32; as float64 it is the middle, which goes to the even one above."""
    got = parsed(b"1.00000017881393432617187499 1.00000017881393432617187501")
    assert got[0].tolist() == [1 + 2.0**-23, 1 + 2.0**-22]


def test_lines_with_too_few_or_too_many_numbers_are_named() -> None:
    for line, count in ((b"\n", 0), (b"7", 1), (b"7 8 9\n", 3)):
        with pytest.raises(ValueError, match=f"rows: line 6 holds {count} numbers, expected 2; nothing was changed"):
            parsed(b"1 2\n", line if line.endswith(b"\n") else line + b"\n", b"x\n")


def test_words_that_are_no_ids_are_named_with_their_place(other: bb.Table, tmp_path: Path) -> None:
    for word in (b"-1", b"+1", b"1_0", b"9223372036854775808", b"\xff", "١".encode(), b"1.0", b""):
        names = [b"%d" % at for at in range(8)]
        names[6] = word
        lines = [name + b" 1 2 3 4 5\n" for name in names]
        (tmp_path / "rows.vec").write_bytes(b"8 5\n" + b"".join(lines))
        text = word.decode("utf-8", "surrogateescape")
        with pytest.raises(ValueError) as caught:
            bb.import_rows(other, tmp_path / "rows.vec", ids="word", chunk=4)
        assert f"{text!r} at position 6 is no id; nothing was changed" in str(caught.value)
    (tmp_path / "rows.vec").write_bytes(b"8 5\n" + b"".join(lines).replace(b"7 1 2 3 4 5", b"7 1 2 3 4"))
    with pytest.raises(ValueError, match=r"rows\.vec: line 9 holds 4 numbers, expected 5"):
        bb.import_rows(other, tmp_path / "rows.vec", ids="word", chunk=4)
    (tmp_path / "rows.vec").write_text("2 5\n000 1 2 3 4 5\n8000 1 2 3 4 5\n")
    with pytest.raises(IndexError, match="id 8000 at position 1 is outside"):
        bb.import_rows(other, tmp_path / "rows.vec", ids="word")
    assert len(other) == 0


def test_records_without_an_end_are_named(other: bb.Table, tmp_path: Path) -> None:
    record = b"a " + bytes(4 * DIM)
    for content, message in (
        (b"3 5\n" + record + b"\n" + record, "breaks off within row 2; nothing was changed"),
        (b"3 5\n" + record + b"x" * (3 << 20), "breaks off within row 1; nothing was changed"),
        (b"1 5\n" + record + b"\n\nb", "goes on after the 1 rows"),
        (b"0 5\nb", "goes on after the 0 rows"),
    ):
        (tmp_path / "rows.bin").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            bb.import_rows(
                other, tmp_path / "rows.bin", format="word2vec-binary", ids=np.arange(int(content[:1])), chunk=2
            )
    (tmp_path / "rows.bin").write_bytes(b"1 5\n" + record + b"\n\n\n")
    assert bb.import_rows(other, tmp_path / "rows.bin", format="word2vec-binary", ids=[1]) == 1


@pytest.mark.parametrize("is_in_order", [True, False])
def test_the_first_word_that_cannot_be_written_is_named_by_id(tmp_path: Path, is_in_order: bool) -> None:
    words = [f"w{at}" for at in range(3 * ROWS + 1)]
    words[9], words[300] = "two words", "more words"
    vocab = tmp_path / "words"
    vocab.write_text("".join(f"{word}\n" for word in words))
    with stored(np.arange(ROWS) if is_in_order else np.arange(ROWS)[::-1]) as table:
        with pytest.raises(ValueError, match=r"word 'two words' of id 9 is empty or has white space"):
            bb.export_rows(table, tmp_path / "rows.vec", vocab=vocab, chunk=50)
        vocab.write_text("".join(f"{word}\n" for word in words[:-1]))
        with pytest.raises(ValueError, match=rf"id {3 * ROWS} has no word in .*words, which names {3 * ROWS}"):
            bb.export_rows(table, tmp_path / "rows.vec", vocab=vocab, chunk=50)
    assert list(tmp_path.iterdir()) == [vocab]


def test_words_are_a_sequence_of_text() -> None:
    given = ["a", "", "wörd", "\udcff\udcfe", "two\nlines", "last"]
    words = Words.of(given)
    assert list(words) == given and words[-1] == "last" and words[1:5:2] == ["", "\udcff\udcfe"] and len(words) == 6
    assert words.index("two\nlines") == 4 and words.numbers() is None
    with pytest.raises(IndexError):
        words[6]
    ids = Words.of_ids(np.array([0, 12, 2**63 - 1]))
    assert list(ids) == ["0", "12", "9223372036854775807"]
    numbers = ids.numbers()
    assert numbers is not None and numbers.tolist() == [0, 12, 2**63 - 1]
    assert list(Words.of([])) == []
