"""When a copy is over: also a failed one may have launched something that still writes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from talaria_common.errors import EngineError
from talaria_gpu.streams import CopyThread


class FakeCudaStream:
    """Says whether what it was given is over."""

    quiet = True

    def synchronize(self) -> None:
        self.quiet = True


@pytest.fixture
def cuda_thread(monkeypatch):
    """A copy thread as on CUDA, and its stream."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    thread = CopyThread("copies", torch.device("cpu"))
    thread._stream = FakeCudaStream()
    yield thread, thread._stream
    thread.close()


class Over:
    """An event that is over."""

    def result(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_over_when_its_stream_is_quiet(cuda_thread, fails):
    thread, stream = cuda_thread

    def launch() -> None:
        stream.quiet = False
        if fails:
            raise OSError("the second launch failed")

    transfer = thread.submit(launch, 0, Over())
    assert transfer.wait(10)
    assert stream.quiet
    with pytest.raises(EngineError, match="second launch") if fails else contextlib.nullcontext():
        transfer.result()
