"""The nats-server configuration that the mesh wants, for `talaria up`, deploy/compose and the tests alike."""

from __future__ import annotations

import json
from dataclasses import dataclass

from talaria_common import subjects

TAP_USER = "tap"
TAP_HIDDEN = (f"{subjects.ROOT}.rpc.instance.*.forward", f"{subjects.ROOT}.tokens.>", "_INBOX.>")
"""What the default tap user may not see: bodies, tokens, and answers meant for others."""


@dataclass(frozen=True, slots=True)
class ServerConf:
    """A server of one machine.

    Args:
        store_dir: where JetStream keeps its files.
        host: address to listen on.
        port: client port; -1: a free one (see `ports_file_dir` of nats-server).
        max_payload_bytes: largest message (the server's ceiling is 64 MiB).
        jetstream_memory_bytes: limit of memory storage.
        jetstream_file_bytes: limit of file storage: events, sessions and all other buckets together.
        user: the mesh's user; empty: no authentication, and no tap user.
        password: of `user`.
        tap_password: of the read-only user `tap`; empty: there is none.
        monitor_port: of the HTTP monitoring endpoint; None: none.
    """

    store_dir: str
    host: str = "127.0.0.1"
    port: int = 4222
    max_payload_bytes: int = 8 << 20
    jetstream_memory_bytes: int = 64 << 20
    jetstream_file_bytes: int = 2 << 30
    user: str = ""
    password: str = ""
    tap_password: str = ""
    monitor_port: int | None = None

    def render(self) -> str:
        """The text of nats.conf. Raises ValueError if a user has no password."""
        lines = [
            f"listen: {_text(f'{self.host}:{self.port}')}",
            f"max_payload: {self.max_payload_bytes}",
            # Two full messages and more may wait for a client before the server takes it for slow.
            f"max_pending: {max(64 << 20, 4 * self.max_payload_bytes)}",
            'write_deadline: "10s"',
            'lame_duck_duration: "30s"',
            "jetstream {",
            f"  store_dir: {_text(self.store_dir)}",
            f"  max_memory_store: {self.jetstream_memory_bytes}",
            f"  max_file_store: {self.jetstream_file_bytes}",
            "}",
        ]
        if self.monitor_port is not None:
            lines.append(f"http: {_text(f'{self.host}:{self.monitor_port}')}")
        if self.user:
            lines += self._authorization()
        elif self.password or self.tap_password:
            raise ValueError("a password needs a user")
        return "\n".join(lines) + "\n"

    def _authorization(self) -> list[str]:
        if not self.password:
            raise ValueError(f"bus user {self.user!r} has no password")
        lines = [
            "authorization {",
            "  users: [",
            f"    {{user: {_text(self.user)}, password: {_text(self.password)}}}",
        ]
        if self.tap_password:
            if self.user == TAP_USER:
                raise ValueError(f"{TAP_USER!r} names the read-only user")
            hidden = ", ".join(_text(s) for s in TAP_HIDDEN)
            lines += [
                "    {",
                f"      user: {_text(TAP_USER)}, password: {_text(self.tap_password)}",
                f'      permissions: {{publish: {{deny: ">"}}, subscribe: {{allow: ">", deny: [{hidden}]}}}}',
                "    }",
            ]
        return [*lines, "  ]", "}"]


def _text(value: str) -> str:
    """A quoted string of the configuration language; its escapes are JSON's as far as it has any."""
    if any(ord(c) < 32 for c in value):
        raise ValueError(f"{value!r} has control characters")
    return json.dumps(value, ensure_ascii=False)
