"""Prefill behind a cached prefix on a CPU computes what SGLang's fallback computes, at less cost."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ours(make_engine):
    make_engine("tiny-qwen3-random", kv_tokens=64)
    from talaria_gpu.engine.sglang import cpu_attention

    return cpu_attention


def operands(lengths, heads=4, kv_heads=2, size=16, value_size=16):
    """lengths: (prefix, new) of each request."""
    import torch

    torch.manual_seed(0)
    total, new = sum(p + n for p, n in lengths), sum(n for _, n in lengths)
    req_to_token = torch.zeros((len(lengths), 600), dtype=torch.int32)
    rows, at = torch.randperm(total), 0
    for i, (p, n) in enumerate(lengths):
        req_to_token[i, : p + n] = rows[at : at + p + n]
        at += p + n
    return {
        "query": torch.randn(new, heads, size),
        "output": torch.zeros(new, heads, value_size),
        "k_cache": torch.randn(total, kv_heads, size),
        "v_cache": torch.randn(total, kv_heads, size)[..., :value_size],
        "req_to_token": req_to_token,
        "req_pool_indices": torch.arange(len(lengths)),
        "seq_lens": torch.tensor([p + n for p, n in lengths]),
        "extend_prefix_lens": torch.tensor([p for p, _ in lengths]),
        "extend_seq_lens": torch.tensor([n for _, n in lengths]),
    }


@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1, "value_size": 12}], ids=["gqa", "latent"])
@pytest.mark.parametrize("lengths", [[(0, 7)], [(5, 7)], [(9, 1)], [(0, 3), (16, 5), (40, 1), (8, 8)]])
def test_the_same_as_sglangs_own(ours, lengths, shape):
    import torch

    given = operands(lengths, **shape)
    expected = ours._original(None, **given | {"output": given["output"].clone()}, enable_gqa=True, causal=True)
    found = ours._extend(None, **given, enable_gqa=True, causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_know_is_sglangs(ours):
    import torch

    given = operands([(5, 7)])
    expected = ours._original(None, **given | {"output": given["output"].clone()}, enable_gqa=True, causal=False)
    assert torch.equal(ours._extend(None, **given, enable_gqa=True, causal=False), expected)


def test_one_token_behind_a_long_prefix_is_cheap(ours):
    given = operands([(599, 1)], heads=16, kv_heads=16, size=64, value_size=64)

    def best(run):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run(None, **given, causal=True)
            times.append(time.perf_counter() - began)
        return min(times)

    assert best(ours._extend) < best(ours._original)
