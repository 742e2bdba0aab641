"""Bytes of every kind of run, moved directly and by way of the device's scratch memory."""

from __future__ import annotations

from random import Random

import pytest
import torch

from talaria_gpu.hkvr import transfer
from talaria_gpu.hkvr.slabs import Cell
from talaria_gpu.hkvr.transfer import Piece, device_to_host, host_to_device
from tests.gpu.hkvr.fake_device import FakeDevice, descriptor

SPECS = {
    "mha": descriptor("mha"),
    "mla": descriptor("mla", "mla", (12, 12, 12)),
    "mixed": descriptor("mixed", rows=(16, 16, 48, 8)),
    "pages of one": descriptor("one", page=1),
}


@pytest.fixture(params=["direct", "in small copies", "link"])
def path(request, monkeypatch):
    """The way over a link is taken between two CPU memories here; what it copies is the same."""
    if request.param == "link":
        monkeypatch.setattr(transfer, "SCRATCH_BYTES", 300)
        monkeypatch.setattr(transfer, "_gather", None)
        monkeypatch.setattr(transfer, "_scatter", None)
        real = transfer._runs

        def out(kv, pool, pieces):
            for run in real(kv.descriptor, pieces):
                transfer._download(kv, run, pool)

        def back(kv, pool, pieces):
            for run in real(kv.descriptor, pieces):
                transfer._upload(kv, run, pool)

        return out, back
    monkeypatch.setattr(transfer, "LEAST_COPY_BYTES", 1 if "small" in request.param else 1 << 20)
    return device_to_host, host_to_device


def one_buffer(device: FakeDevice) -> FakeDevice:
    """The same device with its segments side by side in one buffer, as an engine has them."""
    widths = device.kv.descriptor.row_bytes
    rows = len(device.kv.segments[0])
    buffer = torch.full((sum(widths) * rows,), 0xFF, dtype=torch.uint8)
    parts = buffer.split([width * rows for width in widths])
    segments = tuple(part.view(rows, width) for part, width in zip(parts, widths, strict=True))
    device.kv = transfer.DeviceKv(descriptor=device.kv.descriptor, segments=segments)
    return device


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["in order", "blocks apart", "rows apart", "shuffled"])
@pytest.mark.parametrize("seed", range(3))
def test_there_and_back(path, spec, together, kind, seed):
    random = Random(seed)
    device, other = FakeDevice(spec, 128), FakeDevice(spec, 128)
    if together:
        device, other = one_buffer(device), one_buffer(other)
    size, count = spec.block_tokens, 6
    starts = {"in order": range(count), "blocks apart": range(0, 2 * count, 2)}.get(kind)
    if starts is not None:
        rows = torch.tensor([first * size + i for first in starts for i in range(size)])
    else:
        picked = range(0, 2 * count * size, 2) if kind == "rows apart" else random.sample(range(128), count * size)
        rows = torch.tensor(list(picked))
    ids = [random.randrange(1000) for _ in range(count * size)]
    device.compute(ids, rows)
    pool = torch.zeros(20 * spec.block_bytes + 64, dtype=torch.uint8)
    places = [*random.sample(range(20), 3), 15, 16, 17] if seed else list(range(4, 10))
    if len(set(places)) < count:
        places = [1, 3, 5, 15, 16, 17]
    cells = [Cell(64 + place * spec.block_bytes, spec.block_bytes) for place in places]
    out, back = path
    out(device.kv, pool, [Piece(cell, rows[i * size : (i + 1) * size]) for i, cell in enumerate(cells)])
    assert not pool[:64].any()
    skip = random.randrange(size)
    there = torch.tensor(random.sample(range(128), count * size - skip))
    pieces, at = [], 0
    for index, cell in enumerate(cells):
        first = skip if index == 0 else 0
        pieces.append(Piece(cell, there[at : at + size - first], skip=first))
        at += size - first
    back(other.kv, pool, pieces)
    other.assert_holds(ids, there, skip)
    untouched = sorted(set(range(128)) - set(there.tolist()))
    assert all((segment[untouched] == 0xFF).all() for segment in other.kv.segments)


def test_stacks_of_an_engine_like_buffer():
    assert [len(stack.rows) for stack in one_buffer(FakeDevice(SPECS["mha"])).kv.stacks] == [4]
    assert [len(stack.rows) for stack in one_buffer(FakeDevice(SPECS["mixed"])).kv.stacks] == [2, 1, 1]
    assert all(len(stack.rows) in {1, 2} for stack in FakeDevice(SPECS["mha"]).kv.stacks)


def test_rows_that_are_not_there():
    device = FakeDevice(SPECS["mha"])
    pool = torch.zeros(1 << 10, dtype=torch.uint8)
    for first in (62, 100):
        with pytest.raises(IndexError):
            device_to_host(device.kv, pool, [Piece(Cell(0, 128), torch.arange(first, first + 4))])
