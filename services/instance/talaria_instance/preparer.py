"""Tokenises bodies: small ones at once, big ones in a thread, so that the event loop never stalls."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import structlog
from prometheus_client import Histogram

from talaria_common.errors import EngineError, TalariaError
from talaria_common.wire.error import info_of
from talaria_gpu.text import Tokenizer, load_tokenizer
from talaria_instance.messages import Prepare, Prepared, PrepareFailed
from talaria_instance.request import tokenise

log = structlog.get_logger(__name__)

THREADS = 2


class Preparer:
    """Tokenizers and threads.

    Args:
        done: called on the event loop with each outcome, before `prepare` returns for a small body.
        seconds: observes how long each took, by where: "loop" or "thread".
    """

    def __init__(self, done: Callable[[Prepared | PrepareFailed], None], seconds: Histogram) -> None:
        self._done = done
        self._on_loop, self._in_thread = seconds.labels("loop"), seconds.labels("thread")
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loaded: dict[str, str | None] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """By model; a live view."""
        return self._tokenizers

    async def load(self, models: Iterable[str], paths: Mapping[str, str]) -> None:
        """Load the models' tokenizers, those that are not loaded already, in a thread.

        Raises:
            ValueError: a model's directory has no tokenizer that loads.
        """
        for model in models:
            path = paths.get(model)
            if model not in self._loaded or self._loaded[model] != path:
                tokenizer = await asyncio.to_thread(load_tokenizer, Path(path) if path is not None else None)
                self._tokenizers[model] = tokenizer
                self._loaded[model] = path

    def prepare(self, request: Prepare) -> None:
        """Tokenise; the outcome goes to `done`."""
        tokenizer = self._tokenizers.get(request.head.model)
        if tokenizer is None or len(request.body) <= tokenizer.inline_bytes:
            began = perf_counter()
            outcome = self._run(request)
            self._on_loop.observe(perf_counter() - began)
            self._done(outcome)
            return
        run = contextvars.copy_context().run  # the call's trace goes along
        future = asyncio.get_running_loop().run_in_executor(self._pool, run, self._run, request)
        task = asyncio.ensure_future(self._deliver(future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Drop what waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _deliver(self, future: asyncio.Future[Prepared | PrepareFailed]) -> None:
        with self._in_thread.time():
            outcome = await future
        self._done(outcome)

    def _run(self, request: Prepare) -> Prepared | PrepareFailed:
        try:
            tokenizer = self._tokenizers[request.head.model]
            return Prepared(request.key, tokenise(request.body, request.head.endpoint, tokenizer))
        except TalariaError as e:
            return PrepareFailed(request.key, info_of(e))
        except Exception as e:  # a template or tokenizer that fails must cost one call, not the instance
            log.exception("tokenising failed", rid=request.key.rid, model=request.head.model)
            return PrepareFailed(request.key, info_of(EngineError(f"tokenising failed: {e}")))
