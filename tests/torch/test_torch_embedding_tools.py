"""`Embedding` under the rest of torch: functional calls, compile, activation checkpointing, DataLoader workers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are disabled


def rows(layer: Any) -> Any:
    """All rows as a tensor, float32[num, dim]."""
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def test_a_swapped_anchor_is_noticed() -> None:
    emb = Embedding(10, 4)
    opt = Optimizer(emb)
    ids = (torch.tensor([1]),)
    same = torch.func.functional_call(emb, dict(emb.named_parameters()), ids)
    assert torch.equal(same, emb(*ids))
    other = {"anchor": torch.zeros(1, requires_grad=True)}
    with pytest.raises(RuntimeError, match="its anchor was swapped for another tensor"):
        torch.func.functional_call(emb, other, ids)
    with torch.no_grad():
        torch.func.functional_call(emb, other, ids)
    assert opt.step() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it itself
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_breaks_the_graph_at_the_layer(backend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = Embedding(10, 4, optimizer=bb.SGD(lr=0.1))
            self.bag = EmbeddingBag(10, 4, table=self.emb.table)
            self.head = torch.nn.Linear(4, 1)

        def forward(self, ids: Any) -> Any:
            return torch.relu(self.head(self.emb(ids) + self.bag(ids[:, None]))).sum()

    torch._dynamo.reset()
    model = Model()
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, backend=backend)
    ids = torch.tensor([1, 2, 2])
    for _ in range(3):
        loss = compiled(ids)
        torch.testing.assert_close(loss, model(ids))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert model.emb.table.step == 3


def test_activation_checkpointing_trains_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    results = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        emb = Embedding(10, 4, optimizer=bb.Adam(lr=0.1), seed=0)
        head = torch.nn.Linear(4, 1)
        model = torch.nn.ModuleList([emb, head])
        opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
        switch = torch.ones(1, requires_grad=True)  # the reentrant kind needs an input with gradient
        for ids in torch.randint(0, 10, (5, 6)):

            def block(ids: Any, switch: Any, emb: Any = emb, head: Any = head) -> Any:
                return torch.tanh(head(emb(ids) * switch))

            out = block(ids, switch) if reentrant is None else checkpoint(block, ids, switch, use_reentrant=reentrant)
            opt.zero_grad()
            (out.sum() + emb(ids).sum()).backward()
            opt.step()
        results.append(rows(emb))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


class Ids(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, layer: Any = None) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]) if self.layer is None else self.layer(torch.tensor([index])).detach()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # multi-threaded, uses fork
def test_dataloader_workers_may_make_ids_but_not_look_up() -> None:
    emb = Embedding(10, 4, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    before = rows(emb)
    for batch in torch.utils.data.DataLoader(Ids(), batch_size=4, num_workers=2):
        emb(batch).sum().backward()
    opt.step()
    assert torch.equal(rows(emb)[:8], before[:8] - 1)
    with pytest.raises(bb.TableClosedError, match="fork"):
        next(iter(torch.utils.data.DataLoader(Ids(emb), num_workers=1)))
    emb(torch.tensor([1]))  # the parent goes on


def test_without_torch_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import bunkbed.torch\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ('bunkbed.torch needs PyTorch; install it with: pip install "bunkbed[torch]"')
