"""Names of blocks: stable across processes, different for whatever must not be shared."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from talaria_gpu.hkvr.agreement import agreed_blocks
from talaria_gpu.hkvr.keys import BlockKeys, block_keys, identity_of

IDENTITY = identity_of({"weights": "a", "dtype": "float32"})


def test_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from talaria_gpu.hkvr.keys import *;"
        "print(block_keys(identity_of({'weights': 'a', 'dtype': 'float32'}), 't', list(range(40)), 16)[-1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {block_keys(IDENTITY, "t", list(range(40)), 16)[-1].hex()}


def test_another_identity_salt_or_earlier_token_is_another_block():
    ids = list(range(64))
    keys = block_keys(IDENTITY, "t", ids, 16)
    assert len(set(keys)) == len(keys) == 4
    others = [
        block_keys(identity_of({"weights": "b", "dtype": "float32"}), "t", ids, 16),
        block_keys(IDENTITY, "u", ids, 16),
        block_keys(IDENTITY, "t", [9, *ids[1:]], 16),
    ]
    for other in others:
        assert not set(keys) & set(other)
    assert identity_of({"a": "bc"}) != identity_of({"ab": "c"})


@given(st.lists(st.integers(0, 1 << 31), max_size=80), st.lists(st.integers(0, 80), max_size=5))
def test_growing_or_at_once_gives_the_same(ids, cuts):
    grown = BlockKeys(IDENTITY, "", 8)
    whole = block_keys(IDENTITY, "", ids, 8)
    for wanted in cuts:
        cut = min(wanted, len(ids))
        assert grown.upto(ids, cut) == whole[: cut // 8]


def test_ranks_agree_on_the_longest_common_run():
    a, b, c = (block_keys(IDENTITY, "", ids, 4) for ids in ([*range(12)], [*range(8)], [*range(8), 0, 0, 0, 0]))
    assert agreed_blocks([a, a]) == 3
    assert agreed_blocks([a, b]) == 2
    assert agreed_blocks([a, a, c]) == 2
    assert agreed_blocks([a, []]) == 0
    assert agreed_blocks([]) == 0
