"""The sim engine's prefix cache against a list of what was put in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_gpu.engine.sim.prefix import ID_BYTES, PageCode, PrefixCache
from talaria_gpu.engine.sim.tokens import pack_ids

PAGE = 4

ids = st.lists(st.integers(0, 1), max_size=30)
"""Two ids only: nearly every sequence shares something with another."""


def pack(sequence: list[int]) -> bytes:
    return PageCode(PAGE).of(pack_ids(sequence))


def longest(inserted: list[tuple[str, list[int]]], salt: str, wanted: list[int]) -> int:
    best = 0
    for other_salt, sequence in inserted:
        if other_salt == salt:
            whole = len(sequence) // PAGE * PAGE
            common = next((i for i, (a, b) in enumerate(zip(sequence, wanted, strict=False)) if a != b), None)
            common = min(len(sequence), len(wanted)) if common is None else common
            best = max(best, min(whole, common) // PAGE * PAGE)
    return best


@given(operations=st.lists(st.tuples(st.sampled_from(["x", "y"]), ids), max_size=40))
@settings(max_examples=80, deadline=None)
def test_a_match_is_the_longest_shared_run_of_whole_pages(operations: list[tuple[str, list[int]]]) -> None:
    cache = PrefixCache(PageCode(PAGE))
    inserted: list[tuple[str, list[int]]] = []
    pages: set[tuple[str, tuple[int, ...]]] = set()
    for now, (salt, sequence) in enumerate(operations):
        packed = pack(sequence)
        _, found = cache.match(salt, packed, now)
        assert found == longest(inserted, salt, sequence)
        _, new = cache.insert(salt, packed, now)
        assert new == len(sequence) // PAGE * PAGE - found
        inserted.append((salt, sequence))
        pages |= {(salt, tuple(sequence[: end + PAGE])) for end in range(0, len(sequence) // PAGE * PAGE, PAGE)}
        assert cache.tokens == len(pages) * PAGE
        assert cache.check() == ""


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_eviction_spares_what_is_locked_and_counts_what_it_frees(data: st.DataObject) -> None:
    cache = PrefixCache(PageCode(PAGE))
    locked = []
    for now in range(data.draw(st.integers(1, 25))):
        sequence = pack(data.draw(ids))
        node, _ = cache.insert("", sequence, now)
        if data.draw(st.booleans()):
            cache.lock(node)
            locked.append((sequence, node))
        if data.draw(st.booleans()):
            want, before, free = data.draw(st.integers(0, 60)), cache.tokens, cache.tokens - cache.locked_tokens
            freed = cache.evict(want)
            assert cache.tokens == before - freed
            assert freed >= min(want, free)
            assert cache.locked_tokens == before - free
        for kept, _ in locked:
            assert cache.match("", kept, now)[1] == len(kept) // ID_BYTES // PAGE * PAGE
        assert cache.check() == ""
    for _, node in locked:
        cache.unlock(node)
    assert cache.locked_tokens == 0
    cache.evict(1 << 30)
    assert (cache.tokens, cache.check()) == (0, "")


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(PageCode(PAGE))
    a, b = [1] * 8, [2] * 8
    cache.insert("", pack(a), 1.0)
    cache.insert("", pack(b), 2.0)
    cache.match("", pack(a), 3.0)
    assert cache.evict(1) == 8
    assert cache.match("", pack(a), 4.0)[1] == 8
    assert cache.match("", pack(b), 4.0)[1] == 0


@pytest.mark.parametrize("page", [4, 16, 64])
def test_codes_stand_for_pages(page: int) -> None:
    """Small pages themselves, larger ones 8 bytes each; one differing token makes another code."""
    code = PageCode(page)
    one, other = list(range(3 * page + 2)), list(range(3 * page + 2))
    other[2 * page] += 1
    a, b = code.of(pack_ids(one)), code.of(pack_ids(other))
    assert len(a) == 3 * code.size
    assert code.size == (16 if page == 4 else 8)
    assert a[: 2 * code.size] == b[: 2 * code.size]
    assert a[2 * code.size :] != b[2 * code.size :]
    cache = PrefixCache(code)
    cache.insert("", a, 1.0)
    assert cache.match("", b, 2.0)[1] == cache.length("", b) == 2 * page
    assert cache.check() == ""
