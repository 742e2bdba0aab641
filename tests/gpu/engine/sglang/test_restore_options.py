"""From an instance's settings to how it keeps KV on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_common.settings import InstanceSettings, load
from talaria_gpu.engine.sglang.factory import host_kv_options


def instance(**changes) -> InstanceSettings:
    return InstanceSettings(id="i-0", models=("a", "b"), **changes)


def test_off_unless_asked_for():
    assert host_kv_options(instance()) is None


@pytest.mark.parametrize("scheduler", ["no-hkvr", "round-only"])
def test_off_where_the_comparison_leaves_it_out(scheduler):
    assert host_kv_options(instance(host_kv_mib=64, scheduler=scheduler)) is None


def test_sizes_and_rates():
    options = host_kv_options(
        instance(host_kv_mib=64, host_kv_verify=False, emulate_kv_h2d_gbps=2.0, emulate_kv_d2h_gbps=1.0)
    )
    assert (options.capacity_bytes, options.verify, options.suspends) == (64 << 20, False, True)
    assert (options.h2d_gbps, options.d2h_gbps) == (2.0, 1.0)


def test_the_default_configuration_keeps_kv_on_the_host():
    for each in load(Path("talaria.toml"), {}).instances:
        assert host_kv_options(each) is not None
