"""Uncompressed members of a ``.zip`` archive: the offset of their bytes, and their checksums.

torch's checkpoints and Keras's files are such archives. Access at the offset saves the copies of an archive's file
objects, and allows writes of rows in any order.
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

#: Bytes of the fixed parts of a member's header, and of its entry in the directory at the end.
_HEADER_BYTES, _ENTRY_BYTES = 30, 46
#: A flag of a member: its checksum and sizes follow its bytes. The second value is the first bytes of that record.
_FOLLOWS, _AFTER = 1 << 3, b"PK\x07\x08"
#: CRC-32's polynomial and its 1, the highest power in the lowest bit.
_POLYNOMIAL, _ONE = 0xEDB88320, 1 << 31


def offset_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes in the archive."""
    file.seek(member.header_offset)
    header = file.read(_HEADER_BYTES)
    # The lengths of name and extra field in the header, which may differ from those in the directory.
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
    return member.header_offset + _HEADER_BYTES + int(name_bytes) + int(extra_bytes)


class MemberRows(FileRows):
    """Rows of a member, and their checksum. Parts are written in any order, also again, and never overlap."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__(descriptor, offset, length)
        self._parts: dict[int, tuple[int, int]] = {}

    def __setitem__(self, part: slice, rows: Any) -> None:
        array: Floats = np.ascontiguousarray(rows, "<f4")
        self._parts[part.start] = (zlib.crc32(array), array.nbytes)
        super().__setitem__(part, array)

    def checksum(self) -> int:
        """Return the CRC-32 of all parts, concatenated."""
        checksum = 0
        powers: dict[int, int] = {}  # by length: all parts but the last have the same
        for start in sorted(self._parts):
            one, count = self._parts[start]
            if count not in powers:
                powers[count] = _power(8 * count)
            # Appended bytes shift the earlier ones, and a shift is a product modulo the polynomial.
            checksum = _product(powers[count], checksum) ^ one
        return checksum


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """Return x to the power `exponent`, modulo CRC-32's polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square = _product(square, square)
        exponent >>= 1
    return power


def set_checksums(file: IO[bytes], checksums: Mapping[str, int]) -> None:
    """Write checksums, by member name, of members whose bytes were written at their offsets."""
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
