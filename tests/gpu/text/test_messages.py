"""Message content in OpenAI's shapes, and what is refused."""

import pytest

from talaria_common.errors import BadRequestError, UnsupportedError
from talaria_gpu.text import ByteTokenizer, load_tokenizer, normalise


def test_parts_are_joined_and_null_is_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "name": "bot"}]
    assert normalise(messages) == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "name": "bot"},
    ]


@pytest.mark.parametrize(
    ("messages", "error", "param"),
    [
        ([], BadRequestError, "messages"),
        ([3], BadRequestError, "messages[0]"),
        ([{"content": "x"}], BadRequestError, "messages[0].role"),
        ([{"role": "tool", "content": "x"}], UnsupportedError, "messages[0].role"),
        ([{"role": "user", "content": 3}], BadRequestError, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], BadRequestError, "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], UnsupportedError, "messages[0].content[0].type"),
        ([{"role": "user", "content": ["x"]}], UnsupportedError, "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], UnsupportedError, "messages[0].tool_calls"),
    ],
)
def test_refusals_name_the_field(messages, error, param):
    with pytest.raises(error) as e:
        normalise(messages)
    assert type(e.value) is error
    assert e.value.param == param


def test_byte_tokenizer():
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert (
        tokenizer.decode(tokenizer.encode_chat(normalise([{"role": "user", "content": "q"}]))) == "user: q\nassistant: "
    )
    assert max(tokenizer.encode("\x00ÿ")) < tokenizer.vocab_size
    assert [tokenizer.token_bytes(i) for i in (2, 3 + 65, 999)] == [b"</s>", b"A", b""]
