"""Results on disk, so that a stopped series of simulations goes on where it was.

A file is named after all that determines the result: scenario, what its profiles say, trace, and the code that
simulates. It holds a digest of its own content, and is renamed into place when it is whole: what is read back is whole,
or it is nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from talaria_replay.live.results import write_text
from talaria_replay.sim import profiles
from talaria_replay.sim.run import SimResult, encode, simulate
from talaria_replay.sim.scenario import Scenario
from talaria_replay.trace import Call

CODE = (
    "talaria_common",
    "talaria_gpu.sched",
    "talaria_gpu.staging",
    "talaria_gpu.hkvr",
    "talaria_gpu.engine",
    "talaria_gpu.text",
    "talaria_router",
    "talaria_telemetry",
    "talaria_instance",
    "talaria_api",
    "talaria_replay",
)
_FIRST_LINE = "talaria-simulation "


class ResultStore:
    """Args: folder: made when it is needed; None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.reused = 0
        """Results that were read and not simulated."""

    def simulate(self, scenario: Scenario, calls: Sequence[Call], *, generated: str = "") -> SimResult:
        """The result: read, or simulated and kept. Raises as `run.simulate`."""
        if self._folder is None:
            return simulate(scenario, calls, generated=generated)
        path = self._folder / f"{key(scenario, calls, generated)}.json"
        found = read(path)
        if found is not None:
            self.reused += 1
            return found
        result = simulate(scenario, calls, generated=generated)
        text = encode(result).decode()
        write_text(path, f"{_FIRST_LINE}{_digest(text)}\n{text}")
        return result


def key(scenario: Scenario, calls: Iterable[Call], generated: str) -> str:
    """Of all that determines a result. Raises ProfileError."""
    h = hashlib.blake2b(digest_size=16)
    h.update(code_digest())
    h.update(msgspec.json.encode([scenario, generated], order="deterministic"))
    for group in scenario.groups:  # by what the files say now, not by their paths
        said = profiles.hardware(group.hardware), [profiles.model(name) for name in group.models]
        h.update(msgspec.json.encode(said, order="deterministic"))
    for call in calls:
        h.update(msgspec.json.encode(call))
    return h.hexdigest()


def read(path: Path) -> SimResult | None:
    """The result in `path`; None if there is none, or not all of it."""
    try:
        first, _, text = path.read_text(encoding="utf-8").partition("\n")
        if first != _FIRST_LINE + _digest(text):
            return None
        return msgspec.json.decode(text, type=SimResult)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None


@cache
def code_digest() -> bytes:
    """Of the modules and profiles that a simulation is made of."""
    h = hashlib.blake2b(digest_size=16)
    for name in CODE:
        for file in _files(resources.files(name)):
            h.update(file.read_bytes())
    return h.digest()


def _files(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _files(entry) if entry.name != "__pycache__" else []
        elif entry.name.endswith((".py", ".toml")):
            found.append(entry)
    return found


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
