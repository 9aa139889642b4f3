"""Requests to a server: JSON in and out, event streams, and every failure as the exception the server meant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from agentkv.errors import AgentkvError, BadRequest, Capacity, EngineFault, from_wire
from agentkv.types import Event

T = TypeVar("T")

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Shorter than servers keep idle connections, so that a request after a long tool call does not meet a closing one."""


class Unreachable(EngineFault):
    """No answer: there is no server, or the connection broke. What the server had committed stays."""

    code = "unreachable"
    http_status = 503
    default_hint = "Check that `agentkv serve` runs and that base_url names it, then resume the session by its id"


class Http:
    """One server. retries: how often a request that found no Capacity is sent again, after the time the server asks for."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._retries = retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connect = CONNECT_SECONDS if timeout is None else min(CONNECT_SECONDS, timeout)
        try:
            url = urlsplit(self.base_url)
            self._client = httpx.Client(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=connect),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_SECONDS),
                transport=transport,
                trust_env=url.hostname
                not in ("127.0.0.1", "::1", "localhost"),  # a proxy for the world is none for this machine
                verify=url.scheme != "http",  # spares plain HTTP the loading of certificates
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise BadRequest(f"base_url={base_url!r}: {error}", param="base_url") from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def call(self, method: str, path: str, body: Any = None, *, kind: type[T]) -> T:
        """The answer to a request, decoded."""
        response = self._retrying(lambda: self._send(method, path, body, stream=False))
        return _decode(response.content, kind)

    def events(self, path: str, body: Any) -> EventStream:
        """The events a request is answered with."""
        return EventStream(self._retrying(lambda: self._send("POST", path, body, stream=True)), self.base_url)

    def _retrying(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(self._retries + 1):
            try:
                return send()
            except Capacity as error:
                if attempt == self._retries or error.retry_after is None:
                    raise
                time.sleep(max(0.0, error.retry_after))
        raise AssertionError("unreachable")

    def _send(self, method: str, path: str, body: Any, *, stream: bool) -> httpx.Response:
        try:
            content = None if body is None else msgspec.json.encode(body)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest(f"cannot be sent as JSON: {error}") from None
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            response = self._client.send(
                self._client.build_request(method, path, content=content, headers=headers), stream=stream
            )
            if response.status_code >= 400:
                try:
                    raise _error(response.status_code, response.read())
                finally:
                    response.close()
        except httpx.UnsupportedProtocol as error:
            raise BadRequest(f"base_url={self.base_url!r}: {error}", param="base_url") from None
        except httpx.HTTPError as error:
            raise _unreachable(error, self.base_url) from error
        return response


class _Line(msgspec.Struct):
    error: dict[str, Any] | None = None


class EventStream:
    """The events of an answer's `data:` lines, until `[DONE]`; an error object is raised."""

    def __init__(self, response: httpx.Response, base_url: str) -> None:
        self._response = response
        self._base_url = base_url

    def close(self) -> None:
        """Hang up; the server cancels what still runs."""
        self._response.close()

    def __iter__(self) -> Iterator[Event]:
        try:
            for line in self._lines():
                field, _, data = line.partition(b":")
                if field != b"data":
                    continue  # comments keep the connection alive
                data = data.strip()
                if data == b"[DONE]":
                    return
                if (error := _decode(data, _Line).error) is not None:
                    raise from_wire(error)
                yield _decode(data, Event)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            raise _unreachable(error, self._base_url) from error

    def _lines(self) -> Iterator[bytes]:
        # only \n ends a line: JSON text may hold other characters that count as line ends elsewhere
        rest = b""
        for chunk in self._response.iter_bytes():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        yield rest


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineFault(
            f"the answer is not one of agentkv's: {error}", hint="Check base_url, and that client and server are of one version"
        ) from None


def _error(status: int, content: bytes) -> AgentkvError:
    """The exception that an error answer carries."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return from_wire(error)
    text = content[:200].decode("utf-8", "replace")
    return EngineFault(f"the server answered {status}: {text}", hint="Check base_url: is it an agentkv server?")


def _unreachable(error: httpx.HTTPError, base_url: str) -> Unreachable:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Unreachable(f"no server answers at {base_url}: {error}")
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"no answer from {base_url} in time", hint="Give the client a longer timeout, or none")
    return Unreachable(f"the connection to {base_url} broke: {type(error).__name__} {error}".rstrip())
