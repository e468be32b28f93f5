"""Options that reach published quality on public data sets, for benchmarks and as a place to start from.

Chosen on pairs held out of the training files; the test items were not looked at. What each reaches, with its
ranking and time, stands in ``benchmarks/RESULTS.md``.

`ML1M` is for MovieLens-1M as the NCF authors split it (leave-one-out, 99 sampled negatives given): generalised
matrix factorization (He et al. 2017) with eight negatives a pair and a strong L2, without which it overfits
from the twelfth epoch on. `GOWALLA` is for Gowalla as the LightGCN authors split it (full ranking): matrix
factorization with BPR. Its negatives are shared by the pairs of a step, so that there can be hundreds of them,
and the harder ones weigh more.

>>> RECIPES["gowalla"].loss
'bpr'
"""

from __future__ import annotations

from bunkbed.train.config import TrainConfig

__all__ = ["GOWALLA", "ML1M", "RECIPES"]

ML1M = TrainConfig(
    model="gmf",
    loss="bce",
    dim=64,
    lr=2e-3,
    l2=1e-2,
    negatives=8,
    batch_size=4096,
    epochs=20,
    valid="random",
    ranking="sampled",
    metric="ndcg@10",
    ks="10",
)

GOWALLA = TrainConfig(
    model="mf",
    loss="bpr",
    dim=64,
    lr=4e-3,
    lr_decay=0.95,
    l2=1e-2,
    negatives=512,
    share_negatives=True,
    hardness=1.0,
    batch_size=2048,
    epochs=28,
    valid="none",
    metric="recall@20",
    ks="20",
)

RECIPES: dict[str, TrainConfig] = {"ml1m": ML1M, "gowalla": GOWALLA}
