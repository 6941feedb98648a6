"""Tells engines what operators want of them, several at once, and notes what follows from it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from balancer.config import BalancerConfig
from balancer.core.control_errors import EngineCallError
from balancer.core.errors import MemberNotFoundError
from balancer.core.fleet.changes import ChangesUnavailableError
from balancer.core.fleet.fan_out import Command, CommandResult, shown_body
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.members import Members
from indexer.core.types import InstanceId

MAX_AT_ONCE = 32

_logger = structlog.stdlib.get_logger(__name__)

Instances = Sequence[InstanceId]


class FanOut:
    """One per balancer."""

    def __init__(
        self,
        *,
        fleet: Callable[[], Fleet],
        engines: EngineClient,
        members: Members[BalancerConfig],
        look_at: Callable[[Instances], None],
        on_cache_dropped: Callable[[Instances], Awaitable[None]],
        timeout_s: Callable[[], float],
    ) -> None:
        """`look_at` probes at once; `on_cache_dropped` ends the credit for what was cached."""
        self._fleet = fleet
        self._engines = engines
        self._members = members
        self._look_at = look_at
        self._on_cache_dropped = on_cache_dropped
        self._timeout_s = timeout_s

    async def tell(
        self, command: Command, query: str, body: bytes, aliases: Sequence[str]
    ) -> Sequence[CommandResult]:
        """Send `command` to the instances named, or to all. Raises MemberNotFoundError."""
        told = self._chosen(aliases)
        if command.sleeps:  # before, so that no request gets there on the way
            await self._note_sleep([each.id for each in told], asleep=True)
        target = f"{command.path}?{query}" if query else command.path
        at_once = asyncio.Semaphore(MAX_AT_ONCE)

        async def tell_one(instance: Instance) -> CommandResult:
            async with at_once:
                return await self._tell(instance, target, body)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(tell_one(each)) for each in told]
        results = [task.result() for task in tasks]
        did = [each.id for each, result in zip(told, results, strict=True) if result.is_ok]
        await self._note(command, [each.id for each in told], did)
        return results

    def _chosen(self, aliases: Sequence[str]) -> Sequence[Instance]:
        fleet = self._fleet().instances
        if not aliases:
            return fleet
        by_alias = {each.alias: each for each in fleet}
        for alias in aliases:
            if alias not in by_alias:
                raise MemberNotFoundError(f"no instance `{alias}` in the fleet", param="instance")
        return [by_alias[alias] for alias in dict.fromkeys(aliases)]

    async def _tell(self, instance: Instance, target: str, body: bytes) -> CommandResult:
        try:
            status, answer = await self._engines.command(
                instance.id, target, body, timeout_s=self._timeout_s()
            )
        except EngineCallError as error:
            return CommandResult(alias=instance.alias, status=None, body=error.reason)
        return CommandResult(alias=instance.alias, status=status, body=shown_body(answer))

    async def _note(self, command: Command, told: Instances, did: Instances) -> None:
        _logger.info("command_told", path=command.path, told=len(told), did=len(did))
        if command.sleeps:
            failed = [each for each in told if each not in set(did)]
            await self._note_sleep(failed, asleep=False)
        if command.wakes:
            await self._note_sleep(did, asleep=False)
        if command.drops_cache and did:
            await self._on_cache_dropped(did)
        if command.changes_models or command.wakes:
            self._look_at(did)

    async def _note_sleep(self, instances: Instances, *, asleep: bool) -> None:
        try:
            await (self._members.put_to_sleep if asleep else self._members.wake_up)(instances)
        except ChangesUnavailableError as error:
            _logger.warning("sleep_not_noted", error=str(error))
