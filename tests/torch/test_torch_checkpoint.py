"""``state_dict`` holds references; loading rewinds the table, or says why it cannot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

torch.set_num_threads(1)


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def train(emb: Any, opt: Any, steps: int = 1) -> None:
    for _ in range(steps):
        opt.zero_grad()
        emb(torch.tensor([1, 2, 3])).pow(2).sum().backward()
        opt.step()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("in_ram", [False, True])
def test_loading_rewinds_rows_slots_and_step(tmp_path: Any, in_ram: bool) -> None:
    emb = Embedding(1000, 4, path=None if in_ram else tmp_path / "t", optimizer=bb.Adam(lr=0.1))
    opt = Optimizer(emb)
    train(emb, opt, 3)
    state = through_a_file(emb.state_dict())
    assert (set(state) == {"anchor", "table"} and sum(t.numel() for t in state.values()) < 300) or in_ram
    kept = {slot: emb.table.get(np.arange(1000), slot=slot) for slot in ("weight", "exp_avg", "exp_avg_sq")}
    train(emb, opt, 2)
    assert emb.load_state_dict(state).missing_keys == []
    assert emb.table.step == 3
    for slot, values in kept.items():
        assert emb.table.get(np.arange(1000), slot=slot).tobytes() == values.tobytes()
    train(emb, opt)
    assert emb.table.step == 4
    emb.load_state_dict(state)  # again
    assert emb.table.step == 3
    emb.table.close()


def test_a_checkpoint_is_durable_and_loads_after_reopening(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t", optimizer=bb.Adam(lr=0.1))
    opt = Optimizer(emb)
    train(emb, opt)
    state, expected = emb.state_dict(), rows(emb)
    train(emb, opt)
    emb.table.close()
    again = Embedding(100, 4, path=tmp_path / "t", optimizer=bb.Adam(lr=0.1))
    assert not torch.equal(rows(again), expected)
    again.load_state_dict(state)
    assert torch.equal(rows(again), expected)
    again.table.close()


def test_the_last_three_stay_and_a_dropped_one_names_those(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t", keep_checkpoints=3)
    opt = Optimizer(emb)
    states = []
    for _ in range(5):
        train(emb, opt)
        states.append(emb.state_dict())
    for step, state in enumerate(states[2:], 3):
        emb.load_state_dict(state)
        assert emb.table.step == step
    message = r"table 't': commit 1 was dropped, .* copy; it keeps 'state_dict-000003' \(commit 3\), .*; raise keep"
    with pytest.raises(RuntimeError, match=message):
        emb.load_state_dict(states[0])
    emb.table.close()


def test_how_many_stay_can_be_set_and_named_epochs_always_do(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t", keep_checkpoints=1)
    assert emb.keep_checkpoints == 1
    assert Embedding(100, 4, table=emb.table, keep_checkpoints=None).keep_checkpoints is None  # the most of all layers
    emb.keep_checkpoints = 1
    opt = Optimizer(emb)
    train(emb, opt)
    emb.table.commit(keep="best")
    best = emb.state_dict()  # nothing changed since: refers to the named epoch
    later = []
    for _ in range(3):
        train(emb, opt)
        later.append(emb.state_dict())
    with pytest.raises(RuntimeError, match="was dropped"):
        emb.load_state_dict(later[0])
    emb.load_state_dict(best)
    assert emb.table.step == 1
    emb.keep_checkpoints = None
    for _ in range(6):
        train(emb, opt)
        later.append(emb.state_dict())
    emb.load_state_dict(later[3])
    assert emb.table.step == 2
    emb.table.close()


def test_state_dict_without_a_change_costs_no_kept_epoch(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t")
    bag = EmbeddingBag(100, 4, table=emb.table)
    model = torch.nn.ModuleDict({"emb": emb, "bag": bag})
    opt = Optimizer(model)
    train(emb, opt)
    first = model.state_dict()
    for _ in range(5):
        assert torch.equal(model.state_dict()["emb.table"], first["emb.table"])
    assert torch.equal(first["emb.table"], first["bag.table"]) and emb.table.epoch == 1
    train(emb, opt)
    model.load_state_dict(first)
    assert torch.equal(model.state_dict()["emb.table"], first["emb.table"])  # still that epoch
    emb.table.close()


def test_pending_gradients_survive_state_dict(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t", optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    emb.state_dict()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)
    emb.table.close()


def test_state_dict_keeps_the_users_meta(tmp_path: Any) -> None:
    emb = Embedding(100, 4, path=tmp_path / "t")
    opt = Optimizer(emb)
    emb.table.commit(meta={"step": 7})
    train(emb, opt)
    emb.state_dict()
    assert emb.table.meta == {"step": 7}
    emb.table.close()


def test_weights_of_nn_embedding_are_imported() -> None:
    theirs = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1))
    ours = torch.nn.Sequential(Embedding(50, 4), torch.nn.Linear(4, 1))
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    ids = torch.tensor([3, 49])
    assert torch.equal(ours(ids), theirs(ids))
    half = {key: value.bfloat16() for key, value in theirs.state_dict().items()}
    ours.load_state_dict(half)
    assert torch.equal(rows(ours[0]), theirs[0].weight.data.bfloat16().float())
    with pytest.raises(
        RuntimeError, match=r"size mismatch for weight: the checkpoint has \(49, 4\), table .* \(50, 4\)"
    ):
        ours[0].load_state_dict({"weight": torch.zeros(49, 4)})


def test_strict_and_missing_and_unexpected_keys() -> None:
    emb = Embedding(50, 4)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "table"'):
        emb.load_state_dict({})
    assert emb.load_state_dict({}, strict=False).missing_keys == ["table"]
    extra = {**emb.state_dict(), "bias": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "bias"'):
        emb.load_state_dict(extra)
    emb.load_state_dict(extra, strict=False)


def test_assign_keeps_the_anchor() -> None:
    emb = Embedding(50, 4)
    anchor = emb.anchor
    emb.load_state_dict(emb.state_dict(), assign=True)
    assert emb.anchor is anchor


def test_a_reference_to_another_table_or_a_damaged_one(tmp_path: Any) -> None:
    emb, other = Embedding(50, 4), Embedding(50, 4, path=tmp_path / "other")
    with pytest.raises(
        RuntimeError, match=r"another one, in RAM only; such a table ends with its process, so give path="
    ):
        emb.load_state_dict(other.state_dict())
    named = Embedding(50, 4, path=tmp_path / "user")
    with pytest.raises(
        RuntimeError, match=r"refers to table 'other' \(uuid .*\), but the layer has opened another one"
    ):
        named.load_state_dict(other.state_dict())
    named.table.close()
    damaged = emb.state_dict()
    damaged["table"] = damaged["table"][:10]
    with pytest.raises(RuntimeError, match="the reference in the state_dict is damaged"):
        emb.load_state_dict(damaged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_trained_after_the_checkpoint_go_back_to_untouched_in_ram_too(dtype: str) -> None:
    emb = Embedding(None, 4, optimizer=bb.Adagrad(lr=0.1, initial_accumulator=0.5), dtype=dtype)
    opt = Optimizer(emb)
    ids, slots = np.array([1, 2, 3, 10**12]), ("weight", "sum")
    train(emb, opt)
    state, expected = emb.state_dict(), [emb.table.get(ids, slot) for slot in slots]
    opt.zero_grad()
    emb(torch.from_numpy(ids)).pow(2).sum().backward()
    opt.step()
    emb.load_state_dict(state)
    assert emb.table.step == 1
    assert all(np.array_equal(emb.table.get(ids, s), v) for s, v in zip(slots, expected, strict=True))


@pytest.mark.parametrize("in_ram", [False, True])
def test_going_back_to_before_the_first_step_starts_over(tmp_path: Any, in_ram: bool) -> None:
    emb = Embedding(100, 4, path=None if in_ram else tmp_path / "t", optimizer=bb.Adam(lr=0.1))
    opt = Optimizer(emb)
    start, results = emb.state_dict(), []
    for _ in range(3):  # the folds of a cross-validation
        emb.load_state_dict(start)
        again = emb.state_dict()
        train(emb, opt, 4)
        assert emb.table.step == 4
        results.append(rows(emb))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    emb.load_state_dict(again)
    train(emb, opt, 4)
    assert torch.equal(results[0], rows(emb))
    emb.table.close()


def test_readers_check_that_they_are_at_the_epoch(tmp_path: Any) -> None:
    emb = Embedding(50, 4, path=tmp_path / "t")
    opt = Optimizer(emb)
    train(emb, opt)
    first = emb.state_dict()
    reader = bb.open(tmp_path / "t", mode="r")
    served = Embedding(50, 4, table=reader)
    served.load_state_dict(first)
    assert torch.equal(served.state_dict()["table"], first["table"])
    train(emb, opt)
    with pytest.raises(
        RuntimeError, match=r"refers to commit 2, but this reader is at commit 1; open it with snapshot="
    ):
        served.load_state_dict(emb.state_dict())
    reader.close()
    emb.table.close()


def test_a_table_of_a_run_is_committed_by_its_run(tmp_path: Any) -> None:
    run = bb.Run(tmp_path / "run", ram="16MiB")
    table = run.table("user", create={"dim": 4, "num_rows": 50, "optimizer": bb.Adam(lr=0.1)})
    emb = Embedding(50, 4, table=table)
    opt = Optimizer(emb)
    train(emb, opt)
    file = io.BytesIO()
    torch.save(emb.state_dict(), file)
    run.commit(files={"dense.pt": file.getvalue()}, keep="best")
    expected = rows(emb)
    train(emb, opt)
    run.commit()
    run.rewind("best")
    emb.load_state_dict(torch.load(io.BytesIO(run.read("dense.pt")), weights_only=True))
    assert torch.equal(rows(emb), expected)
    run.close()
