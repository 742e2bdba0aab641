"""Seen placements are exact whatever the order, and gaps end."""

from hypothesis import given
from hypothesis import strategies as st

from talaria_instance.placements import GAP_S, MAX_GAPS, ROUTER_IDLE_S, Placements


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_any_order_is_counted_exactly(seqs):
    placements = Placements()
    for seq in seqs:
        placements.saw(0.0, "r", "e", seq)
        seen = placements.seen(0.0)["r/e"]
        assert set(range(1, seen.upto + 1)) - set(seen.missing) <= set(seqs)
    assert set(range(1, seen.upto + 1)) - set(seen.missing) == set(seqs)


def test_gaps_expire_each_in_its_time():
    placements = Placements()
    placements.saw(0.0, "r", "e", 2)
    placements.saw(GAP_S - 1, "r", "e", 4)
    assert placements.seen(GAP_S)["r/e"].missing == (1, 3)
    assert placements.seen(GAP_S + 1)["r/e"].missing == (3,)
    assert placements.seen(2 * GAP_S)["r/e"].missing == ()


def test_bounded():
    placements = Placements()
    placements.saw(0.0, "r", "e", 1_000_000)
    assert len(placements.seen(0.0)["r/e"].missing) == MAX_GAPS
    placements.saw(0.0, "r2", "e", 1)
    placements.saw(ROUTER_IDLE_S, "r2", "e", 2)
    assert list(placements.seen(ROUTER_IDLE_S + 1)) == ["r2/e"]
