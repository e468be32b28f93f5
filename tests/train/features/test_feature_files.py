"""Files of features: what they are read as, what is refused, and later files of a run."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

import pyarrow.parquet as pq  # noqa: E402

from bunkbed.train.data.store import load_vocabs  # noqa: E402
from bunkbed.train.data.vocab import DataError  # noqa: E402
from bunkbed.train.features.features import load_features, read_names  # noqa: E402
from bunkbed.train.features.reading import SideFile, parse_kinds, store_features  # noqa: E402
from feature_cases import every_pair, matrix, read, small  # noqa: E402


def test_columns_are_of_the_kinds_that_their_values_say(tmp_path: Path) -> None:
    about = read(
        tmp_path,
        "id,colour,tags,price,is_new,same\n3,red,p|q,10,1,5\n1,blue,q,,0,5\n2,red,q|r|q,30,1,5\n9,NA,p,20,0,5\n",
    )
    found, names = matrix(tmp_path / "data", "item")
    assert names == [("colour", "red"), ("tags", "p"), ("tags", "q"), ("price", ""), ("is_new", "")]
    third = np.float32(1.2247449)  # 10 less the mean 20, divided by the deviation 8.165
    expected = [[0, 0, 1, 0, 0], [1, 0, 1, third, 1], [1, 1, 1, -third, 1], [0, 1, 0, 0, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert load_vocabs(tmp_path / "data")[1].labels.tolist() == [1, 2, 3, 9]  # 9 has features alone
    assert load_features(tmp_path / "data")["item"].has_row.tolist() == [True, True, True, False]
    of_item = about["item"]
    assert (of_item["ids"], of_item["new"], of_item["features"]) == (4, 1, 5)
    assert [(each["name"], each["kind"], each["features"], each["left_out"]) for each in of_item["columns"]] == [
        ("colour", "category", 1, 1), ("tags", "values", 2, 1), ("price", "number", 1, 0),
        ("is_new", "number", 1, 0), ("same", "number", 0, 0),
    ]  # fmt: skip


def test_given_kinds_win(tmp_path: Path) -> None:
    text = "id\tzip\tnote\twords\n1\t7\ta\tx y\n2\t7\ta\ty z\n3\t8\ta\tz\n"
    read(tmp_path, text, "zip=category,2=skip,words=values")
    assert matrix(tmp_path / "data", "item")[1] == [("zip", "7"), ("words", "y"), ("words", "z")]


def test_users_share_one_feature(tmp_path: Path) -> None:
    read(tmp_path, "user,plan\na,x\nc,x\n", side="user")
    found, names = matrix(tmp_path / "data", "user")
    assert names == [("", "every user"), ("plan", "x")]
    assert found.tolist() == [[1, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    "text",
    [
        "item_id:token\tgenre:token_seq\tyear:token\n1\tA B\t95\n2\tB C,D\t95\n3\tA\t96\n",
        "sku,genre,year\n1,A|B,95\n2,B,95\n3,A,96\n",
        gzip.compress(b"1::A|B::95\n2::B::95\n3::A::96\n"),
        "1|A B|95\n2|B|95\n3|A|96\n",
        "id\tgenre\tyear\n1\tA,B\tnew\n2\tB\tnew\n3\tA\told\n",
        '"1","A, B",95\r\n"2",B,95\r\n"3",A,96\r\n',
    ],
    ids=["RecBole", "header", "gzip, colons", "bars", "only text", "quoted"],
)
def test_forms_of_text(text: str | bytes, tmp_path: Path) -> None:
    has_names = isinstance(text, str) and "genre" in text
    genre, year = ("genre", "year") if has_names else ("1", "2")
    read(tmp_path, text, "" if isinstance(text, str) and ":token" in text else f"{genre}=values,{year}=category")
    found, names = matrix(tmp_path / "data", "item")
    old = "new" if isinstance(text, str) and "new" in text else "95"
    assert names == [(genre, "A"), (genre, "B"), (year, old)]
    assert found.tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0]]


def test_parquet(tmp_path: Path) -> None:
    data = small(tmp_path)
    table = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int32()),
            "tags": pa.array([["A", "B"], ["B"], None]),
            "sold": pa.array([True, False, None]),
            "price": pa.array([1.5, None, 2.5]),
            "year": pa.array([95, 95, 96]),
        }
    )
    pq.write_table(table, tmp_path / "items.parquet")
    store_features(data, {"item": SideFile(tmp_path / "items.parquet")}, {"year": "category"}, every_pair(data))
    found, names = matrix(data, "item")
    assert names == [("tags", "B"), ("sold", ""), ("price", ""), ("year", "95")]
    assert found.tolist() == [[1, 1, -1, 1], [1, 0, 0, 1], [0, 0, 1, 0]]


def test_the_column_of_ids_is_the_named_one_or_a_well_known_one(tmp_path: Path) -> None:
    read(tmp_path, "kind,key\nA,1\nA,2\n", id_col="key")
    assert matrix(tmp_path / "data", "item")[1] == [("kind", "A")]
    read(tmp_path, "kind,movie_id\nB,1\nB,2\n")
    assert matrix(tmp_path / "data", "item")[1] == [("kind", "B")]


@pytest.mark.parametrize(
    ("text", "kinds", "message"),
    [
        ("id,a\n1,x\n2,x,y\n", "", r"features.csv line 3: expected 2 columns, found 3: '2, x, y'"),
        ("id,a\n1,x\n2,x\n1,y\n", "", r"features.csv line 4: the item '1' is there a second time \(first at line 2\)"),
        ("id,a\n1,x\n,x\n", "", "features.csv line 3: the item is missing"),
        ("item,a\n1,x\nb,x\n", "", "features.csv line 3: the item 'b' is no integer, as those of the interactions are"),
        ("id,a\n7,x\n8,x\n", "", "none of its 2 items is among the 3 of the interactions; the column of ids is 'id'"),
        ("item\n1\n2\n", "", "has one column"),
        ("id,a,a\n1,x,y\n", "", "2 columns are called 'a'; give each a name of its own"),
        ("item,a\n", "", "has a header and no rows"),
        ("id,a\n1,x\n2,y\n", "", "has no feature that two items share; leave it out"),
        ("id,a\n1,2\n2,b\n", "a=number", r"line 3: 'a' is not a finite number \(found 'b'\); correct it, or give --fe"),
        ("id,a\n1,2\n2,inf\n", "a=number", r"line 3: 'a' is not a finite number \(found 'inf'\)"),
        ("id,a\n1,x\n2,x\n", "b=skip", "no column 'b', which --feature-kinds names"),
        ("id,a\n1,x\n2,\udcff\n", "", "line 3: the column 'a' is not UTF-8 text"),
    ],
)
def test_a_bad_file_is_named_with_its_line(text: str, kinds: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text.encode("utf-8", "surrogateescape"), kinds)
    assert load_features(tmp_path / "data") == {} and len(load_vocabs(tmp_path / "data")[1]) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item,movie_id,a\n1,2,x\n", "cannot tell which column holds the items: 'item', 'movie_id'; rename the others"),
        ("user,a\n1,x\n", "the first column, 'user', holds users; give it with --user-features"),
        ("sku9,a\np,x\nq,x\n", "line 1 is a header, or 'sku9' is one of the items and has no interactions; --header"),
        (
            "id,v:float_seq\np,1 2\n",
            "column 'v' holds lists of numbers, which are no features; give --feature-kinds v=sk",
        ),
        ("id,a\np,1e308\nq,-1e308\nr,1e308\n", "line 2: 'a' is too far from the other numbers to be a weight"),
    ],
)
def test_what_is_not_clear_is_asked(text: str, message: str, tmp_path: Path) -> None:
    small(tmp_path, ["p", "q", "r"])
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, text)


def test_a_header_is_found_by_the_ids_or_given(tmp_path: Path) -> None:
    small(tmp_path, ["p", "q", "r"])
    read(tmp_path, "p,b,NA\nq,b,1\nr,c,2\n")  # a word above numbers, and yet no header
    assert matrix(tmp_path / "data", "item")[1] == [("1", "b"), ("2", "")]
    read(tmp_path, "sku9,a\np,x\nq,x\n", header=True)
    assert matrix(tmp_path / "data", "item")[1] == [("a", "x")]
    read(tmp_path, "sku9,x\np,x\nq,y\n", header=False)
    assert load_vocabs(tmp_path / "data")[1].labels.tolist() == ["p", "q", "r", "sku9"]


def test_a_column_named_id_gives_way_to_a_well_known_name(tmp_path: Path) -> None:
    read(tmp_path, "id,a,item_id\n2,x,3\n3,x,1\n1,y,2\n", "id=skip")
    assert matrix(tmp_path / "data", "item")[0].tolist() == [[1], [0], [1]]


def test_a_position_of_the_interactions_is_not_one_of_the_file(tmp_path: Path) -> None:
    read(tmp_path, "1,3,x\n2,1,x\n3,2,y\n", "1=skip", id_col="1")
    assert matrix(tmp_path / "data", "item")[0].tolist() == [[1], [1], [0]]


def test_numbers_that_differ_by_rounding_alone_are_equal(tmp_path: Path) -> None:
    about = read(tmp_path, "id,a,b\n1,0.1,x\n2,0.1,x\n3,0.1,y\n")
    assert about["item"]["columns"][0]["features"] == 0


def test_lists_of_numbers_in_parquet_are_refused(tmp_path: Path) -> None:
    data = small(tmp_path)
    pq.write_table(pa.table({"id": [1, 2], "v": [[0.5, 1.0], [1.0]], "a": ["x", "x"]}), tmp_path / "v.parquet")
    file = {"item": SideFile(tmp_path / "v.parquet")}
    with pytest.raises(DataError, match=r"column 'v' holds list<.*>, which is no feature; give --feature-kinds v=skip"):
        store_features(data, file, {}, every_pair(data))
    store_features(data, file, {"v": "skip"}, every_pair(data))
    assert matrix(data, "item")[1] == [("a", "x")]


@pytest.mark.parametrize("text", ["a", "a=colour", "=skip", "a=skip,a=number"])
def test_bad_kinds(text: str) -> None:
    with pytest.raises(ValueError, match="option feature_kinds"):
        parse_kinds(text)


@pytest.mark.parametrize("name", ["item_features.parquet", "features.json", "item_feature_names.parquet"])
def test_damaged_features_are_found(name: str, tmp_path: Path) -> None:
    read(tmp_path, "id,a\n1,x\n2,x\n")
    path = tmp_path / "data" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x55
    path.write_bytes(content[:20] if name == "features.json" else content)
    with pytest.raises(DataError, match=name):
        load_features(tmp_path / "data")
        read_names(tmp_path / "data", "item")
    if name != "features.json":
        path.unlink()
        with pytest.raises(DataError, match=f"{name}: is missing"):
            load_features(tmp_path / "data")
            read_names(tmp_path / "data", "item")


def test_a_later_file_keeps_kinds_and_known_values(tmp_path: Path) -> None:
    before = small(tmp_path)
    read(tmp_path, "id,a,size,note:token\n1,x,1,p\n2,x,1,p\n3,y,2,p\n", "size=category,3=skip")
    names = read_names(before, "item")
    assert names == [("a", "x"), ("size", "1")]
    (tmp_path / "later").mkdir()
    after = small(tmp_path / "later")
    (tmp_path / "later.csv").write_text("id,a,note:token,size,more\n1,z,p,1,m\n2,z,p,2,m\n3,x,p,3,n\n")
    file = {"item": SideFile(tmp_path / "later.csv")}
    store_features(after, file, {"more": "category"}, every_pair(after), before)
    found, grown = matrix(after, "item")
    assert grown == [*names, ("a", "z"), ("more", "m")]
    # x of one item alone has a row already; columns that are known keep their kind without a given one.
    assert found.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]]
    store_features(after, file, {"note": "skip"}, every_pair(after), before)
    assert read_names(after, "item") == [*names, ("a", "z"), ("more", "m")]


def test_a_later_file_keeps_separators_and_scales(tmp_path: Path) -> None:
    before = small(tmp_path)
    read(
        tmp_path, "id,tags,size,same,note\n1,Film Noir|Drama,1,7,a\n2,Film Noir,2,7,a\n3,Drama,3,7,b\n", "note=category"
    )
    names = read_names(before, "item")
    (tmp_path / "later").mkdir()
    after = small(tmp_path / "later")
    file = {"item": SideFile(tmp_path / "later.csv")}

    def later(text: str, **kinds: str) -> dict[str, Any]:
        (tmp_path / "later.csv").write_text(text)
        found: dict[str, Any] = store_features(after, file, kinds, every_pair(after), before)["item"]
        return found

    about = later("id,tags,size\n1,Film Noir,1\n2,Film Noir,2\n")
    assert read_names(after, "item") == names  # and no words of "Film Noir"
    assert (about["lost"], about["absent"]) == (1, ["same", "note"])
    about = later("id,size,tags\n1,1,Drama\n2,2,Drama\n3,3,Drama\n", size="number")
    assert about["lost"] == 0
    with pytest.raises(DataError, match="'size' is of kind number in this run and cannot become category"):
        later("id,size,tags\n1,1,Drama\n", size="category")
    with pytest.raises(DataError, match="line 3: 'size' is too far from the other numbers to be a weight"):
        later("id,size,tags\n1,1,Drama\n2,50000,Drama\n")
    about = later("id,same,tags\n1,7,Drama\n2,50000,Drama\n3,7,Drama\n")  # scaled when it first varies
    found = matrix(after, "item")
    assert np.abs(found[0][:, found[1].index(("same", ""))]).max() < 2
    assert about["columns"][0]["mean"] == pytest.approx(50014 / 3)
