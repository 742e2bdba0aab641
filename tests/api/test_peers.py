from __future__ import annotations

from talaria_api.peers import KEPT_EPOCHS, Peers


def peers() -> Peers:
    return Peers(silence_s=2.0, outage_s=10.0)


def test_late_messages_of_an_earlier_life_are_ignored() -> None:
    p = peers()
    assert p.hear(1.0, "i", "a")
    assert p.hear(2.0, "i", "b")
    assert not p.hear(3.0, "i", "a")
    assert p.hear(3.0, "i", "b")
    assert p.lost(3.0, "i", "a", since=1.0) == "restarted"
    assert p.lost(3.0, "i", "b", since=2.0) is None


def test_message_of_an_earlier_life_is_no_sign_of_life() -> None:
    p = peers()
    p.hear(1.0, "i", "a")
    p.hear(2.0, "i", "b")
    p.hear(4.5, "i", "a")
    assert p.lost(4.5, "i", "b", since=2.0) == "silent"


def test_silence_counts_from_the_acceptance_at_the_earliest() -> None:
    p = peers()
    p.hear(1.0, "i", "a")
    assert p.lost(100.0, "i", "a", since=99.0) is None
    assert p.lost(102.0, "i", "a", since=99.0) == "silent"
    assert p.lost(102.0, "never-heard", "a", since=101.0) is None


def test_quiet_for() -> None:
    p = peers()
    assert p.quiet_for(5.0, "i") == float("inf")
    p.hear(1.0, "i", "a")
    assert p.quiet_for(5.0, "i") == 4.0


def test_memory_of_lives_is_bounded() -> None:
    p = peers()
    for n in range(KEPT_EPOCHS * 3):
        assert p.hear(float(n), "i", f"e{n}")
    assert not p.hear(100.0, "i", f"e{KEPT_EPOCHS * 3 - 2}")
