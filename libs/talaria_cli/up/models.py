"""Preparing the models of all instances, in a process of its own: a recipe that has something to make imports torch.

`python -m talaria_cli.up.models --config FILE` is that process; `prepare_all` runs it and passes on what it says.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from talaria_cli.up.child import Child, ending, fresh_log, tail
from talaria_cli.up.plan import Part
from talaria_common.settings import Settings, SettingsError, load

REMIND_S = 10.0


class ModelsError(Exception):
    """A model could not be prepared; the message has the last words of the process that tried."""


def wanted(settings: Settings) -> list[str]:
    """Models that some instance needs on disk: sim engines have no weights."""
    names = {m for i in settings.instances if i.engine != "sim" for m in i.models}
    return [name for name in settings.models if name in names]


async def prepare_all(config: Path, log: Path, say: Callable[[str], None]) -> None:
    """Run the preparation to its end; cancelled, it ends the process.

    Raises:
        ModelsError: it failed.
    """
    since = time.monotonic()
    part = Part("models", "models", (sys.executable, "-m", "talaria_cli.up.models", "--config", str(config)))
    child = await Child.start(part, fresh_log(log))
    waiting = asyncio.ensure_future(child.wait())
    shown, reminded = 0, since
    try:
        while True:
            await asyncio.wait({waiting}, timeout=0.2)
            lines = [line for line in tail(log, 1000) if line.startswith("model ")]
            for line in lines[shown:]:
                say(line)
            shown = len(lines)
            if waiting.done():
                break
            if time.monotonic() - reminded >= REMIND_S:
                reminded = time.monotonic()
                say(f"  still preparing models, {reminded - since:.0f} s so far")
    finally:
        child.kill()
        code = await waiting
    if code != 0:
        words = "".join(f"\n    {line}" for line in child.last_words())
        raise ModelsError(f"preparing the models failed ({ending(code)}); log: {log}{words}")


def main() -> int:
    """The process; returns an exit code. Progress on stdout, each line beginning with "model "."""
    parser = argparse.ArgumentParser(description="Prepare the configured models.")
    parser.add_argument("--config", type=Path, required=True)
    from talaria_gpu.models import ModelPreparationError, prepare

    try:
        settings = load(parser.parse_args().config)
        for name in wanted(settings):
            prepare(name, settings.models[name], progress=lambda line: print("model", line, flush=True))
    except (SettingsError, ModelPreparationError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
