"""Batches, negatives and splits are pure functions of the seed, and hold what they promise."""

import numpy as np
import pytest

pytest.importorskip("duckdb")

from bunkbed.train.data.interactions import Interactions, Vocab
from bunkbed.train.data.sampling import BatchesAhead, BatchSource, SeenPairs, _stable_order, random_order
from bunkbed.train.data.splits import split
from bunkbed.train.processes.team import ALONE, Team
from bunkbed.train.settings.config import TrainConfig

NUM_USERS, NUM_ITEMS = 50, 40


def interactions(pairs, num_users=NUM_USERS, num_items=NUM_ITEMS):
    users, items = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    return Interactions(
        users, items, Vocab.of(list(range(num_users))), Vocab.of(list(range(num_items))), source="pairs.csv"
    )


def random_interactions(count=600, seed=0):
    rng = np.random.default_rng(seed)
    chosen = rng.choice(NUM_USERS * NUM_ITEMS, size=count, replace=False)
    return interactions(np.stack([chosen // NUM_ITEMS, chosen % NUM_ITEMS], axis=1))


def source(pairs, *, seed=7, reject=True, batch_size=64, negatives=5):
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS) if reject else None
    return BatchSource(pairs, batch_size=batch_size, negatives=negatives, seed=seed, seen=seen)


def test_an_epoch_has_every_pair_once_as_a_positive():
    pairs = random_interactions()
    batches = list(source(pairs).batches(epoch=3))
    assert [len(batch.users) for batch in batches] == [64] * 9 + [24]
    users = np.concatenate([batch.users for batch in batches])
    positives = np.concatenate([batch.items[:, 0] for batch in batches])
    assert sorted(zip(users, positives, strict=True)) == sorted(zip(pairs.users, pairs.items, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"shared": True, "popular": True, "log_q": True}], ids=str)
def test_ranks_take_parts_whose_mean_is_the_batch(world, options):
    pairs = random_interactions(641)  # the last batch has one pair
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS)
    teams = [Team() for _ in range(world)]
    for rank, team in enumerate(teams):
        team.rank, team.world = rank, world
    options = {"batch_size": 64, "negatives": 12, "seed": 7, "seen": seen, **options}
    whole, *parts = (BatchSource(pairs, team=team, **options) for team in (ALONE, *teams))
    for step in (0, 10):
        batch, mine = whole.batch(1, step), [part.batch(1, step) for part in parts]
        assert batch.weight == 1 and batch.step_pairs == len(batch.users) == (64 if step == 0 else 1)
        counted = [one for one in mine if one.weight]
        np.testing.assert_array_equal(np.concatenate([one.users for one in counted]), batch.users)
        for one in mine:
            assert one.step_pairs == len(batch.users) and len(one.users) >= 1
            if one.weight:  # the mean of the losses of parts is then that of the batch
                assert one.weight == len(one.users) * world / len(batch.users)
        if "shared" not in options:
            np.testing.assert_array_equal(np.concatenate([one.items for one in counted]), batch.items)
            continue
        done = 0
        for one in counted:
            size, negatives = len(one.users), len(batch.items) - len(batch.users)
            of_batch = np.r_[done : done + size, len(batch.users) : len(batch.items)]
            np.testing.assert_array_equal(one.items, batch.items[of_batch])
            in_batch = batch.seen[(batch.seen >= done * negatives) & (batch.seen < (done + size) * negatives)]
            assert sorted(one.seen) == sorted(in_batch - done * negatives)
            if "log_q" in options:
                np.testing.assert_array_equal(one.log_q, batch.log_q[of_batch])
            done += size
    assert sum(one.weight for one in mine) == pytest.approx(world)


def test_any_batch_can_be_asked_for_at_any_time():
    pairs = random_interactions()
    one, other = source(pairs), source(pairs)
    expected = {(e, s): one.batch(e, s) for e in (1, 2) for s in range(one.steps(e))}
    for epoch, step in [(2, 5), (1, 9), (2, 0), (1, 0), (1, 1)]:
        batch = other.batch(epoch, step)
        np.testing.assert_array_equal(batch.users, expected[epoch, step].users)
        np.testing.assert_array_equal(batch.items, expected[epoch, step].items)


def test_epochs_steps_and_seeds_differ():
    pairs = random_interactions()
    batch = source(pairs).batch(1, 0)
    for other in (source(pairs).batch(2, 0), source(pairs).batch(1, 1), source(pairs, seed=8).batch(1, 0)):
        assert not np.array_equal(batch.users, other.users)
        assert not np.array_equal(batch.items[:, 1:], other.items[:, 1:])


def test_golden_batch():
    # A run that is resumed after an upgrade of NumPy must go on with the batches it would have had.
    batch = source(random_interactions(), batch_size=3, negatives=3).batch(1, 0)
    np.testing.assert_array_equal(random_order(5, 1, 2, 6), GOLDEN_ORDER)
    np.testing.assert_array_equal(batch.items[:, 1:], GOLDEN_NEGATIVES)


GOLDEN_ORDER = [2, 3, 0, 4, 1, 5]
GOLDEN_NEGATIVES = [[20, 29, 36], [1, 9, 36], [15, 7, 32]]


def test_negatives_are_never_items_the_user_has():
    pairs = random_interactions(count=1400)  # 70 % of everything
    has = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    for batch in source(pairs).batches(1):
        for user, items in zip(batch.users.tolist(), batch.items.tolist(), strict=True):
            assert (user, items[0]) in has
            assert not any((user, item) in has for item in items[1:])


def popular_source(pairs, *, shared=False, negatives=5, reject=True):
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS) if reject else None
    options = {"batch_size": 64, "negatives": negatives, "seed": 7, "seen": seen}
    return BatchSource(pairs, **options, shared=shared, popular=True, log_q=True)


def skewed_interactions():
    """Item n of 40 has about 50 / (n + 1) users; the last ten have none."""
    rng = np.random.default_rng(0)
    chosen = [(user, item) for item in range(30) for user in rng.choice(50, max(1, 50 // (item + 1)), replace=False)]
    return interactions(chosen)


def test_popular_negatives_come_as_often_as_their_pairs_and_each_may_come():
    pairs = skewed_interactions()
    drawn = np.concatenate([popular_source(pairs, reject=False).batch(e, 0).items[:, 1:].ravel() for e in range(300)])
    expected = (np.bincount(pairs.items, minlength=NUM_ITEMS) + 1) / (len(pairs) + NUM_ITEMS)
    found = np.bincount(drawn, minlength=NUM_ITEMS) / len(drawn)
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(expected.max() / len(drawn)))
    assert found.min() > 0


def test_popular_negatives_are_never_items_the_user_has():
    pairs = skewed_interactions()
    has = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    for batch in popular_source(pairs).batches(1):
        for user, items in zip(batch.users.tolist(), batch.items.tolist(), strict=True):
            assert not any((user, item) in has for item in items[1:])


def test_a_batch_says_how_likely_its_items_were():
    pairs = skewed_interactions()
    likely = np.log((np.bincount(pairs.items, minlength=NUM_ITEMS) + 1) / (len(pairs) + NUM_ITEMS))
    own = popular_source(pairs).batch(1, 0)
    assert own.log_q.dtype == np.float32
    np.testing.assert_allclose(own.log_q, likely[own.items], rtol=1e-6)
    shared = popular_source(pairs, shared=True, negatives=500, reject=False).batch(1, 0)
    negatives, positives = shared.items[len(shared.users) :], shared.items[: len(shared.users)]
    assert len(set(negatives.tolist())) == len(negatives) < 500
    np.testing.assert_allclose(shared.log_q[: len(positives)], likely[positives], rtol=1e-6)
    # What was drawn twice counts twice: the counts add up to the draws.
    counts = np.exp(likely[negatives] - shared.log_q[len(positives) :])
    np.testing.assert_allclose(counts, np.rint(counts), rtol=1e-5)
    assert round(counts.sum()) == 500
    assert source(pairs).batch(1, 0).log_q is None


def test_a_corrected_softmax_over_popular_items_is_the_softmax_over_all():
    torch = pytest.importorskip("torch")
    from bunkbed.train.models.losses import shared_loss

    pairs = skewed_interactions()
    generator = torch.Generator().manual_seed(0)
    users = torch.randn(NUM_USERS, 4, generator=generator)
    items = torch.randn(NUM_ITEMS, 4, generator=generator).requires_grad_()
    batch = popular_source(pairs, shared=True, negatives=2_000_000, reject=False).batch(1, 0)
    rows = users[torch.from_numpy(batch.users)]

    def gradient(log_q):
        loss = shared_loss(rows, items[torch.from_numpy(batch.items)], kind="softmax", bias=log_q)
        return torch.autograd.grad(loss, items)[0]

    positives = torch.from_numpy(batch.items[: len(rows)])
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(rows @ items.T, positives), items)
    torch.testing.assert_close(gradient(-torch.from_numpy(batch.log_q)), expected, rtol=0, atol=2e-3)
    # Without q, items count as often as they were drawn, and the popular ones too much.
    likely = (np.bincount(pairs.items, minlength=NUM_ITEMS) + 1) / (len(pairs) + NUM_ITEMS)
    drawn = np.log(likely)[batch.items].astype(np.float32) - batch.log_q
    assert (gradient(torch.from_numpy(drawn)) - expected).abs().max() > 0.02


def test_negatives_are_uniform_over_the_items_a_user_has_not():
    pairs = interactions([(0, item) for item in range(30)])
    drawn = np.concatenate([b.items[:, 1:].ravel() for e in range(40) for b in source(pairs).batches(e)])
    counts = np.bincount(drawn, minlength=NUM_ITEMS)
    assert (counts[:30] == 0).all()
    assert counts[30:].sum() == 6000
    assert (abs(counts[30:] - 600) < 100).all()  # 4 standard deviations, and the seed is fixed


def test_a_user_who_has_everything_keeps_a_seen_negative():
    pairs = interactions([(0, item) for item in range(NUM_ITEMS)])
    batch = source(pairs).batch(1, 0)
    assert batch.items.min() >= 0 and batch.items.max() < NUM_ITEMS


def test_without_rejection_any_item_may_come():
    pairs = interactions([(0, item) for item in range(NUM_ITEMS)])
    drawn = source(pairs, reject=False).batch(1, 0).items[:, 1:]
    assert len(np.unique(drawn)) > 30


@pytest.mark.parametrize("count", [1, 20, 50, 100, 900])  # hashed, searched; from 62 on an exact bitmap
def test_seen_pairs_agree_with_a_set(count):
    pairs = random_interactions(count=count)
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS)
    has = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    # Users beyond the last one with pairs may be asked about too.
    users, items = np.divmod(np.arange((NUM_USERS + 3) * NUM_ITEMS), NUM_ITEMS)
    expected = [(user, item) in has for user, item in zip(users.tolist(), items.tolist(), strict=True)]
    np.testing.assert_array_equal(seen.contains(users, items), expected)


def test_seen_pairs_may_be_empty():
    nothing = np.empty(0, np.int64)
    assert not SeenPairs(nothing, nothing, 5).contains(np.arange(5), np.arange(5)).any()


def shared(pairs, *, reject=True, negatives=11, seed=7):
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS) if reject else None
    return BatchSource(pairs, batch_size=64, negatives=negatives, shared=True, seed=seed, seen=seen)


@pytest.mark.parametrize("negatives", [1, 11, 19, 21, 40])  # drawn, or from half of the items on a permutation
def test_shared_negatives_are_different_items_and_clashes_are_named(negatives):
    pairs = random_interactions()
    has = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    for batch in shared(pairs, negatives=negatives).batches(1):
        count = len(batch.users)
        assert len(batch.items) == count + negatives
        positives, drawn = batch.items[:count].tolist(), batch.items[count:].tolist()
        assert all(pair in has for pair in zip(batch.users.tolist(), positives, strict=True))
        assert len(set(drawn)) == negatives
        expected = [
            u * negatives + i
            for u, user in enumerate(batch.users.tolist())
            for i, item in enumerate(drawn)
            if (user, item) in has
        ]
        assert sorted(batch.seen.tolist()) == expected


@pytest.mark.parametrize("num_asked", [1, 50])  # one user: its items are fewer than those items' users; or not
def test_clashes_walk_either_way(num_asked):
    pairs = random_interactions(count=300)
    has = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    seen = SeenPairs(pairs.users, pairs.items, NUM_ITEMS)
    rng = np.random.default_rng(2)
    for _ in range(5):
        # Users beyond the last one with pairs too, and some more than once.
        users = rng.integers(0, NUM_USERS + 3, num_asked)
        items = rng.permutation(NUM_ITEMS)[:15]
        expected = [
            u * 15 + i
            for u, user in enumerate(users.tolist())
            for i, item in enumerate(items.tolist())
            if (user, item) in has
        ]
        assert sorted(seen.clashes(users, items).tolist()) == expected


@pytest.mark.parametrize("bound", [5, 2**34, 2**64 - 1])  # equal keys; equal upper halves; neither
def test_the_order_of_keys_is_that_of_a_stable_sort(bound):
    keys = np.random.default_rng(0).integers(0, bound, 2000, dtype=np.uint64)
    np.testing.assert_array_equal(_stable_order(keys), np.argsort(keys, kind="stable"))


def test_shared_negatives_are_a_pure_function_of_epoch_and_step():
    pairs = random_interactions()
    one, other = shared(pairs), shared(pairs)
    list(one.batches(1))
    np.testing.assert_array_equal(one.batch(2, 3).items, other.batch(2, 3).items)
    assert not np.array_equal(one.batch(2, 3).items[-11:], one.batch(2, 4).items[-11:])
    assert one.batch(2, 3).seen is not None and shared(pairs, reject=False).batch(2, 3).seen is None


def test_more_shared_negatives_than_items_is_an_error():
    with pytest.raises(ValueError, match="option negatives=41 is more than the 40 items there are to share"):
        shared(random_interactions(), negatives=41)


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(ValueError, match=r"pairs\.csv has no pairs to train on"):
        source(interactions([]), reject=False)


def held_out(pairs, valid, seed=0):
    parts = split(pairs, TrainConfig(valid=valid, seed=seed))
    assert parts.valid is not None
    both = np.concatenate([parts.train.users * 1000 + parts.train.items, parts.valid.users * 1000 + parts.valid.items])
    np.testing.assert_array_equal(np.sort(both), np.sort(pairs.users * 1000 + pairs.items))
    return parts.valid


def test_last_holds_out_the_last_pair_of_the_file_of_every_user_with_two():
    valid = held_out(interactions([(0, 9), (1, 5), (0, 3), (2, 1), (2, 8), (2, 2)]), "last")
    assert list(zip(valid.users, valid.items, strict=True)) == [(0, 3), (2, 2)]


def test_random_holds_out_one_pair_a_user_by_seed():
    pairs = random_interactions()
    valid = held_out(pairs, "random")
    np.testing.assert_array_equal(np.sort(valid.users), np.flatnonzero(np.bincount(pairs.users) > 1))
    np.testing.assert_array_equal(held_out(pairs, "random").items, valid.items)
    assert not np.array_equal(held_out(pairs, "random", seed=1).items, valid.items)


def test_a_fraction_holds_out_that_share_of_every_user():
    pairs = random_interactions()
    valid = held_out(pairs, "0.25")
    counts = np.bincount(pairs.users, minlength=NUM_USERS)
    np.testing.assert_array_equal(np.bincount(valid.users, minlength=NUM_USERS), np.rint(counts * 0.25))


def test_a_fraction_leaves_every_user_a_pair_to_train_on():
    valid = held_out(interactions([(0, 1), (0, 2), (1, 3)]), "0.9")
    assert valid.users.tolist() == [0]


def test_none_holds_out_nothing():
    pairs = random_interactions()
    parts = split(pairs, TrainConfig(valid="none"))
    assert parts.valid is None and len(parts.train) == len(pairs)


@pytest.mark.parametrize("valid", ["last", "random", "0.1"])
def test_a_split_without_a_held_out_pair_is_an_error(valid):
    with pytest.raises(
        ValueError, match=rf"option valid='{valid}' holds nothing out: no user of pairs\.csv has enough"
    ):
        split(interactions([(0, 1), (1, 2)]), TrainConfig(valid=valid))


def test_batches_made_ahead_are_those_that_are_asked_for():
    pairs = random_interactions()
    one = source(pairs)
    ahead = BatchesAhead(source(pairs), depth=3, epochs=3)
    try:
        # To the end of an epoch, over it, back, on from the middle, past the last one that is made ahead.
        for epoch, first, count in [(1, 0, 10), (2, 0, 4), (1, 5, 2), (2, 7, 3), (3, 0, 10), (4, 2, 1)]:
            asked = ahead.batches(epoch, first)
            for step in range(first, first + count):
                batch, expected = next(asked), one.batch(epoch, step)
                np.testing.assert_array_equal(batch.users, expected.users)
                np.testing.assert_array_equal(batch.items, expected.items)
            assert next(ahead.batches(1, 10), None) is None
    finally:
        ahead.close()
        ahead.close()


def test_an_error_of_a_batch_made_ahead_comes_where_the_batch_would_have():
    one = source(random_interactions())
    make = one.batch

    def fail(epoch, step):
        if step == 2:
            raise RuntimeError("no such batch")
        return make(epoch, step)

    one.batch = fail
    ahead = BatchesAhead(one, depth=4, epochs=1)
    asked = ahead.batches(1)
    next(asked), next(asked)
    with pytest.raises(RuntimeError, match="no such batch"):
        next(asked)
    ahead.close()
