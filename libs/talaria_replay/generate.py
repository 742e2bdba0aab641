"""Agent sessions made from published and derived figures, for those who have no trace at hand.

Three shapes, each a handful of quantiles with its source:

- "paper": depth, gap and prompt length as the paper's Figure 2 has them (445 SWE-Bench Verified sessions): depth p50
  11, p95 49, max 187; gap p50 0.39 s, p95 1.32 s; prompt p50 25K, p95 105K tokens; 96.8% of continuations reuse more
  than half. First prompt and growth are not published: they are chosen here so that the prompt quantiles come out.
- "mini-swe-agent": quantiles derived from 500 sessions of mini-swe-agent on SWE-bench Verified with Gemini 3 Pro
  (gruckion/mini-swe-agent @ d12a71a, MIT).
- "claude-code": quantiles derived from 692 Claude Code sessions (callanjfox/kv-cache-tester @ 94f6046, Apache-2.0). The
  largest first prompts and growths are smaller here: there they are histories written anew, which are not modelled.

Gaps are synthetic everywhere: a lognormal with median 0.39 s and sigma 0.74, which fits the paper's two published
quantiles. Every generated call says so.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from talaria_replay.quantiles import QuantileTable
from talaria_replay.trace import Call

GAP_MEDIAN_S = 0.39
GAP_SIGMA = 0.74


@dataclass(frozen=True, slots=True)
class Shape:
    """Quantiles of an agent's sessions; token counts per call.

    Attributes:
        depth: calls per session.
        first: tokens of the first prompt.
        growth: new prompt tokens per later call (tool output and framing), without the previous completion.
        completion: tokens of an answer.
        spread: sigma of a lognormal factor on one session's growth: sessions differ more than calls within one.
        damp: exponent by which deep sessions grow more slowly per call: (depth / median depth) ** -damp.
        forget: share of continuations that keep less than half of the previous context (compaction).
    """

    depth: QuantileTable
    first: QuantileTable
    growth: QuantileTable
    completion: QuantileTable
    spread: float = 0.0
    damp: float = 0.0
    forget: float = 0.0


def _table(points: str) -> QuantileTable:
    """A table from points written percent:value."""
    pairs = (point.split(":") for point in points.split())
    return QuantileTable([(float(percent), float(value)) for percent, value in pairs])


SHAPES: dict[str, Shape] = {
    "paper": Shape(
        depth=_table("0:2 5:4 25:7 50:11 75:21 95:49 99:90 100:187"),
        first=_table("0:6000 5:8000 50:14000 95:32000 100:60000"),
        growth=_table("0:60 5:90 25:220 50:450 75:1100 95:4500 99:12000 100:25000"),
        completion=_table("0:20 5:60 25:110 50:180 75:350 95:1100 100:8000"),
        spread=0.85,
        forget=0.032,
    ),
    "mini-swe-agent": Shape(
        depth=_table("0:14 5:20 10:22 25:27 50:36 75:46 90:66 95:83 99:115 100:145"),
        first=_table("0:1300 5:1364 25:1482 50:1647 75:1961 95:2864 99:4500 100:10427"),
        growth=_table("0:0 5:0 10:17 25:19 50:91 75:287 90:757 95:1395 99:3416 99.9:4270 100:14847"),
        completion=_table("0:16 5:23 25:43 50:89 75:282 90:681 95:1038 99:2425 99.9:6016 100:14148"),
        damp=0.25,
    ),
    "claude-code": Shape(
        depth=_table("0:2 5:4 10:7 25:18 50:44 75:90 90:149 95:210 99:342 100:514"),
        first=_table("0:8000 5:13021 25:18587 50:24236 75:105000 90:180000 95:220000 99:400000 100:720000"),
        growth=_table("0:1 5:18 10:31 25:145 50:430 75:1292 90:3655 95:7000 99:16000 100:60000"),
        completion=_table("0:20 5:88 25:138 50:217 75:429 90:894 95:1528 99:3680 99.9:8216 100:18195"),
        spread=0.2,
        forget=0.0173,
    ),
}


def gap(rng: random.Random) -> float:
    """A synthetic tool gap in seconds."""
    return GAP_MEDIAN_S * math.exp(GAP_SIGMA * rng.gauss(0, 1))


def generate(
    shape: str,
    *,
    sessions: int,
    models: Sequence[str],
    seed: int,
    max_calls: int | None = None,
    max_context_tokens: int | None = None,
    shares: Sequence[float] | None = None,
) -> Iterator[Call]:
    """`sessions` sessions of `shape`, models taken in turn; the same seed gives the same calls.

    Args:
        shape: a key of SHAPES.
        sessions: how many.
        models: names, handed out round robin by session.
        seed: of everything random.
        max_calls: cut sessions after so many calls.
        max_context_tokens: compact a session (keep a fifth) when prompt and completion would pass this.
        shares: draw models with these probabilities instead.

    Raises:
        KeyError: no such shape.
    """
    figures = SHAPES[shape]
    limits = None if shares is None else list(itertools.accumulate(shares))
    for number in range(sessions):
        rng = random.Random(f"{shape}/{seed}/{number}")  # noqa: S311 - repeatable on purpose
        yield from _session(
            figures,
            rng,
            name=f"{shape}-{seed}-{number}",
            model=models[number % len(models)] if limits is None else models[_drawn(limits, seed, number)],
            max_calls=max_calls,
            limit=max_context_tokens,
        )


def _drawn(limits: Sequence[float], seed: int, number: int) -> int:
    u = random.Random(f"model/{seed}/{number}").random() * limits[-1]  # noqa: S311 - repeatable on purpose
    return min(bisect_right(limits, u), len(limits) - 1)


def _session(
    shape: Shape, rng: random.Random, *, name: str, model: str, max_calls: int | None, limit: int | None
) -> Iterator[Call]:
    depth = max(1, round(shape.depth.at(rng.random())))
    factor = math.exp(shape.spread * rng.gauss(0, 1)) * (depth / shape.depth.at(0.5)) ** -shape.damp
    context = 0  # the previous prompt and completion together
    for number in range(min(depth, max_calls or depth)):
        completion = max(1, round(shape.completion.at(rng.random())))
        if number == 0:
            reusable, prompt = 0, round(shape.first.at(rng.random()))
        else:
            new = round(factor * shape.growth.at(rng.random()))
            forgets = rng.random() < shape.forget
            reusable = round(context * rng.uniform(0.1, 0.5)) if forgets else context
            prompt = reusable + new
        if limit is not None and prompt + completion > limit:
            reusable = min(context, max(1, limit // 5)) if number else 0
            prompt = max(1, min(prompt, limit - completion, reusable + max(1, prompt - context)))
            completion = min(completion, limit - prompt)
            reusable = min(reusable, prompt)
        yield Call(
            session=name,
            call=number,
            model=model,
            prompt_tokens=max(1, prompt),
            completion_tokens=max(1, completion),
            reusable_tokens=reusable,
            gap_s=None if number == 0 else round(gap(rng), 4),
            gap_source="none" if number == 0 else "synthetic",
            seed=rng.getrandbits(32),
        )
        context = max(1, prompt) + max(1, completion)
