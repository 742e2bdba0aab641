# ruff: noqa: INP001, S310, T201 - a script; the URL is the container's own; what it prints is what `inspect` shows
"""A container's health: $HEALTH_URL answers 200. Standard library only; says why not, for `docker inspect`."""

import os
import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(os.environ["HEALTH_URL"], timeout=2) as answer:
        print(answer.read(500).decode("utf-8", "replace"))
except urllib.error.HTTPError as e:
    sys.exit(f"{e.code}: {e.read(500).decode('utf-8', 'replace')}")
except OSError as e:
    sys.exit(str(e))
