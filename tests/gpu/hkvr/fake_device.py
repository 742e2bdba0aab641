"""A device's KV pools without a model: a row's bytes are a function of the whole prefix up to it."""

from __future__ import annotations

from hashlib import blake2b

import torch

from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.keys import block_keys, identity_of
from talaria_gpu.hkvr.states import Found
from talaria_gpu.hkvr.transfer import DeviceKv

NAN = 0xFF


def descriptor(name, family="mha", rows=(8, 8, 8, 8), block=4, page=2, *, complete=True):
    return KvDescriptor(
        model=name,
        identity=identity_of({"name": name}),
        family=family,
        dtype="float32",
        page_tokens=page,
        block_tokens=block,
        row_bytes=rows,
        complete=complete,
    )


def found(blocks) -> Found:
    """A prefix of full blocks."""
    return Found(sum(block.tokens for block in blocks), tuple(blocks))


class FakeDevice:
    """One model's rows and which of them are free."""

    def __init__(self, spec: KvDescriptor, rows: int = 64) -> None:
        self.kv = DeviceKv(
            descriptor=spec,
            segments=tuple(torch.full((rows, width), NAN, dtype=torch.uint8) for width in spec.row_bytes),
        )
        self.free = list(range(rows))

    def keys(self, ids, salt=""):
        return block_keys(self.kv.descriptor.identity, salt, ids, self.kv.descriptor.block_tokens)

    def take(self, count: int, scattered: int = 0) -> torch.Tensor:
        """Rows; every second one of the free ones if scattered."""
        step = 2 if scattered and len(self.free) >= 2 * count else 1
        rows = self.free[: count * step : step]
        self.free = [r for r in self.free if r not in set(rows)]
        assert len(rows) == count
        return torch.tensor(rows, dtype=torch.int64)

    def give(self, rows: torch.Tensor) -> None:
        """Free them, and poison what they held."""
        for segment in self.kv.segments:
            segment[rows] = NAN
        self.free = sorted(self.free + rows.tolist())

    def truth(self, ids, segment: int) -> torch.Tensor:
        """[tokens, row bytes] that a forward pass would have left."""
        width = self.kv.descriptor.row_bytes[segment]
        digest = blake2b(f"{self.kv.descriptor.model}/{segment}".encode())
        out = []
        for token in ids:
            digest.update(token.to_bytes(8, "little"))
            out.append(torch.frombuffer(bytearray(digest.digest()[:width]), dtype=torch.uint8))
        return torch.stack(out) if out else torch.empty((0, width), dtype=torch.uint8)

    def compute(self, ids, rows: torch.Tensor) -> None:
        for index, segment in enumerate(self.kv.segments):
            segment[rows] = self.truth(ids, index)

    def assert_holds(self, ids, rows: torch.Tensor, start: int = 0) -> None:
        """Rows hold tokens [start, start + len(rows)) of `ids`, exactly."""
        for index, segment in enumerate(self.kv.segments):
            assert torch.equal(segment[rows], self.truth(ids, index)[start : start + len(rows)])


class FakeStates:
    """A hybrid's recurrent states in slots: a state is a function of the whole prefix. In two parts of two layers."""

    def __init__(self, kv: KvDescriptor, slots: int = 32) -> None:
        self.parts = tuple(
            DeviceKv(
                KvDescriptor(
                    model=kv.model,
                    identity=kv.identity,
                    family="recurrent",
                    dtype="float32",
                    page_tokens=1,
                    block_tokens=1,
                    row_bytes=(40, 24),
                    complete=part == 1,
                ),
                tuple(torch.full((slots, width), NAN, dtype=torch.uint8) for width in (40, 24)),
            )
            for part in range(2)
        )
        self.free = list(range(1, slots))
        self.bytes = 2 * 64

    def take(self) -> torch.Tensor:
        return torch.tensor([self.free.pop(0)], dtype=torch.int64)

    def give(self, slot: torch.Tensor) -> None:
        for part in self.parts:
            for segment in part.segments:
                segment[slot] = NAN
        self.free.append(int(slot))

    def truth(self, ids, part: int, layer: int) -> torch.Tensor:
        text = f"{self.parts[part].descriptor.model}/{part}/{layer}/{list(ids)}".encode()
        width = self.parts[part].descriptor.row_bytes[layer]
        return torch.frombuffer(bytearray(blake2b(text, digest_size=width).digest()), dtype=torch.uint8)

    def compute(self, ids, slot: torch.Tensor) -> None:
        for p, part in enumerate(self.parts):
            for layer, segment in enumerate(part.segments):
                segment[slot] = self.truth(ids, p, layer)

    def assert_holds(self, ids, slot: torch.Tensor) -> None:
        for p, part in enumerate(self.parts):
            for layer, segment in enumerate(part.segments):
                assert torch.equal(segment[slot][0], self.truth(ids, p, layer))
