from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common import ids
from talaria_common.bus.names import check_key, check_subject

words = st.lists(st.text(max_size=20), min_size=1, max_size=4)


def test_request_ids_have_one_length_and_differ():
    made = {ids.new_rid() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(r) for r in made} == {ids.RID_LENGTH}
    assert len(ids.new_epoch()) == 12
    assert ids.new_epoch() != ids.new_epoch()


@given(words)
def test_a_hash_is_a_key_and_a_subject_token_whatever_was_hashed(parts: list[str]):
    hashed = ids.hash_id(*parts)
    assert check_key(hashed) == check_subject(hashed) == hashed
    assert len(hashed) == 32
    assert ids.hash_id(*parts) == hashed


@given(words, words)
def test_different_parts_have_different_hashes(one: list[str], other: list[str]):
    assert (ids.hash_id(*one) == ids.hash_id(*other)) == (one == other)


def test_hashes_are_stable_across_processes_and_versions():
    """The session table outlives a release: this value may never change."""
    assert ids.hash_id("tenant", "session", "model") == "94939c4ebc1e1ade97ffa400d08ee74b"
    assert ids.partition_of("tenant", "session", "model") == 78


def test_parts_are_not_just_joined():
    assert ids.hash_id("a", "bc") != ids.hash_id("ab", "c")


def test_lone_surrogates_from_json_can_be_hashed():
    assert len(ids.hash_id("\ud800")) == 32


def test_partitions_are_even():
    counts = Counter(ids.partition_of("t", str(i), "m") for i in range(25_600))
    assert set(counts) <= set(range(ids.PARTITIONS))
    assert len(counts) == ids.PARTITIONS
    assert max(counts.values()) < 160


@pytest.mark.parametrize("name", ["a", "A1", "cold-0", "a_b", "x" * 64])
def test_names_that_are_taken(name: str):
    assert ids.check_name(name) == name
    assert check_subject(f"a.{name}.b")


@pytest.mark.parametrize("name", ["", "-a", "a-", "a.b", "a b", "*", ">", "a\n", "ä", "x" * 65, "_a"])
def test_names_that_are_refused(name: str):
    with pytest.raises(ValueError, match="instance"):
        ids.check_name(name, "instance")


@pytest.mark.parametrize("name", ["m", "org/Model-1.5B:q4@main+x", "x" * 128])
def test_model_names_that_are_taken(name: str):
    assert ids.check_model_name(name) == name


@pytest.mark.parametrize("name", ["", "/m", "m/", "a b", "ä", "x" * 129, "m\n"])
def test_model_names_that_are_refused(name: str):
    with pytest.raises(ValueError, match="model name"):
        ids.check_model_name(name)
