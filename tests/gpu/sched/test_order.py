"""The order of slots: staging gets the time that slots leave it, and nobody is overtaken for it."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.sched.config import SlotConfig
from talaria_gpu.sched.messages import Arrived, Call, RunSwitch, Switched, Turn
from talaria_gpu.sched.order import for_staging, hidden_ms
from talaria_gpu.sched.slots import SlotScheduler
from tests.gpu.sched.toy import Job, Toy

costs = st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 2000)), min_size=1, max_size=5)


@given(costs)
def test_no_order_hides_more_than_a_twentieth_more(given_costs: list[tuple[float, float]]) -> None:
    names = [f"m{i}" for i in range(len(given_costs))]
    of = dict(zip(names, given_costs, strict=True))

    def hidden(order) -> float:
        return hidden_ms(order, lambda m: of[m][0], lambda m: of[m][1])

    chosen = for_staging(names, lambda m: of[m][0], lambda m: of[m][1])
    assert sorted(chosen) == names
    assert chosen[0] == names[0], "the rotation goes on from where it is"
    assert all(hidden(p) <= 1.05 * hidden(chosen) + 1e-6 for p in itertools.permutations(names))
    if chosen != names:
        assert hidden(chosen) > hidden(names)


def test_the_large_model_comes_after_the_long_slot() -> None:
    """b is large (2 s to stage), c's slots are long: a, c, b hides 500 + 2000 + 100, a, b, c only 100 + 500 + 500."""
    stage = {"a": 500.0, "b": 2000.0, "c": 500.0}
    slot = {"a": 100.0, "b": 600.0, "c": 2000.0}
    assert for_staging("abc", stage.get, slot.get) == ["a", "c", "b"]
    assert for_staging("abc", lambda _: 0.0, slot.get) == ["a", "b", "c"], "without staging the order stays"


def test_the_order_is_chosen_when_a_round_begins_and_kept_while_anybody_waits() -> None:
    core = SlotScheduler(("a", "b", "c"), SlotConfig(slot_ms=100.0), "a", 0.0)
    for model, ms in (("a", 500.0), ("b", 2000.0), ("c", 500.0)):
        core.estimates.switch(model, ms, loaded_bytes=1000, weight_bytes=1000)
    for model, ms in (("a", 100.0), ("b", 600.0), ("c", 2000.0)):
        core._state.book.closed(model, 0.0, ms)
    for rid, model in (("b1", "b"), ("c1", "c")):
        assert core.handle(0.0, Arrived(Call(rid, model, 0.0))) == []
    assert core.handle(0.0, Turn())[-1] == RunSwitch("c")
    core.handle(0.1, Switched("c", 100.0, loaded_bytes=1000, weight_bytes=1000))
    core._state.book.closed("a", 0.0, 90_000.0)
    assert core.upcoming == "b"


def test_other_orders_are_the_configured_one_and_that_of_getting_work() -> None:
    """c gets work before b does, and d when a has its slot again."""
    for how, turns in (("configured", "bcda"), ("arrival", "cbda")):
        core = SlotScheduler(("a", "b", "c", "d"), SlotConfig(slot_ms=100.0, order=how), "a", 0.0)
        for n, model in enumerate("acbd"):
            core.estimates.switch(model, 1000.0 * n, loaded_bytes=1000, weight_bytes=1000)
            core.handle(0.0, Arrived(Call(f"{model}1", model, 0.0)))
        core.handle(0.0, Turn())
        came = []
        for n, _ in enumerate(turns):
            came.append(core.upcoming)
            core.handle(0.1 * n, Switched(core.upcoming, 100.0, loaded_bytes=1000, weight_bytes=1000))
        assert "".join(came) == turns, how


@given(
    st.sampled_from(["staging", "configured", "arrival"]),
    st.permutations("abc"),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2000), st.integers(1, 60)), min_size=3, max_size=20),
)
@settings(max_examples=120, deadline=None)
def test_in_any_order_nobody_waits_while_another_has_two_slots(how, order, arrivals) -> None:
    """The toy checks it, as it does everything else, whatever is known of staging and slots."""
    jobs = [Job(f"r{i}", m, at, tokens=n) for i, (m, at, n) in enumerate(arrivals)]
    toy = Toy(("a", "b", "c"), SlotConfig(slot_ms=100.0, order=how), jobs, 30)
    for place, model in enumerate(order):
        toy.core.estimates.switch(model, 1000.0 * place, loaded_bytes=1000, weight_bytes=1000)
        toy.rules.knows_switch(model, 1000.0 * place)
        toy.core._state.book.closed(model, 0.0, 1000.0 * (place + 1))
    toy.work()
    assert set(toy.done.values()) == {"length"}
