"""Options that several commands take, and how their results are printed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from balancer.core.settings.routing import PolicyName


class Format(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


class TableFormat(StrEnum):
    """How `audit` prints its result."""

    TABLE = "table"
    JSON = "json"


class SimulatedConnector(StrEnum):
    """How simulated engines hand over KV cache."""

    NIXL = "nixl"
    NIXL_PUSH = "nixl_push"
    MOONCAKE = "mooncake"
    EXAMPLE = "example"
    LMCACHE = "lmcache"
    OFFLOADING = "offloading"


class SimulatedEncoderConnector(StrEnum):
    """How simulated encode engines hand over what they have encoded."""

    EXAMPLE = "example"
    CPU = "cpu"
    MOONCAKE = "mooncake"


FormatOption = Annotated[Format, typer.Option("--format", help="For people or for programs.")]
InstanceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL[,NAME=VALUE…]",
        help="An engine: `http://host:port`, then any of `events=tcp://…`, `replay=tcp://…`, "
        "`role=prefill|decode|mixed`, `alias=…`, `connector=NAME`, "
        "`transfer.KEY=VALUE`, `ranks=N`, `rank_base=N`. "
        "Repeatable.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A YAML file; see docs/configuration.md.")
]
PolicyOption = Annotated[
    PolicyName | None,
    typer.Option(
        help="How an instance is chosen; kvlb if not said. A class of your own: `routing.policy` in the file."
    ),
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes that answer on the port; 1 if not said."),
]
RedisOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis that holds the index: `redis://host:6379`, `rediss://…`, `unix:///path`. "
        "Its password goes into KVLB_REDIS_PASSWORD.",
    ),
]
SimulateArgument = Annotated[
    str,
    typer.Argument(
        metavar="FLEET",
        help="`2p2d`: two prefill and two decode instances; `4`: four mixed ones; `1e2m`: an "
        "encode instance for two mixed ones.",
    ),
]
