"""A rank other than 0: builds its share of every model and does what rank 0 says, in that order.

    python -m talaria_gpu.engine.sglang.ranks.follower --fd N

It ends with 0 when rank 0 closes the socket or dies, and with 1 when it can no longer keep step: the others find out by
the end of the socket, and in the middle of a collective by its failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from talaria_common.errors import TalariaError
from talaria_gpu.engine.processes import die_with_parent
from talaria_gpu.engine.sglang import environment
from talaria_gpu.engine.sglang.ranks.control import Join, Order, Outcome, digest, refusal_of


def build(join: Join, control: Connection) -> Any:
    """This rank's engine. Says when it has imported what it needs; from then on the ranks wait for each other."""
    environment.prepare(join.engine["device"], join.size)
    from talaria_gpu.engine.sglang.engine import SglangEngine
    from talaria_gpu.hkvr.gloo import GlooRanks

    control.send(Outcome())
    directory = Path(join.directory)
    ranks = GlooRanks(join.rank, join.size, directory / "ranks")
    return SglangEngine(**join.engine, ranks=ranks, meeting=directory / "sglang")


def obey(engine: Any, order: Order) -> Outcome:
    """Carry one order out. Raises whatever ends this rank."""
    from talaria_gpu.hkvr.agreement import RankLostError

    try:
        value = getattr(engine, order.method)(*order.arguments)
    except RankLostError:
        raise
    except TalariaError as e:
        return Outcome(refusal=refusal_of(e))
    seen = digest(order.method, value)
    return Outcome(value=value if seen is None else seen)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="One rank of a tensor-parallel engine.")
    parser.add_argument("--fd", required=True, type=int, help="inherited end of a socket pair")
    args = parser.parse_args(argv)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control: Connection = Connection(args.fd)
    engine: Any = None
    try:
        engine = build(control.recv(), control)
        control.send(Outcome())
        while True:
            order = control.recv()
            outcome = obey(engine, order)
            if order.answered:
                control.send(outcome)
    except (EOFError, ConnectionError):
        return 0
    except Exception as e:  # noqa: BLE001 - whatever it is, a rank that cannot keep step must not linger
        traceback.print_exc(file=sys.stderr)
        with contextlib.suppress(OSError):  # rank 0 may be gone, too
            control.send(Outcome(failure=f"{type(e).__name__}: {e}"))
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # copy threads and process groups must not keep a rank alive whose engine is over
