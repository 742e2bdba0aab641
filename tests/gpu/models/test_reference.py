"""The tie rule of the token comparison, on a reference small enough to write down."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from talaria_gpu.models.reference import assert_greedy, first_difference


class Counting:
    """Says last + 1 (of 10); after 4, tokens 5 and 7 are as good as equal."""

    def logits(self, ids):
        rows = torch.zeros(len(ids), 10)
        for row, token in zip(rows, ids, strict=True):
            row[(token + 1) % 10] = 1.0
            if token == 4:
                row[7] = 1.0 - 5e-5
        return rows


def test_equal():
    assert assert_greedy(Counting(), [1], [2, 3, 4, 5]) == 0
    assert assert_greedy(Counting(), [1], []) == 0


def test_a_difference_is_named():
    found = first_difference(Counting(), [1], [2, 3, 9])
    assert (found.index, found.got, found.expected, found.tie) == (2, 9, 4, False)
    with pytest.raises(AssertionError, match="got=9"):
        assert_greedy(Counting(), [1], [2, 3, 9])


def test_either_of_a_tie_counts_and_is_counted():
    assert assert_greedy(Counting(), [2], [3, 4, 7, 8]) == 1
    with pytest.raises(AssertionError):  # a third one does not
        assert_greedy(Counting(), [2], [3, 4, 6])
    with pytest.raises(AssertionError):  # nor does a tie excuse what follows
        assert_greedy(Counting(), [2], [3, 4, 7, 9])


def test_after_a_tie_it_goes_on_from_the_references_token():
    asked = []

    def go_on(ids, n):
        asked.append((ids, n))
        return [6, 7][:n]

    assert assert_greedy(Counting(), [2], [3, 4, 7, 8, 9], go_on) == 1
    assert asked == [([2, 3, 4, 5], 2)]
    with pytest.raises(AssertionError):
        assert_greedy(Counting(), [2], [3, 4, 7, 8, 9], lambda _ids, _n: [6, 6])


def test_a_tie_at_the_end_asks_for_nothing_more():
    def never(ids, n):
        raise AssertionError

    assert assert_greedy(Counting(), [2], [3, 4, 7], never) == 1
