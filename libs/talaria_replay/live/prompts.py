"""Prompts of the right length and prefix relation for a trace without text (5.1).

A session is an append-only conversation: each prompt is the one before, the server's real answer, and new text of the
length that the trace asks for. Where the trace keeps less than the whole previous context (compaction), the prompt
keeps that much of its beginning. New text is drawn from the call's own seed, so runs send the same text; two things may
differ between runs: the server's answers inside the history, and the length of new text where another server counts
other tokens. Each call's body has a digest in the results, so that two runs can be compared call by call.

Lengths are in the server's tokens, which only it can count: characters per token are measured by two probes before the
run and corrected by each answer's `usage`. As each prompt is measured from the last real count, errors do not add up.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

from talaria_replay.trace import Call

Message = dict[str, Any]

_WORDS: list[str] = (  # noqa: SIM905 - readable as text
    "the file test value return class error line call model field import from table frame units array index self name "
    "type check where when result column header parse read write data object method string list item case none true "
    "false this that with should would because after before between change fix issue patch branch commit build run "
    "open close start stop first last next other same small large time path module function argument default"
).split()
_ALPHA = 0.3
WHOLE = 0.98
"""A call that reuses this share of the previous context is a plain continuation; below, the context was cut."""


def words(rng: random.Random, chars: int) -> str:
    """Exactly `chars` characters of plain words."""
    parts: list[str] = []
    size = 0
    while size < chars:
        word = rng.choice(_WORDS)
        parts.append(word)
        size += len(word) + 1
    return " ".join(parts)[:chars].ljust(chars, "s")


class Rate:
    """Characters per token and tokens of a message's frame, as one server counts for one model.

    It learns, so each session needs its own: else the length of its texts would depend on when others are answered.
    """

    def __init__(self, chars_per_token: float = 4.0, frame_tokens: float = 8.0) -> None:
        self.chars_per_token = chars_per_token
        self.frame_tokens = frame_tokens

    def probed(self, small: tuple[int, int], large: tuple[int, int]) -> None:
        """Two probes of one user message: (characters, prompt tokens) each."""
        (chars_a, tokens_a), (chars_b, tokens_b) = small, large
        if tokens_b > tokens_a:
            self.chars_per_token = max(0.25, (chars_b - chars_a) / (tokens_b - tokens_a))
            self.frame_tokens = max(0.0, tokens_a - chars_a / self.chars_per_token)

    def learn(self, chars: int, tokens: float) -> None:
        """`chars` of new text and its frame came to `tokens`: long texts tell the rate, short ones the frame."""
        text = chars / self.chars_per_token
        if text > 16 * self.frame_tokens and tokens > self.frame_tokens:
            observed = min(16.0, max(0.25, chars / (tokens - self.frame_tokens)))
            self.chars_per_token += _ALPHA * (observed - self.chars_per_token)
        else:
            self.frame_tokens = max(0.0, self.frame_tokens + _ALPHA * (tokens - text - self.frame_tokens))

    def copy(self) -> Rate:
        """What is known so far, to go on from."""
        return Rate(self.chars_per_token, self.frame_tokens)

    def chars(self, tokens: float) -> int:
        """Text for so many tokens; at least one character, as an empty message is none."""
        return max(1, round(tokens * self.chars_per_token))


@dataclass(slots=True)
class Conversation:
    """One session's conversation. `next` makes the messages of a call, `answered` takes what came of it."""

    rate: Rate
    salt: str = ""
    messages: list[Message] = field(default_factory=list)
    known_tokens: int = 0
    """The server's own count of the previous prompt and its answer; 0 before the first."""
    _new: tuple[int, int] = (0, 0)
    """Characters of the last prompt's new text, and the context before it."""
    _cut_short: bool = False
    """The context before it was cut: its tokens are an estimate, of which nothing is to be learnt."""
    _sent: list[Message] | None = None
    _context: int = 1
    """The previous prompt and completion as the trace counts them."""

    def next(self, call: Call) -> list[Message]:
        """The messages of `call`: its recorded ones if it has any, else made ones."""
        if call.messages is not None:
            self._sent = None
            return call.messages
        kept = self._keep(call)
        frame = self.rate.frame_tokens
        text = words(_rng(call, self.salt), self.rate.chars(max(1.0, call.prompt_tokens - kept - frame)))
        self._new = (len(text), kept)
        if self.messages and self.messages[-1]["role"] == "user":  # cut inside this message: it goes on differently
            last = self.messages.pop()
            self.messages.append({"role": "user", "content": f"{last['content']} {text}"})
        else:
            self.messages.append({"role": "user", "content": text})
        self._sent = self.messages
        return list(self.messages)

    def answered(self, answer: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The server's answer and counts; 0 prompt tokens: it did not tell, and the estimate stands."""
        if self._sent is None:
            return
        chars, before = self._new
        if prompt_tokens and not self._cut_short:
            self.rate.learn(chars, prompt_tokens - before)
        elif not prompt_tokens:
            prompt_tokens = round(before + self.rate.frame_tokens + chars / self.rate.chars_per_token)
        self.messages.append({"role": "assistant", "content": answer or " "})
        self.known_tokens = prompt_tokens + completion_tokens

    def _keep(self, call: Call) -> int:
        """Keep the call's reusable prefix of the conversation; returns its estimated tokens."""
        context, self._context = self._context, call.prompt_tokens + call.completion_tokens
        self._cut_short = False
        if not call.call or not call.reusable_tokens or not self.messages:
            self.messages = []
            return 0
        if call.reusable_tokens >= WHOLE * context:
            return self.known_tokens
        self._cut_short = True
        # In the server's tokens: its counts and the trace's differ a little.
        return self._cut(min(round(call.reusable_tokens * self.known_tokens / context), call.prompt_tokens - 1))

    def _cut(self, budget: int) -> int:
        """Cut the conversation to its first `budget` tokens, within a message if need be."""
        kept: list[Message] = []
        tokens = 0.0
        for message in self.messages:
            size = self.rate.frame_tokens + len(message["content"]) / self.rate.chars_per_token
            if tokens + size <= budget:
                kept.append(message)
                tokens += size
                continue
            room = budget - tokens - self.rate.frame_tokens
            if room >= 1:
                kept.append(message | {"content": message["content"][: self.rate.chars(room)]})
                tokens = budget
            break
        self.messages = kept
        return round(tokens)


def _rng(call: Call, salt: str) -> random.Random:
    seed = call.seed if call.seed is not None else f"{call.session}/{call.call}"
    return random.Random(f"{salt}/{seed}")  # noqa: S311 - repeatable on purpose


def digest(messages: list[Message]) -> str:
    """16 hex digits that tell whether two runs sent the same messages."""
    h = hashlib.blake2b(digest_size=8)
    for message in messages:
        h.update(json.dumps(message, sort_keys=True).encode() + b"\0")
    return h.hexdigest()
