"""What PyTorch's own tests of its embedding layers ask for, asked of ours.

The names are those of ``test/nn/test_embedding.py`` of pytorch/pytorch (commit 013a59d6). A test of a name has a
function ``test_NAME`` here, or is in `REFUSED` or `NOT_APPLICABLE`; `tests/frameworks/test_counts.py` counts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

NAMES = (
    "embedding_max_norm_unsorted_repeating_indices",
    "embedding_sparse_basic",
    "embedding_sparse_empty_tensor",
    "move_sparse_half_embedding",
    "embedding_max_norm",
    "embedding_from_pretrained",
    "embedding_bag_from_pretrained",
    "embedding_from_pretrained_padding_idx",
    "embedding_bag_from_pretrained_padding_idx",
    "embedding_from_pretrained_options",
    "embedding_functional",
    "large_tensors",
    "embedding_bag_functional",
    "embedding_bag_padding_idx_error",
    "embeddingbag_from_pretrained",
    "embeddingbag_from_pretrained_options",
    "embeddingbag_include_last_offset",
    "embedding_dense_grad",
    "embedding_scalar_weight_error",
    "embedding_backward",
    "embedding_max_norm_backward",
    "embedding_max_norm_fwd_AD",
    "embedding_padding_idx",
    "embedding_bag_1D_padding_idx",
    "embedding_bag_2D_padding_idx",
    "embedding_max_norm_device",
    "embedding_bag_empty_input",
    "embedding_bag_out_of_bounds_idx",
    "embedding_bag_dimension_errors",
    "EmbeddingBag_per_sample_weights_failures",
    "EmbeddingBag_empty_per_sample_weights_and_offsets",
    "EmbeddingBag_per_sample_weights_and_offsets",
    "EmbeddingBag_per_sample_weights_and_new_offsets",
    "EmbeddingBag_per_sample_weights_and_no_offsets",
    "embedding_bag_device",
    "embedding_bag_non_contiguous_weight",
    "embedding_bag_bfloat16",
    "embedding_bag_half",
    "embedding_bag_per_sample_weights_grad",
)

_PRETRAINED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

#: What is refused, with what the message says to do. Parts of other tests are refused, too: there, `pytest.raises`.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "embedding_max_norm_unsorted_repeating_indices": (lambda: Embedding(20, 64, max_norm=1.0), "normalise the output"),
    "embedding_sparse_empty_tensor": (lambda: Embedding(10, 0, sparse=True), "embedding_dim must be at least 1, got 0"),
    "embedding_max_norm": (lambda: Embedding(22, 5, max_norm=1.0), "normalise the output"),
    "embedding_from_pretrained_options": (
        lambda: Embedding.from_pretrained(_PRETRAINED, max_norm=2.0, norm_type=0.5, sparse=True),
        "normalise the output",
    ),
    "embeddingbag_from_pretrained_options": (
        lambda: EmbeddingBag.from_pretrained(_PRETRAINED, mode="max"),
        r"take the maximum of an Embedding's output: Embedding\(\.\.\.\)\(ids\)\.amax\(dim=1\)",
    ),
    "embedding_max_norm_backward": (lambda: Embedding(4, 4, max_norm=1.0), "normalise the output"),
    "embedding_max_norm_fwd_AD": (lambda: Embedding(4, 4, max_norm=1.0), "normalise the output"),
    "embedding_max_norm_device": (lambda: Embedding(22, 5, max_norm=1.0), "normalise the output"),
}

NOT_APPLICABLE = {"large_tensors": "of torch.nn.functional alone: an output of 2**31 values on a GPU with 40 GB"}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: How far outputs may differ: 16-bit weights of torch's layer are rounded, our rows are float32.
ATOL = {torch.float32: 1e-6, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}
INTEGERS = tuple(itertools.product((torch.int32, torch.int64), repeat=2))


def rows_of(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.num_embeddings)))


def ours_like(theirs: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return our layer with the rows of torch's, and its gradients as what an SGD step of rate 1 subtracts."""
    arguments = {"padding_idx": theirs.padding_idx, "optimizer": bb.SGD(lr=1.0)}
    kind: Any = Embedding
    if isinstance(theirs, torch.nn.EmbeddingBag):
        kind, arguments["mode"] = EmbeddingBag, theirs.mode
        arguments["include_last_offset"] = theirs.include_last_offset
    layer = kind(*theirs.weight.shape, **arguments)
    layer.table.set(np.arange(len(theirs.weight)), theirs.weight.detach().float().numpy())
    return layer.to(dtype)


def check(theirs: Any, *inputs: Any, weights: Any = None, dtype: torch.dtype = torch.float32, grad: Any = None) -> Any:
    """Compare outputs, gradients of rows and gradients of weights; return our output."""
    theirs = theirs.to(dtype)
    ours = ours_like(theirs, dtype)
    optimizer = Optimizer(ours)
    before = rows_of(ours)
    given = [None if weights is None else weights.clone().detach().requires_grad_(weights.requires_grad) for _ in "ab"]
    out = [
        layer(*inputs) if one is None else layer(*inputs, per_sample_weights=one)
        for layer, one in zip((ours, theirs), given, strict=True)
    ]
    assert out[0].dtype is dtype
    close = {"rtol": 0.05 if dtype in (torch.float16, torch.bfloat16) else 1e-5, "atol": ATOL[dtype]}
    torch.testing.assert_close(out[0], out[1], **close)
    grad = torch.linspace(-1, 1, out[1].numel()).reshape(out[1].shape) if grad is None else grad
    for one in out:
        one.backward(grad.to(dtype))
    optimizer.step()
    wanted = theirs.weight.grad.to_dense().float()
    torch.testing.assert_close(before - rows_of(ours), wanted, rtol=close["rtol"], atol=5 * close["atol"])
    if weights is not None and weights.requires_grad:
        torch.testing.assert_close(given[0].grad, given[1].grad, **close)
    return out[0].detach()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, what_to_do = REFUSED[name]
    with pytest.raises(ValueError, match=what_to_do):
        call()


def test_embedding_sparse_basic() -> None:
    torch.manual_seed(0)
    check(torch.nn.Embedding(10, 20, sparse=True), torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]]))
    layer = Embedding(10, 20, sparse=True)
    optimizer = Optimizer(layer)
    empty = layer(torch.tensor([], dtype=torch.int64))
    empty.sum().backward()
    optimizer.step()
    assert empty.shape == (0, 20)


def test_move_sparse_half_embedding() -> None:
    layer = Embedding(10, 3, sparse=True)
    assert layer.anchor.device.type == "cpu" and layer.anchor.dtype == torch.get_default_dtype()
    layer.to(torch.float16)
    assert layer(torch.tensor([1])).dtype == torch.float16
    assert (layer.num_embeddings, layer.embedding_dim) == (10, 3)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_embedding_from_pretrained(dtype: torch.dtype) -> None:
    matrix = _PRETRAINED.to(dtype)
    if dtype is not torch.float32:
        with pytest.raises(TypeError, match=r"must be float32, bfloat16 or float16.*give embeddings\.float\(\)"):
            Embedding.from_pretrained(matrix)
        matrix = matrix.float()
    layer = Embedding.from_pretrained(matrix)
    assert torch.equal(rows_of(layer), matrix) and torch.equal(layer(torch.tensor([0, 1])), matrix)


def test_embedding_bag_from_pretrained() -> None:
    layer = EmbeddingBag.from_pretrained(_PRETRAINED)
    assert torch.equal(rows_of(layer), _PRETRAINED)
    assert torch.equal(layer(torch.tensor([0, 1]), torch.arange(2)), _PRETRAINED)


def _keeps_the_padding_row(kind: Any) -> None:
    matrix = torch.rand(4, 3, requires_grad=True)
    with torch.no_grad():
        matrix[2] = 7
    assert torch.equal(rows_of(kind.from_pretrained(matrix, padding_idx=2)), matrix.detach())


def test_embedding_from_pretrained_padding_idx() -> None:
    _keeps_the_padding_row(Embedding)


def test_embedding_bag_from_pretrained_padding_idx() -> None:
    _keeps_the_padding_row(EmbeddingBag)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_functional(padding_idx: int | None) -> None:
    ids, matrix = torch.tensor([[1, 3, 2], [0, 2, 1]]), torch.rand(4, 3)
    layer = Embedding.from_pretrained(matrix, padding_idx=padding_idx)
    assert torch.equal(layer(ids), torch.nn.functional.embedding(ids, matrix, padding_idx=padding_idx))


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_bag_functional(padding_idx: int | None) -> None:
    ids, matrix = torch.tensor([[1, 3, 2], [0, 2, 1]]), torch.rand(4, 3)
    layer = EmbeddingBag.from_pretrained(matrix, padding_idx=padding_idx)
    wanted = torch.nn.functional.embedding_bag(ids, matrix, padding_idx=padding_idx)
    torch.testing.assert_close(layer(ids), wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(AttributeError, match=r"write rows with layer\.table\.set"):
        layer.weight = torch.nn.Parameter(matrix)


@pytest.mark.parametrize("padding_idx", range(-6, 6))
def test_embedding_bag_padding_idx_error(padding_idx: int) -> None:
    if -4 <= padding_idx < 4:
        assert EmbeddingBag(4, 3, padding_idx=padding_idx).padding_idx == padding_idx % 4
        return
    with pytest.raises(ValueError, match=rf"padding_idx={padding_idx} is outside \[-4, 4\)"):
        EmbeddingBag(4, 3, padding_idx=padding_idx)


def test_embeddingbag_from_pretrained() -> None:
    layer = EmbeddingBag.from_pretrained(_PRETRAINED)
    assert torch.equal(layer(torch.tensor([[0, 1]])), _PRETRAINED.mean(0, keepdim=True))


def test_embeddingbag_include_last_offset() -> None:
    """torch reads a last offset of 3 of 4 ids as 4 here, and as 3 without a padding id: that is refused."""
    theirs = torch.nn.EmbeddingBag(100, 3, include_last_offset=True, padding_idx=61)
    ids = torch.tensor([0, 1, 2, 3])
    out = check(theirs, ids, torch.tensor([0, 3, 4]))
    torch.testing.assert_close(out, torch.stack([theirs.weight[:3].mean(0), theirs.weight[3]]).detach())
    for padding_idx, mode in itertools.product((None, 61), ("sum", "mean")):
        bag = EmbeddingBag(100, 3, include_last_offset=True, padding_idx=padding_idx, mode=mode)
        with pytest.raises(ValueError, match="offsets must end with the number of ids, 4, got 3"):
            bag(ids, torch.tensor([0, 3, 3]))


def test_embedding_dense_grad() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[0, 1, 1, 2], [3, 5, 7, 11]])
    check(torch.nn.Embedding(20, 20), ids, dtype=torch.float64)
    layer = Embedding(20, 20)
    with pytest.raises(RuntimeError, match=r"no second derivative; take torch\.autograd\.grad with respect to"):
        torch.autograd.grad(layer(ids).square().sum(), layer.anchor, create_graph=True)


@pytest.mark.parametrize("weight", [torch.tensor(1.0), torch.ones(1, 1, 1)])
def test_embedding_scalar_weight_error(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"embeddings must be \[rows, dim\], got \["):
        Embedding.from_pretrained(weight)


@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding_backward(dtype: torch.dtype) -> None:
    """Gradients of one lookup, of two, and of two with ids that the caller changes in between."""
    for changed, times in ((False, 1), (False, 2), (True, 2)):
        layer = Embedding(10, 3, sparse=True, optimizer=bb.SGD(lr=1.0)).to(dtype)
        optimizer, before, ids = Optimizer(layer), rows_of(layer), torch.tensor([7, 1, 3])
        wanted = torch.zeros(10, 3)
        for number in range(times):
            if changed and number == 1:
                ids[0] = 8
            wanted[ids] += 1
            layer(ids).sum().backward()
        optimizer.step()
        torch.testing.assert_close(before - rows_of(layer), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_padding_idx(dtype: torch.dtype, sparse: bool) -> None:
    for padding_idx, row in ((0, 0), (-2, 8)):
        layer = Embedding(10, 20, padding_idx=padding_idx, sparse=sparse).to(dtype)
        ids = torch.tensor([[row, 2, 4, 5], [4, 3, row, 9]])
        out = layer(ids)
        assert not out[0, 0].any() and not out[1, 2].any() and out[0, 1].any()
    changed = Embedding(10, 20, padding_idx=2, sparse=sparse).to(dtype)
    changed.table.set([2], np.ones((1, 20), np.float32))
    assert torch.equal(changed(torch.tensor([0, 2]))[1], torch.ones(20, dtype=dtype))
    for padding_idx in (25, -25):
        with pytest.raises(ValueError, match=rf"padding_idx={padding_idx} is outside \[-10, 10\)"):
            Embedding(10, 20, padding_idx=padding_idx)
    for number, others in itertools.product((1, 2, 1000), ([], [1, 3], [2])):
        check(torch.nn.Embedding(5, 2, padding_idx=0, sparse=sparse), torch.tensor(others + [0] * number))


def ragged(chance: np.random.Generator, is_padding: bool, with_last: bool) -> tuple[Any, Any]:
    """Return ids and offsets of ten bags: one is full and one is empty."""
    lengths = chance.integers(1, 10, 10)
    full, empty = chance.choice(10, 2, replace=False)
    lengths[full], lengths[empty] = 10, 0
    ids = np.ones(lengths.sum(), np.int64) if is_padding else chance.integers(0, 100, lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(ids), torch.from_numpy(offsets if with_last else offsets[:-1])


@pytest.mark.parametrize(("mode", "sparse"), [("mean", False), ("mean", True), ("sum", False), ("sum", True)])
@pytest.mark.parametrize("with_last", [False, True])
def test_embedding_bag_1D_padding_idx(mode: str, sparse: bool, with_last: bool) -> None:
    chance = np.random.default_rng(0)
    for is_padding in (False, True):
        ids, offsets = ragged(chance, is_padding, with_last)
        for padding_idx in (None, *sorted(set(ids.tolist()))[:12]):
            theirs = torch.nn.EmbeddingBag(
                100, 3, mode=mode, sparse=sparse, include_last_offset=with_last, padding_idx=padding_idx
            )
            check(theirs, ids, offsets)
    with pytest.raises(ValueError, match="mode='max' is not supported"):
        EmbeddingBag(100, 3, mode="max", padding_idx=1)


@pytest.mark.parametrize(("mode", "sparse"), [("mean", False), ("mean", True), ("sum", False), ("sum", True)])
@pytest.mark.parametrize("bags", [1, 10])
def test_embedding_bag_2D_padding_idx(mode: str, sparse: bool, bags: int) -> None:
    chance = np.random.default_rng(1)
    for is_padding in (False, True):
        ids = np.ones((bags, 10), np.int64) if is_padding else chance.integers(0, 10, (bags, 10))
        ids[bags // 2] = ids[bags // 2, 0]  # a bag of one id only
        for padding_idx in sorted(set(ids.ravel().tolist())):
            check(
                torch.nn.EmbeddingBag(10, 3, mode=mode, sparse=sparse, padding_idx=padding_idx), torch.from_numpy(ids)
            )


@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_embedding_bag_empty_input(ids: torch.dtype, offsets: torch.dtype) -> None:
    for sparse, starts in itertools.product((False, True), ([0], [0, 0])):
        layer = EmbeddingBag(4, 3, sparse=sparse)
        out = layer(input=torch.tensor([], dtype=ids), offsets=torch.tensor(starts, dtype=offsets))
        assert torch.equal(out, torch.zeros(len(starts), 3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_out_of_bounds_idx(mode: str, dtype: torch.dtype) -> None:
    for padding_idx, (bad, ids) in itertools.product((None, 0), ((-1, [[-1, 1]]), (11, [[11, 8]]))):
        layer = EmbeddingBag(10, 2, mode=mode, padding_idx=padding_idx)
        for weights in (None, torch.randn(1, 2)) if mode == "sum" else (None,):
            with pytest.raises(IndexError, match=rf"id {bad} at position 0 is outside \[0, 10\)"):
                layer(torch.tensor(ids, dtype=dtype), per_sample_weights=weights)


def test_embedding_bag_dimension_errors() -> None:
    with pytest.raises(ValueError, match="input must be 1- or 2-dimensional"):
        EmbeddingBag(2, 6)(torch.full((2, 0, 0, 6, 6), 1), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="offsets must be 1-dimensional"):
        EmbeddingBag(2, 2)(torch.ones(2, dtype=torch.int64), torch.zeros(2, 0, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"embeddings must be \[rows, dim\]"):
        EmbeddingBag.from_pretrained(torch.zeros(2, 2, 2))


KNOWN = [3, 1, 1, 1, 4, 0], [0, 0, 3, 3, 6]


def known(mode: str, ids: torch.dtype, offsets: torch.dtype, **options: Any) -> tuple[Any, Any, Any]:
    """Return torch's layer with the rows 1 to 10, and six ids in bags of which three are empty."""
    theirs = torch.nn.EmbeddingBag(5, 2, mode=mode, **options)
    with torch.no_grad():
        theirs.weight.copy_(torch.arange(1.0, 11).view(5, 2))
    starts = KNOWN[1] + ([6] if options.get("include_last_offset") else [])
    return theirs, torch.tensor(KNOWN[0], dtype=ids), torch.tensor(starts, dtype=offsets)


@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_EmbeddingBag_per_sample_weights_failures(ids: torch.dtype, offsets: torch.dtype) -> None:
    theirs, given, starts = known("sum", ids, offsets)
    layer = ours_like(theirs)
    for dtype in (torch.float64, torch.float16, torch.int64):
        with pytest.raises(TypeError, match=rf"must have the layer's dtype, torch\.float32, got {dtype}"):
            layer(given, starts, torch.ones(6, dtype=dtype))
    with pytest.raises(ValueError, match=r"must have input's shape \[6\], got \[5\]"):
        layer(given, starts, torch.randn(5))
    with pytest.raises(ValueError, match=r"must have input's shape \[7, 3\], got \[21\]"):
        layer(torch.zeros(7, 3, dtype=ids), None, torch.randn(21))
    with pytest.raises(ValueError, match="per_sample_weights needs mode='sum', but this layer has mode='mean'"):
        EmbeddingBag(5, 2)(torch.zeros(7, 3, dtype=ids), None, torch.randn(7, 3))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_EmbeddingBag_empty_per_sample_weights_and_offsets(
    ids: torch.dtype, offsets: torch.dtype, dtype: torch.dtype
) -> None:
    theirs, _, _ = known("sum", ids, offsets)
    for trains in (True, False):
        weights = torch.empty(0, dtype=dtype, requires_grad=trains)
        none = torch.tensor([], dtype=ids), torch.tensor([0] * 5, dtype=offsets)
        assert not check(theirs, *none, weights=weights, dtype=dtype).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_EmbeddingBag_per_sample_weights_and_offsets(
    ids: torch.dtype, offsets: torch.dtype, dtype: torch.dtype
) -> None:
    for trains in (True, False):
        theirs, given, starts = known("sum", ids, offsets)
        check(theirs, given, starts, weights=torch.linspace(-1, 2, 6, dtype=dtype).requires_grad_(trains), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_EmbeddingBag_per_sample_weights_and_new_offsets(
    ids: torch.dtype, offsets: torch.dtype, dtype: torch.dtype
) -> None:
    for mode, trains, with_last in itertools.product(("sum", "mean"), (None, True, False), (True, False)):
        if mode == "mean" and trains is not None:
            continue
        theirs, given, starts = known(mode, ids, offsets, include_last_offset=with_last)
        weights = None if trains is None else torch.linspace(-1, 2, 6, dtype=dtype).requires_grad_(trains)
        check(theirs, given, starts, weights=weights, dtype=dtype)


SIZES = [(2, 3, 5, 7), (2, 5, 53, 23), (101, 5, 3, 7), (2, 101, 3, 7)]


def as_embedding(size: tuple[int, ...], mode: str, sparse: bool, dtype: torch.dtype, weights: bool | None) -> None:
    """Compare bags of one length with an `Embedding` whose output is reduced."""
    rows, dim, bags, length = size
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(rows, dim, mode=mode, sparse=sparse)
    ids = torch.randint(rows, (bags, length))
    factors = None
    if weights is not None:
        factors = torch.randn(bags, length).softmax(-1).reshape(-1).to(dtype).requires_grad_(weights)
    grad = torch.rand(bags, dim)
    out = check(theirs, ids.reshape(-1), torch.arange(bags) * length, weights=factors, dtype=dtype, grad=grad)
    plain = Embedding(rows, dim, optimizer=bb.SGD(lr=1.0))
    plain.table.set(np.arange(rows), theirs.weight.detach().float().numpy())
    each = plain(ids)
    if factors is not None:
        each = each * factors.detach().float().reshape(bags, length, 1)
    reduced = each.sum(1) if mode == "sum" else each.mean(1)
    close = {"rtol": 0.05, "atol": ATOL[dtype]} if dtype in (torch.float16, torch.bfloat16) else {}
    torch.testing.assert_close(out.float(), reduced.detach(), **({"rtol": 1e-5, "atol": 1e-5} | close))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_EmbeddingBag_per_sample_weights_and_no_offsets(size: tuple[int, ...], dtype: torch.dtype) -> None:
    for sparse, trains in itertools.product((True, False), repeat=2):
        as_embedding(size, "sum", sparse, dtype, trains)


def bags_of(mode: str, sparse: bool, dtype: torch.dtype, ids: torch.dtype, offsets: torch.dtype) -> None:
    """A known example, its two-dimensional form, empty bags, bags of one length, and arguments that are wrong."""
    theirs, given, starts = known(mode, ids, offsets, sparse=sparse)
    part = 1 if mode == "sum" else 3
    known_grad = torch.tensor([[99.0, 99], [1, 2], [99, 99], [3, 4], [99, 99]])
    out = check(theirs, given, starts, dtype=dtype, grad=known_grad)
    wanted = torch.tensor([[0.0, 0], [13, 16], [0, 0], [13, 16], [0, 0]], dtype=dtype) / part
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=ATOL[dtype])
    theirs, given, _ = known(mode, ids, offsets, sparse=sparse)
    out = check(theirs, given.view(2, -1), dtype=dtype, grad=known_grad[[1, 3]])
    torch.testing.assert_close(out, wanted[[1, 3]], rtol=1e-2, atol=ATOL[dtype])
    theirs, _, _ = known(mode, ids, offsets, sparse=sparse)
    assert not check(theirs, torch.tensor([], dtype=ids), torch.zeros(4, dtype=offsets), dtype=dtype).any()
    for size in [(17, 9, 11, 5), *itertools.product([1, 2], repeat=4)]:
        as_embedding(size, mode, sparse, dtype, None)
    bag, ones, thirds = EmbeddingBag(10, 20, mode=mode, sparse=sparse), torch.ones(3, 4, dtype=ids), torch.arange(3)
    flat = ones.reshape(-1)
    for bad, message in (
        ((ones, thirds), "offsets must be None for 2-dimensional input"),
        ((flat,), "offsets must be given for 1-dimensional input"),
        ((flat, torch.tensor([1, 1, 2], dtype=offsets)), "offsets must start with 0, got 1"),
        ((flat, torch.tensor([0, 1, 100], dtype=offsets)), "offsets must not decrease nor pass the 12 ids, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            bag(*bad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ids", "offsets"), INTEGERS)
def test_embedding_bag_device(ids: torch.dtype, offsets: torch.dtype, dtype: torch.dtype) -> None:
    for mode, sparse in itertools.product(("sum", "mean"), (False, True)):
        bags_of(mode, sparse, dtype, ids, offsets)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding_bag_non_contiguous_weight(mode: str, dtype: torch.dtype) -> None:
    matrix = torch.randn(3, 4, dtype=dtype)[:, :3]
    ids, offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 2])
    out = [EmbeddingBag.from_pretrained(one, mode=mode)(ids, offsets) for one in (matrix, matrix.clone().contiguous())]
    assert torch.equal(*out)


def test_embedding_bag_bfloat16() -> None:
    for mode in ("sum", "mean"):
        bags_of(mode, True, torch.bfloat16, torch.int64, torch.int32)


def test_embedding_bag_half() -> None:
    bags_of("sum", True, torch.float16, torch.int32, torch.int64)


@pytest.mark.parametrize(("rows_train", "weights_train"), list(itertools.product((True, False), repeat=2)))
def test_embedding_bag_per_sample_weights_grad(rows_train: bool, weights_train: bool) -> None:
    layer = EmbeddingBag(256, 256, mode="sum", device="cpu", optimizer=bb.SGD(lr=1.0))
    layer.requires_grad_(rows_train)
    ids, weights = torch.arange(1, 5).expand(3, -1), torch.rand(3, 4, requires_grad=weights_train)
    optimizer, before = Optimizer(layer), rows_of(layer)
    out = layer(ids, per_sample_weights=weights.softmax(-1))
    assert out.requires_grad is (rows_train or weights_train)
    if out.requires_grad:
        out.square().sum().backward()
        optimizer.step()
    assert (before != rows_of(layer)).any().item() is rows_train
    assert (weights.grad is not None) is weights_train
