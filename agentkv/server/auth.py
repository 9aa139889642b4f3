"""Who is asking: bearer keys, and the tenant and salt that follow from the key alone."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from starlette.requests import Request

from agentkv.errors import BadRequest


class Unauthorized(BadRequest):
    """No key, or one that the server does not accept."""

    code = "invalid_api_key"
    http_status = 401
    default_hint = "Send 'Authorization: Bearer KEY' with a key the server was started with"


class Auth:
    """Maps a request to its tenant. Without keys everyone is the one tenant ""."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        # digests of equal length: comparing them takes the same time whatever was sent
        self._keys = [(_digest(key), _tenant(key)) for key in dict.fromkeys(keys) if key]

    def tenant(self, request: Request) -> str:
        """The tenant of the request's key. Raises Unauthorized. Nothing in the body has a say."""
        if not self._keys:
            return ""
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        given = _digest(sent.strip() if scheme.lower() == "bearer" else "")
        found: str | None = None
        for known, tenant in self._keys:  # every key is compared, found or not
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise Unauthorized("the API key is missing or not accepted")
        return found


def salt_of(tenant: str) -> str:
    """What separates one tenant's prefixes from another's; derived from the key by way of the tenant."""
    return tenant


def _digest(key: str) -> bytes:
    return sha256(b"agentkv-key\0" + key.encode("utf-8", "surrogatepass")).digest()


def _tenant(key: str) -> str:
    return sha256(b"agentkv-tenant\0" + key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
