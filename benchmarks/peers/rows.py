"""Formats of rows other than .npy, Parquet, Arrow and safetensors, each with a writer that is not ours.

The import is timed with the writer's file, so that each import also reads a file of another implementation.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.core.threads import get_num_threads

Content = dict[str, Any]
#: Writes rows that are ready in RAM, in the form that the library takes.
Write = Callable[[Path], Any]
SAVE = "numpy.save of as many bytes"


@dataclass(frozen=True)
class Peer:
    """A format, and a writer of it that ours is compared with.

    Args:
        format: its name in `bunkbed.io.formats`.
        file: what an export is called.
        side: the writer's name.
        ready: (float32[N, dim] by slot) to the writer of it.
        rows: tiny, quick, full; few where a format is slow.
        has_state: with Adam's state, otherwise weights alone.
        against_save: compared with `SAVE` first, because `side` is slower than it has to be.
        only_import: there is no export.
        is_judged: whether the target is meant for it.
        has_words: its rows are named by their ids in decimal.
        needs: the module, and what installs it.
    """

    format: str
    file: str
    side: str
    ready: Callable[[Content], Write]
    rows: tuple[int, int, int]
    has_state: bool = False
    against_save: bool = False
    only_import: bool = False
    is_judged: bool = True
    has_words: bool = False
    needs: tuple[str, str] | None = None


def _torch(content: Content) -> Write:
    import torch

    tensors = {slot: torch.from_numpy(values) for slot, values in content.items()}
    weight = tensors.pop("weight")
    optimizer = {"state": {0: {"step": 1, **tensors}}, "param_groups": [{"params": [0]}]}
    return lambda path: torch.save({"model": {"weight": weight}, "optimizer": optimizer}, path)


def _h5(content: Content) -> Write:
    import h5py

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("layers/embedding/vars/0", data=content["weight"])

    return write


def _keras(content: Content) -> Write:
    """The layout of Keras: an archive, not compressed, of a configuration and a file of weights."""
    import h5py

    def write(path: Path) -> None:
        weights = io.BytesIO()
        with h5py.File(weights, "w") as file:
            file.create_dataset("layers/embedding/vars/0", data=content["weight"])
            variables = [np.int64(1), np.float32(0.1), content["exp_avg"], content["exp_avg_sq"]]
            for at, value in enumerate(variables):
                file.create_dataset(f"optimizer/vars/{at}", data=value)
        config = {"compile_config": {"optimizer": {"class_name": "Adam"}}}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("config.json", json.dumps(config))
            archive.writestr("model.weights.h5", weights.getbuffer())

    return write


def _tensorflow(content: Content) -> Write:
    import tensorflow as tf

    with tf.device("CPU:0"):
        checkpoint = tf.train.Checkpoint(weight=tf.Variable(content["weight"], trainable=False))
    return lambda path: checkpoint.write(str(path.with_suffix("")))


def _lines(values: Any, separator: str) -> Any:
    return (separator.join(f"{value:.9g}" for value in row) for row in values.tolist())


def _word2vec(content: Content) -> Write:
    values = content["weight"]

    def write(path: Path) -> None:
        with path.open("w") as file:
            file.write("{} {}\n".format(*values.shape))
            file.writelines(f"{word} {line}\n" for word, line in enumerate(_lines(values, " ")))

    return write


def _word2vec_binary(content: Content) -> Write:
    values = content["weight"]

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write("{} {}\n".format(*values.shape).encode())
            for word, row in enumerate(values):
                file.write(b"%d " % word + row.tobytes() + b"\n")

    return write


def _projector(content: Content) -> Write:
    values = content["weight"]

    def write(path: Path) -> None:
        path.mkdir()
        with (path / "tensors.tsv").open("w") as file:
            file.writelines(f"{line}\n" for line in _lines(values, "\t"))
        (path / "metadata.tsv").write_text("".join(f"{word}\n" for word in range(len(values))))

    return write


def _usearch(content: Content) -> Write:
    from usearch.index import Index

    values = content["weight"]

    def write(path: Path) -> None:
        index = Index(ndim=values.shape[1], metric="ip", dtype="f32")
        index.add(np.arange(len(values), dtype=np.uint64), values, threads=get_num_threads())
        index.save(str(path))

    return write


_PLAIN = "plain Python write"
_H5 = ("h5py", "h5py")
#: Numbers of `Peer.rows`.
_STATE, _WEIGHTS, _TEXT = (900, 60_000, 333_000), (1_500, 150_000, 1_000_000), (300, 10_000, 100_000)
#: TensorFlow has all rows in memory, in addition to those of the file that it writes.
_IN_MEMORY = (1_500, 150_000, 300_000)

PEERS = (
    Peer("torch", "rows.pt", "torch.save", _torch, _STATE, has_state=True, needs=("torch", "torch")),
    Peer(
        "keras",
        "rows.keras",
        "h5py and zipfile write",
        _keras,
        _STATE,
        has_state=True,
        against_save=True,
        only_import=True,
        needs=_H5,
    ),
    Peer("weights-h5", "rows.weights.h5", "h5py write", _h5, _WEIGHTS, needs=_H5),
    Peer("tensorflow", "rows.index", "Checkpoint.write", _tensorflow, _IN_MEMORY, needs=("tensorflow", "tensorflow")),
    Peer("word2vec", "rows.vec", _PLAIN, _word2vec, _TEXT, against_save=True, has_words=True),
    Peer("word2vec-binary", "rows.bin", _PLAIN, _word2vec_binary, _WEIGHTS, against_save=True, has_words=True),
    Peer("projector", "rows.projector", _PLAIN, _projector, _TEXT, against_save=True, has_words=True),
    Peer(
        "usearch",
        "rows.usearch",
        "usearch add and save",
        _usearch,
        (100, 2_000, 4_000),
        is_judged=False,
        needs=("usearch", "usearch"),
    ),
)
