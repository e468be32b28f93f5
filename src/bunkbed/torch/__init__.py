"""Tables in PyTorch: `Embedding`, `EmbeddingBag`, one `Optimizer` for dense weights and tables, `lookahead`.

Swap ``torch.nn.Embedding`` for `Embedding`, wrap the optimizer once, keep the training loop::

    emb = Embedding(100_000_000, 64, path="tables/user", ram="2GiB")
    opt = Optimizer(model, dense=torch.optim.AdamW(model.parameters()))
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'bunkbed.torch needs PyTorch; install it with: pip install "bunkbed[torch]"', name="torch"
    ) from None

from bunkbed.torch.bag import EmbeddingBag
from bunkbed.torch.block_sampler import BlockSampler
from bunkbed.torch.collection import EmbeddingCollection
from bunkbed.torch.embedding import Embedding
from bunkbed.torch.freezing import freeze
from bunkbed.torch.layer import anchors
from bunkbed.torch.lookahead import lookahead
from bunkbed.torch.open_run import open_run
from bunkbed.torch.optimizer import Optimizer
from bunkbed.torch.portable import save_portable

__all__ = [
    "BlockSampler",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Optimizer",
    "anchors",
    "freeze",
    "lookahead",
    "open_run",
    "save_portable",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that define them."""
    return __all__
