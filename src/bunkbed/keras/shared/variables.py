"""The two scalar variables that represent a table in Keras: its token, and its kept epoch.

Keras and TensorFlow train, save, restore and replicate variables. The token represents the rows in optimizer steps, the
kept epoch represents them where weights are saved and loaded. Both are one number; the rows stay in the table.
"""

from __future__ import annotations

import json
import weakref

import keras
import numpy as np

from bunkbed.core.types import Json
from bunkbed.keras.base.backend import IS_TORCH
from bunkbed.keras.base.caller import caller_locals
from bunkbed.keras.base.stepping import SteppedVariable
from bunkbed.keras.base.types import DType, KerasOptimizer, Shared, Strategy, Tensor

if IS_TORCH:
    from bunkbed.keras.torch.backend import EpochParameter
else:
    import tensorflow as tf


class Token(SteppedVariable):
    """The variable that the optimizer gets instead of the rows; its gradient encodes which row gradients it got.

    See `bunkbed.keras.base.pending` for the protocol. Its value is always 0. This one is for TensorFlow; torch's is in
    `bunkbed.keras.torch.backend`.
    """

    def __init__(self, owner: Shared, name: str) -> None:
        self._owner = weakref.ref(owner)
        self.strategy = tf.distribute.get_strategy()
        super().__init__(name, aggregation="mean")

    def assign(self, value: Tensor) -> Tensor:
        """Take the optimizer's step: update the table with the row gradients that the token's gradient encodes."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this token is closed")
        stepping, scaling, gradient = self.assigned_by(value, caller_locals())
        value = gradient if stepping is None else value
        replica = tf.distribute.get_replica_context()
        # Assigned outside a step, as by set_weights(). A table that was not made yet has no pending gradients.
        if replica is None or (stepping is None and not owner.has_table):
            return value
        if owner.workers is not None:
            if stepping is None and tf.executing_eagerly() and not owner.workers.is_in_replica() and not gradient:
                return value  # restored from a checkpoint, whose value is 0
            zero = owner.settle(tf.reshape(gradient, [1]), stepping, scaling)
            replica.merge_call(_set, args=(self, zero))
        elif replica.num_replicas_in_sync == 1:
            # The lookups of the next step read the variable, so they run after this step.
            self.value.assign(owner.settle(tf.reshape(gradient, [1]), stepping, scaling))
        elif tf.__internal__.distribute.strategy_supports_no_merge_call():
            raise RuntimeError("bunkbed.keras steps tables only where replicas can meet; leave jit_compile out")
        else:
            replica.merge_call(_settle_once, args=(self, owner, gradient, stepping, scaling))
        return value


def _settle_once(
    strategy: Strategy,
    token: Token,
    owner: Shared,
    gradients: Tensor,
    stepping: KerasOptimizer,
    scaling: KerasOptimizer,
) -> None:
    stepping, scaling = (strategy.experimental_local_results(each)[0] for each in (stepping, scaling))
    zero = owner.settle(tf.stack(strategy.experimental_local_results(gradients)), stepping, scaling)
    _set(strategy, token, zero)


def _set(strategy: Strategy, token: Token, value: Tensor) -> None:
    strategy.extended.update(token.value, lambda variable, value: variable.assign(value), args=(value,))


class KeptEpoch(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """The epoch that saved weights refer to: a read commits the table and keeps the epoch, an assignment rewinds.

    So ``get_weights`` and ``set_weights`` (which early stopping uses), ``.weights.h5``, ``.keras`` and
    `tf.train.Checkpoint` hold the reference where they hold the weights of other layers. Its number has the epoch in
    the low 40 bits, and above it 23 bits of the table's uuid, so that another table's number is detected.
    """

    def __init__(self, owner: Shared, name: str) -> None:
        self._owner = weakref.ref(owner)
        super().__init__(
            initializer=keras.initializers.Zeros(), shape=(), dtype="int64", trainable=False, autocast=False, name=name
        )
        if IS_TORCH:
            self._value = EpochParameter.of(self)

    def _alive(self) -> Shared:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this variable is closed")
        return owner

    def numpy(self) -> Tensor:
        """Commit the table, keep the epoch, and return int64[]: 0 for a table that was not made yet."""
        return np.asarray(self.saved(in_process=True), np.int64)

    def saved(self, *, in_process: bool = False) -> int:
        """Commit the table and keep the epoch; return its number, 0 for a table that was not made yet."""
        reference = self._alive().save(in_process=in_process)
        return 0 if reference is None else _number(reference.uuid, reference.epoch)

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> Tensor:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Tensor) -> Tensor:
        """Rewind the table to the kept epoch.

        Raises:
            ValueError: the epoch was dropped (lists those that remain), or belongs to another table.
        """
        number = int(value)
        self._alive().go_back(number, _number)
        return value

    def __repr__(self) -> str:
        return f"<KeptEpoch {self.path}>"  # the base class reads the value, which commits

    # ---- tf.train.Checkpoint

    def _serialize_to_tensors(self) -> Json:
        reference = self._alive().save()
        return {"REFERENCE": tf.constant(json.dumps(None if reference is None else reference.fields()))}

    def _restore_from_tensors(self, restored_tensors: Json) -> Tensor:
        fields = json.loads(restored_tensors["REFERENCE"].numpy())
        self._alive().load(fields)
        return self.value


def _number(uuid: str, epoch: int) -> int:
    return int(uuid[:6], 16) % 2**23 << 40 | epoch
