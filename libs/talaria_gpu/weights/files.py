"""Image files: written once, without a name, so that they vanish with the process; checked when read back."""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from talaria_common.errors import EngineError

_PIECE = 16 << 20


class ImageFile:
    """One image on disk. May be made in another thread than the one that uses it.

    Args:
        image: uint8, on the host.
        directory: on a disk with room; None: the system's directory for temporary files.
        wanted: asked now and then whether to go on.

    Raises:
        OSError: the disk is full, or the like; ECANCELED: it is not wanted any more.
    """

    def __init__(self, image: torch.Tensor, directory: Path | None, wanted: Callable[[], bool] = lambda: True) -> None:
        self.size = image.numel()
        self._file = tempfile.TemporaryFile(prefix="talaria-weights-", dir=directory, buffering=0)  # noqa: SIM115 - kept
        self._checksum = 0
        try:
            self._write(memoryview(image.numpy()), wanted)
        except OSError:
            self.close()
            raise

    def _write(self, view: memoryview, wanted: Callable[[], bool]) -> None:
        for at in range(0, self.size, _PIECE):
            if not wanted():
                raise OSError(errno.ECANCELED, "its model was closed")
            piece = view[at : at + _PIECE]
            self._checksum = zlib.crc32(piece, self._checksum)
            written = 0
            while written < len(piece):
                written += self._file.write(piece[written:]) or 0

    def read(self, target: torch.Tensor) -> None:
        """Fill `target`. May run in another thread than the one that made the file.

        Raises:
            EngineError: the file is cut short, or its bytes are not those written.
        """
        view = memoryview(target.numpy())
        at = checksum = 0
        while at < self.size:
            got = os.preadv(self._file.fileno(), [view[at : at + _PIECE]], at)
            if not got:
                raise EngineError(f"its image file is cut short: {at} of {self.size} bytes are there")
            checksum = zlib.crc32(view[at : at + got], checksum)
            at += got
        if checksum != self._checksum:
            raise EngineError("its image file has changed: the checksum differs")

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()
