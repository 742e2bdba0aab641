"""`talaria chat`: a conversation in the terminal, as one session."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from talaria_cli.up import runfile

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The command line."""

    model: str
    message: str
    system: str
    url: str
    key: str
    session: str
    max_tokens: int
    temperature: float
    state_dir: Path


class ChatError(Exception):
    """The server refused or failed; the message is its own."""


class Chat:
    """One conversation. `turn` streams an answer; what was said so far travels along, as agents do it."""

    def __init__(self, http: httpx.Client, model: str, options: ChatOptions) -> None:
        self._http = http
        self._model = model
        self._options = options
        self.session = options.session or f"chat-{secrets.token_hex(6)}"
        self.messages: list[dict[str, str]] = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})
        self.usage: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.ttft_s = 0.0

    def turn(self, text: str) -> Iterator[str]:
        """Say `text`; yields the answer's pieces as they come. Raises ChatError; the turn is then taken back."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> Iterator[str]:
        body = {
            "model": self._model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
        }
        since, self.ttft_s = time.monotonic(), 0.0
        headers = {"X-Talaria-Session-ID": self.session}
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ChatError(f"{answer.status_code}: {error_message(answer.text)}")
            self.headers = {k.lower(): v for k, v in answer.headers.items()}
            for event in sse(answer.iter_lines()):
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                self.usage = event.get("usage") or self.usage
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        self.ttft_s = self.ttft_s or time.monotonic() - since
                        yield piece

    def footer(self) -> str:
        """What the last turn cost, in one line."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        where = ", ".join(
            f"{name} {value}"
            for name in ("instance", "route", "cache")
            if (value := self.headers.get(f"x-talaria-{name}"))
        )
        prompt, out = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        return f"{prompt} prompt tokens ({cached} cached), {out} out, first after {self.ttft_s:.2f} s; {where}"


def sse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent event stream, up to [DONE]; comments (keep-alives) are skipped."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def error_message(text: str) -> str:
    """The message in OpenAI's error shape; else the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def run_chat(options: ChatOptions) -> int:
    """One-shot with a message, else a loop until end of input; returns the exit code."""
    running = runfile.read(options.state_dir)
    url = options.url or (running.url if running else DEFAULT_URL)
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    timeout = httpx.Timeout(600.0, connect=5.0)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as http:
        try:
            chat = Chat(http, options.model or first_model(http), options)
            if options.message:
                _say(chat, options.message)
                return 0
            return _loop(chat)
        except ChatError as e:
            print(f"talaria chat: {e}", file=sys.stderr)
        except httpx.ConnectError:
            print(f"talaria chat: nothing answers at {url}; is `make up` running? (--url)", file=sys.stderr)
        except httpx.HTTPError as e:
            print(f"talaria chat: {url}: {e or type(e).__name__}", file=sys.stderr)
    return 1


def first_model(http: httpx.Client) -> str:
    """The first model that the api lists. Raises ChatError."""
    answer = http.get("/v1/models")
    if answer.status_code != 200:
        raise ChatError(f"{answer.status_code}: {error_message(answer.text)}")
    models = [row["id"] for row in answer.json()["data"]]
    if not models:
        raise ChatError("the api lists no model")
    return str(models[0])


def _say(chat: Chat, text: str) -> None:
    for piece in chat.turn(text):
        print(piece, end="", flush=True)
    print(flush=True)
    print(f"[{chat.footer()}]", file=sys.stderr)


def _loop(chat: Chat) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - input() edits lines with it

        print(f"session {chat.session}; end with Ctrl-D", file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if not text:
            continue
        try:
            _say(chat, text)
        except ChatError as e:
            print(f"[{e}]", file=sys.stderr)
            if not sys.stdin.isatty():
                return 1
        except KeyboardInterrupt:
            print("[stopped]", file=sys.stderr)
