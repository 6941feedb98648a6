"""The routes that change something: membership of the fleet, and commands to its engines.

Closed unless an admin key is set, also to this machine: `X-API-Key` has to be that key.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from balancer.config import BalancerConfig
from balancer.core.errors import BadRequestError, BodyTooLargeError
from balancer.core.fleet.fan_out import COMMANDS, Command, overall_status
from balancer.core.fleet.roster import Member
from balancer.core.fleet.snapshot import Fleet
from balancer.core.fleet.view import unavailable_reason
from balancer.core.http.rewrite import decode_body
from balancer.core.settings.control import AdminSettings
from balancer.fleet.admin import FleetAdmin
from balancer.fleet.fan_out import FanOut
from balancer.fleet.members import Members
from balancer.guards import guard, key_guard
from indexer.core.types import InstanceId

MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSurface:
    """What the routes use."""

    members: Members[BalancerConfig]
    fleet_admin: FleetAdmin
    fan_out: FanOut
    fleet: Callable[[], Fleet]
    in_flight: Callable[[InstanceId], int]


def admin_routes(surface: AdminSurface, admin: Callable[[], AdminSettings]) -> APIRouter:
    """Build them."""
    routes = APIRouter(tags=["operator"])
    keyed = [Depends(key_guard(admin))]
    routes.add_api_route(
        "/instances",
        _listing(surface),
        methods=["GET"],
        dependencies=[Depends(guard(admin))],
        description=(
            "Every instance: where it is, who named it, whether it gets requests, what runs on it."
        ),
    )
    _add_membership(routes, surface, keyed)
    for command in COMMANDS.values():
        _add_command(routes, surface, command, keyed)
    return routes


def _listing(surface: AdminSurface) -> Callable[[], Awaitable[Response]]:
    async def list_instances() -> Response:
        present = surface.members.present
        shown = [_shown(surface, each) for each in present.members]
        leaving = [{"alias": each.name, "url": each.id} for each in present.leaving]
        return _json({"instances": shown, "leaving": leaving})

    return list_instances


def _add_membership(routes: APIRouter, surface: AdminSurface, keyed: list[Any]) -> None:
    @routes.post("/instances", dependencies=keyed, include_in_schema=False)
    @routes.post("/instances/add", dependencies=keyed, openapi_extra=_body(ADD_EXAMPLE))
    async def add_instance(request: Request) -> Response:
        """Take an instance in, once it has said which model it serves."""
        member = await surface.fleet_admin.add(await _read(request))
        told = f"Added {member.id} to the {member.settings.role.value} instances."
        return _json({"message": told, "instance": _shown(surface, member)})

    @routes.delete("/instances", dependencies=keyed, include_in_schema=False)
    @routes.post(
        "/instances/remove",
        dependencies=keyed,
        openapi_extra=_body(NAME_EXAMPLE),
        responses={202: {"description": "It leaves when it has finished."}},
    )
    async def remove_instance(request: Request) -> Response:
        """Let an instance go: nothing new at once, gone when nothing runs on it (`force`: at once)."""
        done = await surface.fleet_admin.remove(await _read_name(request))
        url = done.member.id
        told = f"{url} leaves when it has finished." if done.is_leaving else f"Removed {url}."
        shown = {"alias": done.member.settings.name, "url": url, "in_flight": done.running}
        return _json({"message": told, "instance": shown}, 202 if done.is_leaving else 200)

    @routes.post("/instances/drain", dependencies=keyed, openapi_extra=_body(NAME_EXAMPLE))
    async def drain_instance(request: Request) -> Response:
        """No new requests for an instance; what runs goes on."""
        member = await surface.fleet_admin.hold(await _read(request), drained=True)
        return _json({"message": f"Draining {member.id}.", "instance": _shown(surface, member)})

    @routes.post("/instances/undrain", dependencies=keyed, openapi_extra=_body(NAME_EXAMPLE))
    async def undrain_instance(request: Request) -> Response:
        """Requests again."""
        member = await surface.fleet_admin.hold(await _read(request), drained=False)
        return _json({"message": f"{member.id} is back.", "instance": _shown(surface, member)})


def _add_command(
    routes: APIRouter, surface: AdminSurface, command: Command, keyed: list[Any]
) -> None:
    async def tell(
        request: Request, instance: Annotated[list[str] | None, Query()] = None
    ) -> Response:
        body = await _read_raw(request)
        query = "&".join(
            part for part in request.url.query.split("&") if part.partition("=")[0] != "instance"
        )
        results = await surface.fan_out.tell(command, query, body, instance or [])
        shown = [result.shown() for result in results]
        return _json({"results": shown}, overall_status(results))

    routes.add_api_route(
        command.path,
        tell,
        methods=["POST"],
        dependencies=keyed,
        responses={502: {"description": "Not all of them did it; who didn't, and why."}},
        description=f"`{command.path}` on every engine, or on those named by `?instance=alias`.",
    )


def _shown(surface: AdminSurface, member: Member) -> Mapping[str, Any]:
    instance = surface.fleet().by_id(member.id)
    settings = member.settings
    return {
        "alias": settings.name,
        "url": member.id,
        "role": settings.role.value,
        "connector": settings.instance().connector,
        "origin": member.origin.value,
        "hold": member.hold.value if member.hold else None,
        "available": instance.is_available if instance else False,
        "reason": unavailable_reason(instance) if instance else "not_probed",
        "in_flight": surface.in_flight(member.id),
    }


async def _read_name(request: Request) -> Mapping[str, Any]:
    """A body, or as the EPD example has it `?url=` without one."""
    url = request.query_params.get("url")
    if url is not None and request.headers.get("content-length", "0") == "0":
        return {"url": url}
    return await _read(request)


async def _read(request: Request) -> Mapping[str, Any]:
    decoded = decode_body(await _read_raw(request))
    if not decoded.is_unicode:
        raise BadRequestError("the body holds half of a character (a lone surrogate)")
    return decoded.value


async def _read_raw(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


ADD_EXAMPLE = {"url": "http://10.0.0.3:8000", "role": "decode"}
NAME_EXAMPLE = {"url": "http://10.0.0.3:8000"}


def _body(example: Mapping[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
