"""The same text, ids and special tokens as transformers, without it."""

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest

from talaria_common.errors import BadRequestError
from talaria_gpu.text import HfTokenizer, load_tokenizer, normalise

pytestmark = pytest.mark.engine
_spec = importlib.util.spec_from_file_location("text_reference_cases", Path(__file__).with_name("reference.py"))


@pytest.fixture(scope="module")
def cases():
    keep = importlib.util.find_spec
    module = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(module)
    finally:
        importlib.util.find_spec = keep
    return module


@pytest.mark.parametrize("model", ["smollm2", "llama"])
def test_chat_equals_transformers(model, expected, cases, request):
    tokenizer = request.getfixturevalue(model)
    for name, raw in cases.CASES.items():
        messages = normalise(raw)
        assert tokenizer.render_chat(messages) == expected[model]["chat_text"][name], name
        assert tokenizer.encode_chat(messages) == expected[model]["chat_ids"][name], name


@pytest.mark.parametrize("model", ["smollm2", "llama"])
def test_encode_and_decode_equal_transformers(model, expected, cases, request):
    tokenizer = request.getfixturevalue(model)
    for text, ids, back in zip(cases.TEXTS, expected[model]["encode"], expected[model]["decode"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == back


def test_eos_is_collected_from_all_files(smollm2, llama, expected):
    assert smollm2.eos_token_ids == (expected["smollm2"]["eos"],)
    assert llama.eos_token_ids == (2, 7)  # generation_config's list, then config and tokenizer, once each


def test_token_bytes(smollm2, llama):
    assert b"".join(map(smollm2.token_bytes, smollm2.encode("naïve 🦜"))) == "naïve 🦜".encode()
    assert smollm2.token_bytes(smollm2.eos_token_ids[0]) == b"<|im_end|>"
    assert b"".join(map(llama.token_bytes, llama.encode("a 你")[1:])) == " a 你".encode()
    assert llama.token_bytes(1) == b"<s>"
    assert smollm2.token_bytes(10**6) == llama.token_bytes(10**6) == b""


def test_a_template_that_refuses_is_a_bad_request(llama):
    messages = normalise([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    with pytest.raises(BadRequestError, match="system must come first") as e:
        llama.encode_chat(messages)
    assert e.value.param == "messages"


def test_no_template(reference, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((reference / "llama" / "tokenizer.json").read_bytes())
    with pytest.raises(BadRequestError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat(normalise([{"role": "user", "content": "a"}]))


def test_a_broken_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        HfTokenizer(tmp_path)


def test_encode_lets_other_threads_run(smollm2):
    text = "The quick brown fox 你好 jumps.\n" * 20_000
    done = threading.Event()

    def encode():
        smollm2.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    began = time.perf_counter()
    thread.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    # Holding the lock would leave this loop one or two turns, however long the encoding took.
    assert turns > 5, f"{turns} turns in {time.perf_counter() - began:.3f} s"


def test_text_needs_no_torch():
    import subprocess

    code = "import sys, talaria_gpu.text; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'sglang')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
