"""A directory of made things: each is made once, by one process, and appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = "talaria-recipe.txt"
"""In every made directory: what made it, and what it is."""


def make_once(cache_dir: Path, key: str, make: Callable[[Path], None], note: str) -> Path:
    """`cache_dir/key`, made by `make(directory)` if it is not there.

    The directory is filled under another name and renamed when complete, so that a killed process leaves nothing half
    made. Processes that want the same key wait for the one that makes it.

    Args:
        cache_dir: made when missing.
        key: names the content, version included: a changed recipe has another key.
        make: fills an empty directory; what it raises is raised here, and nothing is kept.
        note: goes into `MARKER`.
    """
    target = cache_dir / key
    if (target / MARKER).is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{key}.lock"):
        if (target / MARKER).is_file():
            return target
        draft = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=cache_dir))
        try:
            draft.chmod(0o755)
            make(draft)
            (draft / MARKER).write_text(note, encoding="utf-8")
            if target.exists():  # without its marker: not ours to trust
                shutil.rmtree(target)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock between processes; the system drops it when the holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
