"""Each policy's signal on small cases: where they agree, and where each goes another way (5.3, Table 1)."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_router.policies import POLICIES
from tests.router.rig import Rig, model

OTHERS = [
    "least-pressure",
    "session-sticky",
    "round-robin",
    "model-residency",
    "prompt-prefix",
    "kv-object",
    "locality",
]


def returned(policy: str, *after: Any, **more: Any) -> str:
    """A session whose last call left 90 of 100 tokens on `a` comes back; `after` is how a, b, c stand by then."""
    rig = Rig(policy=policy, **more)
    rig.view(rig.snapshot("a"), full=True)
    rig.turn()
    rig.later(3)
    names = ("a", "b", "c")
    rig.view(*(rig.snapshot(i, (m,)) for i, m in zip(names, after, strict=False)), full=True)
    return rig.placed().iid


def test_all_the_names():
    assert sorted(POLICIES) == sorted([*OTHERS, "talaria"])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_instance_is_chosen_by_all(policy: str):
    assert returned(policy, model(running=3, queued=2)) == "a"


@pytest.mark.parametrize(
    ("policy", "goes_to"),
    [
        ("talaria", "b"),  # a: switch 500 + restore; b: 90 recomputed, active; c: switch 500, 90 recomputed
        ("model-residency", "b"),
        ("locality", "b"),
        ("prompt-prefix", "a"),
        ("kv-object", "a"),
        ("session-sticky", "a"),
        ("least-pressure", "c"),
    ],
)
def test_kv_on_a_that_must_switch_against_a_busier_one_that_need_not(policy: str, goes_to: str):
    a = model(state="host", restore_ms_per_token=0.1, running=1)
    b = model(running=2)
    c = model(state="host")
    assert returned(policy, a, b, c) == goes_to


@pytest.mark.parametrize(
    ("policy", "goes_to"),
    [
        ("talaria", "b"),  # 400 tokens wait at a, more than the prefix is worth
        ("kv-object", "b"),
        ("model-residency", "b"),
        ("least-pressure", "b"),
        ("prompt-prefix", "a"),
        ("session-sticky", "a"),
    ],
)
def test_kv_behind_a_queue(policy: str, goes_to: str):
    assert returned(policy, model(queued=4, queued_tokens=400), model()) == goes_to


@pytest.mark.parametrize(("kept", "goes_to"), [(50, "a"), (49, "b")])
def test_prompt_prefix_exploits_from_half_of_the_prompt_on(kept: int, goes_to: str):
    rig = Rig(policy="prompt-prefix")
    rig.view(rig.snapshot("a"), full=True)
    rig.turn(kv_tokens=kept)
    rig.view(rig.snapshot("a", (model(running=1),)), rig.snapshot("b"), full=True)
    assert rig.placed().iid == goes_to


def test_model_residency_waits_for_the_shortest_slot_among_the_switched_out():
    busy = (model(state="host"), model("other", running=4))
    idle = (model(state="host"), model("other"))
    rig = Rig(policy="model-residency")
    rig.view(rig.snapshot("a", busy), rig.snapshot("b", idle), full=True)
    assert rig.placed().iid == "b"


def test_locality_prefers_the_quicker_load_and_ignores_its_own_queue():
    rig = Rig(policy="locality")
    slow, quick = model(state="host", switch_ms=900.0), model(state="host", queued=5, queued_tokens=2000)
    rig.view(rig.snapshot("a", (slow,)), rig.snapshot("b", (quick,)), full=True)
    assert rig.placed().iid == "b"


@pytest.mark.parametrize("policy", OTHERS)
def test_only_talaria_reserves(policy: str):
    rig = Rig(policy=policy)
    rig.view(rig.snapshot("a"), full=True)
    rig.turn()
    assert rig.books.installed == 0


class TestAvoidableOpens:
    """Counted as the paper does: the chosen instance must open the model though another has it resident."""

    def count(self, policy: str, *models: Any) -> tuple[int, dict[str, int]]:
        rig = Rig(policy=policy)
        rig.view(*(rig.snapshot(i, (m,)) for i, m in zip("abc", models, strict=False)), full=True)
        rig.placed()
        told = rig.events("route")[-1].data.get("avoidable_open", False)
        assert told == bool(rig.state.counts.avoidable_opens)
        return rig.state.counts.avoidable_opens, dict(rig.state.counts.opens)

    def test_least_pressure_opens_what_talaria_does_not(self):
        pool = (model(running=1), model(state="host"))
        assert self.count("least-pressure", *pool) == (1, {"host": 1})
        assert self.count("talaria", *pool) == (0, {})

    def test_an_open_that_nobody_spares_is_not_avoidable(self):
        assert self.count("least-pressure", model(state="host"), model(state="cold")) == (0, {"host": 1})

    def test_one_who_holds_it_but_is_not_well_spares_nothing(self):
        rig = Rig(policy="least-pressure")
        rig.view(rig.snapshot("a", status="draining"), rig.snapshot("b", (model(state="host"),)), full=True)
        assert rig.placed().iid == "b"
        assert rig.state.counts.avoidable_opens == 0

    def test_a_lease_that_leads_to_a_switched_out_model_counts_as_well(self):
        rig = Rig()
        rig.view(rig.snapshot("a"), full=True)
        rig.turn()
        rig.view(rig.snapshot("a", (model(state="host"),)), rig.snapshot("b"), full=True)
        assert rig.placed().via == "lease"
        assert rig.state.counts.avoidable_opens == 1
        assert rig.events("route")[-1].data["avoidable_open"] is True
