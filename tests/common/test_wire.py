"""Schemas of the bus: what is written is read, and versions mix."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_common import wire
from talaria_common.wire import WireError, decode, encode
from talaria_common.wire.base import Wire

STRUCTS = sorted(
    (s for s in vars(wire).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)), key=lambda s: s.__name__
)
small = st.integers(0, 2**53)


def values(kind: Any) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911 - one case per type
    """Strategies for a field's type, as msgspec sees it."""
    info = msgspec.inspect
    match kind:
        case info.StrType(pattern=pattern):
            return st.text(max_size=8) if pattern is None else st.from_regex(pattern)
        case info.IntType():
            return small
        case info.FloatType():
            return st.floats(0, 1e9, allow_nan=False)
        case info.BoolType():
            return st.booleans()
        case info.NoneType():
            return st.none()
        case info.LiteralType(values=choices):
            return st.sampled_from(choices)
        case info.AnyType():
            return st.one_of(st.none(), small, st.text(max_size=8), st.booleans())
        case info.UnionType(types=kinds):
            return st.one_of([values(k) for k in kinds])
        case info.ListType(item_type=item):
            return st.lists(values(item), max_size=2)
        case info.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case info.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case info.StructType(cls=cls):
            return structs(cls)
    raise AssertionError(f"no strategy for {kind!r}")


@cache
def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    fields = msgspec.inspect.type_info(cls).fields

    def strategy(field: Any) -> st.SearchStrategy[Any]:
        recursive = (
            isinstance(field.type, msgspec.inspect.ListType) and getattr(field.type.item_type, "cls", None) is cls
        )
        return st.just([]) if recursive else values(field.type)

    return st.fixed_dictionaries(
        {f.name: strategy(f) for f in fields if f.required},
        optional={f.name: strategy(f) for f in fields if not f.required},
    ).map(lambda given_: cls(**given_))


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
@settings(max_examples=25)  # times three tests, times every struct
@given(data=st.data())
def test_what_is_written_is_read(cls: type[msgspec.Struct], data: st.DataObject):
    message = data.draw(structs(cls))
    assert decode(encode(message), cls) == message


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
@settings(max_examples=25)  # times three tests, times every struct
@given(data=st.data())
def test_unknown_fields_of_a_newer_part_are_ignored(cls: type[msgspec.Struct], data: st.DataObject):
    message = data.draw(structs(cls))
    newer = json.loads(encode(message)) | {"of_tomorrow": {"deep": [1, None]}, "z": 1}
    assert decode(json.dumps(newer), cls) == message


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
@settings(max_examples=25)  # times three tests, times every struct
@given(data=st.data())
def test_what_an_older_part_leaves_out_has_its_default(cls: type[msgspec.Struct], data: st.DataObject):
    required = {f.name for f in msgspec.inspect.type_info(cls).fields if f.required}
    message = data.draw(structs(cls))
    older = {k: v for k, v in json.loads(encode(message)).items() if k in required}
    read = decode(json.dumps(older), cls)
    for field in msgspec.structs.fields(cls):
        if not field.required:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            assert getattr(read, field.name) == default


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_structs_are_frozen_and_leave_defaults_out(cls: type[msgspec.Struct]):
    assert cls.__struct_config__.frozen
    assert cls.__struct_config__.omit_defaults
    assert not cls.__struct_config__.forbid_unknown_fields


# The fields of protocol v1 that have no default. A new field needs one: an older part will not send it.
REQUIRED = {
    "Cancel": "rid attempt",
    "CandidateCost": "iid req_ms kv_ms act_ms total_ms",
    "ClusterView": "telemetry epoch version at_ms",
    "Completion": "iid epoch rid attempt router seq partition tenant session model ok at_ms",
    "ControlReply": "ok iid epoch",
    "ControlRequest": "",
    "ErrorInfo": "code message",
    "Event": "kind source at_ms",
    "Fence": "partition owner_rev rid attempt",
    "ForwardHead": "placement endpoint api api_epoch tenant session model",
    "ForwardReply": "accepted",
    "Frame": "rid attempt seq kind",
    "InstanceView": "snapshot age_ms health",
    "ModelState": "name state",
    "Placement": "iid fence router seq accept_by_ms deadline_ms",
    "Presence": "iid epoch pool",
    "Queued": "waited_ms",
    "RouteReply": "",
    "RouteRequest": "rid tenant session model api prompt_bytes deadline_ms",
    "SeenPlacements": "",
    "SessionRecord": "tenant session model iid last_use_ms",
    "Snapshot": "iid epoch version at_ms pool status",
    "TokenBatch": "iid epoch",
    "TokenLogprob": "token logprob bytes",
    "Usage": "prompt_tokens completion_tokens",
    "Verdict": "reason error",
}


def test_v1_grows_by_defaulted_fields_only():
    assert {c.__name__: " ".join(f.name for f in msgspec.structs.fields(c) if f.required) for c in STRUCTS} == REQUIRED


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "Cancel"),
        (b"{", "Cancel"),
        (b"[]", "Cancel"),
        (b'{"rid": "r"}', "attempt"),
        (b'{"rid": 1, "attempt": 0}', "rid"),
        (b'{"rid": "r", "attempt": 0, "reason": "other"}', "reason"),
        (b'{"rid": "\xff", "attempt": 0}', "Cancel"),
    ],
)
def test_what_does_not_fit_names_the_field(data: bytes, says: str):
    with pytest.raises(WireError, match=says):
        decode(data, wire.Cancel)


def test_all_structs_share_their_base():
    assert all(issubclass(c, Wire) or c is wire.ErrorInfo for c in STRUCTS)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" + "0" * 30, "-1" + "0" * 30])
def test_numbers_that_arithmetic_overflows_on_are_refused(number: str):
    text = encode(wire.Snapshot(iid="i", epoch="e", version=1, at_ms=7777, pool="cold", status="ready")).decode()
    with pytest.raises(WireError, match="at_ms"):
        decode(text.replace("7777", number), wire.Snapshot)
    with pytest.raises(WireError, match="decode_step_ms"):
        decode(f'{{"name":"m","state":"host","decode_step_ms":{number}}}', wire.ModelState)


def test_nesting_without_end_is_refused():
    with pytest.raises(WireError):
        decode(b'{"rid":"r","attempt":0,"later":' + b"[" * 100_000 + b"]" * 100_000 + b"}", wire.Cancel)
