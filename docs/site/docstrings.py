"""An extension of griffe: docstrings as this project writes them, in the form that griffe's Google parser reads.

Ours say several exceptions in a line and go on without an indent; examples stand at the end without a heading, and
``::`` announces code. Unchanged, the site would drop lines and show examples as quotations.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_RAISES = re.compile(r"(?<=^Raises:\n)((?:[ ]{4}.*\n?)+)", re.MULTILINE)
_NEXT = re.compile(r"(?<=[.;])\s+(?=[A-Z][A-Za-z]*(?:Error|Warning)\b[A-Za-z, ]*:)")
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def to_google(text: str) -> str:
    """The docstring with an exception a line, examples in fences, and a plain colon before code."""
    text = _RAISES.sub(_one_a_line, text)
    text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _one_a_line(match: re.Match[str]) -> str:
    end = "\n" if match[0].endswith("\n") else ""
    return "".join(f"    {item}\n" for item in _NEXT.split(" ".join(match[0].split()))).rstrip("\n") + end


class OurDocstrings(Extension):
    """Rewrites every docstring with `to_google` once it is read, and leaves out parameters that are not for users."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.is_function:
            for name in [parameter.name for parameter in obj.parameters if parameter.name.startswith("_")]:
                del obj.parameters[name]
        if obj.docstring is not None:
            obj.docstring.value = to_google(obj.docstring.value)
