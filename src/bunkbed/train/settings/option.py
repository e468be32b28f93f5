"""How a field of a configuration is offered on the command line, and which values are valid."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any

__all__ = ["EVALUATION", "LEARNING", "MEMORY", "MODEL", "RUN", "Option", "option", "option_of"]

#: Panels of the help text.
MODEL, LEARNING, MEMORY, EVALUATION, RUN = "Model", "Learning", "Memory and speed", "Evaluation", "Run"


@dataclass(frozen=True)
class Option:
    """What the command line and the checks know of a field.

    Args:
        panel: of the help text.
        help: the help text.
        choices: the valid words.
        least, most: bounds of a whole number, both valid.
        above: bound of a number, itself not valid; with `least`, which is then valid.
        metavar: placeholder of the value in the help text.
    """

    panel: str
    help: str
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    above: float | None = None
    metavar: str | None = None


def option(default: Any, panel: str, help: str, **more: Any) -> Any:
    """Return a dataclass field with an `Option`."""
    return field(default=default, metadata={"option": Option(panel, help, **more)})


def option_of(made: Field[Any]) -> Option:
    """Return the option of a dataclass field."""
    found: Option = made.metadata["option"]
    return found
