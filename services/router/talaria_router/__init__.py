"""Where a call goes: sessions, leases, cost ranking, overload. Never sees a body or a token."""
