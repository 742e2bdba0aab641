"""Imports nats-py without aiohttp.

nats-py imports it where it is installed (SGLang brings it along) for connections over WebSockets, which the bus does
not offer. It is a third of what a service's start costs in CPU.
"""

import sys


def import_nats() -> None:
    """Import nats-py; a later `import aiohttp` of somebody else works as ever."""
    if "aiohttp" in sys.modules:
        import nats.aio.client  # noqa: PLC0415

        return
    sys.modules["aiohttp"] = None  # type: ignore[assignment] # makes its import fail
    try:
        import nats.aio.client  # noqa: F401, PLC0415
    finally:
        del sys.modules["aiohttp"]


import_nats()
