"""Rows named by words: word2vec's files and the TensorBoard projector's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb

FORMATS = {"word2vec": "rows.vec", "word2vec-binary": "rows.bin", "projector": "rows.projector"}
#: Floats whose text is long, short or extreme.
HARD = [0.1, -0.0, 1e-45, -3.4028235e38, 1.17549435e-38, 16777217.0, 1 / 3, 2.0**-126 * 1.5]


@pytest.fixture
def table() -> Iterator[bb.Table]:
    with bb.create(None, dim=8, num_rows=100) as made:
        rows = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
        rows[3] = HARD
        rows[4] = np.random.default_rng(1).integers(0, 0x7F7FFFFF, 8).astype(np.uint32).view(np.float32)
        made.set(np.arange(60, 20, -2), rows)
        yield made


@pytest.fixture
def other() -> Iterator[bb.Table]:
    with bb.create(None, dim=8, num_rows=100, seed=9) as made:
        yield made


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk", [None, 6])
def test_rows_come_back_bit_for_bit_by_their_ids(
    table: bb.Table, other: bb.Table, tmp_path: Path, format: str, chunk: int | None
) -> None:
    file = tmp_path / FORMATS[format]
    seen: list[tuple[int, int]] = []
    assert bb.export_rows(table, file, format=format, chunk=chunk, progress=lambda *at: seen.append(at)) == 20
    assert seen[-1] == (20, 20)
    with pytest.raises(ValueError, match="names its rows by words, such as '22'; give vocab="):
        bb.import_rows(other, file, format=format)
    assert bb.import_rows(other, file, format=format, ids="word", chunk=chunk) == 20
    ids = np.arange(100)
    np.testing.assert_array_equal(other.contains(ids), table.contains(ids))
    stored = ids[table.contains(ids)]
    np.testing.assert_array_equal(other.lookup(stored).view(np.uint32), table.lookup(stored).view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
def test_words_come_back_by_their_vocabulary(table: bb.Table, other: bb.Table, tmp_path: Path, format: str) -> None:
    file, vocab, written = tmp_path / FORMATS[format], tmp_path / "words.txt", tmp_path / "new.txt"
    words = [f"wörd-{at}" for at in range(61)]
    words[22] = '"quoted'
    vocab.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    bb.export_rows(table, file, format=format, vocab=vocab)
    bb.import_rows(other, file, format=format, vocab=vocab, chunk=7)
    stored = np.arange(22, 61, 2)
    np.testing.assert_array_equal(other.lookup(stored), table.lookup(stored))
    with bb.create(None, dim=8, num_rows=100) as packed:
        bb.import_rows(packed, file, format=format, vocab=written, chunk=7)
        np.testing.assert_array_equal(packed.lookup(np.arange(20)), table.lookup(stored))
    assert written.read_text(encoding="utf-8").split("\n") == [*(words[at] for at in stored), ""]
    vocab.write_text("only\nthese\n")
    with pytest.raises(ValueError, match=r"id 60 has no word in .*words.txt, which names 2"):
        bb.export_rows(table, tmp_path / "again", format=format, vocab=vocab)
    assert not (tmp_path / "again").exists()


def test_files_of_the_original_tools(other: bb.Table, tmp_path: Path) -> None:
    """The C tool ends a line with a space, and a binary row with a line feed, or, as gensim's, with nothing."""
    rows = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float32)
    text = "3 8\n" + "".join(
        f"{word} {' '.join(f'{x:.9g}' for x in row)} \n" for word, row in zip("abc", rows, strict=True)
    )
    (tmp_path / "c.vec").write_text(text)
    parts = [word.encode() + b" " + row.tobytes() for word, row in zip("abc", rows, strict=True)]
    for end in (b"", b"\n"):
        (tmp_path / "c.bin").write_bytes(b"3 8\n" + b"".join(part + end for part in parts))
        bb.import_rows(other, tmp_path / "c.bin", format="word2vec-binary", ids=[5, 6, 7])
        np.testing.assert_array_equal(other.lookup([5, 6, 7]), rows)
        vocab = tmp_path / f"words-{len(end)}"
        bb.import_rows(other, tmp_path / "c.bin", format="word2vec-binary", vocab=vocab)
        assert vocab.read_text() == "a\nb\nc\n"
    (tmp_path / "c.vec").write_text(text + "\n")
    bb.import_rows(other, tmp_path / "c.vec", ids=[1, 2, 3])
    np.testing.assert_array_equal(other.lookup([1, 2, 3]), rows)
    weird = b"1 8\n\xff\xfe " + rows[0].tobytes()
    (tmp_path / "weird.bin").write_bytes(weird)
    bb.import_rows(other, tmp_path / "weird.bin", format="word2vec-binary", vocab=tmp_path / "v")
    assert (tmp_path / "v").read_bytes() == b"\xff\xfe\n"
    bb.import_rows(other, tmp_path / "weird.bin", format="word2vec-binary", vocab=tmp_path / "v")


def test_text_that_does_not_fit_is_named_with_its_line(other: bb.Table, tmp_path: Path) -> None:
    good = "1 2 3 4 5 6 7 8"
    file = tmp_path / "rows.vec"
    for text, message in (
        (f"a {good}\nb {good}\n", "line 1 must be 'rows dim'"),
        ("2 7\n", r"rows must be float32\[N, 8\], got float32\[2, 7\]"),
        (f"2 8\na {good}\nb {good[:-2]}\n", "line 3 holds 7 numbers, expected 8; nothing was changed"),
        (f"3 8\na {good}\nb {good[:-2]}\nc {good} 9\n", "line 3 holds 7 numbers, expected 8; nothing was changed"),
        (f"2 8\na {good}\nb {good[:-1]}x\n", "line 3 holds 'x', which is no number; nothing was changed"),
        (f"3 8\na {good}\n\nb {good}\n", "line 3 holds 0 numbers, expected 8"),
        (f"2 8\na {good}\nb {good[:-1]}nan\n", r"weight of row 1 \(id 1\), element 7, is nan"),
        (f"3 8\na {good}\nb {good}\n", "says that it holds 3 rows, and holds 2; nothing was changed"),
        (f"1 8\na {good}\nb {good}\n", "says that it holds 1 rows, and holds 2; nothing was changed"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            bb.import_rows(other, file, vocab=tmp_path / "words")
    for content, message in (
        (b"2 8\na " + bytes(32) + b"b " + bytes(31), "breaks off within row 1; nothing was changed"),
        (b"2 8\na " + bytes(32) + b"b", "breaks off within row 1; nothing was changed"),
        (b"1 8\na " + bytes(32) + b"b " + bytes(32), "goes on after the 1 rows"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            bb.import_rows(other, file, format="word2vec-binary", vocab=tmp_path / "words")
    assert len(other) == 0 and not (tmp_path / "words").exists()


def test_projector_metadata(other: bb.Table, tmp_path: Path) -> None:
    line = "\t".join("12345678")
    (tmp_path / "tensors.tsv").write_text(f"{line}\n{line}\n")
    assert bb.import_rows(other, tmp_path / "tensors.tsv") == 2
    with pytest.raises(ValueError, match=r"ids='item': there is no .*metadata.tsv"):
        bb.import_rows(other, tmp_path, format="projector", ids="item")
    (tmp_path / "metadata.tsv").write_text("title\titem\nIt\t42\n")
    with pytest.raises(ValueError, match=r"say with ids= which column names rows, one of title, item"):
        bb.import_rows(other, tmp_path, format="projector")
    with pytest.raises(ValueError, match=r"names 1 rows, .* holds 2"):
        bb.import_rows(other, tmp_path, format="projector", ids="item")
    (tmp_path / "metadata.tsv").write_text("title\titem\nIt\t42\nThat\t7\n")
    assert bb.import_rows(other, tmp_path, format="projector", ids="item") == 2
    assert other.lookup([42, 7])[:, 0].tolist() == [1.0, 1.0]
    bb.import_rows(other, tmp_path / "tensors.tsv", ids="title", vocab=tmp_path / "titles")
    assert (tmp_path / "titles").read_text() == "It\nThat\n"
    (tmp_path / "metadata.tsv").write_text("title\titem\nIt\t42\nThat\n")
    with pytest.raises(ValueError, match=r"metadata.tsv: line 3 has 1 columns; nothing was changed"):
        bb.import_rows(other, tmp_path, format="projector", ids="item")
    with pytest.raises(ValueError, match=r"an export is a folder of both files; name it .projector"):
        bb.export_rows(other, tmp_path / "more.tsv")


def test_words_that_a_format_cannot_hold_are_refused(other: bb.Table, tmp_path: Path) -> None:
    other.set([0, 1], np.ones((2, 8), np.float32))
    (tmp_path / "words").write_text("fine\nNew York\ttab\n")
    for name in ("rows.vec", "rows.projector"):
        with pytest.raises(ValueError, match=r"word 'New York\\ttab' of id 1 "):
            bb.export_rows(other, tmp_path / name, vocab=tmp_path / "words")
    assert [path.name for path in tmp_path.iterdir()] == ["words"]
