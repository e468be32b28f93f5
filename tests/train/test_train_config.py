"""Every option has a default that works, a message when its value does not, and a rule where the data decide."""

from dataclasses import fields
from typing import Any

import pytest

import bunkbed as bb
from bunkbed.train.settings.auto import AUTO, RECIPES, decide
from bunkbed.train.settings.config import TrainConfig


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "als"}, ValueError, "option model must be one of mf, gmf, neumf, two-tower, sasrec, got 'als'"),
        ({"loss": "hinge"}, ValueError, "option loss must be one of bpr, bce, softmax, ccl, got 'hinge'"),
        ({"sampling": "zipf"}, ValueError, "option sampling must be one of uniform, popularity, got 'zipf'"),
        ({"layers": "8"}, ValueError, "option layers='8' needs model neumf or two-tower, got model 'mf'"),
        ({"model": "neumf", "layers": "8,x"}, ValueError, "option layers must be whole numbers .*, got '8,x'"),
        ({"model": "neumf", "layers": "8,0"}, ValueError, "option layers must be at least 1, got 0"),
        (
            {"optimizer": "lamb"},
            ValueError,
            "option optimizer must be one of adam, adagrad, rowwise_adagrad, sgd, got",
        ),
        ({"dtype": "int8"}, ValueError, "option dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"ranking": "both"}, ValueError, "option ranking must be one of full, sampled, got 'both'"),
        ({"dim": 0}, ValueError, "option dim must be at least 1, got 0"),
        ({"dim": 64.0}, TypeError, r"option dim must be a whole number, got 64\.0"),
        ({"epochs": True}, TypeError, "option epochs must be a whole number, got True"),
        ({"batch_size": -1}, ValueError, "option batch_size must be at least 1, got -1"),
        ({"negatives": 0}, ValueError, "option negatives must be at least 1, got 0"),
        ({"patience": -1}, ValueError, "option patience must be at least 0, got -1"),
        ({"eval_users": -1}, ValueError, "option eval_users must be at least 0, got -1"),
        ({"eval_users": "all"}, TypeError, "option eval_users must be a whole number, got 'all'"),
        ({"seed": 2**63}, ValueError, r"option seed must be below 2\^63, got 9223372036854775808"),
        ({"lookahead": -1}, ValueError, "option lookahead must be 0 to 64, got -1"),
        ({"window": 0}, ValueError, "option window must be 1 to 64, got 0"),
        ({"window": True}, TypeError, "option window must be a whole number, got True"),
        ({"lr": 0.0}, ValueError, r"option lr must be finite and above 0, got 0\.0"),
        ({"lr": float("nan")}, ValueError, "option lr must be finite and above 0, got nan"),
        ({"lr": "1e-3"}, TypeError, r"option lr must be a number, got '1e-3' \(in YAML write 1\.0e-3\)"),
        ({"lr_decay": 1.5}, ValueError, r"option lr_decay must be above 0 and at most 1, got 1\.5"),
        ({"l2": -0.1}, ValueError, r"option l2 must be finite and at least 0, got -0\.1"),
        ({"hardness": -1}, ValueError, "option hardness must be finite and at least 0, got -1"),
        ({"hardness": 1.0, "loss": "bce"}, ValueError, r"option hardness=1\.0 needs loss bpr, got loss 'bce'"),
        ({"bias": 1}, TypeError, "option bias must be true or false, got 1"),
        ({"ram": "lots"}, ValueError, "option ram: .*'lots'"),
        ({"ram": 1.5}, ValueError, r"option ram: .*1\.5"),
        (
            {"valid": "first"},
            ValueError,
            "option valid must be random, last, none, a share .* or a fraction .*, got 'first'",
        ),
        (
            {"valid": "1.0"},
            ValueError,
            r"option valid must be .* a fraction between 0 and 1 such as 0\.1, got '1\.0'",
        ),
        ({"metric": "auc"}, ValueError, "option metric must be hr@k, ndcg@k, recall@k or mrr, got 'auc'"),
        ({"metric": "hr@0"}, ValueError, "option metric must be hr@k, .*, got 'hr@0'"),
        (
            {"ks": "ten"},
            ValueError,
            "option ks must be whole numbers between commas such as \"10,20\", got 'ten'",
        ),
        ({"ks": "0,5"}, ValueError, "option ks must be at least 1, got 0"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(options, error, message):
    with pytest.raises(error, match=message):
        TrainConfig(**options)


def test_options_survive_a_trip_through_plain_values():
    config = TrainConfig(model="gmf", lr=0.01, ram="64MiB", valid="0.1", bias=True)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_numbers_of_yaml_are_taken_where_words_are_expected():
    assert TrainConfig.from_dict({"valid": 0.1, "ks": 5}) == TrainConfig(valid="0.1", ks="5")


def test_a_perceptron_chooses_its_layers_by_dim():
    assert TrainConfig().layer_widths == ()
    assert TrainConfig(model="neumf", dim=16).layer_widths == (16, 8, 4)
    assert TrainConfig(model="neumf", dim=1).layer_widths == (1, 1, 1)
    assert TrainConfig(model="two-tower", dim=16).layer_widths == (32,)
    assert TrainConfig.from_dict({"model": "two-tower", "layers": 8}).layer_widths == (8,)


def test_an_unknown_option_lists_those_that_exist():
    with pytest.raises(
        ValueError,
        match=r"unknown option 'learning_rate'; the options are model, layers, length, dropout, loss, dim, .*threads",
    ):
        TrainConfig.from_dict({"learning_rate": 1})


def test_the_cutoff_of_the_chosen_metric_is_among_the_reported():
    assert TrainConfig(ks="20,5", metric="recall@50").cutoffs == (5, 20, 50)
    assert TrainConfig(ks="5", metric="mrr").cutoffs == (5,)


def test_the_learning_rate_depends_on_the_epoch_alone():
    config = TrainConfig(lr=1.0, lr_decay=0.5)
    assert [config.lr_at(epoch) for epoch in (1, 2, 3)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", bb.Adam), ("adagrad", bb.Adagrad), ("rowwise_adagrad", bb.RowwiseAdagrad), ("sgd", bb.SGD)],
)
def test_the_tables_have_the_optimizer_asked_for(name, kind):
    assert TrainConfig(optimizer=name, lr=0.5).table_optimizer() == kind(lr=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "sgd"])
def test_bytes_of_a_record_are_those_of_the_table(name, dtype):
    config = TrainConfig(optimizer=name, dtype=dtype, dim=6)
    assert TrainConfig(model="neumf", optimizer=name, dtype=dtype, dim=3).record_bytes() == config.record_bytes()
    with bb.create(None, dim=6, num_rows=10, optimizer=config.table_optimizer(), dtype=dtype) as table:
        assert table.nbytes == 10 * config.record_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("pairs", [0, 1, 63, 5_000, 100_000, 10**9])
@pytest.mark.parametrize("given", [{}, {"loss": "bce"}, {"model": "neumf"}, {"loss": "softmax"}, {"optimizer": "sgd"}])
@pytest.mark.parametrize("candidates", [False, True])
def test_every_decision_is_a_valid_config_with_a_reason(
    recipe: str, pairs: int, given: dict[str, Any], candidates: bool
) -> None:
    config, reasons = decide(given, recipe, pairs=pairs, items=max(1, pairs // 10), candidates=candidates)
    undecided = {"refit": not RECIPES[recipe].refit, "ranking": not candidates, "loss": "loss" in given}
    assert set(reasons) == set(AUTO) - {name for name, is_so in undecided.items() if is_so} and all(reasons.values())
    others = {field.name for field in fields(TrainConfig)} - set(AUTO) - set(given)
    plain = TrainConfig()
    assert all(getattr(config, name) == getattr(plain, name) for name in others)
    assert all(getattr(config, name) == value for name, value in given.items())


def test_what_is_given_stays() -> None:
    given = {
        "loss": "bpr", "ranking": "full", "dim": 7, "batch_size": 11, "negatives": 40, "share_negatives": False,
        "hardness": 0.25, "lr": 0.125, "lr_decay": 0.75, "l2": 0.375, "epochs": 9, "patience": 5, "refit": False,
    }  # fmt: skip
    config, reasons = decide(given, "best", pairs=1_000_000, items=1_000, candidates=True)
    assert reasons == {} and config == TrainConfig.from_dict(given)


@pytest.mark.parametrize(
    ("given", "pairs", "items", "expected"),
    [
        ({}, 800_000, 40_000, {"batch_size": 1024, "negatives": 256, "share_negatives": True, "lr": 0.005, "l2": 0.04}),
        ({}, 800_000, 1_000, {"negatives": 250, "hardness": 3.0}),
        ({}, 5_000, 100, {"batch_size": 64, "negatives": 25, "l2": 0.08}),
        ({}, 10, 3, {"batch_size": 32, "negatives": 1}),
        ({"order": "blocks:4x8"}, 800_000, 1_000, {"negatives": 31}),  # of the items of a block
        ({"loss": "softmax"}, 800_000, 40_000, {"hardness": 0.0, "share_negatives": True}),
        ({"loss": "ccl"}, 800_000, 40_000, {"hardness": 0.0, "negatives": 1536, "l2": 0.0, "share_negatives": True}),
        ({"loss": "ccl"}, 5_000, 100, {"negatives": 25, "l2": 0.0}),
        ({"loss": "bce"}, 800_000, 40_000, {"share_negatives": False, "negatives": 8, "lr": 0.005, "hardness": 0.0}),
        ({"loss": "bce"}, 800_000, 40_000, {"l2": 0.002}),
        ({"loss": "bce"}, 5_000, 100, {"l2": 0.004}),
        ({"loss": "bce", "model": "gmf"}, 800_000, 40_000, {"l2": 0.01}),  # its weight lengthens the rows
        ({"loss": "bpr", "negatives": 8}, 800_000, 40_000, {"l2": 0.01}),
        ({"model": "neumf"}, 800_000, 40_000, {"share_negatives": False, "negatives": 8, "batch_size": None}),
        ({"model": "neumf"}, 200_000, 40_000, {"batch_size": 2048}),
        ({"model": "neumf", "batch_size": 4096}, 800_000, 40_000, {"batch_size": 4096}),
        ({"negatives": 4}, 800_000, 40_000, {"share_negatives": False, "hardness": 0.0}),
        ({"negatives": 32}, 800_000, 40_000, {"share_negatives": True, "hardness": 3.0}),
        ({"negatives": 4, "share_negatives": True}, 800_000, 40_000, {"lr": 0.005}),
        ({"optimizer": "rowwise_adagrad"}, 800_000, 40_000, {"lr": 0.15}),
        ({"epochs": 40}, 800_000, 40_000, {"patience": 0, "lr_decay": 0.943}),
        ({"epochs": 2}, 800_000, 40_000, {"patience": 0, "lr_decay": 0.848}),
        ({"valid": "none"}, 800_000, 40_000, {"patience": 0}),
    ],
)
def test_rules(given: dict[str, Any], pairs: int, items: int, expected: dict[str, Any]) -> None:
    config, _ = decide(given, "default", pairs=pairs, items=items)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "candidates", "expected"),
    [
        ({}, False, ("bpr", "full")),
        ({}, True, ("bce", "sampled")),
        ({"ranking": "sampled"}, False, ("bce", "sampled")),
        ({"ranking": "full"}, True, ("bpr", "full")),
        ({"model": "gmf"}, True, ("bce", "sampled")),
        ({"model": "sasrec"}, True, ("softmax", "sampled")),
        ({"loss": "softmax"}, True, ("softmax", "sampled")),
        ({"negatives": 256}, True, ("bpr", "sampled")),
        ({"share_negatives": True}, True, ("bpr", "sampled")),
        ({"hardness": 2.0}, True, ("bpr", "sampled")),
    ],
)
def test_the_loss_is_for_the_items_that_are_ranked(
    given: dict[str, Any], candidates: bool, expected: tuple[str, str]
) -> None:
    config, _ = decide(given, "default", pairs=100_000, items=1_000, candidates=candidates)
    assert (config.loss, config.ranking) == expected
