"""Detection of the columns of users and items in a file, and of a header line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bunkbed.train.data.vocab import DataError

HeaderChoice = bool | Literal["auto"]
LayoutChoice = Literal["auto", "columns", "adjacency"]

# Compared in lower case, only letters and digits: "User ID", "user_id" and "userId" are equal.
_USER_WORDS = """
u uid user users userid usersid userindex useridx customer customerid visitor visitorid session sessionid
member memberid reviewer reviewerid account accountid listener listenerid reader readerid
"""
_ITEM_WORDS = """
i iid item items itemid itemindex itemidx movie movieid film filmid product productid asin parentasin
track trackid song songid artist artistid book bookid isbn business businessid venue venueid poi location
locationid article articleid news newsid video videoid game gameid sku anime animeid
"""
USER_NAMES = frozenset(_USER_WORDS.split())
ITEM_NAMES = frozenset(_ITEM_WORDS.split())
_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")


def looks_like_header(rows: Sequence[Sequence[str]], asked: Iterable[int | str | None]) -> bool:
    """Return whether the first of the sampled rows names the columns.

    It does if it contains a name that the caller gave, or a well-known name of users and one of items, or no number
    while some column below has only numbers.
    """
    first, rest = rows[0], rows[1:]
    if any(isinstance(col, str) and not col.isdecimal() and col in first for col in asked):
        return True
    names = {_plain(field) for field in first}
    if names & USER_NAMES and names & ITEM_NAMES:
        return True
    if any(not field.strip() or _NUMBER.fullmatch(field) for field in first):
        return False
    columns = ([row[at] for row in rest if len(row) > at and row[at].strip()] for at in range(len(first)))
    return any(column and all(map(_NUMBER.fullmatch, column)) for column in columns)


def find_columns(
    path: str,
    names: Sequence[str] | None,
    width: int,
    user_col: int | str | None,
    item_col: int | str | None,
    first: tuple[int, str] = (1, ""),
) -> tuple[int, int]:
    """Return the positions of the users' and the items' column.

    Args:
        path: file name for messages.
        names: names of the header, None without a header.
        width: number of columns.
        user_col: name or position from the caller.
        item_col: name or position from the caller.
        first: number (from 1) and text of the first line, for messages.

    Raises:
        DataError: no such column, several columns of that name, the same column twice, or no recognized column.
    """
    if width < 2:
        found = repr(first[1]) if names is None else f"only the column {names[0]!r}"
        raise DataError(
            f"{path} line {first[0]}: expected a user and an item separated by comma, tab or space, found {found}"
        )
    known: tuple[int | None, int | None] = (None, None)
    if names is not None:
        known = (_well_known(names, USER_NAMES), _well_known(names, ITEM_NAMES))
    elif user_col is None or item_col is None:
        # Without names, the first two columns are used, as in published data sets.
        known = (0, 1)
    # Two columns with unknown names: the first is the user, the second the item.
    if names is not None and width == 2 and known == (None, None) and user_col is None and item_col is None:
        known = (0, 1)
    chosen = []
    for col, guess, what in ((user_col, known[0], "user"), (item_col, known[1], "item")):
        if col is not None:
            chosen.append(_asked_column(path, names, width, col, what, first))
        elif guess is not None:
            chosen.append(guess)
        else:
            listed = ", ".join(names or ())
            raise DataError(
                f"{path}: cannot tell which column holds the {what}s; it has: {listed}; "
                f"say which with --{what}-col NAME, or its position from 0"
            )
    user, item = chosen
    if user == item:
        both = f"column {names[user]!r}" if names is not None else f"column {user}"
        raise DataError(f"{path}: users and items cannot both come from {both}; give --user-col and --item-col")
    return user, item


def find_others(
    path: str,
    names: Sequence[str] | None,
    width: int,
    others: Mapping[str, int | str],
    taken: tuple[int, int],
    first: tuple[int, str] = (1, ""),
) -> dict[str, int]:
    """Return the positions of further columns ("time", "rating"), by what they hold; arguments as `find_columns`.

    Args:
        others: name or position from the caller, by what the column holds.
        taken: positions of the users and the items.

    Raises:
        DataError: no such column, several columns of that name, or one that holds something else.
    """
    found: dict[str, int] = {}
    used = dict(zip(taken, ("user", "item"), strict=True))
    for what, col in others.items():
        at = _asked_column(path, names, width, col, what, first)
        if at in used:
            column = f"column {names[at]!r}" if names is not None else f"column {at}"
            raise DataError(
                f"{path}: {column} cannot hold both the {used[at]}s and the {what}s; "
                f"give another --{what}-col or --{used[at]}-col"
            )
        found[what], used[at] = at, what
    return found


def _asked_column(
    path: str, names: Sequence[str] | None, width: int, col: int | str, what: str, first: tuple[int, str]
) -> int:
    if isinstance(col, str) and names is not None and col in names:
        places = [at for at, name in enumerate(names) if name == col]
        if len(places) > 1:
            listed = ", ".join(map(str, places))
            raise DataError(
                f"{path}: {len(places)} columns are called {col!r}, at positions {listed} (from 0); "
                f"give one by its position: --{what}-col {places[0]}"
            )
        return places[0]
    if isinstance(col, int) or col.isdecimal():
        at = int(col)
        if not 0 <= at < width:
            listed = f": {', '.join(names)}" if names is not None else ""
            raise DataError(f"{path}: has no column {at}; it has {width} columns, 0 to {width - 1}{listed}")
        return at
    if names is None:
        raise DataError(
            f"{path}: has no header line to find column {col!r} in (line {first[0]} is {first[1]!r}); "
            f"give the position, --{what}-col 0 to {width - 1}, or --header if that line names the columns"
        )
    lowered = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(col.lower(), list(lowered), n=1, cutoff=0.6)
    hint = f"; did you mean {lowered[close[0]]!r}" if close else ""
    raise DataError(f"{path}: has no column {col!r}; it has: {', '.join(names)}{hint}")


def named_columns(names: Sequence[str], wanted: frozenset[str]) -> list[int]:
    """Return the positions of well-known names."""
    return [at for at, name in enumerate(names) if _plain(name) in wanted]


def _well_known(names: Sequence[str], wanted: frozenset[str]) -> int | None:
    found = named_columns(names, wanted)
    # "user_id, user_name": the id is used; between two ids the caller must choose.
    ids = [at for at in found if _plain(names[at]).endswith("id")]
    if len(ids) == 1:
        return ids[0]
    return found[0] if len(found) == 1 else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.partition(":")[0].lower())  # RecBole writes name:type


def shown(field: str, *, limit: int = 60) -> str:
    """Return a field or line for a message: quoted, cut if long."""
    return repr(field if len(field) <= limit else field[: limit - 3] + "...")
