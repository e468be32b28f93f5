"""Training of recommenders from implicit feedback, on tables larger than memory.

- `loop` trains, `recipes` has options that reach published quality, `scalars` writes to TensorBoard;
- `settings` has every option, and the file in which a run keeps its options;
- `data` reads, splits, samples and stores interactions;
- `models` has the scores, the losses and the dense weights;
- `evaluate` ranks, recommends and compares; `trained` is a trained run in use; `output` draws and logs;
- `demo` and `report` implement the commands of these names.

Import the modules one by one (`bunkbed.train.data.interactions`, `bunkbed.train.loop`, ...), so that torch and pyarrow
load only where they are used. `bunkbed.train.Recommender` is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bunkbed.train.trained import Recommender as Recommender

__all__ = ["Recommender"]


def __getattr__(name: str) -> Any:
    if name == "Recommender":
        from bunkbed.train.trained import Recommender

        return Recommender
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
