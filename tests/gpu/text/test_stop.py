"""Stop strings: the output ends before the first match, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_gpu.text import StopStrings


def run(stops, pieces):
    machine, out = StopStrings(stops), ""
    for piece in pieces:
        released = machine.feed(piece)
        out += released.text
        if released.matched is not None:
            return out, released.matched
    return out + machine.flush(), None


def naive(stops, text):
    """The shortest prefix that ends in a stop string, less the longest such string."""
    for end in range(len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_cutting_makes_no_difference(stops, pieces):
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_nothing_is_held_that_cannot_become_a_match(stops, pieces):
    machine, fed, out = StopStrings(stops), "", ""
    for piece in pieces:
        released = machine.feed(piece)
        if released.matched is not None:
            break
        fed, out = fed + piece, out + released.text
        held = fed[len(out) :]
        assert fed.startswith(out)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_examples():
    assert run(["\n\n"], ["one\n", "two\n", "\nthree"]) == ("one\ntwo", "\n\n")
    assert run(["</s>", "</step>"], ["x </st", "op>"]) == ("x </stop>", None)
    assert run([], ["as it is"]) == ("as it is", None)
    with pytest.raises(ValueError):
        StopStrings([""])
