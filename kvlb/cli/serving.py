"""Commands that serve: `up`, `indexer`, `balancer`."""

# ruff: noqa: PLC0415, PLR0913 - see `kvlb.cli`; and an option is an argument

from typing import Annotated

import typer

from kvlb.cli.options import (
    ConfigOption,
    HostOption,
    InstanceOption,
    PolicyOption,
    PortOption,
    RedisOption,
    WorkersOption,
)


def up(
    *,
    instance: InstanceOption = None,
    config: ConfigOption = None,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="FLEET", help="Start simulated engines with it, such as `2p2d`."),
    ] = None,
    policy: PolicyOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: Annotated[
        int | None, typer.Option(hidden=True, help="Of `kvlb balancer`; here it says why not.")
    ] = None,
) -> None:
    """Follow the engines' KV events and balance OpenAI requests over them, in one process.

    For example:

    - `kvlb up --simulate 2p2d`
    - `kvlb up --instance http://127.0.0.1:8000,events=tcp://127.0.0.1:5557 --port 9000`
    - `kvlb up --config kvlb.yaml --policy round_robin`
    """
    from kvlb.settings import Overrides
    from kvlb.up import up as run

    run(
        Overrides(
            instances=tuple(instance or ()), policy=policy, host=host, port=port, workers=workers
        ),
        config=config,
        simulate=simulate,
    )


def indexer(
    *,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    redis: RedisOption = None,
    host: Annotated[str | None, typer.Option(help="Address of the status server.")] = None,
    status_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its port; 8081 if not said.")
    ] = None,
) -> None:
    """Follow the engines' KV events and keep the index in Redis. One for a fleet.

    It takes no requests: `kvlb balancer` does, and reads the same Redis. Both are given the same
    file. Killed and started again, it goes on where it was. SIGHUP or a changed file changes the
    fleet while it runs.

    For example:

    - `kvlb indexer --config kvlb.yaml`
    - `kvlb indexer --redis redis://127.0.0.1:6379 --instance http://127.0.0.1:8000`
    """
    from kvlb.processes import indexer as run
    from kvlb.settings import Overrides

    run(
        Overrides(
            instances=tuple(instance or ()), redis_url=redis, host=host, status_port=status_port
        ),
        config=config,
    )


def balancer(
    *,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    redis: RedisOption = None,
    policy: PolicyOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
) -> None:
    """Balance OpenAI requests by the index that `kvlb indexer` keeps in Redis. As many as you like.

    Without Redis or indexer it goes on, by load alone. With --workers several processes answer on one
    port, as one balancer: they share load and figures, and one that dies is started again. SIGTERM finishes what runs; SIGHUP or a
    changed file changes fleet and routing while it runs.

    For example:

    - `kvlb balancer --config kvlb.yaml`
    - `kvlb balancer --redis redis://127.0.0.1:6379 --instance http://127.0.0.1:8000`
    - `kvlb balancer --config kvlb.yaml --workers 4`
    """
    from kvlb.processes import balancer as run
    from kvlb.settings import Overrides

    run(
        Overrides(
            instances=tuple(instance or ()),
            redis_url=redis,
            policy=policy,
            host=host,
            port=port,
            workers=workers,
        ),
        config=config,
    )
