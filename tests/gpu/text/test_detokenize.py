"""Deltas never break a character, and add up to the decoding of all ids."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria_gpu.text import ByteTokenizer, WindowDetokenizer

BYTES = ByteTokenizer()


def cut(items, sizes):
    """`items` in pieces of the given sizes, the rest at the end."""
    out, at = [], 0
    for size in sizes:
        out.append(items[at : at + size])
        at += size
    return [*out, items[at:]]


def stream(detokenizer, pieces):
    return [detokenizer.feed(piece) for piece in pieces] + [detokenizer.flush()]


sizes = st.lists(st.integers(1, 5), max_size=40)


@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 5), max_size=60), sizes=sizes)
def test_byte_ids_of_any_kind_add_up(ids, sizes):
    assert "".join(stream(BYTES.detokenizer(), cut(ids, sizes))) == BYTES.decode(ids)


@given(text=st.text(max_size=60), sizes=sizes)
def test_bytes_never_give_half_a_character(text, sizes):
    deltas = stream(BYTES.detokenizer(), cut(BYTES.encode(text), sizes))
    assert "".join(deltas) == BYTES.decode(BYTES.encode(text))
    assert all("\ufffd" not in d or "\ufffd" in text for d in deltas)


def test_a_character_comes_when_it_is_whole():
    detokenizer = BYTES.detokenizer()
    assert [detokenizer.feed([i]) for i in BYTES.encode("a🦜")] == ["a", "", "", "", "🦜"]
    assert detokenizer.flush() == ""


def test_a_broken_tail_comes_at_the_end():
    detokenizer = BYTES.detokenizer()
    assert detokenizer.feed(BYTES.encode("ok 🦜")[:-1]) == "ok "
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.engine
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ids_of_smollm2_add_up(smollm2, data):
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    assert "".join(stream(smollm2.detokenizer(), cut(ids, data.draw(sizes)))) == smollm2.decode(ids)


@pytest.mark.engine
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\x00▁"), max_size=40),
    sizes=sizes,
)
def test_text_through_a_sentencepiece_vocabulary(llama, text, sizes):
    ids = llama.encode(text)
    detokenizer = llama.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    deltas = stream(detokenizer, cut(ids, sizes))
    assert "".join(deltas) == llama.decode(ids)
    assert all("\ufffd" not in d or "\ufffd" in text for d in deltas)


@pytest.mark.engine
def test_a_vocabulary_of_broken_bytes_does_not_stall_the_window(llama):
    broken = llama.encode("é")[2]  # the first of two byte tokens, again and again
    detokenizer = llama.detokenizer()
    deltas = [detokenizer.feed([broken]) for _ in range(200)]
    assert sum(map(len, deltas)) > 100
    assert len(detokenizer._ids) < 100
