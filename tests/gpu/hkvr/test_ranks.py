"""Two substrate ranks as processes: what one lacks, none restores; when one goes, the other says so."""

from __future__ import annotations

import multiprocessing as mp

import pytest

from talaria_gpu.hkvr.agreement import Alone, agree_on
from tests.gpu.hkvr.rank_process import run

CONTEXT = mp.get_context("spawn")


EXPECTED = {
    "lags": [(0, 6), (0, 6)],
    "has_less": [(4, False)] * 2,
    "differs": [(2, False)] * 2,
    "has_nothing": [(0, False)] * 2,
    "saves_what_only_it_lacks": [(["first"], ["first", "nothing new", "what rank 1 lost"], 6, "")] * 2,
    "drops_what_only_it_has": [(6, 12, 3, 3, 24, 1, ""), (3, 12, 3, 3, 24, 1, "")],
    "has_another_state": [(0, 0, 2, 8, "")] * 2,
    "is_corrupt": [(12, 3, ""), (12, 3, "")],
    "park_is_damaged": [False, False],
    "dies": ["lost", None],
}


@pytest.fixture
def ranks(tmp_path):
    """Runs scenarios on two ranks; what each rank has to say to each, None where it is gone."""
    started, pipes = [], []

    def together(scenarios, listen=2):
        for rank in range(2):
            ours, theirs = CONTEXT.Pipe()
            arguments = (scenarios, rank, str(tmp_path / "meeting"), theirs)
            started.append(CONTEXT.Process(target=run, args=arguments, daemon=True))
            started[-1].start()
            theirs.close()
            pipes.append(ours)
        return {scenario: [heard(pipe) for pipe in pipes[:listen]] for scenario in scenarios}

    def heard(pipe):
        try:
            return pipe.recv() if pipe.poll(60 if pipe is pipes[0] else 10) else None
        except EOFError:
            return None

    yield together
    for process in started:
        process.kill()
        process.join()


def test_what_one_rank_lacks_none_has(ranks):
    """One lags, has less, has other blocks, has damaged ones; and the last one is killed in the middle of a copy."""
    assert ranks(list(EXPECTED)) == EXPECTED


def test_a_rank_that_hangs_is_given_up(ranks):
    assert ranks(["hangs"], listen=1) == {"hangs": ["lost"]}


def test_one_rank_agrees_with_itself():
    assert agree_on(Alone(), [b"a", b"b"]) == (2, True)
    assert agree_on(Alone(), []) == (0, True)
