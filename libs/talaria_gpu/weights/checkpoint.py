"""A model's files on disk: whole, and in the page cache before anybody waits for them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from talaria_common.errors import EngineError

_PIECE = 16 << 20
_LENGTH = struct.Struct("<Q")


def check(directory: Path) -> int:
    """Compare every safetensors file with what its header says; returns the bytes of all of them.

    Raises:
        EngineError: names the file that is cut short or is no safetensors file, and the sizes.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{directory}: no safetensors files")
    return sum(_check_file(file) for file in files)


def _check_file(file: Path) -> int:
    size = file.stat().st_size
    try:
        with file.open("rb") as f:
            (header_bytes,) = _LENGTH.unpack(f.read(_LENGTH.size))
            header = json.loads(f.read(min(header_bytes, size)))  # cut short, it does not parse
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as e:
        raise EngineError(f"{file} is no whole safetensors file: {e}") from e
    wanted = _LENGTH.size + header_bytes + max(ends, default=0)
    if size != wanted:
        raise EngineError(f"{file} has {size} B, its header says {wanted} B: it is cut short or damaged")
    return size


def read_ahead(directory: Path) -> None:
    """`check`, then read every file once, so that loading it finds it in memory. Raises EngineError as `check` does."""
    check(directory)
    piece = bytearray(_PIECE)
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as f:
            while f.readinto(piece):
                pass
