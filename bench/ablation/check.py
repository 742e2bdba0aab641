"""Tokens: equal in every configuration, or equal to the reference as far as it tells the two apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.ablation.sessions import prompts
from talaria_replay.trace import Call


class Checker:
    """Counts calls whose tokens differ between configurations, and compares some with a full recompute (DESIGN 8).

    Args:
        calls: all of them.
        paths: the models' directories.
    """

    def __init__(self, calls: Mapping[str, Sequence[Call]], paths: Mapping[str, Path]) -> None:
        self._sessions = calls
        self._paths = paths
        self.compared = self.ties = self.different = self.wrong = 0

    def different_calls(self, tokens: Mapping[str, Mapping[str, list[int]]]) -> dict[str, list[list[int]]]:
        """Rid → the distinct answers, of the calls with more than one; `tokens` by run, then rid."""
        answers: dict[str, list[list[int]]] = {}
        for of_run in tokens.values():
            for rid, ids in of_run.items():
                known = answers.setdefault(rid, [])
                if ids not in known:
                    known.append(ids)
        self.different = sum(len(each) > 1 for each in answers.values())
        return {rid: each for rid, each in answers.items() if len(each) > 1}

    def compare(self, answers: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Each answer with the reference's greedy continuation."""
        from talaria_gpu.models.reference import Reference, assert_greedy

        by_model: dict[str, list[str]] = {}
        for rid in answers:
            by_model.setdefault(self._sessions[rid.rpartition("/")[0]][0].model, []).append(rid)
        for model, rids in by_model.items():
            reference = Reference(self._paths[model])
            for rid in rids:
                session, _, number = rid.rpartition("/")
                body = prompts(self._sessions[session])[int(number)]
                for out in answers[rid]:
                    self.compared += 1
                    try:
                        self.ties += assert_greedy(reference, body, out)
                    except AssertionError as e:
                        self.wrong += 1
                        print(f"ablation: {rid}: {e}", flush=True)
