"""The first hour with recommenders: its commands work in their order, and print what the page shows, but for figures.

They run on the first lines of the page's file and with fewer epochs; the page's figures are those of the whole file.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

for package in ("torch", "pyarrow", "duckdb", "matplotlib", "implicit", "fastapi"):
    pytest.importorskip(package)
from starlette.testclient import TestClient  # noqa: E402

from bunkbed.serve.app import create_app  # noqa: E402
from bunkbed.serve.settings import ServeSettings  # noqa: E402
from bunkbed.train.settings import auto  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-hour-recommender.md"
INSTALLING = ("pip", "curl -O", "unzip")
LINES, EPOCHS = 6_000, 4


def plain(text: str) -> str:
    """Return a text with # for each figure and one space for each gap."""
    return " ".join(re.sub(r"[\d.,]*\d", "#", text).split())


def served(folder: str, curl: str) -> str:
    """Return the answer to a curl command by the server of a run."""
    words = shlex.split(curl)
    with TestClient(create_app(ServeSettings(folder, ram=64 << 20))) as client:
        path, body = words[2].removeprefix("localhost:8080"), json.loads(words[words.index("-d") + 1])
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_the_page_runs_as_written(
    shared_data: Path,
    cli: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("ml-100k").mkdir()
    with gzip.open(shared_data / "ml-100k" / "ml-100k.inter.gz", "rt") as source:
        Path("ml-100k/u.data").write_text("".join(itertools.islice(source, 1, LINES)))
    monkeypatch.setitem(auto.RECIPES, "default", replace(auto.RECIPES["default"], epochs=EPOCHS))
    output, server, shown = "", "", 0
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for language, block in blocks:
        if language == "python":
            exec(block, {})
            assert capsys.readouterr().out.startswith("[(")
        elif language == "text":  # of the shell's blocks since the text before
            for part in re.split(r"\.\.\.|\n", block):
                assert plain(part) in plain(output), output
            output, shown = "", shown + 1
        for line in block.splitlines() if language == "sh" else ():
            command, *words = shlex.split(line, comments=True)
            if line.startswith(INSTALLING):
                continue
            if command == "curl":
                output += served(server, line)
            elif command != "bunkbed":
                output += subprocess.run(["bash", "-c", line], check=True, stdout=subprocess.PIPE, text=True).stdout
            elif words[0] == "serve":
                server = words[1]
            else:
                code, out, err = cli(*words)
                assert code == 0, f"{line}\n{err}"
                output += out + err
    assert shown == 7 and server
    assert Path("runs/sasrec/report.html").exists() and Path("top.parquet").exists()
