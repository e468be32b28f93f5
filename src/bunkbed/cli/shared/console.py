"""Consoles, errors in one line, options from a YAML file, JSON output."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import rich.markup
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from bunkbed.core.budget import format_bytes
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError


class UsageProblem(BunkbedError, ValueError):
    """The command line is wrong; nothing was changed."""


#: Characters that a terminal does not display as such: control characters, direction marks, surrogates.
_ACTED_ON = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def neutral(text: str) -> str:
    """Return untrusted text with an escape, such as ``\\x1b``, for each character of `_ACTED_ON`."""
    return _ACTED_ON.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape(text: str) -> str:
    """Return untrusted text for a line of rich markup, without markup of its own."""
    return rich.markup.escape(neutral(text).replace("\n", "\\n").replace("\t", "\\t"))


class SafeConsole(Console):
    """A console that escapes the control characters of printed text, so that only its own reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else neutral(text), style, control)


def stdout() -> Console:
    """Return a console on the present `sys.stdout`, which tests replace."""
    return SafeConsole(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """Return a console on standard error, for progress and errors, so that stdout has only the result."""
    return SafeConsole(file=sys.stderr, highlight=False)


def print_error(message: str) -> None:
    """Print one line on stderr, with red on a terminal."""
    line = Text("error: ", style="bold red").append(" ".join(message.split()), style="not bold")
    stderr().print(line, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as one line of JSON on stdout."""
    sys.stdout.write(json.dumps(value, default=_plain, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def byte_progress(what: str, unit: Literal["bytes", "rows"] = "bytes") -> Iterator[Callable[[int, int], None]]:
    """Show a line on stderr that counts bytes or rows, if stderr is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield lambda done, total: None
        return

    def shown(number: int) -> str:
        return format_bytes(number) if unit == "bytes" else f"{number:,}"

    with console.status(what) as status:
        yield lambda done, total: status.update(
            f"{what}: {shown(done)} of {shown(total)}{' rows' if unit == 'rows' else ''}"
        )


def describe(error: Exception) -> str:
    """Return an exception as one line of text."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return str(error) if "pip install" in str(error) else f"the module {error.name} is not installed"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        reason = error.strerror[:1].lower() + error.strerror[1:]
        return f"{where}{reason}{_similar_file(error)}"
    if isinstance(error, (BunkbedError, ValueError, IndexError, MemoryError, OSError)) and str(error):
        return str(error)
    name = type(error).__name__
    return f"internal error, {name}: {error}; --debug shows where"


def need(*modules: str, command: str, extra: str = "train") -> None:
    """Check that optional packages are installed, before any work.

    Raises:
        ModuleNotFoundError: a package is missing; the message says how to install it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ModuleNotFoundError(
            f'bunkbed {command} needs {names}; install with: pip install "bunkbed[{extra}]"',
            name=missing[0],
        )


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a YAML file the defaults of this command. Flags take precedence.

    Raises:
        UsageProblem: not YAML, not a mapping, or a key that is not an option of this command.
    """
    if path is None:
        return None
    need("yaml", command=f"{context.info_name} --config")
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageProblem(f"{path}{line}: is not YAML ({problem})") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UsageProblem(f"{path}: expected options as 'key: value' lines, found {type(values).__name__}")
    known = {name: name for name in _option_names(context)}
    defaults: Json = {}
    for key, value in values.items():
        name = known.get(str(key).replace("-", "_"))
        if name is None:
            raise UsageProblem(f"{path}: {unknown_key(str(key), sorted(known))}")
        if isinstance(value, dict):
            raise UsageProblem(f"{path}: {key} must be a plain value, found a mapping")
        defaults[name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def unknown_key(key: str, known: list[str]) -> str:
    """Return a message about a key that is not in `known`; it names the most similar key."""
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}" if close else f"the options are {', '.join(known)}"
    return f"unknown option {key!r}; {hint}"


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the options that a flag, the environment or YAML has set."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        help="Read options from a YAML file; flags win.",
        callback=load_config,
        is_eager=True,
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _option_names(context: typer.Context) -> list[str]:
    own = [str(param.name) for param in context.command.params]
    return [name for name in own if name not in ("config", "help")]


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    return repr(value)


def _similar_file(error: OSError) -> str:
    """Return a hint if the name of a missing file is similar to that of an existing file."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, (str, Path)):
        return ""
    path = Path(error.filename)
    if path.exists():
        return ""
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6)
    return f"; did you mean {path.parent / close[0]}" if close else ""
