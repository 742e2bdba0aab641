"""Writes answers: SSE chunks and whole JSON bodies, in OpenAI's shapes, around constant parts made once per call."""

from __future__ import annotations

from typing import Any

import msgspec

from talaria_api import errors
from talaria_api.validate import Request
from talaria_common import __version__
from talaria_common.errors import TalariaError
from talaria_common.ids import hash_id
from talaria_common.wire import Frame, TokenLogprob, Usage

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class Answer:
    """What all chunks of one answer have in common."""

    def __init__(self, rid: str, request: Request, created: int) -> None:
        self.request = request
        self.chat = request.endpoint == "chat"
        self.id = f"chatcmpl-{rid}" if self.chat else f"cmpl-{rid}"
        self.created = created
        self.fingerprint = f"fp_{hash_id(__version__, request.model)[:10]}"

    def head(self, kind: str) -> bytes:
        """The object's members up to and without `choices`, no closing brace."""
        members = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
        }
        return _encode(members)[:-1]


class StreamWriter:
    """Turns frames into SSE chunks.

    The first chunk has the role; one chunk with the finish reason ends the text; a chunk with usage and no choices
    follows if it was asked for; then [DONE].
    """

    def __init__(self, answer: Answer) -> None:
        r = answer.request
        self._chat = answer.chat
        self._ids = r.return_token_ids
        self._logprobs = Logprobs(chat=answer.chat) if r.logprobs else None
        self._usage = r.include_usage
        self._first = True
        kind = "chat.completion.chunk" if answer.chat else "text_completion"
        self._head = b"data: " + answer.head(kind) + b',"choices":'
        self._open = self._head + (b'[{"index":0,"delta":' if answer.chat else b'[{"index":0,"text":')
        self._close = (b',"usage":null' if r.include_usage else b"") + b"}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null}]' + self._close

    def frame(self, frame: Frame) -> bytes:
        """The chunks of a delta or final frame; b"" if it shows the client nothing."""
        final = frame.kind == "final"
        shown = frame.text or (self._ids and frame.token_ids) or (self._logprobs and frame.logprobs)
        out = b""
        if shown or self._first:
            out = self._delta(frame)
            self._first = False
        return out + self._final(frame) if final else out

    def _delta(self, frame: Frame) -> bytes:
        text = _encode(frame.text)
        if self._chat:
            text = (b'{"role":"assistant","content":' if self._first else b'{"content":') + text + b"}"
        if not (self._ids or self._logprobs):
            return self._open + text + self._plain
        logprobs = self._logprobs.encode(frame.logprobs, frame.text) if self._logprobs else b"null"
        parts = [self._open, text, b',"logprobs":', logprobs, b',"finish_reason":null']
        prompt = b""
        if self._ids:
            parts += (b',"token_ids":', _encode(frame.token_ids))
            if self._first:
                prompt = b',"prompt_token_ids":' + _encode(frame.prompt_token_ids)
                if not self._chat:
                    parts.append(prompt)
        parts += (b"}]", prompt, self._close)
        return b"".join(parts)

    def _final(self, frame: Frame) -> bytes:
        empty = b"{}" if self._chat else b'""'
        reason = _encode(frame.finish_reason or "stop")
        out = self._open + empty + b',"logprobs":null,"finish_reason":' + reason + b"}]" + self._close
        if self._usage and frame.usage is not None:
            out += self._head + b'[],"usage":' + _encode(usage(frame.usage)) + b"}\n\n"
        return out + DONE

    @staticmethod
    def error(error: TalariaError) -> bytes:
        """The data frame that ends a stream which cannot be finished; no [DONE] follows."""
        return b"data: " + errors.body(error) + b"\n\n"


class Whole:
    """Gathers the frames of an answer that is not streamed."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.final: Frame | None = None

    def add(self, frame: Frame) -> None:
        """Take a delta or the final frame."""
        if frame.text:
            self._texts.append(frame.text)
        self._token_ids += frame.token_ids
        self._prompt_token_ids += frame.prompt_token_ids
        self._logprobs += frame.logprobs
        if frame.kind == "final":
            self.final = frame

    def body(self) -> bytes:
        """The answer, once `final` is there."""
        final = self.final
        assert final is not None
        a = self._answer
        text = "".join(self._texts)
        logprobs = b"null"
        if a.request.logprobs:
            logprobs = Logprobs(chat=a.chat).encode(self._logprobs, text)
        choice: dict[str, Any] = {"index": 0}
        if a.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": msgspec.Raw(logprobs), "finish_reason": final.finish_reason or "stop"}
        rest: dict[str, Any] = {"choices": [choice], "usage": usage(final.usage)}
        if a.request.return_token_ids:
            choice["token_ids"] = self._token_ids
            rest["prompt_token_ids"] = self._prompt_token_ids
            if not a.chat:
                choice["prompt_token_ids"] = self._prompt_token_ids
        return a.head("chat.completion" if a.chat else "text_completion") + b"," + _encode(rest)[1:]


def usage(counts: Usage | None) -> dict[str, Any]:
    """OpenAI's usage, with where the cached part of the prompt came from."""
    u = counts or Usage(prompt_tokens=0, completion_tokens=0)
    return {
        "prompt_tokens": u.prompt_tokens,
        "completion_tokens": u.completion_tokens,
        "total_tokens": u.prompt_tokens + u.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": u.cached_tokens, "cache_source": u.cache_source},
    }


class Logprobs:
    """Log probabilities in the shape of either endpoint. The older one counts characters, so it has a position."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._offset = 0

    def encode(self, tokens: list[TokenLogprob], text: str) -> bytes:
        """JSON for tokens whose text is `text`."""
        if self._chat:
            return _encode({"content": [_chat_token(t) for t in tokens], "refusal": None})
        offsets = []
        at = self._offset
        for token in tokens:
            offsets.append(at)
            at += len(token.token)
        self._offset += len(text)
        return _encode(
            {
                "tokens": [t.token for t in tokens],
                "token_logprobs": [_finite(t.logprob) for t in tokens],
                "top_logprobs": [{o.token: _finite(o.logprob) for o in t.top} for t in tokens],
                "text_offset": offsets,
            }
        )


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": t.token, "logprob": _finite(t.logprob), "bytes": t.bytes} for t in token.top]
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": token.bytes, "top_logprobs": top}


def _finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)
