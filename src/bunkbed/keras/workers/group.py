"""The workers of a `tf.distribute.MultiWorkerMirroredStrategy`, and the exchange of messages among them.

Messages use the strategy's collectives, in which every worker must take part: a worker that stays away leaves the
others waiting. So a worker sends an error that occurs before a collective through that collective, and all workers
raise. If the process of a worker ends, TensorFlow ends the collective of the others with an error.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bunkbed.core.types import Json
from bunkbed.files.run_files import is_sharded
from bunkbed.files.workers import Placement, folder_of_worker, folders_of_workers
from bunkbed.keras.base.types import Strategy, Tensor
from bunkbed.keras.workers.messages import error_message, message, split_messages
from bunkbed.table.opening import is_table

#: Time that a worker waits for the others, when all make a layer or save, before it logs a warning.
_PATIENCE_S = 60.0
_log = logging.getLogger("bunkbed.keras")


class Workers:
    """The workers of a strategy, seen from one worker.

    Attributes:
        index: the number of this worker, from 0.
        count: the number of workers.
        placement: ``"sharded"`` or ``"replicated"``.
        strategy: the strategy of the workers.
    """

    def __init__(self, strategy: Strategy, index: int, count: int, placement: Placement) -> None:
        self.strategy = strategy
        self.index = index
        self.count = count
        self.placement = placement
        self._gather: Callable[[Tensor], Tensor] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each worker has a part of the rows."""
        return self.placement == "sharded"

    def folder(self, index: int | None = None) -> str:
        """Return the name of a worker's directory, by default of this worker's."""
        return folder_of_worker(self.placement, self.index if index is None else index, self.count)

    # ---- In a replica, at every lookup or step

    def is_in_replica(self) -> bool:
        """Return whether this is inside ``strategy.run``, where collectives work."""
        replica = tf.distribute.get_replica_context()
        return replica is not None and int(replica.num_replicas_in_sync) == self.count

    def require_replica(self, what: str) -> None:
        """Raise RuntimeError outside ``strategy.run``, where collectives do not work."""
        if not self.is_in_replica():
            raise RuntimeError(
                f"Embedding: with placement={self.placement!r}, {what} takes all {self.count} workers; do it inside "
                "strategy.run(...), as model.predict does by itself, and on every worker as often"
            )

    def all_gather(self, said: Tensor) -> Tensor:
        """Send this worker's message; return int64[...] messages of all workers, one after another."""
        replica = tf.distribute.get_replica_context()
        said.set_shape([None])
        gathered = replica.all_gather(tf.identity(said), axis=0)  # identity: it must have this replica's device
        if not tf.executing_eagerly():
            gathered.set_shape([None])
        return gathered

    # ---- Outside of replicas, where a layer is made or saved

    def meet(self, what: str, say: Callable[[], Any]) -> list[Any]:
        """Exchange a JSON value with all workers, each of which must call this; return the values in order.

        Args:
            what: what the workers do, for errors.
            say: returns this worker's value; if it raises on a worker, all workers raise.

        Raises:
            RuntimeError: another worker failed; the message has its error.
        """
        if tf.distribute.in_cross_replica_context() is False and tf.distribute.has_strategy():
            raise RuntimeError(f"Embedding: {what} takes all workers, and cannot be done inside strategy.run(...)")
        failure: Exception | None = None
        try:
            text = json.dumps(say()).encode()
            words = np.frombuffer(text + b" " * (-len(text) % 8), np.int64)
            mine = message(0, 0, 1, words)
        except Exception as error:
            failure, mine = error, error_message(error)
        # TensorFlow has no timeout for a collective that another worker never enters.
        waits = threading.Timer(
            _PATIENCE_S,
            lambda: _log.warning(
                "%s takes all %d workers, and this one waits for the others; every worker must make the same layers "
                "and save as often as the others", what, self.count,
            ),
        )  # fmt: skip
        waits.daemon = True
        waits.start()
        try:
            gathered = self._gathered(mine)
        finally:
            waits.cancel()
        if failure is not None:
            raise failure
        return [
            json.loads(each.ids.tobytes()) for each in split_messages(gathered, self.index, f"Embedding: {what}", 1)
        ]

    def _gathered(self, mine: Tensor) -> Tensor:
        if self._gather is None:
            strategy = self.strategy

            @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])  # type: ignore[untyped-decorator]
            def gather(said: Tensor) -> Tensor:
                def each(said: Tensor) -> Tensor:
                    return tf.distribute.get_replica_context().all_gather(tf.identity(said), 0)

                return strategy.run(each, args=(said,))

            self._gather = gather
        with tf.init_scope():
            result = self.strategy.experimental_local_results(self._gather(tf.constant(mine)))[0]
        return result.numpy()

    # ---- Directories

    def place(self, path: Path) -> Path:
        """Return the directory of this worker's part of the table at `path`."""
        return path / self.folder()

    def parts(self, path: Path) -> Json:
        """Return facts about the files at `path`, for `agree_on_parts`."""
        return {
            "has": self.place(path).is_dir(),
            "all": folders_of_workers(path),
            "here": is_table(path) or is_sharded(path),
        }

    def _how_to_reshard(self, path: Path, option: str = "") -> str:
        if not self.is_sharded:
            return ""
        return f"make them with bunkbed reshard {shlex.quote(str(path))} --shards {self.count}{option}, "

    def agree_on_parts(self, path: Path, said: list[Json]) -> None:
        """Raise ValueError if the files at `path` are not a table of these workers, or lack a worker's part."""
        mine = [self.folder(index) for index in range(self.count)]
        for index, each in enumerate(said):
            if each["here"]:
                raise ValueError(
                    f"Embedding: worker {index} has a whole table at {path}, which is no part of one with "
                    f"placement={self.placement!r}; give another path, {self._how_to_reshard(path, ' --workers')}or "
                    f"copy the table to {path / mine[index]} on every worker (placement='replicated')"
                )
            strange = [name for name in each["all"] if name not in mine]
            if strange:
                raise ValueError(
                    f"Embedding: worker {index} has {path / strange[0]}, and {self.count} workers with placement="
                    f"{self.placement!r} would create another table; start as many workers as before, "
                    f"{self._how_to_reshard(path) if strange[0].startswith('shard-') else ''}or give another path"
                )
        if not all(each["has"] for each in said) and any(each["has"] or each["all"] for each in said):
            lacking = next(index for index, each in enumerate(said) if not each["has"])
            raise ValueError(
                f"Embedding: worker {lacking} has no {path / mine[lacking]}, and others have their parts of the table; "
                "put it back (were workers given other numbers?), or give another path for a new table"
            )


def workers_of(placement: str) -> Workers | None:
    """Return the workers of the strategy whose scope this is; None if there is one process.

    Raises:
        ValueError: under this strategy each process would train a separate table.
    """
    strategy = tf.distribute.get_strategy()
    resolver: Strategy = getattr(strategy, "cluster_resolver", None)
    cluster: Strategy = None if resolver is None else resolver.cluster_spec()
    tasks = 1 if not cluster else max(1, sum(cluster.num_tasks(job) for job in cluster.jobs if job != "evaluator"))
    kind = type(strategy).__name__
    if tasks == 1 and not isinstance(strategy, (tf.distribute.TPUStrategy, tf.distribute.ParameterServerStrategy)):
        return None
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or placement == "central":
        raise ValueError(
            f"Embedding: under {kind} with {tasks} processes each would train a table of its own; under "
            'tf.distribute.MultiWorkerMirroredStrategy give placement="sharded" (each worker has rows of its own) or '
            'placement="replicated" (each has all rows); tf.distribute.MirroredStrategy spreads the devices of one '
            "process"
        )
    if strategy.num_replicas_in_sync != tasks:
        raise ValueError(
            f"Embedding: {tasks} workers with {strategy.num_replicas_in_sync} replicas; a table's workers have one "
            "device each: start one process for each GPU, with CUDA_VISIBLE_DEVICES or "
            "tf.config.set_visible_devices"
        )
    index = int(resolver.task_id) + ("chief" in cluster.jobs and resolver.task_type == "worker")  # the replica's number
    return Workers(strategy, index, tasks, "sharded" if placement == "sharded" else "replicated")
