"""Bodies: what passes, what is refused, with which code and param; and that both ways of checking agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from talaria_api.schemas import ChatRequest, CompletionRequest
from talaria_api.validate import parse_chat, parse_completion
from talaria_common.errors import BadRequestError, UnsupportedError

USER = {"role": "user", "content": "x"}


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER]} | more).encode()


def text(**more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "x"} | more).encode()


HARMLESS: list[dict[str, Any]] = [
    {"n": 1},
    {"n": None},
    {"tools": []},
    {"tools": None},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"functions": []},
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"logit_bias": {}},
    {"modalities": ["text"]},
    {"audio": None},
    {"prediction": None},
    {"web_search_options": None},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 0.0},
    {"min_tokens": 0},
    {"repetition_penalty": 1},
    {"repetition_penalty": 1.0},
    {"stop_token_ids": []},
    {"chat_template_kwargs": {}},
    {"continue_final_message": False},
    {"include_stop_str_in_output": False},
    {"reasoning_effort": None},
    {"stop": None},
    {"stop": []},
    {"stop": "x"},
    {"stop": ["a", "b", "c", "d"]},
    {"seed": -5},
    {"temperature": 0},
    {"temperature": 2},
    {"temperature": None},
    {"top_p": 1},
    {"max_tokens": 1},
    {"max_completion_tokens": 1},
    {"logprobs": True, "top_logprobs": 20},
    {"logprobs": False},
    {"frequency_penalty": -2},
    {"presence_penalty": 2},
    {"user": "u"},
    {"metadata": {"a": [1]}},
    {"stream": None},
    {"stream": True, "stream_options": {}},
    {"stream": True, "stream_options": {"include_usage": True, "later": 1}},
    {"ignore_eos": True},
    {"return_token_ids": False},
    {"parallel_tool_calls": True},
    {"never_heard_of": {"x": 1}},
    {"store": False},
    {"messages": [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": None}, USER]},
    {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x", "more": 1}]}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "name": "n"}]},
]


@pytest.mark.parametrize("more", HARMLESS, ids=str)
def test_accepted(more: dict[str, Any]) -> None:
    assert parse_chat(chat(**more)).model == "m"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, fields]}


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"guided_json": {}}, "guided_json"),
    ({"json_schema": "{}"}, "json_schema"),
    ({"regex": "a"}, "regex"),
    ({"top_k": 40}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"stop_token_ids": [2]}, "stop_token_ids"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    (message(role="tool", content="x", tool_call_id="1"), "messages[1].role"),
    (message(role="assistant", content="x", tool_calls=[{}]), "messages[1].tool_calls"),
    (
        message(role="user", content=[{"type": "text", "text": "x"}, {"type": "image_url"}]),
        "messages[1].content[1].type",
    ),
]


@pytest.mark.parametrize(("more", "param"), UNSUPPORTED, ids=str)
def test_unsupported(more: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        parse_chat(chat(**more))
    assert (e.value.param, e.value.status, e.value.code) == (param, 400, "unsupported_parameter")
    assert param in e.value.message


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 1 << 40}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": 1}, "stop"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"metadata": []}, "metadata"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    (message(role="wizard", content="x"), "messages[1].role"),
    (message(role="user"), "messages[1].content"),
    (message(role="user", content=None), "messages[1].content"),
    (message(role="user", content=5), "messages[1].content"),
    (message(role="user", content=[{"type": "text"}]), "messages[1].content[0].text"),
    (message(role="user", content="x", name=5), "messages[1].name"),
]


@pytest.mark.parametrize(("more", "param"), WRONG, ids=str)
def test_wrong(more: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as e:
        parse_chat(chat(**more))
    assert (e.value.param, e.value.code) == (param, "invalid_request")


NOT_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"{}x",
    b'{"model": NaN}',
    b'{"model":"\xff"}',
    b'{"model":"m","messages":[],"x":"\xff"}',
    b'{"model":"m","messages":[{"role":"user","content":"\xc3"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":' + b"[" * 100_000,
    b'{"model":"m","messages":[{"role":"user","content":"\x01"}]}',
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda b: repr(b[:40]))
def test_not_json(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(BadRequestError) as e:
            parse(body)
        assert e.value.status == 400


TEXT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ["a", "b"]}, "prompt", "unsupported_parameter"),
    ({"prompt": [1, 2]}, "prompt", "unsupported_parameter"),
    ({"prompt": [[1, 2]]}, "prompt", "unsupported_parameter"),
    ({"prompt": []}, "prompt", "unsupported_parameter"),
    ({"prompt": ""}, "prompt", "invalid_request"),
    ({"prompt": None}, "prompt", "invalid_request"),
    ({"prompt": 5}, "prompt", "invalid_request"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"logprobs": 6}, "logprobs", "invalid_request"),
    ({"logprobs": True}, "logprobs", "invalid_request"),
]


@pytest.mark.parametrize(("more", "param", "code"), TEXT_REFUSED, ids=str)
def test_completions_refused(more: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as e:
        parse_completion(text(**more))
    assert (e.value.param, e.value.code) == (param, code)


@pytest.mark.parametrize(
    "more",
    [{"prompt": ["x"]}, {"best_of": 1}, {"echo": False}, {"suffix": ""}, {"logprobs": 0}, {"logprobs": 5}],
    ids=str,
)
def test_completions_accepted(more: dict[str, Any]) -> None:
    assert parse_completion(text(**more)).endpoint == "completions"


def test_facts() -> None:
    body = chat(
        messages=[{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "é"}]}],
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        return_token_ids=True,
    )
    it = parse_chat(body)
    assert it[:8] == ("chat", "m", True, True, 7, True, True, 4)
    assert parse_chat(chat(max_tokens=7, max_completion_tokens=3)).max_tokens == 3
    assert parse_completion(text(prompt="éa")).prompt_bytes == 3
    assert parse_completion(text(logprobs=0)).logprobs


# --- both ways of checking say the same

_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 25), st.floats(-3, 3), st.sampled_from(["", "x", "none", "text"])
)
_values = st.recursive(
    _scalars,
    lambda v: (
        st.lists(v, max_size=5) | st.dictionaries(st.sampled_from(["type", "text", "include_usage"]), v, max_size=3)
    ),
    max_leaves=5,
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"])},
        optional={
            "content": _values
            | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.just("x")})),
            "tool_calls": _values,
            "name": _values,
        },
    ),
    max_size=3,
)


@given(
    st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), _values, max_size=4), _messages | st.just([USER])
)
def test_chat_fast_path_and_schema_agree(more: dict[str, Any], messages: list[Any]) -> None:
    agree(ChatRequest, parse_chat, {"model": "m", "messages": messages} | more)


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), _values, max_size=4))
def test_completion_fast_path_and_schema_agree(more: dict[str, Any]) -> None:
    agree(CompletionRequest, parse_completion, {"model": "m", "prompt": "x"} | more)


def agree(schema: Any, parse: Any, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    try:
        schema.model_validate_json(body)
        by_schema = True
    except ValidationError:
        by_schema = False
    try:
        parse(body)
        fast = True
    except BadRequestError:
        fast = False
    assert fast == by_schema, body


class TestSharedPrefix:
    """The fingerprint of the leading system messages, for the router (RouteRequest.prefix_id)."""

    def prefix(self, *messages: tuple[str, str]) -> tuple[str, int]:
        body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}
        request = parse_chat(json.dumps(body).encode())
        return request.prefix_id, request.prefix_bytes

    def test_equal_for_equal_beginnings_only(self):
        system = ("system", "You are a careful engineer. " * 20)
        one, other = self.prefix(system, ("user", "a")), self.prefix(system, ("user", "b"))
        assert one == other
        assert one[1] == len(system[1]) + 2
        assert self.prefix(("system", system[1] + "!"), ("user", "a"))[0] != one[0]
        assert self.prefix(system, ("developer", "x"), ("user", "a"))[0] != one[0]

    def test_none_without_one_worth_telling(self):
        assert self.prefix(("user", "long " * 200)) == ("", 0)
        assert self.prefix(("system", "short"), ("user", "a")) == ("", 0)
