"""Files packed by zstd, of one frame or several. The library's own reader ends where a cut-off file ends, without a
word: half of the data would be taken for all of it."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

BLOCK = 2**17


class DamagedError(Exception):
    """No zstd data, or cut off."""


def unpacked(raw: BinaryIO) -> io.BufferedReader:
    """The content of a packed file."""
    return io.BufferedReader(_Frames(raw), 2**16)


class _Frames(io.RawIOBase):
    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.packed = b""  # read, not yet unpacked
        self.ready = memoryview(b"")  # unpacked, not yet given away
        self.frame: Any = None  # the one that is being unpacked

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.raw.close()
        super().close()

    def readinto(self, out: Any) -> int:
        import zstandard

        while not self.ready:
            self.packed = self.packed or self.raw.read(BLOCK)
            if not self.packed:
                if self.frame is not None:
                    raise DamagedError("it ends inside a zstd frame: was it cut off?")
                return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(self.packed))
            except zstandard.ZstdError as error:
                raise DamagedError(str(error)) from None
            self.packed = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame = None
        size = min(len(out), len(self.ready))
        out[:size], self.ready = self.ready[:size], self.ready[size:]
        return size
