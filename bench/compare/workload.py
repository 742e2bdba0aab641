"""The bodies of a replay: made once, and the same for every system."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from talaria_replay import trace
from talaria_replay.live.prompts import Conversation, Rate, words
from talaria_replay.live.run import PROBE_CHARS
from talaria_replay.trace import Call

Count = Callable[[list[dict[str, Any]]], int]
"""Tokens of a conversation, as a server with the model's tokenizer and chat template counts them."""


def with_bodies(calls: Sequence[Call], count: Count, salt: str) -> list[Call]:
    """The calls with messages of their lengths, and the exact lengths that came of it.

    As in the paper's replay a body is fixed: where the recorded agent put its model's answer, there is made text of the
    answer's length, and not what a server has just said. So answers can be compared from system to system.
    """
    rate = _probed(count)
    out: list[Call] = []
    for session in trace.sessions(calls).values():
        talk = Conversation(rate, salt)
        for call in session:
            messages = talk.next(msgspec.structs.replace(call, messages=None))
            tokens = count(messages)
            answer = words(random.Random(f"{salt}/{call.session}/{call.call}"), rate.chars(call.completion_tokens))
            talk.answered(answer, tokens, call.completion_tokens)
            out.append(msgspec.structs.replace(call, messages=messages, prompt_tokens=tokens))
    return out


def _probed(count: Count) -> Rate:
    rate = Rate()
    probes = [(chars, count(text(chars, f"probe {chars}"))) for chars in PROBE_CHARS]
    rate.probed(*probes)
    return rate


def text(chars: int, seed: str) -> list[dict[str, Any]]:
    """One user message of so many characters."""
    return [{"role": "user", "content": words(random.Random(seed), chars)}]
