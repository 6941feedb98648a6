"""Reads what `/instances/...` is asked: vLLM's example proxies' bodies and our own.

Rules:

1. `{"type": "prefill", "instance": "host:port"}` says the same as `{"role": "prefill", "url":
   "http://host:port"}`. Host names and IPv6 in brackets are hosts like any other.
2. Every other key is one of an `instances:` entry of the file, checked in the same way; an error
   names it.
3. Of an instance that the file names, and that was removed, the request says what is to be
   different; the rest is as the file has it.
4. A variable of this process's environment can't be named from outside (`api_key_env`): who may add
   an instance could have any variable sent to an address of their own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from balancer.core.errors import BadRequestError
from balancer.core.fleet.snapshot import Role
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, decode_settings
from indexer.core.addresses import parse_instance_id
from indexer.core.types import InstanceId

_WITH_PORT = re.compile(r":[0-9]+\Z")
SYNONYMS = {"type": "role", "instance": "url", "dp_size": "ranks"}
"""The examples' keys, and ours."""
ROLES = {"prefill_decode": Role.MIXED.value, "pd": Role.MIXED.value}
"""Other words for a role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberName:
    """Which instance is meant."""

    id: InstanceId | None = None
    alias: str | None = None
    role: str | None = None
    """The examples say it too; None: any."""
    force: bool = False


def read_entry(body: Mapping[str, Any], entry_type: type[InstanceSettings]) -> InstanceSettings:
    """The instance to add. Raises BadRequestError."""
    values = _with_our_names(body)
    if "api_key_env" in values:
        raise BadRequestError(
            "`api_key_env` can't be set from outside: give `api_key`, or set `engine_api_key`",
            param="api_key_env",
        )
    if "url" not in values:
        raise BadRequestError("`url` (or `instance`) is missing", param="url")
    _refuse_no_text(values, "url")
    values["url"] = _with_scheme(values["url"])
    role = values.get("role")
    if isinstance(role, str):
        values["role"] = ROLES.get(role, role)
    try:
        return decode_settings(values, entry_type, where="")
    except ConfigError as error:
        raise BadRequestError(str(error)) from error


def amend_filed(
    filed: InstanceSettings, entry: InstanceSettings, body: Mapping[str, Any]
) -> InstanceSettings:
    """`filed` with what `body` says, which was read as `entry`. Raises BadRequestError.

    An alias made of the role, and settings of the connector, go with what they were for.
    """
    said = {key: getattr(entry, key) for key in _with_our_names(body) if key != "url"}
    try:
        if said.get("role", filed.role) is not filed.role:
            said.setdefault("alias", None)
        if "transfer" not in said:
            bare = msgspec.structs.replace(filed, **said, transfer={})
            is_same = bare.connector_name == filed.connector_name
            said["transfer"] = filed.transfer if is_same else {}
        return msgspec.structs.replace(filed, **said)
    except ValueError as error:
        raise BadRequestError(f"`{error}; the file says the rest of this instance") from error


def read_name(body: Mapping[str, Any]) -> MemberName:
    """Which instance to remove, drain or undrain. Raises BadRequestError."""
    values = _with_our_names(body)
    unknown = sorted(set(values) - {"url", "alias", "role", "force"})
    if unknown:
        raise BadRequestError(f"unknown key `{unknown[0]}`", param=unknown[0])
    for key in ("url", "alias", "role"):
        _refuse_no_text(values, key)
    if ("url" in values) is ("alias" in values):
        raise BadRequestError("name the instance by `url` (or `instance`), or by `alias`")
    force = values.get("force", False)
    if not isinstance(force, bool):
        raise BadRequestError("`force` must be true or false", param="force")
    role = values.get("role")
    return MemberName(
        id=_read_id(values["url"]) if "url" in values else None,
        alias=values.get("alias"),
        role=None if role is None else ROLES.get(role, role),
        force=force,
    )


def _with_our_names(body: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(body)
    for theirs, ours in SYNONYMS.items():
        if theirs in values:
            if ours in values:
                raise BadRequestError(f"`{theirs}` and `{ours}` say the same: give one")
            values[ours] = values.pop(theirs)
    return values


def _refuse_no_text(values: Mapping[str, Any], key: str) -> None:
    if key in values and not isinstance(values[key], str):
        raise BadRequestError(f"`{key}` must be text", param=key)


def _with_scheme(address: str) -> str:
    if "://" in address:
        return address
    if not _WITH_PORT.search(address):
        raise BadRequestError("write `host:port`", param="url")
    return f"http://{address}"


def _read_id(address: str) -> InstanceId:
    try:
        return parse_instance_id(_with_scheme(address))
    except ValueError as error:
        raise BadRequestError(f"`url`: {error}", param="url") from error
