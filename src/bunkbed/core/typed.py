"""A decorator that checks the types of arguments against the annotations of a public function.

Without it the binding's messages would name C++ overloads, not the argument. Functions of a training step do not use
the decorator, because a check takes microseconds.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

#: For each annotation: the accepted classes, and their name in messages.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool, np.bool_), "True or False"),
    int: ((int, np.integer), "an int"),
    float: ((int, float, np.integer, np.floating), "a number"),
    str: ((str,), "a string"),
    type(None): ((type(None),), "None"),
    os.PathLike: ((os.PathLike,), "a path"),
    dict: ((dict,), "a dict"),
    Mapping: ((Mapping,), "a dict"),
    Sequence: ((Sequence,), "a list or tuple"),
    Callable: ((Callable,), "a function"),  # type: ignore[dict-item]
}


def typed(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Check arguments that are annotated as plain values; the function itself checks the others.

    Raises:
        TypeError: the decorated function got an argument of another type. ValueError: it got text that is not UTF-8 or
            has a null character, or an int that 64 bits cannot hold.

    >>> @typed
    ... def scan(chunk: int = 1) -> int:
    ...     return chunk
    >>> scan("a")
    Traceback (most recent call last):
    TypeError: scan: chunk must be an int, got 'a'
    """
    signature = inspect.signature(function)
    kinds: dict[str, tuple[tuple[type, ...], str]] = {}

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if not kinds:  # at the first call, because annotations may name classes that a module defines later
            hints = get_type_hints(function)
            kinds[""] = (), ""
            for name in signature.parameters:
                hint = hints.get(name, Any)
                kind = _kind(hint)
                if kind is None and isinstance(hint, type) and hint.__module__.startswith("bunkbed."):
                    kind = (hint,), f"a bunkbed.{hint.__name__}"
                if kind is not None:
                    kinds[name] = kind
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own message
        for name, value in given.items():
            if name in kinds:
                _require(f"{function.__qualname__.removesuffix('.__init__')}: {name}", value, *kinds[name])
        return function(*args, **kwargs)

    return checked


def _kind(hint: Any) -> tuple[tuple[type, ...], str] | None:
    """Return the accepted classes and their name; None where only the function can check the value."""
    origin = get_origin(hint)
    if origin is Literal:
        return _kind(type(get_args(hint)[0]))
    if origin in (Union, types.UnionType):
        parts = [_kind(one) for one in get_args(hint)]
        if None in parts:
            return None
        named = [part for part in parts if part is not None]
        return tuple(one for classes, _ in named for one in classes), " or ".join(name for _, name in named)
    return _KINDS.get(origin or hint)


def _require(what: str, value: object, classes: tuple[type, ...], name: str) -> None:
    is_flag = isinstance(value, (bool, np.bool_))
    if not isinstance(value, classes) or (is_flag and bool not in classes):
        raise TypeError(f"{what} must be {name}, got {shortened(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{what} must fit 64 bits, got {shortened(value)}")
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        try:
            is_plain = isinstance(text, str) and "\0" not in text and text.encode() is not None
        except UnicodeEncodeError:
            is_plain = False
        if not is_plain:
            raise ValueError(f"{what} must be UTF-8 text without null characters, got {shortened(value)}")


def shortened(value: object) -> str:
    """Return `repr(value)` for an error message, at most 80 characters.

    >>> shortened("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    try:
        text = repr(value)
    except Exception as error:  # an int of more than 4,300 digits, or a class with a faulty __repr__
        text = f"{type(value).__name__} ({error})"
    return text if len(text) <= 80 else text[:77] + "..."
