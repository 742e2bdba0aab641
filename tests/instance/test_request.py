"""Bodies: what is read, what is refused and under which name."""

import msgspec
import pytest

from talaria_common.errors import BadRequestError, UnsupportedError
from talaria_gpu.text import ByteTokenizer
from talaria_instance.messages import Params
from talaria_instance.request import read, tokenise

TOKENIZER = ByteTokenizer()
MESSAGES = [{"role": "user", "content": "hé"}]


def chat(**kw):
    return msgspec.json.encode({"model": "m", "messages": MESSAGES} | kw)


def completion(**kw):
    return msgspec.json.encode({"model": "m", "prompt": "hé"} | kw)


def test_defaults():
    prompt = tokenise(chat(), "chat", TOKENIZER)
    assert prompt.params == Params()
    assert TOKENIZER.decode(prompt.input_ids) == "user: hé\nassistant: "
    assert prompt.text_bytes == 3


def test_all_parameters():
    fields = {
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 4,
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "ignore_eos": True,
        "return_token_ids": True,
        "user": "someone",
        "unknown_to_us": {"x": 1},
    }
    assert read(chat(**fields), "chat").params == Params(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        seed=3,
        stop=("a", "b"),
        logprobs=4,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        ignore_eos=True,
        return_token_ids=True,
        max_tokens_field="max_completion_tokens",
    )
    assert read(completion(logprobs=2, stop="x"), "completions").params == Params(logprobs=2, stop=("x",))


def test_logprobs_without_alternatives():
    assert read(chat(logprobs=True), "chat").params.logprobs == 0
    assert read(chat(logprobs=False), "chat").params.logprobs is None


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("hé", "hé"), (["hé"], "hé"), (TOKENIZER.encode("hé"), "hé"), ([TOKENIZER.encode("hé")], "hé")],
)
def test_shapes_of_prompts(prompt, text):
    made = tokenise(completion(prompt=prompt), "completions", TOKENIZER)
    assert TOKENIZER.decode(made.input_ids) == text
    assert made.text_bytes == 3


@pytest.mark.parametrize(
    ("endpoint", "fields", "error", "param"),
    [
        ("chat", {"n": 2}, UnsupportedError, "n"),
        ("chat", {"tools": [{"type": "function"}]}, UnsupportedError, "tools"),
        ("chat", {"stop": ["a"] * 5}, BadRequestError, "stop"),
        ("chat", {"stop": ""}, BadRequestError, "stop"),
        ("chat", {"temperature": 2.1}, BadRequestError, "temperature"),
        ("chat", {"top_p": 0}, BadRequestError, "top_p"),
        ("chat", {"max_tokens": 0}, BadRequestError, "max_tokens"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, BadRequestError, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, BadRequestError, "top_logprobs"),
        ("chat", {"messages": []}, BadRequestError, "messages"),
        ("chat", {"messages": "x"}, BadRequestError, None),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            UnsupportedError,
            "messages[0].content[0].type",
        ),
        ("completions", {"echo": True}, UnsupportedError, "echo"),
        ("completions", {"suffix": "x"}, UnsupportedError, "suffix"),
        ("completions", {"best_of": 2}, UnsupportedError, "best_of"),
        ("completions", {"prompt": ["a", "b"]}, UnsupportedError, "prompt"),
        ("completions", {"prompt": ["a", 1]}, BadRequestError, "prompt"),
        ("completions", {"prompt": ""}, BadRequestError, "prompt"),
        ("completions", {"prompt": [999]}, BadRequestError, "prompt"),
        ("completions", {"prompt": [-1]}, BadRequestError, "prompt"),
        ("completions", {"prompt": [True]}, BadRequestError, "prompt"),
    ],
)
def test_refusals(endpoint, fields, error, param):
    data = chat(**fields) if endpoint == "chat" else completion(**fields)
    with pytest.raises(error) as e:
        tokenise(data, endpoint, TOKENIZER)
    assert type(e.value) is error
    assert e.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": [' + b"[" * 5000,
        b'{"messages":[{"role":"user","content":"\xff"}]}',
    ],
)
def test_bodies_that_are_none(data):
    with pytest.raises(BadRequestError):
        tokenise(data, "chat", TOKENIZER)
