"""Options that reach published quality on public data sets, for benchmarks and as starting points.

The options were chosen on pairs held out of the training files. `GOWALLA` then trains on all pairs; the others hold out
one pair of each user, which selects the epoch. The quality of each recipe is in ``benchmarks/RESULTS.md``.

`ML1M_BCE` and `ML1M` are for MovieLens-1M in the NCF authors' split (leave-one-out, 99 sampled negatives given). Both
use generalised matrix factorization (He et al. 2017): `ML1M_BCE` with cross-entropy and eight own negatives for each
pair, `ML1M` with BPR. `ML1M_NEUMF` is `ML1M_BCE` with the same paper's NeuMF. `GOWALLA` is for Gowalla in the LightGCN
authors' split (full ranking): matrix factorization with BPR. `ML1M_BF16` is `ML1M` with bfloat16 rows and row-wise
Adagrad, at 132 bytes a row instead of 768. With BPR, the pairs of a step share hundreds of negatives, so a step touches
few rows, and harder negatives weigh more. All recipes need a strong L2. Their pairs are in uniform order for every
budget.

>>> RECIPES["gowalla"].loss
'bpr'
"""

from __future__ import annotations

from dataclasses import replace

from bunkbed.train.settings.config import TrainConfig

__all__ = ["GOWALLA", "ML1M", "ML1M_BCE", "ML1M_BF16", "ML1M_NEUMF", "RECIPES"]

ML1M = TrainConfig(
    model="gmf",
    loss="bpr",
    dim=64,
    lr=3e-3,
    lr_decay=0.8,
    l2=4e-2,
    negatives=256,
    share_negatives=True,
    hardness=0.5,
    batch_size=1024,
    epochs=8,
    order="uniform",
    valid="random",
    ranking="sampled",
    metric="ndcg@10",
    ks="10",
)

ML1M_BCE = TrainConfig(
    model="gmf",
    loss="bce",
    dim=64,
    lr=2e-3,
    l2=1e-2,
    negatives=8,
    batch_size=4096,
    epochs=20,
    order="uniform",
    valid="random",
    ranking="sampled",
    metric="ndcg@10",
    ks="10",
)

ML1M_NEUMF = replace(ML1M_BCE, model="neumf", dim=32, epochs=12)

ML1M_BF16 = replace(ML1M, dtype="bfloat16", optimizer="rowwise_adagrad", lr=0.15)

GOWALLA = TrainConfig(
    model="mf",
    loss="bpr",
    dim=64,
    lr=5e-3,
    lr_decay=0.85,
    l2=4e-2,
    negatives=512,
    share_negatives=True,
    hardness=3.0,
    batch_size=2048,
    epochs=12,
    order="uniform",
    valid="none",
    metric="recall@20",
    ks="20",
)

RECIPES: dict[str, TrainConfig] = {
    "ml1m": ML1M,
    "ml1m-bce": ML1M_BCE,
    "ml1m-neumf": ML1M_NEUMF,
    "ml1m-bf16": ML1M_BF16,
    "gowalla": GOWALLA,
}
