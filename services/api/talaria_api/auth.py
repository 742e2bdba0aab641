"""API keys: which tenant is calling. Without keys everybody is the open tenant, and the api binds to loopback."""

from __future__ import annotations

import hashlib
import hmac

from talaria_common.errors import UnauthorizedError
from talaria_common.settings import AuthSettings


class Authenticator:
    """Maps an `Authorization` header to a tenant. Keys are known only by their SHA-256."""

    def __init__(self, settings: AuthSettings) -> None:
        self._open_tenant = settings.open_tenant
        self._keys = [(bytes.fromhex(key.sha256), key.tenant) for key in settings.keys]

    def tenant(self, authorization: bytes | None) -> str:
        """The caller's tenant.

        Every configured key is compared, in constant time each, so that timing tells nothing about them.

        Raises:
            UnauthorizedError: keys are configured and `authorization` carries none of them.
        """
        if not self._keys:
            return self._open_tenant
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise UnauthorizedError("no API key: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip()).digest()
        tenant = None
        for known, owner in self._keys:
            if hmac.compare_digest(known, digest):
                tenant = owner
        if tenant is None:
            raise UnauthorizedError("the API key is not valid")
        return tenant
