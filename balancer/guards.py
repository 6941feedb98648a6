"""Who may ask the balancer's own routes: this machine (`balancer/core/http/local_clients.py`), or who has the key."""

import secrets
from collections.abc import Awaitable, Callable

from fastapi import Request

from balancer.core.errors import ForbiddenError, UnauthorizedError
from balancer.core.http.local_clients import is_local_client
from balancer.core.settings.control import AdminSettings

Check = Callable[[Request], Awaitable[None]]


def guard(admin: Callable[[], AdminSettings]) -> Check:
    """Let operators look: on this machine, or with the admin key."""

    async def check(request: Request) -> None:
        settings = admin()
        if "x-api-key" not in request.headers and _is_local(request, settings):
            return
        closed = (
            "open on this machine only, as localhost or 127.0.0.1; "
            "set `admin.api_key` or `admin.local_hosts` to allow more"
        )
        _check_key(request, settings, closed)

    return check


def key_guard(admin: Callable[[], AdminSettings]) -> Check:
    """Let operators change something: with the admin key, wherever they are."""

    async def check(request: Request) -> None:
        _check_key(request, admin(), "closed; set `admin.api_key` to open this with `X-API-Key`")

    return check


def _check_key(request: Request, admin: AdminSettings, closed: str) -> None:
    if admin.api_key is None:
        raise ForbiddenError(closed)
    given = request.headers.get("x-api-key", "")
    if not secrets.compare_digest(given.encode(), admin.api_key.reveal().encode()):
        raise UnauthorizedError("`X-API-Key` is missing or wrong")


def _is_local(request: Request, admin: AdminSettings) -> bool:
    address = request.client.host if request.client else None
    hosts = request.headers.getlist("host")
    return is_local_client(address, request.headers, hosts, admin.local_hosts)
