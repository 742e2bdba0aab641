"""How much of a waiting call's prompt will have to be computed, as far as earlier calls tell.

What is cached for a call is known exactly when it is admitted; until then it counts in the queue that routers see, and
counting the prompts of returning calls whole would make a short queue look like many seconds of prefill.
"""

from __future__ import annotations

from talaria_instance.calls import Call

ALPHA = 0.2


class Reuse:
    """Per model, the share of returning calls' prompts that had to be computed, an exponentially weighted mean."""

    def __init__(self) -> None:
        self._computed: dict[str, float] = {}

    def learn(self, call: Call) -> None:
        """The call has its first token."""
        if call.head.is_continuation and call.prompt_tokens:
            share = 1.0 - call.cached_tokens / call.prompt_tokens
            known = self._computed.get(call.head.model, share)
            self._computed[call.head.model] = known + ALPHA * (share - known)

    def fresh_tokens(self, call: Call) -> int:
        """Prompt tokens that are expected to be computed; all of a session's first call, and where nothing is known."""
        if not call.head.is_continuation:
            return call.prompt_tokens
        return round(call.prompt_tokens * self._computed.get(call.head.model, 1.0))
