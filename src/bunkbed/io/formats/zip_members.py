"""Members of a ``.zip`` archive that are stored as they are: where their bytes lie, and their checksums.

torch's checkpoints and Keras's files are such archives. Reading and writing at the offset saves the copies that an
archive's own file objects make, and rows come in another order than an archive is written in.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from bunkbed.core.arguments import Floats
from bunkbed.io.formats.dense import FileRows

#: Fixed parts of what stands before a member, and of its entry in the directory at the end.
_HEADER_BYTES, _ENTRY_BYTES = 30, 46
#: Of a member's flags: its checksum and sizes follow its bytes, in a record that begins with this.
_FOLLOWS, _AFTER = 1 << 3, b"PK\x07\x08"
#: CRC-32's polynomial and its 1, the highest power in the lowest bit.
_POLYNOMIAL, _ONE = 0xEDB88320, 1 << 31


def offset_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where in the archive the bytes of a member begin."""
    file.seek(member.header_offset)
    header = file.read(_HEADER_BYTES)
    # The name and the extra field of the header itself, which the directory's need not be like.
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
    return member.header_offset + _HEADER_BYTES + int(name_bytes) + int(extra_bytes)


class MemberRows(FileRows):
    """Rows of a member, and their checksum. Each part is written once or again, in any order, but never another one."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__(descriptor, offset, length)
        self._parts: dict[int, tuple[int, int]] = {}

    def __setitem__(self, part: slice, rows: Any) -> None:
        array: Floats = np.ascontiguousarray(rows, "<f4")
        self._parts[part.start] = (zlib.crc32(array), array.nbytes)
        super().__setitem__(part, array)

    def checksum(self) -> int:
        """CRC-32 of all parts one after the other."""
        checksum = 0
        powers: dict[int, int] = {}  # parts have one length, but for the last
        for start in sorted(self._parts):
            one, count = self._parts[start]
            if count not in powers:
                powers[count] = _power(8 * count)
            # Bytes that follow shift what is before them, and a shift is a product modulo the polynomial.
            checksum = _product(powers[count], checksum) ^ one
        return checksum


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """x to the `exponent`, modulo CRC-32's polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square = _product(square, square)
        exponent >>= 1
    return power


def set_checksums(file: IO[bytes], checksums: Mapping[str, int]) -> None:
    """Writes checksums of members whose bytes were written by themselves, by the members' names."""
    with zipfile.ZipFile(file) as archive:
        members, at = archive.infolist(), archive.start_dir
    file.seek(at)
    directory = file.read()
    entry = 0
    for member in members:  # in the directory's order
        if member.filename in checksums:
            checksum = struct.pack("<I", checksums[member.filename])
            place = member.header_offset + 14
            if member.flag_bits & _FOLLOWS:
                end = offset_of(file, member) + member.file_size
                file.seek(end)
                assert file.read(4) == _AFTER, f"{member.filename} is not followed by its checksum"
                place = end + 4
            for where in (place, at + entry + 16):
                os.pwrite(file.fileno(), checksum, where)
        entry += _ENTRY_BYTES + sum(struct.unpack("<HHH", directory[entry + 28 : entry + 34]))
