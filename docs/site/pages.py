"""A hook of mkdocs: pages whose only source lies outside ``docs/``, and links between pages that hold in both places.

Pages are written to be read in the repository, so their links are paths of files there. On the site a link to a file
that is a page becomes a link to that page; a link to any other file becomes its text alone, for the site has no such
file. The page of the command line is made of the commands' own help.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]

#: Pages of the site whose source is elsewhere in the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "format.md": "FORMAT.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/RESULTS.md",
    "torch-examples.md": "examples/torch/README.md",
    "keras-examples.md": "examples/keras/README.md",
}
COMMAND_LINE = "api/command-line.md"

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
_HIDDEN = re.compile(r"<!---.*?-->\n?", re.DOTALL)  # what only the tests of the snippets read


def on_files(files: Any, config: Any) -> Any:
    for uri, source in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, COMMAND_LINE, content=command_line()))
    return files


def command_line() -> str:
    """Markdown of every command's help, by typer's own means."""
    from typer import Context
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from bunkbed.cli.app import app

    command = get_command(app)
    return get_docs_for_click(obj=command, ctx=Context(command), name="bunkbed", title="Command line")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri == COMMAND_LINE:
        return markdown
    source = source_of(page.file.src_uri)
    pages = {source_of(file.src_uri): file.src_uri for file in files}

    def follow(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = (source.parent / path).resolve()
        if target in pages:
            here = os.path.relpath(pages[target], Path(page.file.src_uri).parent)
            return f"{mark}[{text}]({here}{hash_}{anchor})"
        return text if target.exists() else match[0]  # what is nowhere stays, for mkdocs to complain of

    parts = _FENCE.split(_HIDDEN.sub("", markdown))
    return "".join(part if _FENCE.fullmatch(part) else _LINK.sub(follow, part) for part in parts)


def source_of(uri: str) -> Path:
    """The file in the repository that the page ``uri`` of the site is made of."""
    return ROOT / ELSEWHERE[uri] if uri in ELSEWHERE else ROOT / "docs" / uri
