"""Reading interactions: every form gives the same pairs, every bad file a message that names the place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.parquet as pq  # noqa: E402

from bunkbed.train.data import formats as data_formats  # noqa: E402
from bunkbed.train.data.interactions import (  # noqa: E402
    DataError,
    Interactions,
    Vocab,
    read_candidates,
    read_dataset,
    read_interactions,
)
from bunkbed.train.data.store import load_dataset, load_vocabs, save_dataset, seen_items, write_rows  # noqa: E402
from bunkbed.train.data.stored import StoredVocab  # noqa: E402

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not at {DATA}")

PAIRS = [("7", "30"), ("7", "10"), ("5", "30"), ("9", "20")]


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def labelled(data: Interactions) -> list[tuple[object, object]]:
    return list(zip(data.user_vocab.decode(data.users), data.item_vocab.decode(data.items), strict=True))


INT_PAIRS = [(int(user), int(item)) for user, item in PAIRS]
FORMS: dict[str, Callable[[], str]] = {
    "a.csv": lambda: "".join(f"{u},{i}\n" for u, i in PAIRS),
    "header.csv": lambda: "user_id,item_id\n" + "".join(f"{u},{i}\n" for u, i in PAIRS),
    "windows.csv": lambda: "\ufeffuserId,movieId\r\n" + "".join(f"{u},{i}\r\n" for u, i in PAIRS),
    "swapped.csv": lambda: "rating,Item ID,User ID\n" + "".join(f"3.5,{i},{u}\n" for u, i in PAIRS),
    "quoted.csv": lambda: "user,title,item\n" + "".join(f'"{u}","a, ""b""\nc",{i}\n' for u, i in PAIRS),
    "spaces.csv": lambda: "user, item\n" + "".join(f"{u}, {i} \n" for u, i in PAIRS),
    "semicolon.csv": lambda: "user;item\n" + "".join(f"{u};{i}\n" for u, i in PAIRS),
    "a.tsv": lambda: "".join(f"{u}\t{i}\t4\t978300760\n" for u, i in PAIRS),
    "quote.tsv": lambda: "user\titem\ttitle\n" + "".join(f'{u}\t{i}\t"12 inch\n' for u, i in PAIRS),
    "blank-lines.tsv": lambda: "\n" + "".join(f"{u}\t{i}\n\n" for u, i in PAIRS),
    "no-last-newline.tsv": lambda: "\n".join(f"{u}\t{i}" for u, i in PAIRS),
    "ratings.dat": lambda: "".join(f"{u}::{i}::5::978300760\n" for u, i in PAIRS),
    "bar.txt": lambda: "".join(f"{u}|{i}\n" for u, i in PAIRS),
    "blanks.txt": lambda: "".join(f"{u}  {i} 5\n" for u, i in PAIRS),
    "blanks-header.txt": lambda: "user item\n" + "".join(f"{u} {i}\n" for u, i in PAIRS),
    "adjacency.txt": lambda: "7 30 10\n5 30\n9 20\n4\n11\n",
    "a.csv.gz": lambda: "".join(f"{u},{i}\n" for u, i in PAIRS),
    "adjacency.gz": lambda: "7 30 10\n5 30\n9 20\n4\n11\n",
    "extensionless": lambda: "".join(f"{u}\t{i}\n" for u, i in PAIRS),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_pairs(name: str, tmp_path: Path) -> None:
    data = read_interactions(write(tmp_path / name, FORMS[name]()))
    assert labelled(data) == INT_PAIRS
    assert data.user_vocab.decode([0, 1, 2]) == [7, 5, 9]
    assert data.users.dtype == data.items.dtype == np.int64
    assert data.num_items == 3
    assert data.num_users == 3


@pytest.mark.parametrize(
    ("users", "items"),
    [
        (pa.array([7, 7, 5, 9], pa.int32()), pa.array([30, 10, 30, 20], pa.uint16())),
        (pa.array(["7", "7", "5", "9"]), pa.array(["30", "10", "30", "20"], pa.large_string())),
        (pa.array(["7", "7", "5", "9"]).dictionary_encode(), pa.array([30, 10, 30, 20])),
    ],
)
def test_parquet(users: object, items: object, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"when": [1, 2, 3, 4], "movieId": items, "userId": users}), path)
    data = read_interactions(path)
    assert labelled(data) == INT_PAIRS
    assert data.form == "Parquet, users from column 'userId', items from column 'movieId'"


def test_strings_stay_strings(tmp_path: Path) -> None:
    data = read_interactions(write(tmp_path / "a.tsv", "/m/027\tNA\n007\tcafé\nx7\tNA\n"))
    assert labelled(data) == [("/m/027", "NA"), ("007", "café"), ("x7", "NA")]
    assert data.user_vocab.kind == "str"


def test_columns_by_name_and_position(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "who,what,when\nann,tea,1\nbob,mate,2\n")
    named = read_interactions(path, user_col="who", item_col="what")
    assert labelled(named) == [("ann", "tea"), ("bob", "mate")]
    assert labelled(read_interactions(path, user_col=1, item_col="0")) == [("tea", "ann"), ("mate", "bob")]


def test_the_layout_can_be_forced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "1 2 3\n4 5 6\n")
    assert labelled(read_interactions(path)) == [(1, 2), (4, 5)]
    assert labelled(read_interactions(path, layout="adjacency")) == [(1, 2), (1, 3), (4, 5), (4, 6)]
    path = write(tmp_path / "b.txt", "1 2 3\n4 5\n")
    with pytest.raises(DataError, match=r"b.txt line 2: expected 3 columns, found 2: '4, 5'"):
        read_interactions(path, layout="columns")


def test_header_can_be_forced_either_way(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "ann,tea\nbob,mate\n")
    assert len(read_interactions(path)) == 2
    assert labelled(read_interactions(path, header=True)) == [("bob", "mate")]
    path = write(tmp_path / "b.csv", "user,item\nbob,mate\n")
    assert len(read_interactions(path)) == 1
    assert labelled(read_interactions(path, header=False)) == [("user", "item"), ("bob", "mate")]


def test_repeated_pairs_count_once(tmp_path: Path) -> None:
    data = read_interactions(write(tmp_path / "a.csv", "1,2\n1,3\n1,2\n2,2\n1,3\n"))
    assert labelled(data) == [(1, 2), (1, 3), (2, 2)]
    assert data.duplicates == 2


def test_many_batches_keep_the_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 5_000, 600_000), rng.integers(0, 1_000_000, 600_000)
    lines = "\n".join(f"u{u},{i}" for u, i in zip(users.tolist(), items.tolist(), strict=True))
    data = read_interactions(write(tmp_path / "a.csv", lines))
    expected = list(dict.fromkeys((f"u{u}", i) for u, i in zip(users.tolist(), items.tolist(), strict=True)))
    assert labelled(data) == expected


BAD = {
    "empty.csv": ("", "empty.csv: is empty"),
    "empty.csv.gz": ("", "empty.csv.gz: is empty"),
    "blank.csv": ("\n\n  \n", "blank.csv: holds only blank lines"),
    "header-only.csv": (
        "user,item\n",
        "header-only.csv: holds no pairs of user and item, only a header line",
    ),
    "one-column.csv": (
        "12\n13\n",
        "one-column.csv line 1: expected a user and an item separated by comma, tab or space, found '12'",
    ),
    "ragged.csv": ("1,2,3\n4,5,6\n\n7,8\n", "ragged.csv line 4: expected 3 columns, found 2: '7, 8'"),
    "ragged.tsv": ("1\t2\n4\t5\n7\t8\t9\n", "ragged.tsv line 3: expected 2 columns, found 3: '7, 8, 9'"),
    "ragged.dat": ("1::2::3\n4::5\n", "ragged.dat line 2: expected 3 columns, found 2: '4, 5'"),
    "ragged.txt": ("1 2\n4 5\n7 8\n7 8 9\n", "ragged.txt line 4: expected 2 columns, found 3: '7, 8, 9'"),
    "ragged-quoted.csv": (
        'user,title,item\n1,"a\nb",2\n3,4\n',
        "ragged-quoted.csv line 4: expected 3 columns, found 2: '3, 4'",
    ),
    "missing-item.csv": ("user,item\n1,2\n3,\n", "missing-item.csv line 3: the item is missing (found '')"),
    "missing-user.tsv": ("1\t2\n \t4\n", "missing-user.tsv line 2: the user is missing (found ' ')"),
    "missing-word.csv": (
        "user,item\n1,2\n3,NaN\n",
        "missing-word.csv line 3: the item is missing (found 'NaN')",
    ),
    "missing-word.txt": ("1 2\n3 NULL\n", "missing-word.txt line 2: the item is missing (found 'NULL')"),
    "binary.csv": (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
        "binary.csv: is not text (byte 0x1a at offset 6); expected CSV, TSV, Parquet, adjacency lines",
    ),
    "utf16.csv": ("1,2\n".encode("utf-16"), "utf16.csv: is UTF-16 text; save it as UTF-8"),
    "latin.csv": (
        "user,item\nann,tea\nbob,café\n".encode("latin-1"),
        "latin.csv line 3: the item is not UTF-8 text (byte 0xe9); save the file as UTF-8",
    ),
    "a.zip": (b"PK\x03\x04rest", "a.zip: is a zip archive; unpack it, or compress it with gzip"),
    "broken.parquet": (b"PAR1nothing", "broken.parquet: is damaged Parquet"),
    "unknown.csv": (
        "name,thing,score\nann,tea,1\n",
        "unknown.csv: cannot tell which column holds the users; it has: name, thing, score; "
        "say which with --user-col NAME",
    ),
    "half-known.csv": (
        "user,when,score\nann,1,1\n",
        "half-known.csv: cannot tell which column holds the items; it has: user, when, score; "
        "say which with --item-col NAME",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_name_the_place(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read_interactions(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "content", "count", "first"),
    [
        ("a.csv", "1,2,3\n4,5,6\n\n7,8\n,9,9\n9,9,9\n", 2, "line 4: expected 3 columns, found 2: '7, 8'"),
        ("a.tsv", "1\t2\n4\t5\n7\t8\t9\n \t8\n9\t9\n", 2, "line 3: expected 2 columns, found 3: '7, 8, 9'"),
        ("a.dat", "1::2::3\n4::5\n4::5::6\n9::9::9\n", 1, "line 2: expected 3 columns, found 2: '4, 5'"),
        ("a.txt", "1 2\n4 5\n7 8 9\n7\n9 9\n", 2, "line 3: expected 2 columns, found 3: '7, 8, 9'"),
        ("b.csv", "user,item\n1,2\n,7\n8,\n4,5\n9,9\n", 2, "line 3: the user is missing (found '')"),
        ("c.csv", "\n\nuser,item\n1,2\n\n,7\n8\n4,5\n9,9\n", 2, "line 6: the user is missing (found '')"),
        ("d.csv", "user,item\n1,2\n8\n,7\n4,5\n9,9\n", 2, "line 3: expected 2 columns, found 1: '8'"),
        ("c.tsv", "1\t2\n\t\n7\n4\t5\n9\t9\n", 2, "line 2: the user is missing (found '')"),
        (
            "lines.csv",
            'user,item,text\n1,2,"a\nb"\n4,5,"\n\n"\n ,7,c\n8\n9,9,\n',
            2,
            "line 7: the user is missing (found ' ')",
        ),
    ],
)
def test_malformed_rows_are_left_out_and_counted(
    name: str, content: str, count: int, first: str, tmp_path: Path
) -> None:
    data = read_interactions(write(tmp_path / name, content), strict=False, layout="columns")
    assert labelled(data) == [(1, 2), (4, 5), (9, 9)]
    assert (data.malformed, data.first_malformed) == (count, first)


@pytest.mark.parametrize(("kinds", "problem"), [((",4,3\n", "9,9\n"), "missing"), (("9,9\n", ",4,3\n"), "expected 3")])
def test_the_first_malformed_row_is_the_first_of_the_file_far_into_it(
    kinds: tuple[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_formats, "_BLOCK_BYTES", 256)
    sound = ["\n1,2,3\n", "4,5,6\n"] * 400
    path = write(tmp_path / "a.csv", "".join(["user,item,x\n", *sound, kinds[0], *sound, *sound, kinds[1]]))
    data = read_interactions(path, strict=False)
    assert data.malformed == 2
    assert data.first_malformed.startswith("line 1202: ") and problem in data.first_malformed


MISREAD = {
    "short-header.csv": (
        "user,item\n1,2,3\n4,5,6\n",
        "all 2 rows are malformed, read as CSV, users from column 'user', items from column 'item'; the first: line 2: "
        "expected 2 columns, found 3: '1, 2, 3'; line 1 says how many columns there are: correct it, or the rows below",
    ),
    "short-first-line.csv": (
        "\n1,2\n" + "1,2,3\n" * 10,
        "10 of 11 rows are malformed, read as CSV, users from column 0, items from column 1; the first: line 3: "
        "expected 2 columns, found 3: '1, 2, 3'; line 2 says how many",
    ),
    "short-first-line.txt": ("1 2\n" + "1 2 3\n" * 4, "4 of 5 rows are malformed, read as blank-separated"),
    "no-users.tsv": (
        "user\titem\n\t4\n\t5\n2\t6\n",
        "2 of 3 rows are malformed, read as TSV, users from column 'user', items from column 'item'; "
        "the first: line 2: the user is missing (found '')",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_file_of_which_more_than_half_is_malformed_is_misread(name: str, tmp_path: Path) -> None:
    content, message = MISREAD[name]
    with pytest.raises(DataError) as caught:
        read_interactions(write(tmp_path / name, content), strict=False)
    assert str(caught.value).startswith(f"{tmp_path / name}: {message}")


def test_a_file_of_which_half_is_malformed_is_read(tmp_path: Path) -> None:
    data = read_interactions(write(tmp_path / "a.csv", "1,2\n3\n4\n5,6\n"), strict=False)
    assert (labelled(data), data.malformed) == ([(1, 2), (5, 6)], 2)


@pytest.mark.parametrize("strict", [True, False])
def test_users_without_items_are_counted_and_no_mistake(strict: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "7 30 10\n5\n\n9 20\n4\n11\n")
    data = read_interactions(path, strict=strict)
    assert labelled(data) == [(7, 30), (7, 10), (9, 20)]
    assert (data.empty_users, data.malformed) == (3, 0)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("above", ["\n", "\n\n", "\r\n", "  \n", "\n \t\n", "\ufeff\n"])
def test_blank_lines_above_a_header_and_within(above: str, strict: bool, tmp_path: Path) -> None:
    for separator in (",", "\t"):
        rows = ["user", "item"], [" "], ["7", "30"], [""], ["5", "10"]
        text = above + "".join(separator.join(row) + "\n" for row in rows)
        data = read_interactions(write(tmp_path / "a.csv", text), strict=strict)
        assert (labelled(data), data.malformed) == ([(7, 30), (5, 10)], 0)
    with pytest.raises(DataError, match=r"a.csv line 2: expected a user and an item .*, found '12'"):
        read_interactions(write(tmp_path / "a.csv", "\n12\n13\n"))


OPEN_QUOTES = {
    "to the end": ('1,2,3\n3,4,"x\n5,6,7\n7,8,9\n', "unexpected end of data"),
    "to the next quote": ('1,2,3\n3,4,"x\n5,6,7\n8,9,"y\n9,9,9\n', "',' expected after '\"'"),
    "over a line without its end": ('1,2,3\n3,4,"x\n5,6,7', "unexpected end of data"),
    "after a missing label": ('1,,3\n3,4,"x\n5,6,7', "unexpected end of data"),
    "over a long field": ('1,2,3\n3,4,"x\n' + "5,6,7\n" * 30_000, "field larger than field limit"),
    "over more than a block": ('1,2,3\n3,4,"x\n' + "5,6,7\n" * 40_000, "field larger than field limit"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", OPEN_QUOTES)
def test_a_quote_that_is_not_closed_is_an_error_that_names_its_line(
    name: str, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, reason = OPEN_QUOTES[name]
    if name == "over more than a block":
        monkeypatch.setattr(data_formats, "_BLOCK_BYTES", 1 << 15)
    with pytest.raises(DataError) as caught:
        read_interactions(write(tmp_path / "a.csv", "user,item,text\n" + content), strict=strict)
    message = str(caught.value)
    assert "a.csv line 3: a quote is opened and not closed where its field ends" in message and reason in message
    assert message.endswith("'3,4,\"x'; close the quote, or double it where it is part of the text")


def test_a_line_too_long_for_its_quotes_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.csv: a quote is opened and not closed where its field ends \(field larger"):
        read_interactions(write(tmp_path / "a.csv", 'user,item\n1,"' + "5" * 140_000 + '"\n3,4\n'))


def test_odd_quotes_within_a_line_are_text(tmp_path: Path) -> None:
    text = 'user,item,text\n1,2,"a"b\n3,4,"x\ny"\n5,6,12"\n7,8,"z'
    assert labelled(read_interactions(write(tmp_path / "a.csv", text))) == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_a_name_of_several_columns_is_refused_and_their_positions_are_not(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "item,user,user\n1,2,3\n4,5,6\n")
    columns = [pa.array([1, 4]), pa.array([2, 5]), pa.array([3, 6])]
    pq.write_table(pa.Table.from_arrays(columns, names=["item", "user", "user"]), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(DataError) as caught:
            read_interactions(tmp_path / name, user_col="user")
        assert str(caught.value) == (
            f"{tmp_path / name}: 2 columns are called 'user', at positions 1, 2 (from 0); "
            "give one by its position: --user-col 1"
        )
        with pytest.raises(DataError, match="say which with --user-col NAME, or its position from 0"):
            read_interactions(tmp_path / name)
        for position, users in ((1, (2, 5)), (2, (3, 6))):
            data = read_interactions(tmp_path / name, user_col=position)
            assert labelled(data) == list(zip(users, (1, 4), strict=True))


def test_rows_of_parquet_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    items = pa.array(["a", "b", "", "a", "c"]).dictionary_encode()
    pq.write_table(pa.table({"user": [1, None, 3, 1, 5], "item": items}), path)
    data = read_interactions(path, strict=False)
    assert sorted(labelled(data)) == [(1, "a"), (5, "c")]
    assert (data.malformed, data.duplicates) == (2, 1)
    assert data.first_malformed == "the user of row 1 (from 0) is missing"


def test_labels_of_a_parquet_dictionary_are_numbered_as_they_appear(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    users = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), pa.array(["a", "unused", "c"]))
    pq.write_table(pa.table({"user": users, "item": [1, 2, 3]}), path)
    assert read_interactions(path).user_vocab.labels.tolist() == ["c", "a"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user_col": "usr"}, "has no column 'usr'; it has: user, item, when; did you mean 'user'"),
        ({"item_col": "zzz"}, "has no column 'zzz'; it has: user, item, when"),
        ({"user_col": 3}, "has no column 3; it has 3 columns, 0 to 2: user, item, when"),
        ({"user_col": "item"}, "users and items cannot both come from column 'item'"),
    ],
)
def test_bad_columns_list_those_there(columns: dict[str, str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "user,item,when\n1,2,3\n")
    with pytest.raises(DataError) as caught:
        read_interactions(path, **columns)
    assert message in str(caught.value)


def test_a_name_without_a_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"has no header line to find column 'user' in \(line 1 is '1,2,3'\)"):
        read_interactions(path, user_col="user")


def test_parquet_nulls_and_types(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"user": [1, 2, None], "item": [1, 2, 3]}), path)
    with pytest.raises(DataError, match=r"a.parquet row 2: column 'user' is missing \(null\)"):
        read_interactions(path)
    pq.write_table(pa.table({"user": [1.0, 2.0], "item": [1, 2]}), path)
    with pytest.raises(DataError, match="column 'user' holds double, users and items must be integers or strings"):
        read_interactions(path)
    pq.write_table(pa.table({"user": ["a", ""], "item": [1, 2]}), path)
    with pytest.raises(DataError, match=r"a.parquet row 1: the user is missing \(''\)"):
        read_interactions(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"{n},{n}\n" for n in range(200_000)).encode())
    path = tmp_path / "a.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a.csv.gz: the gzip stream is damaged or cut short"):
        read_interactions(path)
    path.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])  # the checksum, which DuckDB ignores
    with pytest.raises(DataError, match=r"a.csv.gz: the gzip stream is damaged or cut short \(CRC check failed"):
        read_interactions(path)


@pytest.mark.parametrize("name", FORMS)
def test_duckdb_reads_plain_text_as_our_reader(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / name, FORMS[name]().replace("30", "\u3000é\u00a030"))
    found = read_interactions(path, strict=False)
    monkeypatch.setattr(data_formats.TextPairs, "_insert_plain", lambda *_: False)
    expected = read_interactions(path, strict=False)
    assert labelled(found) == labelled(expected)
    assert (found.malformed, found.first_malformed) == (expected.malformed, expected.first_malformed)


@pytest.mark.parametrize("name", ["g[1]", "a*b", "a?b", "a\\b", "it's"])
def test_a_path_is_no_pattern(name: str, tmp_path: Path) -> None:
    for other in ("g1", "aXb"):
        (tmp_path / other).mkdir()
        write(tmp_path / other / "a.csv", "8,8\n")
        pq.write_table(pa.table({"user": [8], "item": [8]}), tmp_path / other / "a.parquet")
    (tmp_path / name).mkdir()
    assert labelled(read_interactions(write(tmp_path / name / "a.csv", "1,2\n"))) == [(1, 2)]
    pq.write_table(pa.table({"user": [1], "item": [2]}), tmp_path / name / "a.parquet")
    assert labelled(read_interactions(tmp_path / name / "a.parquet")) == [(1, 2)]


def test_reading_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from benchmarks.cases.training import train_data

    train_data.main(["--tiny", "--dir", str(tmp_path)])
    assert "quoted.csv, streamed: " in capfd.readouterr().out


def test_directories_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory; give one file"):
        read_interactions(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_interactions(tmp_path / "absent.csv")


def test_a_test_file_extends_the_numbering(tmp_path: Path) -> None:
    train = write(tmp_path / "train.txt", "7 30 10\n5 30\n9 20\n")
    test = write(tmp_path / "test.txt", "7 20 40\n8 30\n")
    data = read_dataset(train, test=test)
    assert data.test is not None
    assert labelled(data.test) == [(7, 20), (7, 40), (8, 30)]
    assert (data.cold_users, data.cold_items, data.num_users, data.num_items) == (1, 1, 4, 4)
    assert data.train.user_vocab is data.test.user_vocab
    assert labelled(data.train) == INT_PAIRS


def test_candidates(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "0\t1\n0\t2\n1\t2\n")
    test = write(tmp_path / "test.tsv", "0\t3\t5\t1\n1\t1\t5\t1\n")
    negatives = write(tmp_path / "test.negative", "(0,3)\t4\t1\n(1,1)\t4\t3\n")
    data = read_dataset(train, test=test, test_negatives=negatives)
    assert data.candidates is not None
    items = data.train.item_vocab
    assert items.decode(data.candidates.positives) == [3, 1]
    assert [items.decode(row) for row in data.candidates.negatives] == [[4, 1], [4, 3]]
    assert data.cold_items == 2

    write(negatives, "(0,3)\t4\t1\n(1,2)\t4\t3\n")
    with pytest.raises(DataError, match=r"test.negative line 2: holds out item 2 of user 1, a pair that .* not have"):
        read_dataset(train, test=test, test_negatives=negatives)
    for content, message in (
        ("(0,3)\t4\t1\n(1,1)\t4\n", "line 2: has 1 negatives where the lines above have 2"),
        ("0\t4\t1\n", r"line 1: expected '\(user,item\)' and its negatives separated by tabs, found '0"),
    ):
        write(negatives, content)
        with pytest.raises(DataError, match=message):
            read_candidates(negatives, (data.train.user_vocab, items))


def test_saved_dataset_is_the_same(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "ann\t1\nann\t2\nbob\t2\nann\t3\n")
    test = write(tmp_path / "test.tsv", "ann\t4\nbob\t1\n")
    negatives = write(tmp_path / "test.negative", "(ann,4)\t4\t1\n(bob,1)\t4\t3\n")
    data = read_dataset(train, test=test, test_negatives=negatives)
    save_dataset(tmp_path / "data", data)
    again = load_dataset(tmp_path / "data")
    assert again.test is not None and again.candidates is not None and data.candidates is not None
    assert labelled(again.train) == labelled(data.train)
    assert labelled(again.test) == [("ann", 4), ("bob", 1)]
    assert np.array_equal(again.candidates.negatives, data.candidates.negatives)
    assert (again.train.source, again.train.form) == (str(train), data.train.form)
    assert [len(vocab) for vocab in load_vocabs(tmp_path / "data")] == [2, 4]
    assert seen_items(tmp_path / "data", 0).tolist() == [0, 1, 2]
    assert seen_items(tmp_path / "data", 9).tolist() == []
    (tmp_path / "data" / "items.parquet").unlink()
    with pytest.raises(DataError, match=r"holds no saved interactions \(items.parquet is missing\)"):
        load_dataset(tmp_path / "data")


def test_vocab_finds_and_suggests() -> None:
    numbers = Vocab.of([10, 30, 20])
    assert numbers.index("20") == numbers.index(20) == 2
    assert numbers.encode([30, 5, "10", "x"]).tolist() == [1, -1, 0, -1]
    with pytest.raises(DataError, match="user 22 is not among the 3 known; the nearest are 20, 30, 10"):
        numbers.index(22, what="user")
    words = Vocab.of(["anna", "bob", "carol"])
    with pytest.raises(DataError, match="user 'Ana' is not among the 3 known; the nearest are anna"):
        words.index("Ana", what="user")
    with pytest.raises(IndexError, match=r"index 3 at position 1 is outside \[0, 3\)"):
        words.decode([0, 3])


@pytest.mark.parametrize("labels", [[*range(90, 100)], ["a", *"cbdefghij"]])
@pytest.mark.parametrize("stored", [False, True])
def test_labels_are_taken_from_several_parts(labels: list[int] | list[str], stored: bool, tmp_path: Path) -> None:
    vocab = Vocab.of(labels)
    if stored:
        batch = pa.record_batch({"label": vocab.array})
        write_rows(tmp_path / "labels.parquet", batch.schema, [batch], row_group=3)
        vocab = StoredVocab(tmp_path / "labels.parquet")
    for wanted in ([8, 0, 8, 3, 2, 9], [4], []):
        taken = vocab.take(np.array(wanted, dtype=np.int64))
        assert taken.to_pylist() == vocab.decode(wanted) == [labels[at] for at in wanted]
        assert taken.type == (pa.int64() if vocab.kind == "int" else pa.string())
    for outside in (-1, 10):
        with pytest.raises(IndexError, match=rf"index {outside} at position 1 is outside \[0, 10\)"):
            vocab.take(np.array([3, outside]))


@needs_data
@pytest.mark.parametrize(
    ("name", "pairs", "users", "items"),
    [("ncf-ml1m/train.tsv.gz", 994_169, 6_040, 3_704), ("gowalla/train.txt.gz", 810_128, 29_858, 40_981)],
)
def test_real_files(name: str, pairs: int, users: int, items: int) -> None:
    data = read_interactions(DATA / name)
    assert (len(data), data.num_users, data.num_items, data.duplicates) == (pairs, users, items, 0)


@needs_data
def test_real_candidates() -> None:
    folder = DATA / "ncf-ml1m"
    data = read_dataset(
        folder / "train.tsv.gz",
        test=folder / "ml-1m.test.rating.gz",
        test_negatives=folder / "ml-1m.test.negative.gz",
    )
    assert data.candidates is not None and data.test is not None
    assert data.candidates.negatives.shape == (6_040, 99)
    assert (data.num_users, data.num_items, data.cold_items, len(data.test)) == (6_040, 3_706, 2, 6_040)
    among = (data.candidates.negatives == data.candidates.positives[:, None]).any(axis=1)
    assert among.sum() == 156


@needs_data
def test_real_files_of_other_kinds() -> None:
    triples = read_interactions(DATA / "fb15k-237" / "train.txt.gz", item_col=2)
    assert triples.user_vocab.kind == "str"
    with pytest.raises(DataError, match="cannot tell which column holds the users; it has: label, I1, I2"):
        read_interactions(DATA / "criteo-sample" / "criteo_sample.txt.gz")
