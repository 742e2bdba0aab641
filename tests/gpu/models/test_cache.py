"""Things in the cache are whole or absent, and made once however many want them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from talaria_gpu.models.cache import MARKER, make_once


def test_made_once_and_found_again(tmp_path):
    made = []

    def make(directory):
        made.append(directory)
        (directory / "weights").write_text("w")

    first = make_once(tmp_path / "new", "thing-v1", make, "note")
    assert make_once(tmp_path / "new", "thing-v1", make, "note") == first
    assert len(made) == 1
    assert (first / "weights").read_text() == "w"
    assert (first / MARKER).read_text() == "note"


def test_another_version_is_made_anew(tmp_path):
    make_once(tmp_path, "thing-v1", lambda d: None, "")
    assert make_once(tmp_path, "thing-v2", lambda d: None, "").name == "thing-v2"


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail(directory):
        (directory / "half").write_text("h")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path, "thing-v1", fail, "")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_a_directory_without_its_marker_is_replaced(tmp_path):
    (tmp_path / "thing-v1").mkdir()
    (tmp_path / "thing-v1" / "old").write_text("?")
    made = make_once(tmp_path, "thing-v1", lambda d: (d / "new").write_text("n"), "")
    assert sorted(p.name for p in made.iterdir()) == ["new", MARKER]


def test_two_processes_make_it_once(tmp_path):
    code = """
import sys, time
from pathlib import Path
from talaria_gpu.models.cache import make_once
def make(directory):
    print("making", flush=True)
    time.sleep(0.5)
make_once(Path(sys.argv[1]), "thing-v1", make, "")
"""
    started = time.monotonic()
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)]
    said = b"".join(p.communicate(timeout=60)[0] for p in both)
    assert [p.returncode for p in both] == [0, 0]
    assert said.count(b"making") == 1
    assert time.monotonic() - started < 60
