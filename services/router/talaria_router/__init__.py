"""Where a call goes: sessions, leases, cost ranking, overload. Never sees a body or a token.

`core` decides and touches neither bus, clock nor event loop; `shell` carries out what it says. Imported by nobody
but the simulator and benchmarks, which drive `core` themselves.
"""
