"""The checksum of a checkpoint file, and the verification of a file.

torch.save writes a zip. Its reader ignores the zip's own checksums and everything outside the records, so that
damaged data loads as weights. A zip ends with a comment of free text that every reader skips: the seal. It holds a
CRC-32 of every byte before it. A CRC-32 finds every error of up to 32 adjacent bits, every odd number of flipped
bits, and all but one in four billion of any others; it is no protection against deliberate changes, and it
costs a save nothing, see :mod:`torchhal.checkpoint._crc`.
"""

from __future__ import annotations

import errno
import re
import zipfile
import zlib
from typing import BinaryIO, NamedTuple

from torchhal.checkpoint._crc import Crc32, torch_describes_records
from torchhal.errors import CheckpointCorruptError, CheckpointError

_END = 22  # bytes of a zip's end-of-central-directory record without a comment
_END_MARK = b"PK\x05\x06"
HEAD = b"PK\x03\x04"
_SEAL = re.compile(rb"torchhal checkpoint 1 saved=([0-9]{20}) crc32=([0-9a-f]{8})")
_CRC_DIGITS = 8
_SEAL_SIZE = len(b"torchhal checkpoint 1 saved=") + 20 + len(b" crc32=") + _CRC_DIGITS
TAIL = _END + _SEAL_SIZE
_PIECE = 16 << 20


class ChecksumWriter:
    """A file for torch.save that forwards every write to ``file`` and computes the checksum.

    The first error is kept in ``error``: torch turns it into "enforce fail", and continues writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: BaseException | None = None
        self._file = file
        self._sum = Crc32(trust_descriptors=torch_describes_records())
        self._end = b""  # the last write, if it may be the zip's end record

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._put(memoryview(self._end))
                self._end = bytes(view) if len(view) == _END else b""
                if not self._end:
                    self._put(view)
            except BaseException as error:
                self.error = error
                raise
        return len(view)

    def flush(self) -> None:
        pass

    def seal(self, saved_ns: int) -> None:
        """Write the held-back end of the zip, with the seal as its comment."""
        if self._end[:4] != _END_MARK or self._end[-2:] != b"\0\0":
            raise CheckpointError("torch.save must end with a zip's end record without a comment (got something else)")
        self._put(memoryview(self._end[:-2] + _SEAL_SIZE.to_bytes(2, "little")))
        self._put(memoryview(b"torchhal checkpoint 1 saved=%020d crc32=" % saved_ns))
        self._pass_on(memoryview(b"%08x" % self._sum.value))

    def _put(self, view: memoryview) -> None:
        if len(view):
            self._sum.update(view)
            self._pass_on(view)

    def _pass_on(self, view: memoryview) -> None:
        while len(view):
            written = self._file.write(view[:_PIECE])
            if not written:
                raise OSError(errno.EIO, f"the file took {written!r} of {min(len(view), _PIECE)} bytes")
            view = view[written:]


class ChecksumFooter(NamedTuple):
    """The record at the end of a checkpoint file."""

    sealed: bool
    saved_ns: int


def read_ending(head: bytes, tail: bytes) -> ChecksumFooter | None:
    """Return the ending of a file from its first 4 and last ``TAIL`` bytes; None if it is no complete zip file."""
    if head[:4] != HEAD:
        return None
    end = tail[-TAIL:-_SEAL_SIZE]
    match = _SEAL.fullmatch(tail[-_SEAL_SIZE:])
    if match and len(end) == _END and end[:4] == _END_MARK and end[-2:] == _SEAL_SIZE.to_bytes(2, "little"):
        return ChecksumFooter(True, int(match[1]))
    if len(tail) >= _END and tail[-_END:][:4] == _END_MARK and tail[-2:] == b"\0\0":
        return ChecksumFooter(False, 0)
    return None


def verify(file: BinaryIO, shown: str) -> ChecksumFooter:
    """Read all of ``file`` and raise CheckpointCorruptError unless every byte is as it was written.

    For a file that plain torch.save wrote: unless the zip's own checksums hold.
    """
    ending, size, tail = _ending_of(file, shown)
    file.seek(0)
    if ending.sealed:
        crc = _sum_up(file, size - _CRC_DIGITS)
        if tail[-_CRC_DIGITS:] != b"%08x" % crc:
            raise CheckpointCorruptError(
                f"{shown!r} is damaged: its checksum is {crc:08x}, but it was saved "
                f"with {tail[-_CRC_DIGITS:].decode()}. Load an earlier checkpoint, or copy this one again"
            )
    else:
        _verify_records(file, shown)
    file.seek(0)
    return ending


def verify_description(file: BinaryIO, shown: str) -> ChecksumFooter:
    """Verify as :func:`verify` does, but only the records that list the tensors: their data may still be damaged."""
    ending, _, _ = _ending_of(file, shown)
    _verify_records(file, shown, data=False)
    file.seek(0)
    return ending


def _ending_of(file: BinaryIO, shown: str) -> tuple[ChecksumFooter, int, bytes]:
    """Return the ending, the file's size, and its last bytes."""
    file.seek(0)
    head = file.read(4)
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL))
    tail = file.read(TAIL)
    ending = read_ending(head, tail)
    if ending is None:
        raise CheckpointCorruptError(f"{shown!r} {_what_is_wrong(head, size)}")
    return ending, size, tail


def _what_is_wrong(head: bytes, size: int) -> str:
    if size == 0:
        return "is empty"
    if head == HEAD:
        return "is damaged: cut off, or with something behind its end"
    return "is no checkpoint: it doesn't start as a zip file, which torch.save writes since torch 1.6"


def _sum_up(file: BinaryIO, count: int) -> int:
    crc, piece = 0, memoryview(bytearray(4 << 20))
    while count:
        got = file.readinto(piece[: min(count, len(piece))])  # type: ignore[attr-defined]
        if not got:
            return -1
        crc = zlib.crc32(piece[:got], crc)
        count -= got
    return crc


def _verify_records(file: BinaryIO, shown: str, *, data: bool = True) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            # Torch never compresses; a compressed record may be a zip bomb.
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise CheckpointCorruptError(f"{shown!r} is no checkpoint: a zip with compressed records")
            described = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not described:
                raise CheckpointCorruptError(f"{shown!r} is no checkpoint: a zip without a 'data.pkl'")
            if not data:
                for name in described:
                    archive.read(name)  # raises BadZipFile for a wrong checksum
                return
            bad = archive.testzip()
    except CheckpointCorruptError:
        raise
    except Exception as error:  # zipfile raises many kinds: struct, unicode, offsets outside the file
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        raise CheckpointCorruptError(f"{shown!r} is damaged: {error}") from error
    if bad is not None:
        raise CheckpointCorruptError(f"{shown!r} is damaged: the checksum of its record {bad!r} is wrong")
