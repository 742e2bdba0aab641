"""Which session a call belongs to: each agent's convention, their order, and what must not count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_api.sessions import MAX_ECHO_CHARS, PREFIX_BYTES, BodyHints, SessionRef, identify
from talaria_api.validate import parse_chat, parse_completion
from talaria_common.ids import hash_id

CLAUDE_JSON = json.dumps({"device_id": "d", "account_uuid": "a", "session_id": "c0ffee-1"})
CLAUDE_OLD = "user_abc123_account_0f0e-11_session_c0ffee-2"


def hints(
    metadata: dict[str, Any] | None = None, key: str | None = None, opening: Callable[[], tuple[str, ...]] | None = None
) -> BodyHints:
    return BodyHints(metadata, key, opening or (lambda: ("user", "hello")))


def who(headers: dict[str, str] | None = None, tenant: str = "t", **body: Any) -> SessionRef:
    raw = {k.lower().encode(): v.encode() for k, v in (headers or {}).items()}
    return identify(raw, hints(**body), tenant)


# first that is there: each row goes before all that follow
ORDER: list[tuple[dict[str, str], dict[str, Any], str, str]] = [
    ({"X-Talaria-Session-ID": "a"}, {}, "a", "header"),
    ({"X-Dynamo-Session-ID": "b"}, {}, "b", "dynamo"),
    ({"x-claude-code-agent-id": "c"}, {}, "c", "claude-code"),
    ({"x-claude-code-session-id": "d"}, {}, "d", "claude-code"),
    ({"thread-id": "e"}, {}, "e", "codex"),
    ({"x-session-id": "f"}, {}, "f", "x-session"),
    ({"x-session-affinity": "g"}, {}, "g", "x-session"),
    ({"x-litellm-session-id": "h"}, {}, "h", "litellm"),
    ({}, {"metadata": {"session_id": "i"}}, "i", "metadata"),
    ({}, {"metadata": {"user_id": CLAUDE_JSON}}, "c0ffee-1", "metadata"),
    ({}, {"key": "j"}, "j", "prompt-cache-key"),
]


@pytest.mark.parametrize(("headers", "body", "session", "source"), ORDER)
def test_each_convention(headers: dict[str, str], body: dict[str, Any], session: str, source: str) -> None:
    it = who(headers, **body)
    assert (it.id, it.source) == (session, source)


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_order(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for more_headers, more_body, _, _ in reversed(ORDER[first:]):
        headers |= more_headers
        metadata = body.get("metadata", {}) | more_body.get("metadata", {})
        body |= more_body | ({"metadata": metadata} if metadata else {})
    it = who(headers, **body)
    assert (it.id, it.source) == ORDER[first][2:]


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (CLAUDE_JSON, "c0ffee-1"),
        (CLAUDE_OLD, "c0ffee-2"),
        ("plain-id", "plain-id"),
        ("{not json", "{not json"),
        ("user_abc_session_", "user_abc_session_"),
    ],
)
def test_metadata_user_id(user_id: str, session: str) -> None:
    it = who(metadata={"user_id": user_id})
    assert (it.id, it.source) == (session, "metadata")


@pytest.mark.parametrize("user_id", ['{"account_uuid":"a"}', '{"session_id":""}', '{"session_id":7}', "", 5, None])
def test_metadata_user_id_that_names_a_person_only_is_no_session(user_id: Any) -> None:
    assert who(metadata={"user_id": user_id}).source == "prefix"


def test_user_and_safety_identifier_are_people() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "user": "u", "safety_identifier": "s"}
    request = parse_chat(json.dumps(body).encode())
    assert identify({}, request.hints, "t").source == "prefix"


@pytest.mark.parametrize("empty", ["", "   "])
def test_empty_headers_are_absent(empty: str) -> None:
    assert who({"X-Talaria-Session-ID": empty, "thread-id": "e"}).source == "codex"


def test_subagent_has_its_session_as_parent() -> None:
    it = who({"x-claude-code-agent-id": "agent", "x-claude-code-session-id": "main"})
    assert (it.id, it.parent) == ("agent", "main")


@pytest.mark.parametrize("family", ["X-Talaria", "X-Dynamo"])
def test_parent_and_final(family: str) -> None:
    it = who({f"{family}-Session-ID": "a", f"{family}-Parent-Session-ID": "p", f"{family}-Session-Final": "True"})
    assert (it.parent, it.final) == ("p", True)
    assert not who({f"{family}-Session-ID": "a", f"{family}-Session-Final": "false"}).final
    assert who({"thread-id": "e", f"{family}-Session-Final": "1"}).final


def test_session_1_is_not_session_12() -> None:
    assert who({"x-session-id": "session-1"}).key("t") != who({"x-session-id": "session-12"}).key("t")


def test_what_goes_on_the_bus_is_hashed_and_of_the_tenant() -> None:
    it = who({"x-session-id": "s"})
    assert it.key("t") == hash_id("t", "s")
    assert it.key("t") != it.key("u")
    assert it.parent_key("t") is None
    assert it._replace(parent="p").parent_key("t") == hash_id("t", "p")


# --- the prefix chain


def prefix_of(*messages: tuple[str, Any], tenant: str = "t", **extra: Any) -> str:
    body = {"model": "m", "messages": [{"role": r, "content": c} for r, c in messages]} | extra
    it = identify({}, parse_chat(json.dumps(body).encode()).hints, tenant)
    assert it.source == "prefix"
    return it.id


def test_prefix_stays_while_the_conversation_grows() -> None:
    beginning = [("system", "be brief"), ("user", "task 1")]
    first = prefix_of(*beginning)
    assert prefix_of(*beginning, ("assistant", "ok"), ("user", "go on")) == first
    assert prefix_of(*beginning, temperature=0.5) == first


def test_prefix_depends_on_the_first_user_message_the_system_message_and_the_tenant() -> None:
    beginning = [("system", "be brief"), ("user", "task 1")]
    others = [
        prefix_of(("system", "be brief"), ("user", "task 2")),
        prefix_of(("system", "be long"), ("user", "task 1")),
        prefix_of(("developer", "be brief"), ("user", "task 1")),
        prefix_of(("user", "task 1")),
        prefix_of(*beginning, tenant="u"),
    ]
    assert len({prefix_of(*beginning), *others}) == 6


def test_prefix_reads_parts_as_their_text() -> None:
    parts = [{"type": "text", "text": "task "}, {"type": "text", "text": "1"}]
    assert prefix_of(("user", parts)) == prefix_of(("user", "task 1"))


def test_prefix_cannot_be_named_by_a_client_of_another_tenant() -> None:
    mine = prefix_of(("user", "x"), tenant="t")
    named = SessionRef(mine, "header")
    assert named.key("u") != SessionRef(mine, "prefix").key("t")


def test_prefix_of_a_bare_prompt_is_its_first_kibibyte() -> None:
    def prefix(prompt: str) -> str:
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return identify({}, parse_completion(body).hints, "t").id

    base = "ä" * (PREFIX_BYTES // 2)
    assert prefix(base + "one") == prefix(base + "two")
    assert prefix("b" + base[1:] + "one") != prefix(base + "one")


def test_texts_are_not_read_when_something_names_the_session() -> None:
    def explode() -> tuple[str, ...]:
        raise AssertionError("read the texts")

    assert who({"x-session-id": "s"}, opening=explode).id == "s"
    with pytest.raises(AssertionError):
        who(opening=explode)


# --- the echo


@pytest.mark.parametrize(
    ("raw", "echo"),
    [("plain id", b"plain id"), ("a\r\nX-Evil: 1", b"a%0D%0AX-Evil: 1"), ("zä", b"z%C3%A4"), ("50%", b"50%25")],
)
def test_echo(raw: str, echo: bytes) -> None:
    assert SessionRef(raw, "header").echo() == echo


@given(st.text(max_size=400))
def test_echo_is_always_a_legal_header_value(raw: str) -> None:
    echo = SessionRef(raw, "metadata").echo()
    assert len(echo) <= MAX_ECHO_CHARS
    assert all(0x20 <= b < 0x7F for b in echo)


@given(st.dictionaries(st.sampled_from([h for headers, *_ in ORDER for h in headers]), st.binary(max_size=30)))
def test_any_header_bytes_give_a_session(headers: dict[str, bytes]) -> None:
    it = identify({k.lower().encode(): v for k, v in headers.items()}, hints(), "t")
    assert it.id
    assert len(it.key("t")) == 32
