"""Names that others chose, such as labels of a training file: shown on a terminal, never obeyed by it."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import bunkbed as bb
from bunkbed.cli.shared.console import SafeConsole, escape, print_error, stderr, stdout

Run = Callable[..., tuple[int, str, str]]
#: C0, C1 and DEL, marks of direction, separators of lines, half a character; markup of rich; several at once.
HOSTILE = [
    "\x1b]0;owned\x07\x1b[2J",
    "\x9b31mred\x9c",
    "del\x7f back\x08 return\rx",
    "\u202egnp.exe\u202c\u2066x\u2069\u200f\u061c",
    "line\u2028para\u2029x",
    "\udc80half",
    "[red]markup[/red][link=http://evil]x[/link]",
    "$(touch owned); `id` 'quoted'",
]


def acted_on(text: str) -> list[str]:
    """Characters in it that a terminal would do something about, but for ends of lines."""
    directions = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return [
        c
        for c in text
        if (c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0" or c in directions or "\ud800" <= c < "\ue000"
    ]


@pytest.mark.parametrize("label", HOSTILE)
def test_a_console_shows_what_a_terminal_would_act_on(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """Whatever way a label takes: the consoles neutralise all text, though it was never escaped."""
    for name, console in (("stdout", stdout), ("stderr", stderr)):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
        table = Table(title=Text(label))
        table.add_row(Text(label), escape(label))
        for shown in (Text(label, style="bold"), Panel(Text(label)), table, f"[b]{escape(label)}[/b]"):
            console().print(shown, soft_wrap=True)
        with console().status(escape(label)):
            pass
        print_error(label)
        written = getattr(sys, name)
        written.flush()
        text = written.buffer.getvalue().decode()
        assert not acted_on(text), (name, text)
        if "[" in label and "\x1b" not in label:
            assert label in text, "markup in a label was taken for markup"


def test_a_console_on_a_terminal_keeps_its_own_escape_sequences() -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text("bold\x1b[2J", style="bold"), highlight=False)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.replace("\\x1b[2J", "X") == "\x1b[1mboldX\x1b[0m\n"


def test_a_label_stays_on_its_line(cli: Run, tmp_path: Path) -> None:
    assert escape("a\nerror: b\tc") == "a\\nerror: b\\tc"
    code, _, err = cli("info", "no\x1b[2J\nsuch")
    assert code == 1 and not acted_on(err) and err.count("\n") == 1
    code, _, err = cli("\x1b[2Jtrain")
    assert code == 2 and not acted_on(err)


@pytest.mark.parametrize("meta", [{"\x1b[2J": "\x9b2J"}, {"a": "[red]b[/red]"}])
def test_what_a_table_from_elsewhere_says_of_itself_is_shown(cli: Run, tmp_path: Path, meta: dict[str, str]) -> None:
    with bb.create(tmp_path / "t", dim=2, num_rows=4, ram="16MiB") as table:
        table.update([1], np.ones((1, 2), np.float32))
        table.commit(meta=meta)
    code, out, _ = cli("info", "t")
    assert code == 0 and not acted_on(out)
    if "a" in meta:
        assert "[red]b[/red]" in out


def test_labels_of_a_training_file_are_shown_and_quoted(cli: Run, tmp_path: Path) -> None:
    for module in ("torch", "pyarrow", "matplotlib"):
        pytest.importorskip(module)
    import pyarrow as pa
    import pyarrow.parquet as parquet

    labels = [label for label in HOSTILE if "\udc80" not in label]  # Parquet is UTF-8
    # The first user is the one of the hint.
    users = [labels[-1], *labels[:-1], *(f"u{number}" for number in range(20))]
    items = [*labels, *(f"i{number}" for number in range(20))]
    pairs = pa.table({"user": np.repeat(users, len(items)), "item": items * len(users)})
    parquet.write_table(pairs, tmp_path / "in.parquet")
    small = ("--dim", "4", "--ram", "4MiB", "--threads", "1", "--epochs", "1", "--batch-size", "64")
    code, out, err = cli("train", "in.parquet", *small, "--out", "runs/a; $(touch owned)")
    assert code == 0, err
    assert not acted_on(out)
    hint = next(line for line in out.splitlines() if line.startswith("try "))
    words = shlex.split(hint.removeprefix("try "))
    assert words[:3] == ["bunkbed", "recommend", "runs/a; $(touch owned)"] and words[4] == labels[-1]
    run = words[2]
    for command in (
        ("recommend", run, "--user", labels[0], "--include-seen", "-k", "30"),
        ("neighbors", run, "--id", labels[0], "-k", "30"),
        ("info", run),
        ("recommend", run, "--user", "\x1b[2Jnone"),
    ):
        code, out, err = cli(*command)
        assert not acted_on(out + err), command
        assert ("none" in command[-1]) == bool(code)
        if command[0] in ("recommend", "neighbors") and not code:
            assert "[red]markup[/red][link=http://evil]x[/link]" in out
            shown = json.loads(cli(*command, "--json")[1])
            listed = [
                one["item" if command[0] == "recommend" else "id"] for one in shown.get("items", shown.get("neighbors"))
            ]
            assert set(labels) - {labels[0]} <= set(listed), "a program reads the labels as they are"


def test_a_damaged_file_of_ids_is_named(cli: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones((3, 2), np.float32))
    (tmp_path / "ids.npy").write_bytes((tmp_path / "rows.npy").read_bytes()[:90])
    code, _, err = cli("import", "t", "rows.npy", "--dim", "2", "--ids", "ids.npy")
    assert code == 1 and "ids.npy is damaged, or not of the format npy" in err
    assert not (tmp_path / "t").exists()
