"""`Embedding`: `keras.layers.Embedding` over a table."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

import bunkbed as bb
from bunkbed.adapters.removal import is_taken
from bunkbed.adapters.tables import Exist, TableOptions, require_same
from bunkbed.core import optim
from bunkbed.core.budget import Budget
from bunkbed.core.init import from_native as initializer_from_native
from bunkbed.core.retention import Retention
from bunkbed.core.types import Json
from bunkbed.keras.base.backend import IS_TORCH
from bunkbed.keras.base.initializers import initializer_of
from bunkbed.keras.base.places import current_path
from bunkbed.keras.base.rows_layer import COMBINERS
from bunkbed.keras.base.types import DType, Initializer, KerasOptimizer, LookupOptions, Shape, Store, Tensor
from bunkbed.keras.shared.table import LayerArguments, SharedTable, is_in_use, shared_of, shared_of_table
from bunkbed.keras.workers.folders import require_whole
from bunkbed.table.facts import DTYPES
from bunkbed.table.table import Table

if IS_TORCH:
    from bunkbed.keras.torch.backend import (
        IdsLayer,
        answer_with_error,
        bags_of,
        is_eager,
        is_recorded,
        require_one_process,
        rows_of,
    )
else:
    import tensorflow as tf

    from bunkbed.keras.shared.lookups import bags_of, rows_of  # type: ignore[assignment]  # takes more
    from bunkbed.keras.tensorflow.callbacks import answer_with_error, is_eager
    from bunkbed.keras.tensorflow.ids_layer import IdsLayer, is_recorded
    from bunkbed.keras.workers.group import workers_of
    from bunkbed.keras.workers.lookups import bags_of_workers, rows_of_workers
    from bunkbed.keras.workers.table import require_shared_by, workers_table_of

#: Name of the table's reference in a saved layer, stored as the bytes of JSON.
_REFERENCE = "table"
#: Prefix of the names of the rows of a table in RAM only.
_ROWS = "rows_"
_log = logging.getLogger("bunkbed.keras")


@keras.saving.register_keras_serializable(package="bunkbed")
class Embedding(IdsLayer):
    """`keras.layers.Embedding` whose rows are in a table that may be larger than RAM.

    Takes the arguments of Keras's layer; additional arguments are keyword-only. ``fit``, ``evaluate``, ``predict``,
    custom loops, loss scaling, gradient accumulation, clipping by ``clipnorm`` and ``clipvalue``, learning-rate
    schedules and callbacks work as with any layer. Rows get one update per step, summed over lookups, layers, replicas.

    The layer owns two scalar variables that represent the table: a token, which optimizers get instead of the rows, and
    the kept commit. Saved weights hold a reference to a commit of the table, never rows: saving commits the table and
    keeps that commit, and loading rewinds rows and optimizer state to it. Saving and ``layer.table.commit()`` make rows
    durable. A table without `path` ends with its process.

    Ids are int64 or a smaller integer, dense, ragged or sparse; on Keras's torch backend dense. An id outside the table
    is an error with the id and its position. ``training=False`` lookups do not change the cache.

    Args:
        input_dim: ids are in ``[0, input_dim)``; None: ids are any non-negative int64.
        output_dim: length of a row.
        embeddings_initializer: a Keras initialiser that is a function of (seed, id) (uniform, random_normal, zeros,
            glorot_uniform and similar) or one of bunkbed; for a stored table None or ``"uniform"`` accept its own.
        mask_zero: id 0 is padding: later layers get a mask of it; with `combiner` the pooling skips it.
        weights: float32[input_dim, output_dim], initial rows of a new table.
        combiner: None, ``"sum"``, ``"mean"`` or ``"sqrtn"``: pool the last axis of the ids, as
            `tf.nn.embedding_lookup_sparse`; the layer is then called with ``(ids, weights=None)``.
        path: folder of the table, created or opened; None: the table is in RAM only.
        ram: bytes, ``"2GiB"`` or a `bunkbed.Budget`.
        optimizer: the rows' update rule. None follows the optimizer given to ``compile`` (class, hyperparameters,
            schedule; see `bunkbed.keras.base.optimizers`), and the first training step makes the table.
        dtype: how rows are stored: ``"float32"`` (default), ``"bfloat16"`` or ``"float16"``; a Keras dtype policy such
            as ``"mixed_float16"`` is that of the output.
        seed: of the initialiser; None draws one as Keras does.
        table: use this table (a `bunkbed.Table`, or another layer's ``.table``), with its own optimizer, instead of
            opening one.
        placement: ``"central"``: one table, which all replicas of a `tf.distribute.MirroredStrategy` look up and which
            is updated once a step; it is not mirrored. ``"sharded"``: the same, divided by a hash of the id over
            `directories`, one per SSD (`bunkbed.ShardedTable`); the common files are in `path`. ``"replicated"`` is
            ``"central"`` in one process. Under a `tf.distribute.MultiWorkerMirroredStrategy` give ``"sharded"`` (each
            worker has a part of the rows) or ``"replicated"`` (each has all rows, with the same bits). Each worker then
            has a directory of its own below `path`: see `bunkbed.keras.workers_table`.
        directories: of a new sharded table, one for each shard; a stored table knows its directories.
        durability, disk: see `bunkbed.create`.
        exist: where a table is at `path`: ``"open"`` goes on with its rows (a warning of the log says so), ``"error"``
            raises, ``"new"`` removes it with its kept commits; layers that have it open raise `TableClosedError`. A
            model that is loaded from a file opens its table.
        retention: the rules of a table of any id (``input_dim=None``) by which ``layer.table.sweep()`` removes rows, as
            `bunkbed.Retention`; None: a stored table has its own, and a new one keeps every row.
        keep_checkpoints: how many epochs kept by saved weights stay loadable; None: all, so that every file loads. A
            warning says when one is dropped, or when they take much more than the rows. ``.keras`` and ``.weights.h5``
            files have the rows of a table in RAM only (up to 1 GiB); each epoch that ``get_weights()`` keeps of it is a
            copy of the stored rows.

    Raises:
        ValueError, TypeError: an argument out of range, unsupported, or contradicting the stored table (names both
            values).

    >>> layer = Embedding(1000, 4, optimizer=bb.Adam(lr=0.01))
    >>> layer(np.array([[0, 7, 7]])).shape
    TensorShape([1, 3, 4])
    """

    _shared: SharedTable

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Initializer = "uniform",
        mask_zero: bool = False,
        weights: Tensor = None,
        combiner: Literal["sum", "mean", "sqrtn"] | None = None,
        *,
        path: str | PathLike[str] | None = None,
        ram: float | str | Budget | None = None,
        optimizer: optim.Optimizer | None = None,
        dtype: DType = None,
        seed: int | None = None,
        table: Table | None = None,
        placement: Literal["central", "sharded", "replicated"] = "central",
        directories: Sequence[str | PathLike[str]] | None = None,
        durability: Literal["durable", "scratch"] | None = None,
        disk: float | str | None = None,
        exist: Exist = "open",
        retention: Retention | None = None,
        keep_checkpoints: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("embeddings_regularizer", "embeddings_constraint", "lora_rank", "quantization_config"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"Embedding: {name}= is not supported, since it would touch every row at every step; "
                    "the optimizer's weight_decay= reaches the rows of a step"
                )
        kwargs.pop("input_length", None)
        stored_dtype = dtype if isinstance(dtype, str) and dtype in DTYPES else None
        super().__init__(dtype=None if stored_dtype else dtype, **kwargs)
        if self.dtype_policy.quantization_mode is not None:
            raise ValueError(
                f"Embedding: dtype={self.dtype_policy.name!r} quantizes weights, which rows are not; give "
                'dtype="bfloat16" or "float16" for rows of half the bytes'
            )
        if input_dim is not None:
            _require_size("input_dim", input_dim)
        _require_size("output_dim", output_dim)
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(f"Embedding: combiner must be None, {', '.join(COMBINERS)}, got {combiner!r}")
        if placement not in ("central", "sharded", "replicated"):
            raise ValueError(f'Embedding: placement must be "central", "sharded" or "replicated", got {placement!r}')
        if placement != "sharded" and directories is not None:
            raise ValueError('Embedding: directories= are those of shards; give placement="sharded" too')
        workers = None if IS_TORCH else workers_of(placement)
        if workers is not None and directories is not None:
            raise ValueError("Embedding: directories= are those of one process; each worker has one below path=")
        if workers is None and placement == "sharded" and (path is None or durability == "scratch"):
            raise ValueError('Embedding: placement="sharded" needs a path, and a table that is kept')
        if IS_TORCH:
            require_one_process("table" if path is None else Path(path).name)
        if keep_checkpoints is not None and keep_checkpoints < 1:
            raise ValueError(f"Embedding: keep_checkpoints must be at least 1, or None for all, got {keep_checkpoints}")
        if optimizer is not None:
            optim.require_optimizer(optimizer)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.mask_zero = mask_zero
        self.combiner = combiner
        self.placement = placement
        self.keep_checkpoints = keep_checkpoints
        self.supports_masking = mask_zero
        self.supports_jit = False  # XLA has no callbacks into this process
        self.autocast = False
        self._stored_dtype = stored_dtype
        self._given_optimizer = optimizer
        self._ram, self._disk, self._durability, self._retention = ram, disk, durability, retention
        self._path = None if path is None else str(path)
        self._directories = None if directories is None else [str(each) for each in directories]
        dims = {"input_dim": input_dim, "output_dim": output_dim}
        if table is not None:
            TableOptions(
                path, ram, disk, optimizer, seed=seed, durability=durability, exist=exist, retention=retention
            ).require_none("Embedding")
            require_same("Embedding", table, **dims)
            self._shared = shared_of_table(table)
            if workers is not None:
                require_shared_by(workers, self._shared)
        else:
            is_default = isinstance(embeddings_initializer, str) and embeddings_initializer == "uniform"
            init, drawn = initializer_of(embeddings_initializer, input_dim, output_dim)
            given = None if is_default else init
            place = None if path is None else current_path(Path(path))
            options = TableOptions(place, ram, disk, optimizer, given, seed, stored_dtype, durability, exist, retention)
            plain = options.arguments(
                "Embedding", dims, "embeddings_initializer", num_rows=input_dim, dim=output_dim, init=init, seed=drawn
            )
            arguments = LayerArguments(
                **vars(plain),
                is_sharded=placement == "sharded" and workers is None,
                directories=None if directories is None else tuple(Path(each) for each in directories),
            )
            if workers is not None:
                self._shared = workers_table_of(arguments, optimizer, workers)
            else:
                if arguments.path is not None:
                    require_whole(arguments.path)
                self._shared = shared_of(arguments, optimizer)
        _require_same_strategy(self._shared)
        self.embeddings_initializer = self._shared.init
        self._shared.keep_at_least(keep_checkpoints)
        self._token = self._shared.token
        self._kept_epoch = self._shared.kept_epoch
        if weights is not None:
            self._import(weights)
        self.built = True

    # ---- the table

    @property
    def table(self) -> Table:
        """The `bunkbed.Table` that holds the rows.

        Raises:
            RuntimeError: the table follows compile's optimizer, and no training step has made it yet.
        """
        return self._shared.table

    @property
    def token(self) -> Tensor:
        """The variable that represents the rows in a tape and an optimizer: one of ``trainable_weights``."""
        return self._token

    @property
    def embeddings(self) -> Tensor:
        """Raise AttributeError, whose message names the methods that read and write rows."""
        raise AttributeError(
            f"Embedding has no attribute 'embeddings': the rows live in table {self._shared.name!r}, larger than one "
            "tensor may be; read rows with layer.table.get(ids), all rows with layer.table.scan(), write rows with "
            "layer.table.set(ids, values), and initialise with embeddings_initializer= or weights="
        )

    def _import(self, weights: Tensor) -> None:
        if isinstance(weights, (list, tuple)) and len(weights) == 1:
            weights = weights[0]
        array = self._checked_rows(weights)
        if self._shared.has_table and len(self.table):
            raise ValueError(
                f"Embedding: table {self.table.name!r} has rows, which weights= would overwrite; leave weights= out, "
                "or write them with layer.table.set(ids, values)"
            )
        self._shared.import_rows(array)

    def _checked_rows(self, weights: Tensor) -> NDArray[np.float32]:
        array = np.asarray(weights, np.float32)
        expected = (len(array) if self.input_dim is None else self.input_dim, self.output_dim)
        if array.shape != expected:
            raise ValueError(f"Embedding: weights must be float32{list(expected)}, got shape {list(array.shape)}")
        return array

    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Go back to the epoch of `get_weights`; or set all rows to the one matrix that a `keras.layers.Embedding` has.

        Raises:
            ValueError: a matrix of another shape, or an epoch that was dropped or is another table's.
        """
        if len(weights) != 1:
            super().set_weights(weights)
            return
        self._shared.import_rows(self._checked_rows(weights[0]))

    def count_params(self) -> int:
        """Return the number of weights of all rows; of the stored rows where ids have no end."""
        if self.input_dim is not None:
            return self.input_dim * self.output_dim
        return len(self.table) * self.output_dim if self._shared.has_table else 0

    # ---- keras.layers.Layer

    def build(self, input_shape: Shape = None) -> None:
        """Do nothing: the table does not need the shape of the ids."""

    def call(self, inputs: Tensor, weights: Tensor = None, training: bool | None = None) -> Tensor:
        """Return the rows of ids.

        Args:
            inputs: int64[...] ids (or a smaller integer), dense or ragged; with a combiner also sparse int64[B, L].
            weights: with a combiner, float32 factors of the ids, of the same kind and shape.
            training: False looks rows up without touching the cache, and without gradients.

        Returns:
            [..., output_dim] in the layer's compute dtype; with a combiner the last axis of the ids is pooled.

        Raises:
            TypeError: ids that are not integers, or too narrow for the table. IndexError: an id outside the table; in
            a graph a `tf.errors.InvalidArgumentError` with the same message.
        """
        is_recorded_now = training is not False and self.trainable and is_recorded(self._token)
        # A graph without its own tape may still be called inside a tape that wants gradients.
        wanted = self.trainable and training is not False and (is_recorded_now or not is_eager())
        # On torch gradients are enabled by default, so `is_recorded` does not show that this is training.
        is_certain = wanted and (training is True or (is_recorded_now and not IS_TORCH))
        train = wanted and self._begin(is_certain)
        touch = train and (is_certain or IS_TORCH)
        rows = self._look_up(inputs, weights, {"train": train, "touch": touch, "is_certain": is_certain})
        return answer_with_error(self._shared, rows) if wanted and not train else rows

    def _begin(self, is_certain: bool) -> bool:
        """Prepare a lookup that may be for training; return whether rows can be trained."""
        shared = self._shared
        if shared.has_table and shared.table.mode == "r":
            if is_certain:
                raise bb.ReadOnlyError(
                    f"table {shared.name!r} is open with mode='r' and cannot be trained; set layer.trainable = False, "
                    "or open the table for writing"
                )
            return False
        optimizer = getattr(self._get_call_context().entry_layer, "optimizer", None)
        if is_certain or (IS_TORCH and optimizer is not None):
            shared.follow(optimizer)
        return bool(shared.has_table)

    def follow(self, optimizer: KerasOptimizer) -> None:
        """Make the table of a layer without ``optimizer=``, for this Keras optimizer that will step it.

        ``fit`` does this. A custom loop needs this call if the model is not compiled, or if the loop calls only a part
        of a model. The rows follow any optimizer that then steps them; it must have the same state.

        Raises:
            ValueError: no update rule of bunkbed follows it.
        """
        self._shared.follow(optimizer)

    def _rows(self, ids: Tensor, options: LookupOptions) -> Tensor:
        look_up: Callable[..., Tensor] = rows_of_workers if self._shared.is_divided else rows_of
        return look_up(self._shared, ids, **options)

    def _bags(self, ids: Tensor, splits: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        assert self.combiner is not None
        look_up: Callable[..., Tensor] = bags_of_workers if self._shared.is_divided else bags_of
        return look_up(self._shared, ids, splits, weights, self.combiner, skip_zero=self.mask_zero, **options)

    # ---- saving

    def get_config(self) -> Json:
        """Return everything but the rows, as JSON; a table given by ``table=`` is saved as its path."""
        config = super().get_config()
        config.pop("dtype", None)
        init = self.embeddings_initializer
        has_table = self._shared.has_table
        optimizer = self._given_optimizer
        if optimizer is None and self._shared.is_explicit:
            optimizer = self.table.optimizer  # of a table that was given
        rules = self.table.retention if has_table else self._retention
        path = self._path
        if path is None and has_table and self.table.path is not None:
            path = str(self.table.path)
        return {
            **config,
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": {"bunkbed": list(init.native())},
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "path": path,
            "ram": self._ram if isinstance(self._ram, (int, str)) else None,
            "optimizer": None if optimizer is None else optimizer.native(),
            "dtype": self._stored_dtype or keras.saving.serialize_keras_object(self.dtype_policy),
            "seed": self._shared.seed,
            "placement": self.placement,
            "directories": self._directories,
            "durability": self._durability,
            "disk": self._disk,
            "retention": asdict(rules) if rules else None,
            "keep_checkpoints": self.keep_checkpoints,
        }

    @classmethod
    def from_config(cls, config: Json) -> Embedding:
        """Return the layer of a `get_config`; this opens the table at its path."""
        config = dict(config)
        # A stored table has its rules, which may have changed since the config was made.
        is_stored = config["path"] is not None and is_taken(current_path(Path(config["path"])))
        rules = None if is_stored else config.get("retention")
        config["retention"] = None if rules is None else Retention(**rules)
        init, optimizer, dtype = config["embeddings_initializer"], config["optimizer"], config["dtype"]
        if isinstance(init, dict) and "bunkbed" in init:
            config["embeddings_initializer"] = initializer_from_native(*init["bunkbed"])
        config["optimizer"] = None if optimizer is None else optim.from_native(optimizer)
        config["dtype"] = keras.saving.deserialize_keras_object(dtype) if isinstance(dtype, dict) else dtype
        if config["path"] is not None and is_in_use(current_path(Path(config["path"]))):
            _log.warning(
                "Embedding %r is made of the config of a layer, and shares the rows of its table %s, which this "
                "process has open; give a copy of a model other paths, or none: bunkbed.keras.moved({old: new})",
                config.get("name"), config["path"],
            )  # fmt: skip
        return cls(**config)

    def save_own_variables(self, store: Store) -> None:
        """Commit the table, keep the epoch, and store a reference to the epoch: uint8[n] of JSON.

        Of a table in RAM only store the rows, too, up to 1 GiB; see `bunkbed.adapters.ram_rows`.
        """
        rows, fields = self._shared.saved_rows()
        if fields is None:
            reference = self._shared.save()
            fields = None if reference is None else reference.fields()
        store[_REFERENCE] = np.frombuffer(json.dumps(fields).encode(), np.uint8)
        for name, values in rows.items():
            store[_ROWS + name] = values

    def load_own_variables(self, store: Store) -> None:
        """Rewind the table to the stored reference, or import the rows that a `keras.layers.Embedding` stored.

        Raises:
            ValueError: the epoch was dropped, the table is another one or not there, or the shape differs.
        """
        if _REFERENCE in store:
            fields = json.loads(bytes(np.asarray(store[_REFERENCE], np.uint8)))
            if _ROWS + "ids" in store:
                names = [name for name in store.keys() if name.startswith(_ROWS)]  # noqa: SIM118  # no dict
                self._shared.load_rows({name.removeprefix(_ROWS): np.asarray(store[name]) for name in names}, fields)
            else:
                self._shared.load(fields)
        elif "0" in store:
            others = sorted(name for name in store.keys() if name != "0")  # noqa: SIM118  # no dict
            if others:
                raise ValueError(
                    f"Embedding: what was saved for layer {self.name!r} has {', '.join(map(repr, others))} next to its "
                    "matrix, as quantized layers have; save the layer before it is quantized"
                )
            self._import(np.asarray(store["0"]))
        else:
            raise ValueError(f"Embedding: what was saved for layer {self.name!r} holds neither a reference nor rows")

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Tensor:
        if save_type == "savedmodel":
            raise ValueError(
                f"Embedding: table {self._shared.name!r} cannot be part of a SavedModel: its lookups run in this "
                "process. bunkbed.keras.export(model, path, max_bytes='1GiB') copies its rows into one, if they "
                'fit; or serve rows from a reader, bunkbed.open(path, mode="r"), next to the rest of the model'
            )
        return super()._trackable_children(save_type, **kwargs)


def _require_same_strategy(shared: SharedTable) -> None:
    """Raise ValueError if a table was made outside a strategy and is used inside it: its token has no replicas."""
    if IS_TORCH:
        return
    strategy = tf.distribute.get_strategy()
    if strategy is not shared.token.strategy and tf.distribute.has_strategy():
        raise ValueError(
            f"Embedding: table {shared.name!r} has a layer that was made outside this {type(strategy).__name__}; make "
            "all its layers in `with strategy.scope():`"
        )


def _require_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"Embedding: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"Embedding: {name} must be at least 1, got {value}")
