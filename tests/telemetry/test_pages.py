"""Views of many instances: pages that the bus carries, and what router and api make of them."""

from __future__ import annotations

import pytest

from talaria_api.cluster import Cluster as ApiCluster
from talaria_common.wire import ClusterView, InstanceView, ModelState, SeenPlacements, Snapshot, encode
from talaria_router.cluster import Cluster as RouterCluster
from talaria_telemetry.core import TelemetryCore
from talaria_telemetry.messages import Beat, Publish
from talaria_telemetry.pages import page_bytes, paged

MODELS = ("qwen3.5-122b", "qwen3-235b", "glm-5-nvfp4")


def snapshot(iid: str, version: int = 1) -> Snapshot:
    """As a busy instance with three models and two routers writes it: about 2 KB."""
    models = tuple(
        ModelState(
            name=name, state="host", context_tokens=131072, kv_capacity_tokens=1_250_000, kv_used_tokens=734_211,
            queued=12, running=31, queued_tokens=54_321, kv_epoch=3, prefill_ms_per_token=0.1733219,
            decode_step_ms=31.2213, switch_ms=1497.3312, cached_sessions=113, max_running=64,
            weight_bytes=131_000_000_000, open_ms=61234.1234, restore_ms_per_token=0.0123456, host_kv_tokens=2_345_678,
        )
        for name in MODELS
    )  # fmt: skip
    seen = {f"router-{n}/1764495868123": SeenPlacements(upto=123_456 + n, missing=(123_401, 123_444)) for n in range(2)}
    return Snapshot(
        iid=iid, epoch="1764495868999", version=version, at_ms=1_764_495_868_999, pool="cold", status="ready",
        models=models, active_model=MODELS[0], round_remaining_ms=1234.56, buffer_bytes=180 << 30, kv_occupancy=0.7312,
        staging_free_bytes=40 << 30, max_queued=1024, seen=seen, prefilled_tokens=123_456_789, switches=1234,
    )  # fmt: skip


def view(*instances: InstanceView, version: int = 1, full: bool = True, removed: tuple[str, ...] = ()) -> ClusterView:
    return ClusterView(
        telemetry="t0", epoch="e", version=version, at_ms=0, full=full, instances=instances, removed=removed
    )


def shown(count: int, *, age_ms: int = 10) -> list[InstanceView]:
    return [InstanceView(snapshot=snapshot(f"cold-{n:04}"), age_ms=age_ms, health="ok") for n in range(count)]


def test_what_fits_is_one_message_as_it_was():
    whole = view(*shown(3), removed=("x",))
    assert paged(whole, 1 << 20) == [whole]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("most", [5000, 20_000, 1 << 20])
def test_pages_are_below_the_bound_and_lose_nothing(full: bool, most: int):
    whole = view(*shown(100), version=7, full=full, removed=("x", "y"))
    pages = paged(whole, most)
    assert all(len(encode(page)) <= most for page in pages)
    assert [page.version for page in pages] == list(range(7, 7 + len(pages)))
    assert [page.full for page in pages] == [False] * (len(pages) - 1) + [full]
    assert tuple(i for page in pages for i in page.instances) == whole.instances
    assert [page.removed for page in pages] == [()] * (len(pages) - 1) + [("x", "y")]
    names = tuple(i.snapshot.iid for i in whole.instances)
    assert pages[-1].members == (names if full and len(pages) > 1 else ())


def test_an_instance_above_the_bound_is_alone_on_its_page():
    pages = paged(view(*shown(3), full=False), 1000)
    assert [len(page.instances) for page in pages] == [1, 1, 1, 0], "the end of the view is not lost with it"


def test_4096_busy_instances_with_three_models_fit_the_bus():
    core = TelemetryCore("t0", "e", heartbeat_s=0.5, missed=3, full_every=10)
    core.handle(0.0, Beat())
    for n in range(4096):
        core.handle(5.0, snapshot(f"cold-{n:04}"))
    limit = 1 << 20  # of a NATS server out of the box
    pages = [e.view for e in core.handle(5.0, Beat(page_bytes(limit))) if isinstance(e, Publish)]
    sizes = [len(encode(page)) for page in pages]
    assert sum(sizes) > 6 << 20, "as large as they really are"
    assert max(sizes) < limit
    assert len(pages[-1].members) == 4096
    (after,) = [e.view for e in core.handle(5.5, Beat(page_bytes(limit))) if isinstance(e, Publish)]
    assert after.version == pages[-1].version + 1, "no reader sees a gap"


class TestRouter:
    def test_knows_everybody_and_who_left(self):
        cluster = RouterCluster(0.5, 3)
        for page in paged(view(*shown(51)), 20_000):
            cluster.view(1.0, page)
        assert len(list(cluster.instances())) == 51
        assert cluster.informed(1.0)
        for page in paged(view(*shown(50), version=100), 20_000):
            cluster.view(9.0, page)
        assert len(list(cluster.instances())) == 50, "the last one is not a member any more"

    def test_does_not_say_who_is_there_before_the_last_page(self):
        cluster = RouterCluster(0.5, 3)
        *first, last = paged(view(*shown(50)), 20_000)
        for page in first:
            cluster.view(1.0, page)
        assert not cluster.informed(1.0)
        cluster.view(1.0, last)
        assert cluster.informed(1.0)

    def test_is_not_sure_where_a_page_was_lost(self):
        cluster = RouterCluster(0.5, 3)
        pages = paged(view(*shown(50)), 20_000)
        for page in pages[:1] + pages[2:]:
            cluster.view(1.0, page)
        assert not cluster.informed(1.0)


class TestApi:
    def test_knows_everybody_and_who_left(self):
        cluster = ApiCluster(1.5)
        for page in paged(view(*shown(51)), 20_000):
            cluster.update(1.0, page)
        assert cluster.ready_instances() == 51, "also what came before it knew of this telemetry"
        for page in paged(view(*shown(50), version=100), 20_000):
            cluster.update(2.0, page)
        assert cluster.ready_instances() == 50

    def test_another_telemetry_counts_once_its_last_page_came(self):
        cluster = ApiCluster(1.5)
        cluster.update(1.0, ClusterView(telemetry="t0", epoch="old", version=900, at_ms=0, instances=(shown(60)[59],)))
        *first, last = paged(view(*shown(50)), 20_000)
        for page in first:
            cluster.update(1.0, page)
        assert cluster.ready_instances() == 1
        cluster.update(1.0, last)
        assert cluster.ready_instances() == 50
