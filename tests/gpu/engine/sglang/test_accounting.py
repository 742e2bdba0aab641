"""Prompt tokens are counted once: from the cache or computed; what a retract repeats is counted apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria_gpu.engine.sglang.accounting import PromptAccount


def test_a_plain_call():
    account = PromptAccount(40)
    assert account.extend(32, 8) == (8, 0)
    assert (account.cached, account.prefilled, account.recomputed) == (32, 8, 0)


def test_chunks_and_a_retract_after_output():
    account = PromptAccount(100)
    account.extend(0, 64)
    account.extend(64, 36)
    assert account.extend(0, 64) == (0, 64)
    assert account.extend(64, 46) == (0, 46)  # ten tokens of output with it
    assert (account.cached, account.prefilled, account.recomputed) == (0, 100, 110)


def test_a_retract_half_way_and_a_longer_prefix_found_then():
    account = PromptAccount(100)
    account.extend(0, 48)
    assert account.extend(80, 20) == (20, 0)
    assert (account.cached, account.prefilled, account.recomputed) == (32, 68, 0)


@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 220), st.integers(1, 100)), max_size=8))
def test_every_prompt_token_counts_once_and_every_computed_token_once(prompt, extents):
    """Whatever prefills follow: no token is counted twice, and none that was computed is lost."""
    account = PromptAccount(prompt)
    computed = 0
    for start, length in extents:
        fresh, again = account.extend(start, length)
        assert min(fresh, again) >= 0
        computed += length
        assert account.cached + account.prefilled <= prompt
    assert account.prefilled + account.recomputed == computed
    account.extend(account.cached + account.prefilled, prompt + 1)
    assert account.cached + account.prefilled == prompt
