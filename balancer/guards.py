"""Who may ask the balancer's own routes: this machine, or who has the admin key."""

import secrets
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from fastapi import Request

from balancer.core.control_settings import AdminSettings
from balancer.core.errors import ForbiddenError, UnauthorizedError

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")

Check = Callable[[Request], Awaitable[None]]


def guard(admin: Callable[[], AdminSettings]) -> Check:
    """Let operators look: on this machine, or with the admin key."""

    async def check(request: Request) -> None:
        if "x-api-key" not in request.headers and _is_local(request):
            return
        _check_key(request, admin(), "open on this machine only; set `admin.api_key` to allow more")

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


def _is_local(request: Request) -> bool:
    """Is the client itself on this machine? A proxy on this machine doesn't make it so."""
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    try:
        address = ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
