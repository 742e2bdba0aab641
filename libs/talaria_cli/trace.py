"""`talaria trace`: make traces from logs or from shapes, and check them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from talaria_replay import trace, workload
from talaria_replay.convert import FORMATS, Count, message_logs, with_gaps
from talaria_replay.generate import SHAPES, gap, generate
from talaria_replay.measure import percentiles


def run_convert(  # noqa: PLR0917 - the command's options
    source: Path,
    out: Path,
    form: str,
    model: str,
    gaps: str,
    seed: int,
    *,
    tokenizer: Path | None = None,
    texts: bool = True,
) -> int:
    """Convert; the trace appears only when it is whole and valid. Returns the exit code."""
    if form not in FORMATS or gaps not in {"none", "synthetic"}:
        print(f"talaria trace: --format is one of {', '.join(FORMATS)}; --gaps is none or synthetic", file=sys.stderr)
        return 2
    if tokenizer is not None and form != "messages":
        print(f"talaria trace: --tokenizer is for --format messages; {form} has its own counts", file=sys.stderr)
        return 2
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    try:
        count = None if tokenizer is None else _count(tokenizer)
    except (ImportError, ValueError) as e:
        print(f"talaria trace: --tokenizer: {e}", file=sys.stderr)
        return 2
    calls = (
        message_logs(source, model=model or "unknown", count=count, texts=texts)
        if form == "messages"
        else FORMATS[form](source, model=model or None)
    )
    if gaps == "synthetic":
        calls = with_gaps(calls, lambda: round(gap(rng), 4))
    return _save(out, calls)


def run_generate(shape: str, out: Path, sessions: int, models: str, seed: int, limit: int | None) -> int:  # noqa: PLR0917 - the command's options
    """Generate. Returns the exit code."""
    if shape not in SHAPES:
        print(f"talaria trace: no shape {shape!r}: there are {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    names = [m for m in models.split(",") if m]
    if not names:
        print(f"talaria trace: --models {models!r}: expected names, with commas between", file=sys.stderr)
        return 2
    made = generate(shape, sessions=sessions, models=names, seed=seed, max_context_tokens=limit)
    return _save(out, made)


def run_workload(source: Path, out: Path, models: str, issues: int) -> int:
    """The same issues of a trace on each model. Returns the exit code."""
    names = [m for m in models.split(",") if m]
    if not names or len(names) != len(set(names)):
        print(f"talaria trace: --models {models!r}: expected different names, with commas between", file=sys.stderr)
        return 2
    try:
        calls = workload.from_trace(trace.read(source), names, issues=issues)
    except (trace.TraceError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    found = len(trace.sessions(calls)) // len(names)
    if found < issues:
        print(
            f"talaria trace: {source}: expected {issues} issues (Astropy sessions, or any where it has none of those), "
            f"found {found}",
            file=sys.stderr,
        )
        return 1
    return _save(out, iter(calls))


def run_check(file: Path) -> int:
    """Name every problem with its line, or say what the trace holds. Returns the exit code."""
    try:
        calls = trace.read(file)
    except (trace.TraceError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    sessions = trace.sessions(calls)
    print(
        f"{file}: {len(calls)} calls of {len(sessions)} sessions, models {', '.join(sorted({c.model for c in calls}))}"
    )
    sources = trace.gap_sources(calls)
    gaps = [c.gap_s for c in calls if c.gap_s is not None]
    for name, values in (
        ("calls per session", [float(len(s)) for s in sessions.values()]),
        ("prompt tokens", [float(c.prompt_tokens) for c in calls]),
        ("completion tokens", [float(c.completion_tokens) for c in calls]),
        (f"gap, s ({', '.join(f'{n} {source}' for source, n in sources.items() if source != 'none')})", gaps),
    ):
        p = percentiles(values)
        if p["n"]:
            print(f"  {name}: p50 {p['p50']:g}, p95 {p['p95']:g}, max {p['max']:g}")
    if missing := trace.missing_gaps(sources):
        print(f"{file}: {missing}; talaria trace convert --gaps synthetic draws them", file=sys.stderr)
    return 0


def _count(folder: Path) -> Count:
    """Tokens of a text. Raises ValueError, or ImportError without the tokenizers library, if `folder` has none."""
    from talaria_gpu.text import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return lambda text: len(tokenizer.encode(text))


def _wrong(e: OSError | RecursionError, out: Path, part: Path) -> str:
    """The file that the user knows, and what is wrong with it."""
    if isinstance(e, RecursionError):
        return f"{out}: messages nested too deeply; expected fewer than 900 levels"
    return f"{out if e.filename in {None, str(part)} else e.filename}: {e.strerror}"


def _save(out: Path, calls: Iterator[trace.Call]) -> int:
    part = out.with_name(f".{out.name}.part{'.gz' if out.suffix == '.gz' else ''}")
    try:
        trace.write(part, calls)
        trace.read(part)
        part.replace(out)
    except trace.TraceError as e:
        print(e, file=sys.stderr)
        return 1
    except (OSError, RecursionError) as e:
        print(f"talaria trace: {_wrong(e, out, part)}", file=sys.stderr)
        return 1
    finally:
        part.unlink(missing_ok=True)
    return run_check(out)
