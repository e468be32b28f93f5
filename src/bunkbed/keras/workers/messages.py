"""Messages of workers through a strategy's collectives: flat int64 arrays, concatenated.

A message is a head of six numbers and a body. The head has the bytes of an error's text (0: none), the table's step, a
checksum of the worker's action (`sign_of`), the numbers of ids and of rows in the body, and the words of the body. Rows
are sent as their bits. Every worker gets the messages of all, in the order of the workers' numbers, and so comes to the
same conclusion: all continue, or all raise.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

_HEAD = 6
_NO_IDS: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True)
class Body:
    """The body of one worker's message."""

    ids: IntArray
    rows: FloatArray


def sign_of(*facts: object) -> int:
    """Return a checksum of `facts`: workers with different checksums are not in the same step of the same program."""
    import zlib  # not hash(): it differs between processes

    return zlib.crc32(repr(facts).encode())


def message(step: int, sign: int, dim: int, ids: IntArray = _NO_IDS, rows: FloatArray | None = None) -> IntArray:
    """Return int64[W] that holds int64[U] ids and float32[R, dim] rows."""
    values = np.empty((0, dim), np.float32) if rows is None else rows
    body = np.zeros((values.size + 1) // 2, np.int64)
    body.view(np.float32)[: values.size] = values.reshape(-1)
    return np.concatenate([[0, step, sign, len(ids), len(values), len(ids) + len(body)], ids, body]).astype(np.int64)


def error_message(error: BaseException) -> IntArray:
    """Return int64[W] that holds an error instead of a body."""
    text = f"{type(error).__name__}: {error}".encode()[:65_536]
    body = np.frombuffer(text + bytes(-len(text) % 8), np.int64)
    return np.concatenate([[len(text), 0, 0, 0, 0, len(body)], body]).astype(np.int64)


def split_messages(gathered: IntArray, worker: int, label: str, dim: int) -> list[Body]:
    """Return the messages of all workers, in order.

    Args:
        gathered: int64[...], the messages one after another.
        worker: the number of this worker.
        label: the start of error messages.
        dim: of the rows.

    Raises:
        RuntimeError: another worker raised an error, or is at another step, or does something else. An error of this
            worker keeps its class if that is a ValueError, LookupError or RuntimeError.
    """
    heads, bodies = [], []
    start = 0
    while start < len(gathered):
        head = [int(number) for number in gathered[start : start + _HEAD]]
        heads.append(head)
        bodies.append(gathered[start + _HEAD : start + _HEAD + head[-1]])
        start += _HEAD + head[-1]
    failed = [index for index, head in enumerate(heads) if head[0]]
    if failed:
        index = worker if worker in failed else failed[0]
        text = bodies[index].tobytes()[: heads[index][0]].decode(errors="replace")
        kind, _, rest = text.partition(": ")
        found = getattr(builtins, kind, None)
        if index == worker and isinstance(found, type) and issubclass(found, (ValueError, LookupError, RuntimeError)):
            raise found(rest)
        raise RuntimeError(f"{label}: worker {index} failed, and nothing was changed: {text}")
    steps = [head[1] for head in heads]
    if len(set(steps)) > 1:
        where = ", ".join(f"worker {index} at step {step}" for index, step in enumerate(steps))
        raise RuntimeError(
            f"{label}: its workers are not at the same step: {where}; nothing was changed; load the last model "
            "that was saved on every worker (model.load_weights): it moves the tables of all workers back to its epoch"
        )
    others = [index for index, head in enumerate(heads) if head[2] != heads[0][2]]
    if others:
        raise RuntimeError(
            f"{label}: worker {others[0]} does not do what worker 0 does; nothing was changed; every worker "
            "must make the same layers with the same arguments, give the same optimizer and learning rate, and look up "
            "and step in the same order"
        )
    return [_body(head, body, dim) for head, body in zip(heads, bodies, strict=True)]


def _body(head: list[int], body: IntArray, dim: int) -> Body:
    ids, rows = head[3], head[4]
    return Body(body[:ids], body[ids:].view(np.float32)[: rows * dim].reshape(rows, dim))
