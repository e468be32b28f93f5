"""Files from strangers: an import reads the file it was given and no other, and never more than that file can hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import tensorflow_checkpoint

ROWS = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
SECRET = np.full((40, 4), 42, np.float32)
HUGE = 2**36
CLAIM = r"claims 68719476736 rows of 16 bytes, and a file of \d+ bytes cannot hold more than \d+; nothing was changed"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def table() -> Iterator[bb.Table]:
    with bb.create(None, dim=4, num_rows=None) as made:
        yield made
        assert len(made) == 0 and made.step == 0, "a refused file changed the table"


@pytest.fixture
def h5py() -> Any:
    return pytest.importorskip("h5py")


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Opening it waits until another process does: a file that must not be opened at all."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def refuse(table: bb.Table, path: Path, message: str, **given: Any) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        bb.import_rows(table, path, **given)
    assert str(path) in str(caught.value), "the error does not name the file"


# ---- HDF5: other files


def test_hdf5_external_storage_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", (40, 4), "<f4", external=[(str(tmp_path / "secret"), 0, 640)])
    refuse(table, tmp_path / "a.h5", r"w is stored in another file, which is not read")


def test_hdf5_external_storage_beside_the_wanted_array_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["w"] = ROWS
        file.create_dataset("deep/x", (40, 4), "<f4", external=[("/etc/hostname", 0, 640)])
    refuse(table, tmp_path / "a.h5", r"deep/x is stored in another file", name="w")


def test_hdf5_external_storage_of_the_step_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["layers/embedding/vars/0"] = ROWS
        file.create_dataset("optimizer/vars/0", (1,), "<i8", external=[(str(tmp_path / "secret"), 0, 8)])
        file["optimizer/vars/2"] = file["optimizer/vars/3"] = ROWS
    keras_file(tmp_path / "a.keras", weights.getvalue())
    refuse(table, tmp_path / "a.keras", r"optimizer/vars/0 is stored in another file")


@pytest.mark.parametrize("mapping", ["plain", "printf"])
def test_hdf5_virtual_storage_is_refused_and_its_files_are_not_opened(
    table: bb.Table, h5py: Any, tmp_path: Path, fifo: Path, mapping: str
) -> None:
    layout = h5py.VirtualLayout((40, 4), "<f4", maxshape=(None, 4))
    source = h5py.VirtualSource(str(fifo), "w", shape=(40, 4), maxshape=(None, 4))
    if mapping == "plain":
        layout[:] = source
    else:  # its shape is that of the other file
        layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("w", layout)
    refuse(table, tmp_path / "a.h5", r"w is made of other arrays \(virtual storage\), which is not read")


@pytest.mark.parametrize("through", ["link", "link/w", "soft"])
def test_hdf5_external_links_are_refused_and_not_followed(
    table: bb.Table, h5py: Any, tmp_path: Path, fifo: Path, through: str
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/link"] = h5py.ExternalLink(str(fifo), "/")
        file["soft"] = h5py.SoftLink("/deep/link/w")
    refuse(table, tmp_path / "a.h5", r"deep/link is a link to another file, which is not read", name=through)


# ---- HDF5: sizes


@pytest.mark.parametrize("given", [{}, {"chunks": (4096, 4)}, {"chunks": (4096, 4), "compression": "gzip"}])
def test_hdf5_rows_that_were_never_written_are_bounded_by_the_file(
    table: bb.Table, h5py: Any, tmp_path: Path, given: dict[str, Any]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", (HUGE, 4), "<f4", **given)
    assert (tmp_path / "a.h5").stat().st_size < 10_000
    refuse(table, tmp_path / "a.h5", f"/w {CLAIM}")


def test_hdf5_chunk_of_more_than_the_file_can_hold_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("w", (40, 4), "<f4", chunks=(2**26, 4), maxshape=(None, 4), compression="gzip")
        made.id.write_direct_chunk((0, 0), zlib.compress(ROWS.tobytes()))
    refuse(table, tmp_path / "a.h5", r"/w, a chunk, claims 67108864 rows of 16 bytes")


def test_hdf5_rows_never_written_come_in_where_the_file_could_hold_them(h5py: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", (400, 4), "<f4", fillvalue=2.5)
    with bb.create(None, dim=4) as table:
        assert bb.import_rows(table, tmp_path / "a.h5") == 400
        assert (table.lookup(np.arange(400)) == 2.5).all()


# ---- .keras


def keras_file(path: Path, weights: bytes, config: bytes | None = None) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        about = json.dumps({"compile_config": {"optimizer": {"class_name": "Adam"}}}).encode()
        archive.writestr("config.json", about if config is None else config, zipfile.ZIP_DEFLATED)
        archive.writestr("model.weights.h5", weights, zipfile.ZIP_STORED)


def test_keras_configuration_that_is_a_zip_bomb_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    keras_file(tmp_path / "a.keras", b"", b" " * 100_000_001)
    assert (tmp_path / "a.keras").stat().st_size < 200_000
    refuse(table, tmp_path / "a.keras", r"its config.json claims 100000001 bytes, at most 100000000 are read")


def test_keras_configuration_that_is_nested_without_end_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    keras_file(tmp_path / "a.keras", b"", b"[" * 100_000 + b"]" * 100_000)
    refuse(table, tmp_path / "a.keras", r"is not a .keras file: maximum recursion depth")


def test_keras_member_that_ends_outside_the_archive_is_refused(table: bb.Table, h5py: Any, tmp_path: Path) -> None:
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["layers/embedding/vars/0"] = ROWS
    keras_file(tmp_path / "a.keras", weights.getvalue())
    data = bytearray((tmp_path / "a.keras").read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # of the directory: that of the weights
    data[entry + 20 : entry + 28] = struct.pack("<II", 2**30, 2**30)
    (tmp_path / "a.keras").write_bytes(data)
    refuse(table, tmp_path / "a.keras", r"its model.weights.h5 of 1073741824 bytes lies outside the file")


# ---- .npy


def npy_file(path: Path, shape: str, order: str = "False") -> None:
    header = f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(1000))


@pytest.mark.parametrize("rows", [HUGE, 2**60, 2**62, 2**64, -1])
@pytest.mark.parametrize("order", ["False", "True"])
def test_npy_header_of_more_rows_than_the_file_holds_is_refused(
    table: bb.Table, tmp_path: Path, rows: int, order: str
) -> None:
    npy_file(tmp_path / "a.npy", f"({rows}, 4)", order)
    refuse(table, tmp_path / "a.npy", r"a.npy is not a .npy file")


def test_npy_header_that_is_nested_without_end_is_refused(table: bb.Table, tmp_path: Path) -> None:
    npy_file(tmp_path / "a.npy", "(" * 4000 + ")" * 4000)
    refuse(table, tmp_path / "a.npy", r"a.npy is (not a .npy file|damaged, or not of the format npy)")


# ---- Parquet and Arrow


def test_parquet_rows_of_more_than_the_file_can_hold_are_refused(table: bb.Table, tmp_path: Path) -> None:
    """Runs of equal values take next to nothing, so a small file may hold rows without end."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    count = 1_000_000
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * count, np.float32)), 4)
    ids = pa.array(np.zeros(count, np.int64))
    one_page = {"compression": "zstd", "data_page_size": 2**30, "max_rows_per_page": count}
    parquet.write_table(pa.table({"id": ids, "weight": zeros}), tmp_path / "a.parquet", **one_page)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    refuse(table, tmp_path / "a.parquet", r"column 'id' claims 1000000 rows of 4 bytes")


def test_parquet_list_of_more_than_the_file_can_hold_is_refused(table: bb.Table, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = pa.array([0, 4_000_000], pa.int32())
    one = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(4_000_000, np.float32)))
    parquet.write_table(pa.table({"id": [1], "weight": one}), tmp_path / "a.parquet", compression="zstd")
    refuse(table, tmp_path / "a.parquet", r"column 'weight.list.element' claims 4000000 rows of 4 bytes")


def test_arrow_offsets_that_point_outside_the_file_are_refused(table: bb.Table, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    offsets = np.array([0, 4, 8], np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ones(8, np.float32)))
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema([("id", pa.int64()), ("weight", lists.type)])) as writer:
        writer.write_batch(pa.record_batch([pa.array([1, 2]), lists], names=["id", "weight"]))
    data = (tmp_path / "a.arrow").read_bytes()
    assert data.count(offsets.tobytes()) == 1
    (tmp_path / "a.arrow").write_bytes(
        data.replace(offsets.tobytes(), np.array([2**30, 2**30 + 4, 2**30 + 8], np.int32).tobytes())
    )
    refuse(table, tmp_path / "a.arrow", r"a.arrow is not a file of the format arrow")


# ---- safetensors


def safetensors_file(path: Path, header: bytes | dict[str, Any], length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(64))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_safetensors_header_that_is_nested_without_end_is_refused(
    table: bb.Table, tmp_path: Path, opening: bytes
) -> None:
    safetensors_file(tmp_path / "a.safetensors", opening * 100_000 + b"1")
    refuse(table, tmp_path / "a.safetensors", r"is not a safetensors file: maximum recursion depth")


@pytest.mark.parametrize("length", [0, 500, 2**63])
def test_safetensors_header_longer_than_the_file_is_refused(table: bb.Table, tmp_path: Path, length: int) -> None:
    safetensors_file(tmp_path / "a.safetensors", b"{}", length)
    refuse(table, tmp_path / "a.safetensors", rf"it says that its header has {length} bytes, of 74 in all")


def test_safetensors_header_longer_than_the_format_allows_is_refused(table: bb.Table, tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    refuse(table, tmp_path / "a.safetensors", r"of 200000000 in all and 100000000 at most")


def test_safetensors_offsets_outside_the_file_are_refused(table: bb.Table, tmp_path: Path) -> None:
    weight = {"dtype": "F32", "shape": [HUGE, 4], "data_offsets": [0, 16 * HUGE]}
    safetensors_file(tmp_path / "a.safetensors", {"weight": weight})
    refuse(table, tmp_path / "a.safetensors", r"tensor 'weight' lies outside the file")


@pytest.mark.parametrize(("shape", "offsets"), [([1.0, 4], [0, 16]), ([1, 4], [0.0, 16.0]), (["1", 4], [0, 16])])
def test_safetensors_sizes_that_are_no_whole_numbers_are_refused(
    table: bb.Table, tmp_path: Path, shape: list[Any], offsets: list[Any]
) -> None:
    safetensors_file(tmp_path / "a.safetensors", {"weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}})
    refuse(table, tmp_path / "a.safetensors", r"is not a safetensors file: a size is no number")


@pytest.mark.parametrize("step", [-1, 2**63 - 1, 10**30])
def test_a_step_that_no_table_can_take_is_refused(table: bb.Table, tmp_path: Path, step: int) -> None:
    rows = {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}
    safetensors_file(
        tmp_path / "a.safetensors", {"__metadata__": {"bunkbed.step": str(step)}, "weight": rows, "exp_avg": rows}
    )
    refuse(table, tmp_path / "a.safetensors", rf"holds optimizer state of step {step}, and steps are in \[0, ")


# ---- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_torch_tensor_that_repeats_a_few_bytes_is_bounded_by_the_file(
    table: bb.Table, torch: Any, tmp_path: Path
) -> None:
    torch.save({"weight": torch.zeros(1, 4).expand(HUGE, 4)}, tmp_path / "a.pt")
    refuse(table, tmp_path / "a.pt", f"weight {CLAIM}")


def test_torch_archive_that_is_compressed_is_refused(table: bb.Table, torch: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(100_000_000))
        archive.writestr("a/version", b"3\n", zipfile.ZIP_STORED)
    refuse(table, tmp_path / "a.pt", r"its 'a/data.pkl' is compressed, and torch compresses nothing")


def test_torch_file_that_runs_code_is_refused(table: bb.Table, torch: Any, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"weight": torch.zeros(1, 4), "x": Attack()}, tmp_path / "a.pt", pickle_module=pickle)
    refuse(table, tmp_path / "a.pt", r"is not a torch checkpoint of tensors alone")
    assert not (tmp_path / "owned").exists()


def test_torch_lists_that_hold_each_other_again_and_again_are_refused(
    table: bb.Table, torch: Any, tmp_path: Path
) -> None:
    content: Any = [torch.zeros(1, 4)]
    for _ in range(30):
        content = [content] * 10
    torch.save(content, tmp_path / "a.pt")
    refuse(table, tmp_path / "a.pt", r"it has more than 1000000 parts, or parts nested more than 100 deep")


def test_torch_list_that_holds_itself_is_refused(table: bb.Table, torch: Any, tmp_path: Path) -> None:
    content: list[Any] = [torch.zeros(1, 4)]
    content.append(content)
    torch.save(content, tmp_path / "a.pt")
    refuse(table, tmp_path / "a.pt", r"it has more than 1000000 parts, or parts nested more than 100 deep")


# ---- word2vec


@pytest.mark.parametrize(
    ("format", "message"),
    [("word2vec", rf"says that it holds {HUGE} rows, and holds 10"), ("word2vec-binary", "breaks off within row 5")],
)
def test_word2vec_header_of_more_rows_than_the_file_holds_is_refused(
    table: bb.Table, tmp_path: Path, format: str, message: str
) -> None:
    (tmp_path / "a").write_bytes(f"{HUGE} 4\n".encode() + b"7 1 2 3 4\n" * 10)
    refuse(table, tmp_path / "a", message, format=format, ids="word")


def test_word2vec_header_of_too_many_digits_is_refused(table: bb.Table, tmp_path: Path) -> None:
    (tmp_path / "a.vec").write_bytes(b"9" * 5000 + b" 4\n")
    refuse(table, tmp_path / "a.vec", r"a.vec is damaged, or not of the format word2vec: ")


# ---- TensorFlow


def test_tensorflow_variable_of_more_than_the_files_can_hold_is_refused(
    table: bb.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index names a shape, and TensorFlow makes room for all of it before it reads a byte."""

    class Reader:
        def get_variable_to_dtype_map(self) -> dict[str, Any]:
            return {"weight": SimpleNamespace(name="float32")}

        def get_variable_to_shape_map(self) -> dict[str, Any]:
            return {"weight": [HUGE, 4]}

    train = SimpleNamespace(load_checkpoint=lambda prefix: Reader())
    fake = SimpleNamespace(train=train, errors=SimpleNamespace(OpError=OSError))
    monkeypatch.setattr(tensorflow_checkpoint, "need", lambda *given: fake)
    (tmp_path / "a.index").write_bytes(b"index")
    (tmp_path / "a.data-00000-of-00001").write_bytes(bytes(640))
    refuse(table, tmp_path / "a.index", CLAIM)


# ---- damage


def files(folder: Path) -> dict[str, Path]:
    """A sound file of each format whose library is here."""
    made: dict[str, Path] = {}
    suffixes = {
        "npy": ".npy",
        "safetensors": ".safetensors",
        "parquet": ".parquet",
        "arrow": ".arrow",
        "torch": ".pt",
        "weights-h5": ".weights.h5",
        "word2vec": ".vec",
        "word2vec-binary": ".bin",
    }
    with bb.create(None, dim=4, num_rows=40) as table:
        table.set(np.arange(40), ROWS)
        for name, suffix in suffixes.items():
            try:
                bb.export_rows(table, folder / f"sound{suffix}", format=name)
            except ImportError:
                continue
            made[name] = folder / f"sound{suffix}"
    return made


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    """Cut, and with bytes changed, at places all over the file: rows come in, or an error names the file."""
    rng = np.random.default_rng(0)
    for name, sound in files(tmp_path).items():
        data = sound.read_bytes()
        path = tmp_path / f"damaged{''.join(sound.suffixes)}"
        for number in range(60):
            bad = bytearray(data)
            at = int(rng.integers(0, len(data)))
            if number % 3 == 0:
                del bad[at:]
            else:
                bad[at : at + 4] = (
                    rng.integers(0, 256, 4).astype(np.uint8).tobytes() if number % 3 == 1 else b"\xff" * 4
                )
            path.write_bytes(bad)
            with bb.create(None, dim=4, num_rows=40) as table:
                try:
                    bb.import_rows(table, path, format=name, ids=None if "word2vec" not in name else "word")
                except (ValueError, TypeError, IndexError, OSError, MemoryError) as error:
                    assert str(path) in str(error), f"{name}, {number}: {error!r} does not name the file"
                    assert len(table) == 0
