"""What the keys of an instance make of its engine's memory."""

from __future__ import annotations

import pytest

from talaria_common.errors import EngineError
from talaria_common.settings import InstanceSettings, SettingsError, parse
from talaria_gpu.engine.sglang.factory import memory_options

MIB = 1 << 20


def instance(**keys) -> InstanceSettings:
    models = keys.pop("models", ["a", "b"])
    settings = {"models": {m: {"source": "tiny-mla"} for m in models}}
    return parse(settings | {"instances": [{"id": "i-0", "models": models, **keys}]}).instances[0]


def test_cold_instances_stage_where_there_is_a_link_and_others_have_nothing_to_stage():
    gpu = {"device": "cuda"}
    assert memory_options(instance(**gpu)).staging
    assert memory_options(instance(emulate_weight_h2d_gbps=1.0)).staging
    assert memory_options(instance(staging=True)).staging
    assert not memory_options(instance()).staging, "one memory: it would be copied twice"
    assert not memory_options(instance(models=["a"], pool="hot", **gpu)).staging
    assert not memory_options(instance(staging=False, **gpu)).staging
    assert not memory_options(instance(scheduler="h2d-only", **gpu)).staging


@pytest.mark.parametrize(("key", "every"), [("off", 0), ("always", 1), (5, 5)])
def test_the_canary_key(key, every):
    assert memory_options(instance(canary=key)).canary_every == every


def test_a_buffer_beyond_its_share_of_the_device_is_refused_with_the_arithmetic():
    options = memory_options(instance(mem_fraction_bump=0.5))
    options.check_share(40 << 30, 80 << 30)
    with pytest.raises(EngineError, match=r"41\.00 GiB is 51% of the device's 80\.00 GiB.*allows 50%"):
        options.check_share(41 << 30, 80 << 30)


def test_a_wrong_canary_is_refused():
    with pytest.raises(SettingsError, match="canary"):
        instance(canary=0)


def test_sizes_and_bandwidths():
    keys = {"emulate_weight_h2d_gbps": 2.5, "emulate_weight_d2d_gbps": 40, "host_weights_mib": 100}
    options = memory_options(instance(staging_chunk_mib=8, host_weights_dir="images", **keys))
    assert (options.chunk_bytes, options.host_weights_bytes, str(options.weights_dir)) == (8 * MIB, 100 * MIB, "images")
    assert (options.h2d_bytes_per_s, options.d2d_bytes_per_s) == (2.5e9, 40e9)
    on_gpu = memory_options(instance(device="cuda", **keys))
    assert (on_gpu.h2d_bytes_per_s, on_gpu.d2d_bytes_per_s) == (None, None), "emulated on CPUs only"
