"""`talaria replay`: a trace's sessions, closed-loop, against a live endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from talaria_replay import trace
from talaria_replay.live.results import ResultError, Results
from talaria_replay.live.run import Plan, Replay, ReplayError, prepare
from talaria_replay.measure import CallRecord


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """As on the command line."""

    file: Path
    plan: Plan
    out: Path | None
    resume: bool
    key: str
    as_json: bool


def model_map(pairs: list[str]) -> dict[str, str]:
    """{"a": "b"} of "a=b". Raises ValueError on anything else."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, found, to = pair.partition("=")
        if not (name and found and to):
            raise ValueError(f"--model-map {pair!r}: expected TRACE_MODEL=SERVER_MODEL, or '*=SERVER_MODEL'")
        out[name] = to
    return out


def run_replay(options: ReplayOptions) -> int:
    """Replay; the summary goes to stdout. 0: every call was answered; 1: not; 2: it could not be made; 130: stopped."""
    try:
        _check_url(options.plan.url)
        calls = prepare(trace.read(options.file), options.plan)
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        progress = _Progress(sum(1 for _ in calls))
        replay = Replay(
            options.plan,
            calls,
            out=options.out,
            resume=options.resume,
            on_call=progress.called,
            on_wait=progress.waits,
            headers=headers,
        )
        progress.expect(replay.calls_to_make)
    except (trace.TraceError, ResultError, ReplayError, OSError) as e:
        for line in str(e).splitlines():
            print(f"talaria replay: {line}", file=sys.stderr)
        return 2
    try:
        with progress:
            results = asyncio.run(_until_stopped(replay))
    except (ReplayError, OSError, BaseExceptionGroup) as e:
        if replay.results.summary:  # complete, and only the file is missing
            show(replay.results, as_json=options.as_json)
        for line in dict.fromkeys(map(_says, _leaves(e))):
            print(f"talaria replay: {line}", file=sys.stderr)
        return 2
    if results is None:
        where = f"; --resume goes on with {options.out}" if options.out else ""
        print(f"talaria replay: stopped after {progress.done} calls{where}", file=sys.stderr)
        return 130
    show(results, as_json=options.as_json)
    if not results.complete and options.out:
        print(f"talaria replay: --resume runs the failed sessions of {options.out} again", file=sys.stderr)
    return 0 if results.complete else 1


def _check_url(url: str) -> None:
    try:
        httpx.URL(url)
    except httpx.InvalidURL as e:
        raise ReplayError(f"--url {url!r}: {e}; expected http://HOST:PORT") from e


def _leaves(e: BaseException) -> Iterator[BaseException]:
    """What a group of errors holds, groups within it too."""
    if isinstance(e, BaseExceptionGroup):
        for each in e.exceptions:
            yield from _leaves(each)
    else:
        yield e


def _says(e: BaseException) -> str:
    return str(e) if isinstance(e, ReplayError | OSError) else f"{type(e).__name__}: {e}"


async def _until_stopped(replay: Replay) -> Results | None:
    """None: stopped before the end. A signal that comes while the whole of it is written changes nothing."""
    task = asyncio.ensure_future(replay.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return replay.results if replay.results.summary else None


class _Progress:
    """A bar on stderr: calls made, failures, and how long it may yet take."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self._failed = 0
        self._bar = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty() and not os.environ.get("FORCE_COLOR"),
        )
        self._task = self._bar.add_task("calls", total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def waits(self, why: str) -> None:
        self._bar.console.print(f"talaria replay: {why}", markup=False, soft_wrap=True)

    def called(self, record: CallRecord) -> None:
        self.done += 1
        self._failed += bool(record.error)
        note = f"TTFT {record.ttft_s:.2f} s" if not record.error else record.error[:40]
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, note=note + failed)


_ROWS = (
    ("session completion time, s", "sct_s"),
    ("TTFT, schedule-aware, s", "ttft_s"),
    ("TTFT, request-local, s", "ttft_request_local_s"),
    ("TTFT of returns, s", "return_ttft_s"),
)


def table(summary: dict[str, Any], title: str) -> Table:
    """Percentiles of a run."""
    out = Table(title=title)
    for column in ("", "p50", "p90", "p95", "p99", "mean", "max", "n"):
        out.add_column(column, justify="left" if not column else "right")
    for name, key in _ROWS:
        row = summary.get(key, {})
        cells = [f"{row[k]:.3f}" if k in row else "-" for k in ("p50", "p90", "p95", "p99", "mean", "max")]
        out.add_row(name, *cells, str(row.get("n", 0)))
    return out


def show(results: Results, *, as_json: bool) -> None:
    """The summary, for people or machines."""
    s = results.summary
    if as_json:
        kept = {"complete": results.complete, "runs": results.runs, "notes": results.notes}
        print(json.dumps(kept | {"plan": results.plan, "summary": s}))
        return
    console = Console()
    console.print(table(s, f"measured on {results.plan['url']}"))
    failed = f", {s['failed_calls']} failed" if s["failed_calls"] else ""
    failed += f", {s['calls_not_made']} not made after them" if s.get("calls_not_made") else ""
    console.print(
        f"{s['calls']} calls of {s['sessions']} sessions{failed}, {s['retries']} retries, {s['wall_s']:.1f} s"
    )
    cached = s["cached_share"]
    reuse = "not reported by this server" if cached is None else f"{cached:.1%} of prompt tokens were cached"
    console.print(f"prefix reuse: {reuse}")
    if s["same_instance_share"] is not None:
        console.print(f"returns to the same instance: {s['same_instance_share']:.1%}")
    if s["prompt_error"].get("n"):
        console.print(f"prompt length against the trace: p95 off by {s['prompt_error']['p95']:.1%}")
    if s["short_answers"]:
        console.print(f"{s['short_answers']} answers were shorter than in the trace (the server stopped by itself)")
    gaps = results.plan["gap_sources"]
    if gaps.get("synthetic"):
        console.print(f"gaps: {gaps['synthetic']} of {sum(gaps.values())} are synthetic (the trace says so)")
    if missing := trace.missing_gaps(gaps):
        console.print(f"gaps: {missing}", style="bold red")
    if results.runs > 1:
        console.print(f"resumed, {results.runs} runs: {'; '.join(results.notes)}")
    for record in [r for r in results.calls if r.error][:5]:
        console.print(f"failed: {record.session} call {record.call}: {record.error}", style="red", markup=False)
