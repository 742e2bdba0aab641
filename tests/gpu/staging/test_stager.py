"""Staging and gathering with real copy threads over a real buffer, pages being taken back meanwhile."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
import torch

from talaria_common.errors import EngineError
from talaria_gpu.staging.chunks import State
from talaria_gpu.staging.gather import gather
from talaria_gpu.staging.plan import Move, Segment, StagePlan, SwitchPlan, stage_plan, switch_plan
from talaria_gpu.staging.stager import Stager
from talaria_gpu.streams import CopyThread

CPU = torch.device("cpu")
PAGES, PAGE, SEGMENTS, WEIGHTS, GAP = 64, 512, 4, 20_000, 9_000
SIZE = WEIGHTS + SEGMENTS * PAGES * PAGE + GAP
CHUNK = 4_096


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plan_for(weight_bytes: int, free=range(8, PAGES)):
    segments = [Segment(WEIGHTS + i * PAGES * PAGE, PAGE) for i in range(SEGMENTS)]
    return stage_plan(weight_bytes, segments, list(free), (SIZE - GAP, SIZE), chunk_bytes=CHUNK)


def started(*args, **options) -> Stager:
    stager = Stager(*args, **options)
    stager.start()
    return stager


@pytest.fixture
def streams():
    made = CopyThread("d2d", CPU), CopyThread("h2d", CPU)
    yield made
    for stream in made:
        stream.close()


def switch_to(stager, buffer, image, streams):
    stager.stop()
    stager.join()
    plan = stager.switch_plan(CHUNK)
    gather(
        plan, buffer=buffer, image=image, bounce=torch.empty(CHUNK, dtype=torch.uint8), d2d=streams[0], h2d=streams[1]
    )
    assert plan.d2d_bytes + plan.h2d_bytes == len(image)
    assert torch.equal(buffer[: len(image)], image)
    return plan


@pytest.mark.parametrize("weight_bytes", [300, 8_000, 60_000, 130_000, SIZE])
def test_all_that_fits_is_staged_and_gathered(streams, weight_bytes):
    buffer, image = random_bytes(SIZE, 0), random_bytes(weight_bytes, 1)
    stage = plan_for(weight_bytes)
    stager = started("b", stage, streams[1], buffer=buffer, image=image)
    stager.join()
    assert stager.bytes_in(State.CLEAN) == stage.covered_bytes
    plan = switch_to(stager, buffer, image, streams)
    assert plan.path == ("d2d" if weight_bytes < 120_000 else "partial")


def test_without_staging_all_comes_from_host(streams):
    buffer, image = random_bytes(SIZE, 0), random_bytes(50_000, 1)
    plan = switch_plan(StagePlan(50_000, (), ()), [], [], chunk_bytes=CHUNK)
    bounce = torch.empty(CHUNK, dtype=torch.uint8)
    gather(plan, buffer=buffer, image=image, bounce=bounce, d2d=streams[0], h2d=streams[1])
    assert plan.path == "h2d"
    assert torch.equal(buffer[:50_000], image)


@pytest.mark.parametrize("seed", range(4))
def test_pages_taken_back_while_chunks_are_written(streams, seed):
    """Calls write the pages they take at once: a chunk still in flight there would be seen in them."""
    random = Random(seed)
    buffer, image = random_bytes(SIZE, 0), random_bytes(110_000, seed)
    slow = CopyThread("slow", CPU, bytes_per_s=5e6)
    stage = plan_for(110_000)
    stager = started("b", stage, slow, buffer=buffer, image=image)
    pages = list(stage.pages)
    taken: list[int] = []
    for _ in range(6):
        time.sleep(random.random() * 0.004)
        now = pages[: random.randint(1, 4)]
        del pages[: len(now)]
        stager.reclaim(now[-1] + 1)
        for page in now:
            for segment in range(SEGMENTS):
                start = WEIGHTS + segment * PAGES * PAGE + page * PAGE
                buffer[start : start + PAGE] = 7
        taken += now
    for page in taken:
        for segment in range(SEGMENTS):
            start = WEIGHTS + segment * PAGES * PAGE + page * PAGE
            assert bool((buffer[start : start + PAGE] == 7).all())
    plan = switch_to(stager, buffer, image, streams)
    assert plan.dirty_bytes == stager.bytes_in(State.DIRTY)
    slow.close()


class GatedStream(CopyThread):
    """Copies only when let."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__("gated", CPU)

    def move(self, target, source) -> None:
        self.begun.release()
        self.gate.acquire()
        super().move(target, source)


def test_a_chunk_is_not_clean_before_its_copy_is_over():
    stream = GatedStream()
    buffer, image = random_bytes(SIZE, 0), random_bytes(3 * CHUNK, 1)
    stager = started("b", plan_for(3 * CHUNK), stream, buffer=buffer, image=image)
    stream.begun.acquire()
    assert stager.bytes_in(State.CLEAN) == 0
    assert stager.bytes_in(State.WRITING) > 0
    with pytest.raises(EngineError, match="still being staged"):
        stager.switch_plan(CHUNK)
    for _ in range(20):
        stream.gate.release()
    stager.join()
    assert stager.bytes_in(State.CLEAN) == 3 * CHUNK
    stream.close()


def test_taking_pages_back_waits_for_the_chunk_in_flight_and_no_other():
    stream = GatedStream()
    buffer, image = random_bytes(SIZE, 0), random_bytes(60_000, 1)
    stage = plan_for(60_000)
    stager = started("b", stage, stream, buffer=buffer, image=image)
    for _ in range(GAP // CHUNK + 1):  # the gap goes first
        stream.begun.acquire()
        stream.gate.release()
    stream.begun.acquire()  # a chunk in high pages is in flight now
    stager.reclaim(stage.pages[0] + 1)  # the lowest page is not under it
    back = threading.Event()
    thread = threading.Thread(target=lambda: (stager.reclaim(PAGES), back.set()))
    thread.start()
    assert not back.wait(0.05)
    for _ in range(50):
        stream.gate.release()
    assert back.wait(10)
    thread.join()
    stager.join()
    assert stager.bytes_in(State.CLEAN) == GAP
    stream.close()


class FailingStream(CopyThread):
    def __init__(self, good: int) -> None:
        self.good = good
        super().__init__("failing", CPU)

    def move(self, target, source) -> None:
        self.good -= 1
        if self.good < 0:
            raise OSError("the link is down")
        super().move(target, source)


def test_a_failed_copy_ends_the_staging_and_loses_nothing(streams):
    buffer, image = random_bytes(SIZE, 0), random_bytes(60_000, 1)
    stream = FailingStream(good=5)
    stager = started("b", plan_for(60_000), stream, buffer=buffer, image=image)
    stager.join()
    assert "the link is down" in (stager.error or "")
    assert switch_to(stager, buffer, image, streams).path == "partial"
    stream.close()


class RefusingStream(CopyThread):
    """Takes so many copies, and then none."""

    def __init__(self, good: int) -> None:
        self.good = good
        super().__init__("refusing", CPU)

    def copy(self, target, source, after=None):
        self.good -= 1
        if self.good < 0:
            raise RuntimeError("no stream to launch on")
        return super().copy(target, source, after)


def test_a_copy_that_is_not_even_begun_holds_no_pages(streams):
    buffer, image = random_bytes(SIZE, 0), random_bytes(60_000, 1)
    stream = RefusingStream(good=5)
    stager = started("b", plan_for(60_000), stream, buffer=buffer, image=image)
    stager.join()
    assert stager.error == "no stream to launch on"
    assert stager.bytes_in(State.WRITING) == 0
    back = threading.Event()
    threading.Thread(target=lambda: (stager.reclaim(9), back.set()), daemon=True).start()
    assert back.wait(10)
    assert switch_to(stager, buffer, image, streams).path == "partial"
    stream.close()


class FailsOnce(CopyThread):
    """Of its copies only one fails."""

    def __init__(self, which: int) -> None:
        self.left = which
        super().__init__("fails-once", CPU)

    def move(self, target, source) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError("the link was down")
        super().move(target, source)


def test_a_failed_bounce_copy_fails_the_gather(streams):
    """What is left in the bounce buffer is moved all the same: that move succeeds, and its bytes are wrong."""
    image = random_bytes(CHUNK, 1)
    buffer = torch.cat((random_bytes(100, 0), image))
    move = Move(source=100, target=0, size=CHUNK, bounce=True)
    plan = SwitchPlan((move,), (), d2d_bytes=CHUNK, h2d_bytes=0, dirty_bytes=0, missing_bytes=0)
    failing, bounce = FailsOnce(0), torch.empty(CHUNK, dtype=torch.uint8)
    with pytest.raises(EngineError, match="the link was down"):
        gather(plan, buffer=buffer, image=image, bounce=bounce, d2d=failing, h2d=streams[1])
    failing.close()


def test_a_gather_whose_moves_fail_waits_for_its_loads(streams):
    buffer, image = random_bytes(SIZE, 0), random_bytes(60_000, 1)
    stager = started("b", plan_for(60_000, free=range(56, PAGES)), streams[1], buffer=buffer, image=image)
    stager.join()
    failing, gated = FailingStream(good=0), GatedStream()
    plan, bounce = stager.switch_plan(CHUNK), torch.empty(CHUNK, dtype=torch.uint8)
    assert any(not load.after for load in plan.loads)
    over = threading.Event()

    def run() -> None:
        with pytest.raises(EngineError, match="the link is down"):
            gather(plan, buffer=buffer, image=image, bounce=bounce, d2d=failing, h2d=gated)
        over.set()

    threading.Thread(target=run, daemon=True).start()
    gated.begun.acquire()  # a load that waits for no move is being written
    assert not over.wait(0.05)
    for _ in range(50):
        gated.gate.release()
    assert over.wait(10)
    failing.close()
    gated.close()


def test_a_gather_that_fails_says_so_when_nothing_is_in_flight_any_more(streams):
    buffer, image = random_bytes(SIZE, 0), random_bytes(60_000, 1)
    stager = started("b", plan_for(60_000), streams[1], buffer=buffer, image=image)
    stager.join()
    failing = FailingStream(good=3)
    plan, bounce = stager.switch_plan(CHUNK), torch.empty(CHUNK, dtype=torch.uint8)
    with pytest.raises(EngineError, match="the link is down"):
        gather(plan, buffer=buffer, image=image, bounce=bounce, d2d=failing, h2d=streams[1])
    failing.close()


def test_an_emulated_bandwidth_is_kept():
    stream = CopyThread("emulated", CPU, bytes_per_s=20e6)
    a, b = random_bytes(1 << 20, 0), random_bytes(1 << 20, 1)
    started = time.perf_counter()
    stream.copy(a, b).result()
    assert time.perf_counter() - started >= (1 << 20) / 20e6
    assert torch.equal(a, b)
    stream.close()
