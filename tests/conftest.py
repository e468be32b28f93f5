"""What every test shares."""

from __future__ import annotations

import gc
import operator
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

# Before anything imports torch: on few cores its OpenMP workers spin after each region and make tiny
# tensors 20 times slower. Nothing here is about torch's speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

# What a shell starts in the background inherits Ctrl-C ignored, and Python then installs no handler of its own.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "bunkbed",
    deadline=None,  # a shared machine pauses
    derandomize=True,  # the same examples every run: a red test is a red test
    print_blob=True,
    # Shrinking a state machine takes minutes: hunt for that.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# For hunting: HYPOTHESIS_PROFILE=hunt pytest tests/table/test_state_machine.py
settings.register_profile(
    "hunt", parent=settings.get_profile("bunkbed"), derandomize=False, max_examples=1000, phases=tuple(Phase)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "bunkbed"))

#: Real data is in a folder next to a developer's checkout, never in it.
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Keep what the frameworks made when they were imported: each collection of garbage would go through all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_ran_before():
    """Tests are shared out between processes as these come free: what one has drawn must not change the next."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed"), ("tensorflow", "random.set_seed")):
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])(0)


@pytest.fixture(autouse=True)
def _no_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rates that were measured here would decide which records share a read. A test may name a cache of its own."""
    rates = sys.modules.get("bunkbed.machine.rates")
    if rates is not None and "XDG_CACHE_HOME" not in os.environ:
        none, real = tmp_path_factory.getbasetemp() / "no-rates.json", rates.cache_file
        monkeypatch.setattr(rates, "cache_file", lambda: real() if "XDG_CACHE_HOME" in os.environ else none)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; the test skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the real data sets are not on this machine (../shared/data)")
    return SHARED_DATA


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in an empty folder; gives exit code, stdout, stderr."""
    from bunkbed.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUNKBED_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def native_defaults():
    """Puts the process-wide settings of the core back after a test that changes them."""
    import bunkbed as bb
    from bunkbed import _native

    simd, threads, io = _native.simd(), bb.get_num_threads(), _native.io()
    yield
    _native.set_fault(None)
    _native.set_io(io)
    _native.set_simd(simd)
    bb.set_num_threads(threads)


#: Files of few, long tests come first: as the last one, each would keep one process busy while the other has nothing.
LONG_FILES = (
    *("test_benchmarks", "test_keras_distribute", "test_keras_examples", "test_keras_multiworker", "test_cli_train"),
    *("test_keras_torch", "test_keras_saving", "test_exactness", "test_pairs", "test_device_kernels"),
    "test_ranks_examples",
    *("test_benchmarks_device", "test_memory", "test_torture"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
    for item in items:
        if item.path.name.startswith("test_keras_"):  # TensorFlow and Keras warn of themselves
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _no_keras_model_outlives_its_test(request: pytest.FixtureRequest):
    """Models are cycles: their tables would go, with a warning of uncommitted rows, in the middle of another test."""
    is_of_keras = request.module.__name__.startswith("test_keras_")
    yield
    if is_of_keras:
        import keras

        keras.backend.clear_session()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
