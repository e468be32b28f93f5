"""The options of ``bunkbed train``, made from the fields of `TrainConfig`; and what other commands share with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from inspect import Parameter
from typing import Annotated, Any, cast

import typer

from bunkbed.train.settings.auto import AUTO
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.option import option_of

DEFAULTS = TrainConfig()
DATA = "Data"


def option(
    panel: str, text: str, *names: str, metavar: str | None = None, parser: Callable[[str], Any] | None = None
) -> Any:
    """Return an option in one panel of the help."""
    if parser is not None and metavar is None:
        metavar = "<int>"
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel, parser=parser)


def whole_number(text: str | int) -> int:
    """Return the number of an option such as ``1_000_000`` or ``1e6``.

    >>> whole_number("1e9"), whole_number("1_000")
    (1000000000, 1000)
    """
    try:
        return int(text)
    except ValueError:
        try:
            number = Decimal(text)
        except InvalidOperation:
            number = Decimal("nan")
    if not number.is_finite() or abs(number) >= 2**63 or number % 1:
        raise typer.BadParameter(f"{text!r} is not a valid integer")
    return int(number)


def chosen(made: Field[Any]) -> type[StrEnum]:
    """Return the choices of a field of the configuration, as Typer wants them."""
    name = "".join(word.capitalize() for word in made.name.split("_"))
    words = [(word.replace("-", "_"), word) for word in option_of(made).choices]
    return cast(type[StrEnum], StrEnum(name, words))


def parameters() -> Iterator[Parameter]:
    """Yield the option of each field of `TrainConfig` as a keyword parameter."""
    for made in fields(TrainConfig):
        offered = option_of(made)
        kind: Any = chosen(made) if offered.choices else str if isinstance(made.default, str) else type(made.default)
        if made.default is None:
            kind = (int if offered.least is not None else str) | None
        dashed = made.name.replace("_", "-")
        names = (f"--{dashed}/--no-{dashed}",) if kind is bool else ()
        default = kind(made.default) if offered.choices else made.default
        shown = option(offered.panel, offered.help, *names, metavar=offered.metavar)
        if made.name in AUTO:
            default, kind, shown.show_default = None, kind | None, "by --recipe"
        yield Parameter(made.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown])


class RecipeName(StrEnum):
    """Rules for options that are not given."""

    fast = "fast"
    default = "default"
    best = "best"


class OptimizerName(StrEnum):
    """Optimizers of the tables."""

    adam = "adam"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"
    sgd = "sgd"


class Ranking(StrEnum):
    """Items that held-out items are ranked with."""

    full = "full"
    sampled = "sampled"


class FileLayout(StrEnum):
    """Layouts of the lines of a text file."""

    auto = "auto"
    columns = "columns"
    adjacency = "adjacency"


OPTIMIZER_DEFAULT = OptimizerName(DEFAULTS.optimizer)
