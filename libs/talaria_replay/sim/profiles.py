"""Hardware and models as files that a person can write, with the source of each number beside it.

A profile is TOML: `hardware/NAME.toml` describes one GPU group (an instance's device), `models/NAME.toml` one model.
The shipped ones are in `talaria_replay/profiles`; a path to a file of one's own does as well. A model's file may hold
several kinds of timing; `CALIBRATIONS` says what each is worth.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from talaria_replay.ranges import Amount, Count, Positive, Share, made

Whole = Annotated[int, msgspec.Meta(ge=0)]
CalibrationName = Literal["paper", "aic", "measured", "roofline"]
CALIBRATIONS: dict[str, str] = {
    "paper": "component figures that the paper itself gives (recompute TTFT of two prefix lengths); decode from aic",
    "aic": "operator tables measured by NVIDIA, composed by aiconfigurator-core 0.12.0: estimates, not measurements",
    "measured": "times measured on the hardware that is simulated, as the model's file says how",
    "roofline": "floating-point and bandwidth limits at stated efficiencies: an estimate for models without tables",
}


class ProfileError(ValueError):
    """A profile is wrong or missing; the message names file and key."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Hardware(_Table, frozen=True):
    """One GPU group. GB = 1e9 bytes, GiB = 2^30."""

    name: str
    about: str
    gpus: Count
    hbm_gib: Positive
    """Per GPU."""
    usable: Share
    """Share of HBM for weights and KV."""
    h2d_gb_s: Positive
    """Per GPU, with all of the group loading at once."""
    d2d_gb_s: Positive
    """Per GPU: a copy within its HBM, bytes moved per second."""
    host_gib: Positive
    """Host memory of the group, for the weights of all its models and for KV."""
    phase1_ms: Amount
    """Switch phases (appendix D), without waits for copies, and without weights and KV moved."""
    phase2_ms: Amount
    phase3_ms: Amount
    phase4_ms: Amount
    phase5_ms: Amount
    bf16_tflops: Amount = 0.0
    """Per GPU, dense; for roofline."""
    hbm_tb_s: Amount = 0.0
    """Per GPU; for roofline."""
    kv_gb_s: Amount = 0.0
    """Per GPU: a link of its own for KV; 0: it shares the other."""
    disk_gb_s: Amount = 0.0
    """Into host memory, of the group: how fast a model that is opened is read; 0: at once."""
    staging_chunk_mib: Positive = 4.0
    """A staging chunk on one GPU, as in `[[instances]]`."""


_TOKENS, _MORE, _STEP = (re.compile(p) for p in (r"[1-9]\d*", r"[1-9]\d*\+\d+", r"b[1-9]\d*@\d+"))


def _keys(name: str, points: Mapping[str, float], form: re.Pattern[str], expected: str) -> None:
    for key in points:
        if not form.fullmatch(key):
            raise ProfileError(f"{name}.{key}: expected a key {expected}, as whole numbers")


class Points(_Table, frozen=True):
    """Measured or composed times, ms: the simulator fits its curves to them (`fit`)."""

    source: str
    prefill_ms: dict[str, Positive] = {}
    """Tokens of one prompt, nothing cached → ms."""
    incr_prefill_ms: dict[str, Positive] = {}
    """"new+cached" tokens → ms."""
    decode_step_ms: dict[str, Positive] = {}
    """"bBATCH@CONTEXT" → ms of one iteration; CONTEXT may be 0."""

    def __post_init__(self) -> None:
        _keys("prefill_ms", self.prefill_ms, _TOKENS, "TOKENS")
        _keys("incr_prefill_ms", self.incr_prefill_ms, _MORE, "NEW+CACHED")
        _keys("decode_step_ms", self.decode_step_ms, _STEP, "bBATCH@CONTEXT")


class Roofline(_Table, frozen=True):
    """What a roofline estimate needs."""

    source: str
    active_params: Positive
    """Parameters used for one token."""
    efficiency: Share
    """Share of peak FLOPs in prefill."""
    bandwidth_efficiency: Share
    """Share of peak bandwidth in decode."""
    step_overhead_ms: Amount
    """Launches and communication of one step."""
    attention_layers: Whole = 0
    """Layers in which a token attends to all before it; 0, as of a model of recurrent layers only, where none does."""
    query_width: Whole = 0
    """Query heads x their size: each pair of tokens costs 4 x this FLOPs in such a layer (scores, and values)."""


class Model(_Table, frozen=True):
    """One model."""

    name: str
    about: str
    weight_gb: Positive
    kv_bytes_per_token: Count
    """Of one copy of its KV."""
    kv_heads: Count
    """With more GPUs than heads each head's KV is kept more than once; 1 for a latent (MLA)."""
    context_tokens: Count
    max_running: Count
    prefill_tokens: Count
    """A prefill batch takes no more calls once it has so many tokens."""
    kv_segments: Count = 1
    """KV tensors on each GPU: K and V of each attention layer, or its latent."""
    state_mb_per_sequence: Amount = 0.0
    """Recurrent state, on top of the KV."""
    kv_tokens: Count | None = None
    """KV capacity where it is configured; None: what the buffer leaves."""
    weight_gb_on: dict[str, Positive] = {}
    """By hardware: where its weights are others, for want of a number format."""
    aic: dict[str, Points] = {}
    """By hardware."""
    measured: dict[str, Points] = {}
    """The same."""
    paper: Points | None = None
    roofline: Roofline | None = None


T = TypeVar("T", Hardware, Model)


def _text(kind: str, name: str) -> tuple[str, str]:
    """(where, what it says) of a profile. A user's file may change while we run, so it is read each time."""
    path = Path(name)
    if path.suffix != ".toml":
        return _shipped(kind, name)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except OSError as e:
        raise ProfileError(f"{path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ProfileError(f"{path}: expected UTF-8 ({e})") from e


@cache
def _shipped(kind: str, name: str) -> tuple[str, str]:
    file = resources.files("talaria_replay").joinpath("profiles", kind, f"{name}.toml")
    if not file.is_file():
        raise ProfileError(f"no {kind} profile {name!r}: there are {', '.join(names(kind))}, or give a .toml file")
    return f"{kind}/{name}.toml", file.read_text(encoding="utf-8")


def _parsed(cls: type[T], where: str, text: str) -> T:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ProfileError(f"{where}: {e}") from e
    return made(cls, values, ProfileError, where)


def names(kind: str) -> list[str]:
    """The shipped profiles of a kind."""
    folder = resources.files("talaria_replay").joinpath("profiles", kind)
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def hardware(name: str) -> Hardware:
    """A shipped one by name, or a file. Raises ProfileError."""
    return _hardware(*_text("hardware", name))


@cache
def _hardware(where: str, text: str) -> Hardware:
    return _parsed(Hardware, where, text)


def changed(hw: Hardware, values: Mapping[str, float]) -> Hardware:
    """`hw` with other values. Raises ProfileError on one that it does not have, or that cannot be."""
    unknown = sorted(name for name in values if not isinstance(getattr(hw, name, None), int | float))
    if unknown:
        raise ProfileError(f"hardware {hw.name}: there is no value {unknown[0]!r} to change")
    return made(Hardware, msgspec.to_builtins(hw) | dict(values), ProfileError, f"hardware {hw.name}") if values else hw


def model(name: str) -> Model:
    """A shipped one by name, or a file; NAME:WORD is NAME under another name. Raises ProfileError."""
    name, _, alias = name.partition(":")
    found = _model(*_text("models", name))
    return msgspec.structs.replace(found, name=f"{found.name}:{alias}") if alias else found


@cache
def _model(where: str, text: str) -> Model:
    return _parsed(Model, where, text)


def fit(rows: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
    """See `_fit`; each set of points is fitted once."""
    return _fit(tuple((tuple(features), y) for features, y in rows))


@cache
def _fit(rows: tuple[tuple[tuple[float, ...], float], ...]) -> tuple[float, ...]:
    """Non-negative weights w that make sum(w·x) come close to y, by relative error: coordinate descent, deterministic.

    Args:
        rows: (features, y > 0) of each point.
    """
    scaled = [[x / y for x in features] for features, y in rows]
    width = len(scaled[0])
    size = [max([row[j] for row in scaled] + [1e-300]) for j in range(width)]
    table = [[row[j] / size[j] for j in range(width)] for row in scaled]
    w = [0.0] * width
    # Normal equations, solved coordinate by coordinate.
    a = [[sum(row[j] * row[k] for row in table) for k in range(width)] for j in range(width)]
    b = [sum(row[j] for row in table) for j in range(width)]
    for _ in range(3000):
        for j in range(width):
            if a[j][j]:  # else no point has it, and its weight stays 0
                w[j] = max(0.0, (b[j] - sum(a[j][k] * w[k] for k in range(width) if k != j)) / a[j][j])
    return tuple(v / s for v, s in zip(w, size, strict=True))


def parse_prefill(points: Points) -> list[tuple[int, int, float]]:
    """(cached, new, ms) of all prefill points."""
    out = [(0, int(n), ms) for n, ms in points.prefill_ms.items()]
    for key, ms in points.incr_prefill_ms.items():
        new, cached = key.split("+")
        out.append((int(cached), int(new), ms))
    return out


def parse_decode(points: Points) -> list[tuple[int, int, float]]:
    """(batch, tokens of all its contexts, ms) of all decode points."""
    out = []
    for key, ms in points.decode_step_ms.items():
        batch, context = key.removeprefix("b").split("@")
        out.append((int(batch), int(batch) * int(context), ms))
    return out


def describe(kind: str) -> list[dict[str, Any]]:
    """Name and about of the shipped profiles."""
    load = hardware if kind == "hardware" else model
    return [{"name": n, "about": load(n).about} for n in names(kind)]
