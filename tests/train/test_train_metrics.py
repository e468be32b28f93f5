"""Metrics and ranks against a loop that sorts, ties against us."""

import math
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bunkbed import _native  # noqa: E402
from bunkbed.train.data.interactions import Candidates, Interactions, Vocab  # noqa: E402
from bunkbed.train.data.stream import draw_users  # noqa: E402
from bunkbed.train.evaluate import ranking, score_blocks  # noqa: E402
from bunkbed.train.evaluate.evaluator import Evaluator, sample_candidates  # noqa: E402
from bunkbed.train.evaluate.metrics import ranking_metrics  # noqa: E402
from bunkbed.train.evaluate.ranking import full_ranks, sampled_ranks  # noqa: E402
from bunkbed.train.models.heads import DotHead, make_head  # noqa: E402
from bunkbed.train.models.scorer import Scorer  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402


class Rows:
    """The part of a table that a Scorer uses."""

    def __init__(self, values):
        self.values = np.asarray(values, dtype=np.float32)

    def lookup(self, ids, *, touch=True):
        assert not touch
        return self.values[ids]


def pairs(found, num_users, num_items):
    users, items = np.array(sorted(found), dtype=np.int64).reshape(-1, 2).T.copy()
    return Interactions(users, items, Vocab.of(list(range(num_users))), Vocab.of(list(range(num_items))))


def brute_force(scores, targets, excluded, ks):
    """Everything from its definition; an equal score ranks before a held-out item."""
    totals = {}
    users = sorted({user for user, _ in targets})
    for user in users:
        mine = {item for owner, item in targets if owner == user}
        hidden = {item for owner, item in excluded if owner == user} - mine
        shown = [item for item in range(scores.shape[1]) if item not in hidden]
        order = sorted(shown, key=lambda item: (-scores[user, item], item in mine, item))
        ranks = sorted(1 + order.index(item) for item in mine)
        for k in ks:
            gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= k)
            ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(mine))))
            hits = sum(rank <= k for rank in ranks)
            for name, value in (
                (f"hr@{k}", hits > 0),
                (f"ndcg@{k}", gain / ideal),
                (f"recall@{k}", hits / len(mine)),
            ):
                totals[name] = totals.get(name, 0) + value
        totals["mrr"] = totals.get("mrr", 0) + 1 / ranks[0]
    return {name: total / len(users) for name, total in totals.items()}


def case(seed, *, num_users=23, num_items=57, dim=4, with_bias=False, with_weight=False):
    rng = np.random.default_rng(seed)
    # Small whole numbers: sums are exact, and ties are many.
    user, item = rng.integers(-2, 3, (num_users, dim)), rng.integers(-2, 3, (num_items, dim))
    bias = rng.integers(-2, 3, (num_items, 1)) if with_bias else None
    weight = rng.integers(-1, 3, dim).astype(np.float32) if with_weight else None
    head = DotHead(None if weight is None else torch.from_numpy(weight))
    scorer = Scorer(Rows(user), Rows(item), head, item_bias=None if bias is None else Rows(bias))
    scores = (user * (1 if weight is None else weight)) @ item.T + (0 if bias is None else bias[:, 0])
    everything = [(int(u), int(i)) for u in range(num_users) for i in range(num_items)]
    chosen = rng.permutation(len(everything))
    targets = {everything[n] for n in chosen[:60]}
    excluded = {everything[n] for n in chosen[50:300]}  # ten pairs are in both
    return scorer, scores, targets, excluded


@pytest.mark.parametrize("options", [{}, {"with_bias": True}, {"with_weight": True}])
@pytest.mark.parametrize("seed", range(5))
def test_full_ranking_is_what_sorting_gives(seed, options):
    scorer, scores, targets, excluded = case(seed, **options)
    owners, ranks = full_ranks(scorer, pairs(targets, 23, 57), pairs(excluded, 23, 57))
    assert len(ranks) == len(targets)
    expected = brute_force(scores, targets, excluded, [1, 5, 20])
    assert ranking_metrics(owners, ranks, [1, 5, 20]) == pytest.approx(expected, abs=1e-12)


def use_small_blocks(monkeypatch, *, users, items):
    """Make blocks of `users` x `items` scores, 2 blocks of users a group and 3 blocks of items a read, at dim 4."""
    monkeypatch.setattr(score_blocks, "BLOCK_USERS", users)
    monkeypatch.setattr(score_blocks, "BLOCK_ITEMS", items)
    monkeypatch.setattr(ranking, "_NUMBERS", 2 * users * 4)
    monkeypatch.setattr(score_blocks, "_QUERY_NUMBERS", 2 * users * 4)
    monkeypatch.setattr(score_blocks, "_READ_NUMBERS", 3 * items * 4)


@pytest.mark.parametrize("most_places", [0, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_groups_reads_and_threads_change_nothing(monkeypatch, most_places, threads):
    scorer, scores, targets, excluded = case(9, num_users=40, num_items=3000)
    use_small_blocks(monkeypatch, users=5, items=64)
    monkeypatch.setattr(score_blocks, "_MOST_PLACES", most_places)
    monkeypatch.setattr("bunkbed.get_num_threads", lambda: threads)
    seen = []
    owners, ranks = full_ranks(
        scorer,
        pairs(targets, 40, 3000),
        pairs(excluded, 40, 3000),
        on_event=lambda event: seen.append(event.done),
    )
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == len({user for user, _ in targets})
    expected = brute_force(scores, targets, excluded, [10])
    assert ranking_metrics(owners, ranks, [10]) == pytest.approx(expected, abs=1e-12)


def test_users_without_held_out_items_and_users_with_every_item(monkeypatch):
    scorer = Scorer(Rows([[1.0], [1.0], [-1.0], [1.0]]), Rows([[3.0], [1.0], [2.0], [2.0]]))
    everything = {(1, item) for item in range(4)}
    targets = {(1, 1), (1, 2), (3, 0), (3, 3)}  # users 0 and 2 have none
    owners, ranks = full_ranks(scorer, pairs(targets, 4, 4), pairs(everything | {(0, 0), (2, 1), (3, 2)}, 4, 4))
    assert sorted(zip(owners.tolist(), ranks.tolist(), strict=True)) == [(1, 1), (1, 2), (3, 1), (3, 2)]
    # A cut-off beyond the number of items: everything is found.
    assert ranking_metrics(owners, ranks, [9])["recall@9"] == 1.0
    monkeypatch.setattr(score_blocks, "_MOST_PLACES", 0)
    owners, ranks = full_ranks(scorer, pairs(set(), 4, 4), pairs(everything, 4, 4))
    assert len(owners) == len(ranks) == 0


def test_an_error_of_a_block_ends_the_ranking_and_its_threads(monkeypatch):
    scorer, _, targets, excluded = case(9)
    use_small_blocks(monkeypatch, users=5, items=8)

    def refuse(*arguments):
        raise MemoryError("no room for scores")

    monkeypatch.setattr(scorer, "all_scores", refuse)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        with pytest.raises(MemoryError, match="no room for scores"):
            full_ranks(scorer, pairs(targets, 23, 57), pairs(excluded, 23, 57))
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
    assert not [each for each in threading.enumerate() if each.name.startswith("bunkbed-scores")]


def test_counting_refuses_arrays_that_do_not_fit():
    def count(scores, starts, floors, counts):
        _native.count_reaching(scores, np.empty(0, np.int64), np.array(starts), floors, counts)

    scores, floors, counts = np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="2 rows of scores need 3 starts, got 2; 2 floors need as many counts, got 2"):
        count(scores, [0, 2], floors, counts)
    with pytest.raises(ValueError, match="2 floors need as many counts, got 1"):
        count(scores, [0, 1, 2], floors, counts[:1])
    with pytest.raises(ValueError, match="scores of a row must be neighbours in memory, and at least one"):
        count(np.asfortranarray(scores), [0, 1, 2], floors, counts)
    with pytest.raises(ValueError, match="must ascend from 0 to the number of floors, 2, got 3 at position 2"):
        count(scores, [0, 1, 3], floors, counts)
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("model", ["neumf", "two-tower"])
@pytest.mark.parametrize("small", [False, True])
def test_perceptrons_rank_as_their_scores_one_by_one_say(monkeypatch, model, small):
    if small:
        use_small_blocks(monkeypatch, users=4, items=100)
    monkeypatch.setattr("bunkbed.train.models.heads._BLOCK_HIDDEN", 5_000)
    config = TrainConfig(model=model, dim=4, layers="6,5", seed=3)
    rng = np.random.default_rng(0)
    user, item = rng.normal(size=(11, config.row_dim)), rng.normal(size=(1500, config.row_dim))
    bias = rng.normal(size=(1500, 1))
    head = make_head(config).requires_grad_(False)
    scorer = Scorer(Rows(user), Rows(item), head, item_bias=Rows(bias))
    double = make_head(config).requires_grad_(False).double()
    queries, vectors = double.queries(torch.from_numpy(user)), double.vectors(torch.from_numpy(item))
    scores = double.pair_scores(queries, vectors.expand(11, -1, -1)).numpy() + bias[:, 0]
    targets, excluded = {(n, 7 * n) for n in range(11)}, {(n, 7 * n + 1) for n in range(11)}
    owners, ranks = full_ranks(scorer, pairs(targets, 11, 1500), pairs(excluded, 11, 1500))
    expected = brute_force(scores, targets, excluded, [10, 100])
    assert ranking_metrics(owners, ranks, [10, 100]) == pytest.approx(expected, abs=1e-12)
    negatives = rng.integers(0, 1500, (11, 40))
    _, ranks = sampled_ranks(scorer, Candidates(np.arange(11), 7 * np.arange(11), negatives))
    own = scores[np.arange(11), 7 * np.arange(11)]
    assert ranks.tolist() == (1 + (scores[np.arange(11)[:, None], negatives] >= own[:, None]).sum(1)).tolist()


@pytest.mark.parametrize("model", ["mf", "gmf", "neumf", "two-tower"])
def test_rounding_is_well_within_what_counts_as_a_tie(model):
    config = TrainConfig(model=model, dim=32, seed=1)
    head = make_head(config).requires_grad_(False)
    users, items = torch.randn(2, 400, config.row_dim, generator=torch.Generator().manual_seed(0)).unbind()
    users[:100, : config.dim] = 0  # neumf's product is nothing there, its perceptron is all
    queries, vectors = head.queries(users), head.vectors(items)
    double = make_head(config).requires_grad_(False).double()
    exact = double.pair_scores(queries.double(), vectors.double()[:, None])[:, 0]
    off = (head.pair_scores(queries, vectors[:, None])[:, 0] - exact).abs()
    allowed = ranking._TIE * head.magnitudes(queries, vectors)
    assert (off <= allowed).all()
    # And it tells apart what differs by more than rounding.
    assert (allowed < 1e-3 * exact.std()).all()


def test_a_model_that_scores_everything_alike_ranks_last():
    scorer = Scorer(Rows(np.zeros((1, 4))), Rows(np.zeros((10, 4))))
    _, ranks = full_ranks(scorer, pairs({(0, 3)}, 1, 10), pairs({(0, 1)}, 1, 10))
    assert ranks.tolist() == [9]


def test_rounding_does_not_break_a_tie_in_our_favour():
    rng = np.random.default_rng(0)
    row = rng.normal(size=64)
    # Every item is the same vector: whatever order a product sums in, all items tie.
    scorer = Scorer(Rows(rng.normal(size=(30, 64))), Rows(np.tile(row, (500, 1))))
    _, ranks = full_ranks(scorer, pairs({(user, 7 * user) for user in range(30)}, 30, 500), pairs(set(), 30, 500))
    assert ranks.tolist() == [500] * 30


def test_sampled_ranking_counts_ties_and_a_repeated_positive_against_us():
    scorer = Scorer(Rows([[1.0]]), Rows([[5.0], [4.0], [4.0], [3.0]]))
    candidates = Candidates(
        users=np.zeros(4, np.int64),
        positives=np.array([0, 1, 1, 3]),
        negatives=np.array([[1, 3], [3, 3], [2, 3], [3, 3]]),
    )
    owners, ranks = sampled_ranks(scorer, candidates)
    assert owners.tolist() == [0] * 4
    assert ranks.tolist() == [1, 1, 2, 3]


def test_metrics_by_hand():
    # User 4: two held-out items at ranks 1 and 4; user 9: one at rank 3.
    metrics = ranking_metrics(np.array([4, 9, 4]), np.array([4, 3, 1]), [3])
    ideal = 1 + 1 / math.log2(3)
    assert metrics == {
        "hr@3": 1.0,
        "ndcg@3": pytest.approx((1 / ideal + 0.5) / 2),
        "recall@3": 0.75,
        "mrr": pytest.approx((1 + 1 / 3) / 2),
    }


def test_nothing_to_evaluate_is_an_error():
    nothing = np.empty(0, np.int64)
    with pytest.raises(ValueError, match="no held-out item to evaluate: the test pairs are empty"):
        ranking_metrics(nothing, nothing, [10])


def test_sampled_candidates_are_unseen_and_drawn_by_seed():
    _, _, targets, excluded = case(1)
    held, known = pairs(targets, 23, 57), pairs(excluded, 23, 57)
    candidates = sample_candidates(held, known, 30, seed=5)
    assert candidates.negatives.shape == (60, 30)
    for user, negatives in zip(candidates.users.tolist(), candidates.negatives.tolist(), strict=True):
        assert not any((user, item) in targets | excluded for item in negatives)
    again = sample_candidates(held, known, 30, seed=5)
    np.testing.assert_array_equal(candidates.negatives, again.negatives)
    assert not np.array_equal(candidates.negatives, sample_candidates(held, known, 30, seed=6).negatives)


def test_the_report_says_what_was_ranked():
    scorer, _, targets, excluded = case(2)
    held, known = pairs(targets, 23, 57), pairs(excluded, 23, 57)
    full = Evaluator(held, known, ranking="full", ks=[5]).evaluate(scorer)
    assert full.ranking == f"full ranking of 57 items, less those trained on; {full.num_users} users; split random"
    assert full.num_users == len({user for user, _ in targets})
    assert list(full.metrics) == ["hr@5", "ndcg@5", "recall@5", "mrr"]
    sampled = Evaluator(held, known, ranking="sampled", ks=[5], eval_negatives=7).evaluate(scorer)
    assert (
        sampled.ranking == f"sampled ranking: 7 negatives for each held-out item; {full.num_users} users; split random"
    )


def test_some_users_are_drawn_by_seed():
    scorer, _, targets, excluded = case(2)
    held, known = pairs(targets, 23, 57), pairs(excluded, 23, 57)

    def evaluate_some(seed, *, users=4, ranking="full"):
        evaluator = Evaluator(held, known, ranking=ranking, ks=[5], eval_users=users, seed=seed)
        return evaluator.evaluate(scorer), evaluator.samples_users

    num_held = len({user for user, _ in targets})
    for ranking_ in ("full", "sampled"):
        result, is_sample = evaluate_some(0, ranking=ranking_)
        assert result.num_users == 4 and is_sample
        assert result.ranking.endswith(f"; 4 of {num_held} users; split random")
        assert evaluate_some(0, ranking=ranking_) == (result, True)
        assert evaluate_some(1, ranking=ranking_)[0].metrics != result.metrics
    # The figures are those of the drawn users' pairs alone.
    asked, of_users = draw_users(held, 4, 0)
    assert asked.sum() == 4 and of_users == num_held
    mine = {(user, item) for user, item in targets if asked[user]}
    assert (
        evaluate_some(0)[0].metrics
        == Evaluator(pairs(mine, 23, 57), known, ranking="full", ks=[5]).evaluate(scorer).metrics
    )
    # All users, asked for or because there are no more.
    everyone = Evaluator(held, known, ranking="full", ks=[5]).evaluate(scorer)
    assert everyone.ranking.endswith(f"; {num_held} users; split random")
    assert evaluate_some(0, users=num_held) == evaluate_some(0, users=0) == (everyone, False)
