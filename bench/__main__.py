"""`make bench`: every benchmark of this folder, in turn; ARGS are passed to each (`--quick`, `--runs N`)."""

from __future__ import annotations

import subprocess
import sys

from bench.report import ROOT

MODULES = ("mesh", "engine", "restore", "switch", "ablation", "router", "simulate")


def main() -> int:
    """Run them all; 1 if any failed."""
    failed = []
    for name in MODULES:
        print(f"bench: === {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]], cwd=ROOT, check=False)
        if done.returncode != 0:
            failed.append(name)
    if failed:
        print(f"bench: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
