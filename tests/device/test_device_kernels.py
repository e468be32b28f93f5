"""Kernels of a device cache: which version of an operation runs, and that both do the same. See kernel_cases_*.py."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import bunkbed as bb  # noqa: E402
from bunkbed.torch.device.kernels import choice  # noqa: E402
from bunkbed.torch.device.kernels.choice import Chooser  # noqa: E402
from bunkbed.torch.device.kernels.operations import update_of  # noqa: E402

HERE = Path(__file__).parent
#: Where `make test` installs Triton, out of the way of processes with TensorFlow.
APART = Path(sys.prefix) / "triton"
IS_THERE = APART.is_dir() or importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start both files of cases, each in its own process: one with Triton's interpreter, one with its compiler."""
    started = {}
    for cases in ("interpreted", "compiled"):
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            "TRITON_INTERPRET": "01"[cases == "interpreted"],
            "PYTHONPATH": os.pathsep.join([str(APART), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / f"kernel_cases_{cases}.py"]
        started[cases] = subprocess.Popen(
            command, env=environment, cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.skipif(not IS_THERE, reason="triton is not installed")
@pytest.mark.parametrize("cases", ["interpreted", "compiled"])
def test_kernels(cases: str, runs: dict[str, Any]) -> None:
    output, _ = runs[cases].communicate(timeout=280)
    assert runs[cases].returncode == 0, output[-8000:]


def test_triton_is_not_imported_where_it_is_of_no_use_or_crashes_the_process() -> None:
    """Not for a CPU; and not after TensorFlow, whatever the device: no `except` helps there."""
    code = """
        import sys, types, torch, bunkbed as bb, bunkbed.torch as bt
        from bunkbed.torch.device.kernels import choice, operations
        layer = bt.Embedding(50, 4, optimizer=bb.Adam(lr=0.1), device_cache="1MiB")
        optimizer = bt.Optimizer(layer)
        layer(torch.arange(9)).sum().backward()
        optimizer.step()
        assert layer.table.step == 1
        layer.table.close(commit=False)
        assert "bunkbed.torch.device.kernels.code" not in sys.modules  # it imports Triton; torch may, too

        sys.modules["tensorflow"] = types.ModuleType("tensorflow")
        choice.has_triton = lambda: True
        chooser = choice.Chooser(device_types=("cpu",))
        found = chooser.run(operations.Gather(4, 4, torch.float32), torch.ones(3, 4), torch.tensor([2]))
        assert found.tolist() == [[1.0] * 4]
        assert "TensorFlow was imported before Triton" in chooser.choices[0].reason, chooser.choices
        assert "bunkbed.torch.device.kernels.code" not in sys.modules
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- the chooser, with operations whose kernels are made up


def doubled(values: Any) -> Any:
    return values * 2


@dataclass(frozen=True)
class Doubling:
    """An operation of which the tests say what its kernel does."""

    kernel: Callable[[Any], Any]
    size: int = 5
    calls: list[int] = field(default_factory=list, compare=False)
    plain_runs: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return f"doubling {self.size}"

    def plain(self, values: Any) -> Any:
        self.calls.append(len(values))
        Doubling.plain_runs += 1
        return doubled(values)

    def sample(self, rng: np.random.Generator) -> tuple[Any, ...]:
        return (torch.from_numpy(rng.standard_normal(self.size).astype(np.float32)),)

    def finish(self, made: Any, *args: Any) -> Any:
        return made


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_triton", lambda: True)


def make_chooser(plain_s: float = 2.0, kernel_s: float = 1.0) -> Chooser:
    """One that tries kernels on the CPU, where each version takes the time that a test says."""

    def seconds(device: Any, run: Callable[[], Any]) -> float:
        chooser.timed += 1  # type: ignore[attr-defined]
        before = Doubling.plain_runs
        run()
        return plain_s if Doubling.plain_runs > before else kernel_s

    chooser = Chooser(seconds, device_types=("cpu",))
    chooser.timed = 0  # type: ignore[attr-defined]
    return chooser


VALUES = torch.tensor([1.0, -3.0])


def test_a_kernel_that_is_equal_and_faster_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def kernel(values: Any) -> Any:
        calls.append(len(values))
        return doubled(values)

    operation, chooser = Doubling(kernel), make_chooser()
    state, given = torch.get_rng_state(), VALUES.clone()
    assert chooser.run(operation, given).tolist() == [2.0, -6.0]
    assert calls[-1] == 2 and operation.calls[-1] == 5, "plain only in the trial, on the sample"
    made = chooser.choices
    assert [(c.operation, c.device, c.is_kernel, c.speedup) for c in made] == [("doubling 5", "cpu", True, 2.0)]
    assert str(made[0]) == "doubling 5 on cpu: kernel (1000000.0 us, plain 2000000.0 us)"
    timed = chooser.timed  # type: ignore[attr-defined]
    assert timed > 2 and timed % 2 == 0
    chooser.run(operation, given)
    chooser.run(Doubling(kernel), given)  # an equal one
    assert chooser.timed == timed and len(chooser.choices) == 1  # type: ignore[attr-defined]
    chooser.run(Doubling(kernel, 7), given)
    assert [c.operation for c in chooser.choices] == ["doubling 5", "doubling 7"]
    assert torch.equal(given, VALUES) and torch.equal(torch.get_rng_state(), state)
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


@pytest.mark.parametrize("kernel_s", [2.0, 2.5])
def test_a_kernel_that_is_no_faster_is_not(kernel_s: float) -> None:
    calls = []

    def kernel(values: Any) -> Any:
        calls.append(len(values))
        return doubled(values)

    chooser = make_chooser(kernel_s=kernel_s)
    for _ in range(2):
        assert chooser.run(Doubling(kernel), VALUES).tolist() == [2.0, -6.0]
    assert set(calls) == {5}, "never on anything but the sample"
    assert [(c.is_kernel, c.speedup) for c in chooser.choices] == [(False, 2.0 / kernel_s)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: torch.nextafter(doubled(values), torch.tensor(9.0)),
        lambda values: torch.where(torch.arange(len(values)) == 3, -doubled(values), doubled(values)),
        lambda values: doubled(values)[:-1],
    ],
    ids=["an ulp", "a sign", "too few"],
)
def test_a_kernel_with_other_bits_is_never_used(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    chooser = make_chooser()
    assert chooser.run(Doubling(wrong), VALUES).tolist() == [2.0, -6.0]
    assert chooser.timed == 0  # type: ignore[attr-defined]
    assert not chooser.choices[0].is_kernel and chooser.choices[0].speedup is None
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "device cache: doubling 5 on cpu: plain (the kernel has other bits than plain operations)"
    ]


def test_zeros_of_either_sign_are_different_bits() -> None:
    zero = Doubling(lambda values: torch.zeros_like(values))
    object.__setattr__(zero, "plain", lambda values: -torch.zeros_like(values))
    chooser = make_chooser()
    chooser.run(zero, VALUES)
    assert "other bits" in chooser.choices[0].reason


def test_a_kernel_that_fails_leaves_plain_operations(caplog: pytest.LogCaptureFixture) -> None:
    def fails(values: Any) -> Any:
        raise ValueError("no such instruction\nat line 5")

    chooser = make_chooser()
    for _ in range(3):
        assert chooser.run(Doubling(fails), VALUES).tolist() == [2.0, -6.0]
    assert [r.getMessage() for r in caplog.records] == [
        "device cache: doubling 5 on cpu: plain (the trial failed: ValueError: no such instruction)"
    ]


def test_a_kernel_that_fails_later_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails_on_two(values: Any) -> Any:
        calls.append(len(values))
        if len(values) == 2:
            raise RuntimeError("cannot be launched")
        return doubled(values)

    chooser = make_chooser()
    operation = Doubling(fails_on_two)
    assert chooser.run(operation, torch.ones(3)).tolist() == [2.0] * 3
    for _ in range(2):
        assert chooser.run(operation, VALUES).tolist() == [2.0, -6.0]
    assert calls.count(2) == 1
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "device cache: doubling 5 on cpu: plain (a launch failed: RuntimeError: cannot be launched)"
    ]
    assert [c.is_kernel for c in chooser.choices] == [False]


def test_memory_that_is_short_is_the_callers_to_know() -> None:
    def is_short(values: Any) -> Any:
        if len(values) == 2:
            raise torch.OutOfMemoryError("of 2 bytes")
        return doubled(values)

    chooser = make_chooser()
    with pytest.raises(torch.OutOfMemoryError, match="of 2 bytes"):
        chooser.run(Doubling(is_short), VALUES)
    assert [c.is_kernel for c in chooser.choices] == [True]


def test_without_triton_everything_is_plain_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    chooser = make_chooser()
    assert chooser.run(Doubling(lambda values: 1 / 0), VALUES).tolist() == [2.0, -6.0]
    assert [c.reason for c in chooser.choices] == ["triton is not installed"]
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG]


def test_other_devices_are_not_tried_and_tests_may_force_either() -> None:
    chooser = Chooser()
    operation = Doubling(lambda values: values * 3)
    assert chooser.run(operation, VALUES).tolist() == [2.0, -6.0]
    with chooser.forced(True):
        assert chooser.run(operation, VALUES).tolist() == [3.0, -9.0]
        with chooser.forced(False):
            assert chooser.run(operation, VALUES).tolist() == [2.0, -6.0]
        with pytest.raises(ZeroDivisionError):  # a test wants to know
            chooser.run(Doubling(lambda values: 1 / 0), VALUES)
    assert chooser.run(operation, VALUES).tolist() == [2.0, -6.0]
    assert chooser.choices == []


def test_threads_wait_for_one_trial() -> None:
    chooser = make_chooser()
    chooser.run(Doubling(doubled), VALUES)
    timed, chooser = chooser.timed, make_chooser()  # type: ignore[attr-defined]

    def slow(values: Any) -> Any:
        time.sleep(0.01)
        return doubled(values)

    operation = Doubling(slow)
    threads = [threading.Thread(target=lambda: chooser.run(operation, VALUES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chooser.timed == timed and len(chooser.choices) == 1  # type: ignore[attr-defined]


def test_an_optimizer_without_a_kernel_has_none() -> None:
    class Own(bb.SGD):
        pass

    assert update_of(Own(lr=0.1), 4) is None
    found = {update_of(bb.Adam(lr=lr, weight_decay=0.1), dim) for lr in (0.1, 0.2) for dim in (4, 8)}
    assert len(found) == 2, "decided once for each dim, whatever the rate"
