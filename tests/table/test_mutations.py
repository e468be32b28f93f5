"""The conformance suite can fail: tables wrong in one way each, and the suite must catch every one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bunkbed.testing import ReferenceTable, philox


class LookupIsAView(ReferenceTable):
    """Hands out one buffer again and again instead of copies."""

    def lookup(self, ids, *, touch=True, out=None):
        found = super().lookup(ids, touch=touch, out=out)
        if out is not None:
            return found
        buffer = self.__dict__.setdefault("_buffer", {}).setdefault(found.shape, found)
        buffer[...] = found
        return buffer


class LookupStores(ReferenceTable):
    """A looked-up row counts as stored."""

    def lookup(self, ids, *, touch=True, out=None):
        found = super().lookup(ids, touch=touch, out=out)
        self._store(np.asarray(ids, np.int64).ravel())
        return found


class DuplicatesAreSteps(ReferenceTable):
    """Applies duplicates one after another, each as a step of its own."""

    def update(self, ids, grads, *, lr=None):
        step = self.step
        for index in range(len(ids)):
            super().update(np.asarray(ids)[index : index + 1], grads[index : index + 1], lr=lr)
            self.step = step
        if not len(ids):
            super().update(ids, grads, lr=lr)
        self.step = step + 1


class DuplicatesAreDropped(ReferenceTable):
    """The last gradient of an id wins."""

    def update(self, ids, grads, *, lr=None):
        last = {row: index for index, row in enumerate(np.asarray(ids).tolist())}
        keep = sorted(last.values())
        super().update(np.asarray(ids, np.int64)[keep], np.asarray(grads)[keep], lr=lr)


class SumsBackwards(ReferenceTable):
    """Sums duplicates in reverse order: right to seven digits, wrong in the last bit."""

    def update(self, ids, grads, *, lr=None):
        super().update(np.asarray(ids, np.int64)[::-1], np.asarray(grads)[::-1], lr=lr)


class BoundIsOffByOne(ReferenceTable):
    def _check_ids(self, ids):
        return super()._check_ids(np.minimum(ids, (self.num_rows or 2**62) - 1) if np.size(ids) else ids)


class NanPasses(ReferenceTable):
    def update(self, ids, grads, *, lr=None):
        super().update(ids, np.nan_to_num(grads, posinf=0, neginf=0), lr=lr)


class ChangesBeforeItChecks(ReferenceTable):
    def update(self, ids, grads, *, lr=None):
        self.step += 1
        super().update(ids, grads, lr=lr)
        self.step -= 1


class ForgetsState(ReferenceTable):
    """`rewind` brings back the weights and not the optimizer's slots."""

    def rewind(self, snapshot):
        slots = {slot: self._arrays[slot].copy() for slot in self.slots}
        super().rewind(snapshot)
        for slot, array in slots.items():
            size = min(len(array), len(self._arrays[slot]))
            self._arrays[slot][:size] = array[:size]


class FirstOfDuplicatesWins(ReferenceTable):
    def set(self, ids, values, slot="weight"):
        super().set(np.asarray(ids)[::-1], np.asarray(values)[::-1], slot=slot)


class ScanMissesTheLast(ReferenceTable):
    def scan(self, slot="weight", chunk=65_536):
        for ids, values in super().scan(slot, chunk):
            if len(ids) > 1:
                yield ids[:-1], values[:-1]


class StagingWrites(ReferenceTable):
    """A staged record is put back over what changed since."""

    def stage(self, ids):
        super().stage(ids)
        self._staged = (np.asarray(ids), ReferenceTable.lookup(self, ids))

    def lookup(self, ids, *, touch=True, out=None):
        if getattr(self, "_staged", None) is not None:
            staged, self._staged = self._staged, None
            known = self.contains(staged[0])
            self.set(staged[0][known], staged[1][known])
        return super().lookup(ids, touch=touch, out=out)


class MeanOfBagIsASum(ReferenceTable):
    def lookup_bags(self, ids, offsets, *, pooling="mean", weights=None, touch=True, out=None):
        pooling = "sum" if pooling == "mean" else pooling
        return super().lookup_bags(ids, offsets, pooling=pooling, weights=weights, touch=touch, out=out)


class _Rounding(ReferenceTable):
    """With another rounding of what an update stores."""

    def update(self, ids, grads, *, lr=None):
        right = philox.narrow_stochastic
        philox.narrow_stochastic = self.rounded
        try:
            super().update(ids, grads, lr=lr)
        finally:
            philox.narrow_stochastic = right


class StateRoundsToNearest(_Rounding):
    """Slots in 16 bits that stall where a step changes less than half a unit."""

    @staticmethod
    def rounded(dtype, values, *, field, right=philox.narrow_stochastic, **key):
        return right(dtype, values, field=field, **key) if field == 0 else philox.narrow_nearest(dtype, values)


class SlotsRoundLikeWeights(_Rounding):
    """One random number for a weight and its state: their errors are not independent."""

    @staticmethod
    def rounded(dtype, values, *, field, right=philox.narrow_stochastic, **key):
        return right(dtype, values, field=0, **key)


class ImportsAreCutOff(ReferenceTable):
    """`set` drops the bits that do not fit instead of rounding to nearest."""

    def set(self, ids, values, slot="weight"):
        if self._dtype_of(slot) == "bfloat16":
            values = (np.asarray(values).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        super().set(ids, values, slot=slot)


class ImportsOverflow(ReferenceTable):
    """A value beyond a 16-bit dtype becomes the largest one in silence."""

    def set(self, ids, values, slot="weight"):
        limit = {"float16": 65504.0, "bfloat16": 3.3895314e38}.get(self._dtype_of(slot), 3.4e38)
        super().set(ids, np.clip(values, -limit, limit), slot=slot)


class OutIsRoundedAgain(ReferenceTable):
    """A 16-bit `out` holds the upper half of the float32 bits, whatever the dtype."""

    def lookup(self, ids, *, touch=True, out=None):
        found = super().lookup(ids, touch=touch)
        if out is None:
            return found
        if out.dtype.itemsize == 2:
            out.view(np.uint16)[...] = found.view(np.uint32) >> np.uint32(16)
        else:
            out[...] = found
        return out


class ClosedStaysOpen(ReferenceTable):
    def _check_open(self):
        pass


# Each mutant, and the test that must catch it (others may too).
MUTANTS: dict[type[ReferenceTable], str] = {
    LookupIsAView: "test_an_earlier_lookup_does_not_see_a_later_update",
    LookupStores: "test_lookup_is_not_storage",
    DuplicatesAreSteps: "test_one_update_of_duplicates_is_one_step_of_their_sum",
    DuplicatesAreDropped: "test_one_update_of_duplicates_is_one_step_of_their_sum",
    SumsBackwards: "test_updates_are_the_reference_to_the_last_bit",
    BoundIsOffByOne: "test_wrong_ids_change_nothing",
    NanPasses: "test_a_gradient_that_is_not_finite_changes_nothing",
    ChangesBeforeItChecks: "test_a_gradient_of_the_wrong_shape_changes_nothing",
    ForgetsState: "test_rewind_returns_everything",
    FirstOfDuplicatesWins: "test_set_keeps_the_last_of_duplicates",
    ScanMissesTheLast: "test_scan_yields_every_stored_row_once",
    StagingWrites: "test_staging_moves_no_value",
    MeanOfBagIsASum: "test_bags",
    StateRoundsToNearest: "test_16_bit_rows_are_the_reference_to_the_last_bit",
    SlotsRoundLikeWeights: "test_16_bit_rows_are_the_reference_to_the_last_bit",
    ImportsAreCutOff: "test_set_rounds_to_nearest_and_get_gives_what_is_stored",
    ImportsOverflow: "test_a_value_beyond_the_rows_dtype_changes_nothing",
    OutIsRoundedAgain: "test_lookup_fills_out_in_16_bits",
    ClosedStaysOpen: "test_a_closed_table_refuses_use",
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Runs those tests on every mutant, and on the sound oracle, in one fresh process; those that failed."""
    folder = tmp_path_factory.mktemp("mutants")
    file = folder / "test_mutants.py"
    lines = [
        "import test_mutations",
        "from bunkbed.testing import ReferenceTable, TableTests",
        "class TestSound(TableTests):",
        "    def make_table(self, tmp_path, **kwargs):",
        "        return ReferenceTable(**kwargs)",
    ]
    for mutant in MUTANTS:
        lines += [
            f"class Test{mutant.__name__}(TableTests):",
            "    def make_table(self, tmp_path, **kwargs):",
            f"        return test_mutations.{mutant.__name__}(**kwargs)",
        ]
    file.write_text("\n".join(lines) + "\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\n")
    chosen = [f"{file}::Test{mutant.__name__}::{test}" for mutant, test in MUTANTS.items()]
    chosen += [f"{file}::TestSound::{test}" for test in sorted(set(MUTANTS.values()))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", *chosen],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return set(re.findall(r"^FAILED \S*?::Test(\w+)::(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_suite_catches(failures: set[tuple[str, str]], mutant: type[ReferenceTable]) -> None:
    assert (mutant.__name__, MUTANTS[mutant]) in failures


def test_the_suite_passes_what_is_sound(failures: set[tuple[str, str]]) -> None:
    assert "Sound" not in {kind for kind, _ in failures}
