"""What every request passes before the application sees it: the token, and bounds.

Plain ASGI, because it must refuse before a body is read. Data needs the token; what holds none of
the cluster's data (the page's own files, the description of the API, /healthz) does not, because a
browser cannot send a token with the first request for a page.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, MutableMapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import problem

BODY_BYTES_MAX = 1 << 16
BODY_DEADLINE_S = 10.0
REQUEST_DEADLINE_S = 330.0
"""Longer than any route waits by itself (routes.LONG_DEADLINE_S)."""

OPEN_PATHS = frozenset({"/healthz", "/", "/docs", "/openapi.json", "/favicon.ico"})
OPEN_PREFIXES = ("/static/",)

SECURITY_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Gate:
    """Lets requests with the token through, within bounds of size and time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._digest = _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Web sockets are not served, and nothing runs at the application's start.
            return
        answer = _with_security_headers(send)
        if not self._may_enter(scope):
            refusal = problem(
                HTTPStatus.UNAUTHORIZED,
                "the control API needs its token",
                given="a missing or wrong token",
                expected="the header Authorization: Bearer TOKEN, with what is in the token file",
            )
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, answer)
            return
        await _run_bounded(self._app, scope, receive, answer)

    def _may_enter(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return True
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests are compared, so that not even the length of the token shows in the time taken.
        is_right = hmac.compare_digest(_digest(given.strip().encode()), self._digest)
        return kind.lower() == "bearer" and is_right


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
        await send(message)

    return send_with_headers


async def _run_bounded(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            body = await _read_body(scope, receive)
    except TimeoutError:
        late = problem(
            HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive", expected=f"{BODY_DEADLINE_S} s"
        )
        await late(scope, receive, send)
        return
    if body is None:
        refusal = problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "the body is too long",
            expected=f"at most {BODY_BYTES_MAX} bytes",
        )
        await refusal(scope, receive, send)
        return
    sent = _SentFlag(send)
    reason = await _run_while_wanted(app(scope, _replay(body, receive), sent), receive)
    if reason and not sent.is_started:
        ended = problem(HTTPStatus.GATEWAY_TIMEOUT, reason)
        await ended(scope, receive, send)


async def _run_while_wanted(answering: Awaitable[None], receive: Receive) -> str:
    """Run the application until it is done, late, or nobody waits; why it was not done, or ""."""
    work = asyncio.ensure_future(answering)
    peer = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait(
            {work, peer}, timeout=REQUEST_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        reason = f"not done after {REQUEST_DEADLINE_S} s"
    except asyncio.CancelledError:
        # Only the server's end cancels a request; this is the outermost frame that sees it.
        reason = "the server is being stopped"
    finally:
        peer.cancel()
    if work.done():
        work.result()
        return ""
    work.cancel()
    await asyncio.wait({work})
    return reason


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class _SentFlag:
    """Remembers whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.is_started = True
        await self._send(message)


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None if it is longer than BODY_BYTES_MAX."""
    announced = Headers(scope=scope).get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > BODY_BYTES_MAX:
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what the connection says."""
    left = [body]

    async def receive_again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receive_again
