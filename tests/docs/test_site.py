"""The pages build into a site, strictly; it has every public name and command, and loads nothing from elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest

import bunkbed
from bunkbed.cli.app import app

pytest.importorskip("mkdocs", reason="the site's builder is not installed: pip install 'bunkbed[docs]'")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every link that leads nowhere, and every name that is not there, fails here."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def public_names() -> set[str]:
    own = {f"bunkbed.{name}" for name, value in vars(bunkbed).items() if is_public(name, value)}
    for part in ("torch", "keras", "testing"):  # read, not imported: what a name is called needs no framework
        tree = ast.parse((ROOT / "src/bunkbed" / part / "__init__.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                own |= {f"bunkbed.{part}.{name}" for name in ast.literal_eval(node.value)}
    return own


def is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType) and hasattr(value, "__module__")


def test_every_public_name_has_its_place(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    names = public_names()
    assert len(names) >= 45
    assert names <= documented, sorted(names - documented)
    inherited = {"bunkbed.Table.lookup", "bunkbed.Table.commit", "bunkbed.ShardedTable.create"}
    assert inherited <= documented


def test_every_command_has_its_section(site: Path) -> None:
    page = (site / "api/command-line.html").read_text()
    commands = [command.name for command in app.registered_commands]
    assert "plan" in commands
    for name in commands:
        assert f'id="bunkbed-{name}"' in page, name


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 15
    for page in pages:
        text = page.read_text()
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?([^\"\s>]+)", text)
        loads += re.findall(r"<link[^>]*\srel=\"?(?:stylesheet|icon|preconnect|preload)[^>]*", text)
        assert loads, page.name
        assert not [load for load in loads if re.search(r"https?:|=\"?//|^//", load)], page.name
        # The theme fetches the script that draws such diagrams from a CDN.
        assert "mermaid" not in re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL), page.name


def test_docstrings_come_in_the_form_the_builder_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/site"))
    from docstrings import to_google

    ours = "Do::\n\nRaises:\n    TypeError: not an\n    int. OSError, EOFError: full.\n    See X.\n\n>>> 1\n1\n\nEnd."
    raised = "Raises:\n    TypeError: not an int.\n    OSError, EOFError: full. See X."
    assert to_google(ours) == f"Do:\n\n{raised}\n\n```pycon\n>>> 1\n1\n```\n\nEnd."
