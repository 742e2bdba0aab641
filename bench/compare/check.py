"""Which of two different answers is right: what the reference says, on either side of a tie (DESIGN 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.compare.figures import comparable
from talaria_gpu.text import HfTokenizer
from talaria_replay.trace import Call

MAX_PATHS = 8
Two = Callable[[list[int]], tuple[int, int, float]]
"""Ids → the best next token, the second best, and how far apart their logits are."""


def greedy(two: Two, prompt: Sequence[int], length: int, tie: float) -> Iterator[list[int]]:
    """Continuations of `length` tokens: the greedy one first, then those that take the other side of a tie."""
    paths: list[list[int]] = [[]]
    for _ in range(MAX_PATHS):
        if not paths:
            return
        path = paths.pop(0)
        while len(path) < length:
            first, second, gap = two([*prompt, *path])
            if gap < tie:
                paths.append([*path, second])
            path = [*path, first]
        yield path


def unlike_reference(answers: Mapping[str, Sequence[str]], calls: Sequence[Call], paths: Mapping[str, Path]) -> int:
    """How many of the answers (by session/call) are none of the reference's."""
    from talaria_gpu.models.reference import TIE, Reference

    by_rid = {f"{call.session}/{call.call}": call for call in calls}
    references: dict[str, Reference] = {}
    wrong = 0
    for rid, said in answers.items():
        call = by_rid[rid]
        tokenizer = HfTokenizer(paths[call.model])
        if call.model not in references:
            references[call.model] = Reference(paths[call.model])
        reference = references[call.model]

        def two(ids: list[int], reference: Reference = reference) -> tuple[int, int, float]:
            best = reference.logits(ids)[-1].topk(2)
            first, second = best.indices.tolist()
            return first, second, float(best.values[0] - best.values[1])

        prompt = list(tokenizer.encode_chat(call.messages or []))
        right = {comparable(tokenizer.decode(p)) for p in greedy(two, prompt, call.completion_tokens, TIE)}
        for answer in said:
            if comparable(answer) not in right:
                wrong += 1
                print(f"compare: {rid}: {answer!r} is none of {right}", flush=True)
    return wrong
