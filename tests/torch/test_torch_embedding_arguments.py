"""How an `Embedding` is made and opened, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are disabled


def rows(layer: Any) -> Any:
    """All rows as a tensor, float32[num, dim]."""
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


# ---- from_pretrained, opening


def test_from_pretrained(tmp_path: Any) -> None:
    weight = torch.randn(7, 3)
    emb = Embedding.from_pretrained(weight, path=tmp_path / "t")
    assert torch.equal(emb(torch.arange(7)), weight) and not emb.anchor.requires_grad
    assert (emb.num_embeddings, emb.embedding_dim) == (7, 3)
    assert Embedding.from_pretrained(weight, freeze=False).anchor.requires_grad
    with pytest.raises(FileExistsError, match=r"from_pretrained: .* exists and its rows would be overwritten"):
        Embedding.from_pretrained(weight, path=tmp_path / "t")
    with pytest.raises(ValueError, match=r"embeddings must be \[rows, dim\], got \[7\]"):
        Embedding.from_pretrained(weight[:, 0])
    emb.table.close()


def test_a_path_is_created_then_opened(tmp_path: Any) -> None:
    emb = Embedding(10, 4, path=tmp_path / "user", ram="8MiB", optimizer=bb.Adagrad(lr=0.1), seed=5)
    assert emb.table.path == tmp_path / "user"
    before = rows(emb)
    again = Embedding(10, 4, path=tmp_path / "user")  # the same process: the same table
    assert torch.equal(rows(again), before)
    assert type(again.table.optimizer) is bb.Adagrad
    for layer in (emb, again):
        layer.table.close()
    reopened = Embedding(10, 4, path=tmp_path / "user", optimizer=bb.Adagrad(lr=0.5))
    assert torch.equal(rows(reopened), before)
    assert reopened.table.optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num": 11}, r"num_embeddings=11 was given, but table 'user' has 10"),
        ({"dim": 5}, r"embedding_dim=5 was given, but table 'user' has 4"),
        ({"seed": 6}, r"seed=6 was given, but table 'user' has 5"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16' was given, but table 'user' has 'float32'"),
        ({"init": bb.Zeros()}, r"init=Zeros\(\) was given, but table 'user' has Normal\(std=1.0\)"),
    ],
)
def test_a_mismatch_names_both_values(tmp_path: Any, arguments: dict[str, Any], message: str) -> None:
    Embedding(10, 4, path=tmp_path / "user", seed=5).table.close()
    num, dim = arguments.pop("num", 10), arguments.pop("dim", 4)
    with pytest.raises(ValueError, match=message):
        Embedding(num, dim, path=tmp_path / "user", **arguments)
    with pytest.raises(ValueError, match=r"its records hold the state of Adam .*, Adagrad \(sum\) was asked for"):
        Embedding(10, 4, path=tmp_path / "user", optimizer=bb.Adagrad())
    emb = Embedding(10, 4, path=tmp_path / "user")  # a refused opening left no lock behind
    with pytest.raises(ValueError, match=message):
        Embedding(num, dim, path=tmp_path / "user", **arguments)
    emb(torch.tensor([1]))  # nor did it close the one that was open
    emb.table.close()


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0 is not supported"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True is not supported"),
        ({"padding_idx": 10}, r"padding_idx=10 is outside \[-10, 10\)"),
        ({"padding_idx": -11}, r"padding_idx=-11 is outside \[-10, 10\)"),
        ({"dtype": torch.float64}, "dtype must be float32, bfloat16 or float16, got torch.float64"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1, or None for all, got 0"),
    ],
)
def test_unsupported_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Embedding(10, 4, **arguments)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 4), ValueError, "num_embeddings must be at least 1, got 0"),
        ((10, 0), ValueError, "embedding_dim must be at least 1, got 0"),
        ((1e6, 4), TypeError, r"num_embeddings must be an int, got 1000000\.0"),
    ],
)
def test_wrong_sizes(sizes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Embedding(*sizes)


def test_unbounded_ids_have_no_end_to_count_from() -> None:
    with pytest.raises(ValueError, match="padding_idx=-1 counts from the end, but num_embeddings is None"):
        Embedding(None, 4, padding_idx=-1)
    emb = Embedding(None, 4, padding_idx=10**15)
    assert torch.equal(emb(torch.tensor([10**15])), torch.zeros(1, 4))


def test_table_brings_its_own_settings() -> None:
    table = bb.create(None, dim=4, num_rows=10)
    with pytest.raises(ValueError, match="from_pretrained: table= has rows of its own"):
        Embedding.from_pretrained(torch.zeros(10, 4), table=table)
    first = Embedding(10, 4, table=table)
    with pytest.raises(ValueError, match=r"its layers share one anchor, on cpu; got device='meta'"):
        Embedding(10, 4, table=table, device="meta")
    assert first.table is table
    with pytest.raises(ValueError, match="optimizer= cannot be given together with table="):
        Embedding(10, 4, table=table, optimizer=bb.SGD())
    with pytest.raises(ValueError, match=r"embedding_dim=5 was given, but table .* has 4"):
        Embedding(10, 5, table=table)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "input must be an int64 or int32 tensor, got list"),
        (torch.zeros(2, 3), r"input must be an int64 or int32 tensor, got float32\[2, 3\]"),
        (torch.zeros(2, dtype=torch.bool), r"input must be an int64 or int32 tensor, got bool\[2\]"),
        (torch.zeros(2, dtype=torch.uint8), r"input must be an int64 or int32 tensor, got uint8\[2\]"),
    ],
)
def test_ids_of_a_wrong_type(ids: Any, message: str) -> None:
    emb = Embedding(10, 4)
    with pytest.raises(TypeError, match=message):
        emb(ids)
    with torch.no_grad(), pytest.raises(TypeError, match=message):
        emb(ids)


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_ids_outside_the_table(bad: int) -> None:
    emb = Embedding(10, 4)
    with pytest.raises(IndexError, match=rf"id {bad} at position 1 is outside \[0, 10\)"):
        emb(torch.tensor([3, bad]))


def test_weight_names_what_to_use_instead() -> None:
    emb = Embedding(10, 4)
    assert not hasattr(emb, "weight")
    with pytest.raises(AttributeError, match=r"table\.get.*table\.scan.*table\.topk.*init="):
        torch.nn.init.normal_(emb.weight)
    with pytest.raises(AttributeError, match=r"no attribute 'weight'"):
        emb.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(AttributeError, match="cannot be replaced; to share a table"):
        emb.anchor = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        _ = emb.wieght


def test_copies_of_files_and_pickles_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Embedding(10, 4, path=tmp_path / "user", ram="8MiB"))
    with pytest.raises(TypeError, match=r"Embedding cannot be copied: table .* has one writer"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"Embedding cannot be pickled: .* save `model.state_dict"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())


def test_repr() -> None:
    emb = Embedding(10, 4, padding_idx=1, dtype="bfloat16", optimizer=bb.SGD())
    assert repr(emb) == "Embedding(10, 4, padding_idx=1, ram only, optimizer=SGD, dtype=bfloat16)"
