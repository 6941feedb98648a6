"""One leg to one instance: the engine's key, and word to the fleet's keeper of how it went."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from balancer.connection import UpstreamAnswer
from balancer.core.errors import EngineError, EngineRefusedError
from balancer.core.fleet import Instance
from balancer.core.http_headers import Headers, drop_header
from balancer.upstream import Upstream
from indexer.core.types import InstanceId

ReportHealth = Callable[[InstanceId, bool, str | None], None]
EngineKey = Callable[[InstanceId], str | None]


class LegSender:
    """Sends one leg to one instance, with the headers it needs."""

    def __init__(
        self, *, upstream: Upstream, engine_key: EngineKey, report_health: ReportHealth
    ) -> None:
        self._upstream = upstream
        self.engine_key = engine_key
        self.report_health = report_health

    async def send(
        self, instance: Instance, method: str, target: str, headers: Headers, body: bytes
    ) -> UpstreamAnswer:
        """Send with the instance's own key, if it has one, in place of the client's."""
        key = self.engine_key(instance.id)
        if key is not None:
            bearer = b"Bearer " + key.encode()
            headers = (*drop_header(headers, b"authorization"), (b"authorization", bearer))
        return await self._upstream.send(instance.id, method, target, headers, body)

    @contextmanager
    def told(self, instance: Instance) -> Iterator[None]:
        """Tell the fleet's keeper how the leg went."""
        try:
            yield
        except EngineRefusedError:
            self.report_health(instance.id, True, None)
            raise
        except EngineError as error:
            self.report_health(instance.id, False, error.code)
            raise
        self.report_health(instance.id, True, None)
