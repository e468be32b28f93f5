"""Types of Keras and TensorFlow, which are untyped; and the shared object of a table, as the backends see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bunkbed.adapters.references import Reference
from bunkbed.core.types import Json

if TYPE_CHECKING:
    from bunkbed.keras.base.pending import Pending
    from bunkbed.table.table import Table

#: A tensor of Keras's backend, or what it converts to a tensor: `tf.Tensor`, `torch.Tensor`, an array, a number.
Tensor: TypeAlias = Any
#: A shape or structure of shapes, as Keras passes it to a layer.
Shape: TypeAlias = Any
#: A dtype, a name, a `keras.DTypePolicy`, or a list.
DType: TypeAlias = Any
#: A `keras.Initializer`, its name or its configuration.
Initializer: TypeAlias = Any
#: A `keras.Optimizer`; with loss scaling, a `keras.optimizers.LossScaleOptimizer`; None without one.
KerasOptimizer: TypeAlias = Any
#: A `keras.Layer`.
Layer: TypeAlias = Any
#: A `keras.Model`, or a layer with the same interface.
Model: TypeAlias = Any
#: What a layer passes from `call` to its lookup: keyword arguments, or None.
LookupOptions: TypeAlias = Any
#: The store of a layer's variables in a ``.keras`` file.
Store: TypeAlias = Any
#: A `tf.data.Dataset`.
Dataset: TypeAlias = Any
#: A `tf.distribute.Strategy`, or its cluster resolver and cluster.
Strategy: TypeAlias = Any


#: The `bunkbed.keras.workers.group.Workers` that train a table, which imports this package; None without workers.
WorkersOf: TypeAlias = Any


class Shared(Protocol):
    """What the backends use of `bunkbed.keras.shared.table.SharedTable`."""

    workers: WorkersOf

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def has_table(self) -> bool: ...
    @property
    def table(self) -> Table: ...
    @property
    def token(self) -> Tensor: ...
    @property
    def pending(self) -> Pending: ...
    def for_lookup(self) -> Table: ...
    def next_place(self) -> int: ...
    def save(self, *, in_process: bool = False) -> Reference | None: ...
    def load(self, fields: Json | None) -> None: ...
    def go_back(self, number: int, number_of: Callable[[str, int], int]) -> None: ...
    def settle(self, gradients: Tensor, optimizer: KerasOptimizer, scaling: KerasOptimizer) -> Tensor: ...
