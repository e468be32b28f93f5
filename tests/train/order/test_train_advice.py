"""Advice before the first step: when it is given, what it names, and that it is an estimate of this run."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import bunkbed as bb
from bunkbed.machine.rates import Machine
from bunkbed.train.advice import SLOW, advice
from bunkbed.train.block_choice import decided
from bunkbed.train.models.recommender import create_tables
from bunkbed.train.settings.config import TrainConfig

GOWALLA = 29_858, 40_981, 810_128
UNIFORM = TrainConfig(order="uniform", ram="16MiB")
FAST = Machine(memory_bytes_per_s=20e9, read_iops=100_000_000, write_bytes_per_s=500e9)


@pytest.fixture
def given(tmp_path):
    """The advice for a config, on tables of the size of Gowalla."""

    def give(config, machine=None, is_new=True):
        users, items, pairs = GOWALLA
        with bb.Run(tmp_path / "run", ram=config.ram) as run:
            tables = create_tables(run, config, users, items)
            found = advice(decided(config, tables), tables, pairs, machine, is_new=is_new)
            for name in run.table_names:
                run.table(name).close()
        return found

    return give


def test_a_slow_run_is_told_what_would_change_it(given):
    found = given(UNIFORM)
    assert found.slowdown > SLOW and not found.is_measured
    # More rows than 20,000 unique ones a step: the items do not fit in their cache, and are read twice.
    assert 20_000 < found.rows_read < 40_000
    changes = {change.options: change.speedup for change in found.changes}
    assert found.slowdown / changes["--order blocks"] < SLOW
    assert changes["--dtype bfloat16 --optimizer rowwise_adagrad (needs another --lr)"] > 2
    assert changes["--share-negatives --negatives 256"] > 1.5
    (ram,) = [options for options in changes if options.startswith("--ram ")]
    assert changes[ram] == found.slowdown
    text = found.lines()
    assert len(text) <= 8 and text[0].startswith("slow: about ")
    assert "an estimate, with assumed rates of the disk (bunkbed plan measures them)" in text[1]
    # The RAM that it names is enough.
    assert given(replace(UNIFORM, ram=ram.removeprefix("--ram "))) is None


@pytest.mark.parametrize(
    "config",
    [replace(UNIFORM, order="auto"), replace(UNIFORM, ram="1GiB"), replace(UNIFORM, order="blocks:10x6")],
    ids=["auto", "in RAM", "blocks"],
)
def test_a_run_that_is_fast_enough_is_told_nothing(given, config):
    assert given(config) is None


def test_blocks_that_do_not_fit_are_slow(given):
    found = given(replace(UNIFORM, order="blocks:2", batch_size=4096))
    assert found is not None and found.slowdown > SLOW
    assert not [change for change in found.changes if "--order" in change.options]


def test_measured_rates_are_used(given):
    assert given(UNIFORM, FAST).slowdown < given(UNIFORM).slowdown / 2
    slow = given(UNIFORM, replace(FAST, read_iops=90_000.0, write_bytes_per_s=1e8))
    assert slow.is_measured and slow.slowdown > given(UNIFORM).slowdown
    assert "with the measured rates of the disk" in slow.lines()[1]


def test_without_lookahead_reads_and_the_model_take_turns(given):
    assert given(replace(UNIFORM, lookahead=0)).slowdown == pytest.approx(given(UNIFORM).slowdown + 1)


def test_a_resumed_run_is_told_what_may_still_change(given):
    assert [change.options.split()[0] for change in given(UNIFORM, is_new=False).changes] == ["--ram"]
