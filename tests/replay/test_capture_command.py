"""`talaria capture`: what it says when it may not listen or cannot write, and that no half trace gets the name."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from talaria_cli.capture import CaptureOptions, _capture, _finish, _Recorder
from talaria_common import subjects
from talaria_common.bus import MemoryBus, MemoryHub, NatsBus
from talaria_common.bus.server_conf import ServerConf
from talaria_common.settings import BusSettings, Settings
from talaria_replay.capture import Capture
from talaria_replay.trace import TraceError, read
from tests.replay.test_capture import completion
from tests.support.nats_server import NatsServer
from tests.support.waiting import until

TAP = Settings(bus=BusSettings(user="tap", password="look"))


def options(file: Path, *, texts: bool = False, calls: int | None = None) -> CaptureOptions:
    return CaptureOptions(file, None, "", file.parent, texts, calls, None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    directory = tmp_path / "nats"
    directory.mkdir()
    server = NatsServer(directory, ServerConf("", user="mesh", password="of-the-mesh", tap_password="look")).start()
    yield server
    server.stop()


async def test_texts_without_the_right_are_no_trace_without_texts(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _capture(options(tmp_path / "t.jsonl", texts=True), server.url, TAP) == 2
    said = capsys.readouterr().err
    assert "listening" not in said
    assert "talaria capture: " in said
    assert "permissions violation for subscription" in said.casefold()
    assert subjects.ALL_FORWARDS in said
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == []


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
async def test_whoever_may_not_see_texts_captures_without_them(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mesh = await NatsBus.connect(server.url, user="mesh", password="of-the-mesh")
    task = asyncio.create_task(_capture(options(tmp_path / name, calls=2), server.url, TAP))
    said = ""

    def listening() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "listening" in said

    await until(listening)
    for rid in ("a", "b"):
        await mesh.publish(subjects.completion("i"), msgspec.json.encode(completion(rid)))
    assert await task == 0
    await mesh.close()
    assert [c.call for c in read(tmp_path / name)] == [0, 1]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [name]


class Full(io.BytesIO):
    def write(self, _data: object) -> int:
        raise OSError(28, "No space left on device")


async def test_a_failed_write_ends_the_capture() -> None:
    stop = asyncio.Event()
    bus = MemoryBus(MemoryHub())
    recorder = _Recorder(Capture(), Full(), None, stop)
    await recorder.listen(bus, texts=False)
    await bus.publish(subjects.completion("i"), msgspec.json.encode(completion("a")))
    await asyncio.wait_for(stop.wait(), 10)
    await bus.close()
    assert recorder.problem == "the trace could not be written: [Errno 28] No space left on device"
    assert recorder.written == 0


def test_a_trace_that_is_not_valid_does_not_get_the_name(tmp_path: Path) -> None:
    recorder = _Recorder(Capture(), io.BytesIO(), None, asyncio.Event())
    recorder.written = 2
    part = tmp_path / "t.jsonl.part"
    part.write_bytes(msgspec.json.encode(Capture().completed(1.0, completion("a"))) + b'\n{"session": "s"')
    with pytest.raises(TraceError, match=r"t\.jsonl\.part: line 2: "):
        _finish(recorder, part, tmp_path / "t.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl.part"]
