"""The ports of a simulated fleet: chosen once, bound anew with every life of an engine."""

import random
import socket
from dataclasses import dataclass

from simulator.core.errors import SettingsError
from simulator.core.settings import EngineSettings

_PORT_ATTEMPTS = 100
_PORT_RANGE = (15_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of one engine, kept over restarts; a rank adds its number to all but two."""

    http: int
    events: int
    replay: int
    side_channel: int
    bootstrap: int

    def replay_of(self, settings: EngineSettings) -> int:
        """Where the first rank replays."""
        distance = settings.replay_distance
        return self.replay if distance is None else self.events + distance


def choose_ports(settings: EngineSettings, base_port: int, index: int, engines: int) -> Ports:
    """Count up from the base port: HTTP, events, replay, side channels, bootstrap servers."""
    ranks = settings.dp_size
    events = base_port + engines + index * ranks
    return Ports(
        http=base_port + index,
        events=events,
        replay=events + engines * ranks,
        side_channel=events + 2 * engines * ranks,
        bootstrap=base_port + engines * (1 + 3 * ranks) + index,
    )


def find_free_ports(host: str, count: int, randomness: random.Random) -> int:
    """Return the first of `count` neighbouring ports that are free at this moment."""
    for _ in range(_PORT_ATTEMPTS):
        # Below the range from which the system takes ports for outgoing connections: between
        # this look and the bind, or while an engine is stopped, nobody else gets them by chance.
        first = randomness.randrange(*_PORT_RANGE)
        if all(_is_free(host, first + offset) for offset in range(count)):
            return first
    raise SettingsError(f"no {count} neighbouring free ports on {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket for a server of asyncio's."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; asyncio doesn't set it on those of a listener like this one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
