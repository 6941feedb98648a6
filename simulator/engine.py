"""One life of one simulated engine: its ranks, its models, its ids. Restarting makes a new one."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from simulator.core.engine import EngineCore
from simulator.core.errors import OverloadedError, RequestRefusedError, UnknownModelError
from simulator.core.event_faults import EventFaults
from simulator.core.handover import Handover, Side, read_handover
from simulator.core.history import FleetHistory
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import RemotePrefill
from simulator.encoder import Encoder, EncoderDirectory
from simulator.misfortunes import Misfortunes
from simulator.publisher import EventPublisher
from simulator.rank import EngineRank

_FIRST_RELEASE_WITH_FIXED_SEED = (0, 29, 0)
_FIRST_RELEASE_TELLING_PEERS = (0, 21, 0)
_FIRST_RELEASE_HASHING_ADAPTER_NAMES = (0, 11, 1)
_FIRST_RELEASE_HASHING_ADAPTER_PATHS = (0, 31, 0)
_REMEMBERED_REQUESTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an engine shares with others of its process."""

    host: str
    directory: TransferDirectory
    context: zmq.asyncio.Context
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    randomness: random.Random
    history: FleetHistory = field(default_factory=FleetHistory)
    encodings: EncoderDirectory = field(default_factory=EncoderDirectory)
    misfortunes: Misfortunes = field(default_factory=Misfortunes)

    @property
    def dialable_host(self) -> str:
        """A host to show: "every interface" is no address to connect to."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104 - recognised


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where an engine's other halves are found."""

    name: str = ""
    """By which the fleet's history knows it."""
    side_port: int
    """Of the first rank; no socket is behind it."""
    bootstrap_url: str
    prefills: bool = False
    """It only computes for others."""
    decodes: bool = False
    """It only consumes what others compute (`kv_role`)."""
    encodes: bool = False
    """It runs the encoder for others and nothing else (`ec_role`)."""
    ec_address: str = ""
    """Where others read what it has encoded."""
    ec_zmq_addrs: tuple[str, ...] = ()
    """Where each of its ranks gets what others push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """What came in, for tests to look at."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights that are loaded."""

    id: int
    path: str


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer of the Responses API, and the conversation up to it."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class SimulatedEngine:
    """The state behind one HTTP port."""

    def __init__(
        self, settings: EngineSettings, surroundings: Surroundings, places: Places
    ) -> None:
        self.settings = settings
        self.places = places
        self.engine_id = f"{surroundings.randomness.getrandbits(128):032x}"
        """Without the end that tells its ranks apart."""
        self.wall_clock = surroundings.wall_clock
        self.clock = surroundings.clock
        self.history = surroundings.history
        self.misfortunes = surroundings.misfortunes
        self.received: deque[ReceivedRequest] = deque(maxlen=_REMEMBERED_REQUESTS)
        self.responses: dict[str, KeptResponse] = {}
        """By id. Never dropped, as in vLLM."""
        self.rejected_requests = 0
        self.is_draining = False
        """/health says 503; requests are served as ever."""
        self._directory = surroundings.directory
        self._random = surroundings.randomness
        self._engine_ids: list[str] = []
        self._sides: list[Side] = []
        self._next_adapter_id = 1
        self.adapters: dict[str, Adapter] = {}
        for name in settings.adapters:
            self.load_adapter(name, f"/adapters/{name}")
        self.ranks = [self._create_rank(rank, surroundings) for rank in range(settings.dp_size)]
        self.encoder = Encoder(
            settings,
            surroundings.encodings,
            encodes=places.encodes,
            address=places.ec_address,
            receives_at=places.ec_zmq_addrs,
        )

    def _create_rank(self, rank: int, surroundings: Surroundings) -> EngineRank:
        settings = self.settings
        engine_id = f"{self.engine_id}_dp{rank}" if settings.dp_size > 1 else self.engine_id
        self._engine_ids.append(engine_id)
        channel = SideChannel(
            engine_id=engine_id,
            host=settings.side_channel_host or surroundings.dialable_host,
            port=self.places.side_port + rank,
            rank=rank,
        )
        core = EngineCore(
            settings,
            none_hash=self._none_hash(),
            channel=channel,
            directory=surroundings.directory,
        )
        self._sides.append(
            Side(
                settings=settings,
                channel=channel,
                directory=self._directory,
                decodes=self.places.decodes,
            )
        )
        if settings.side_channel_host in {None, surroundings.dialable_host}:
            surroundings.directory.enter(engine_id, core.reservations)
        surroundings.directory.register(self.places.bootstrap_url, engine_id)
        publisher = EventPublisher(
            settings, rank=rank, context=surroundings.context, wall_clock=surroundings.wall_clock
        )
        return EngineRank(core, publisher, surroundings.clock)

    def _none_hash(self) -> bytes:
        """The parent of every first block: random per process up to 0.28 and with xxhash, unless fixed."""
        if self.settings.hash_seed is not None:
            return self.settings.hash_seed.encode()
        is_fixed = self.settings.release >= _FIRST_RELEASE_WITH_FIXED_SEED
        if is_fixed and self.settings.hash_algorithm == "sha256":
            return b"vllm-none-hash"
        return self.random_hex(32).encode()

    def random_hex(self, digits: int) -> str:
        return f"{self._random.getrandbits(4 * digits):0{digits}x}"

    def set_event_faults(self, faults: EventFaults) -> None:
        """What goes wrong with the events of every rank from now on."""
        for rank in self.ranks:
            rank.publisher.faults = faults

    def reset_prefix_cache(self) -> bool:
        """Forget every rank's cache unless it is in use; told with the next step."""
        results = [rank.core.reset_prefix_cache() for rank in self.ranks]
        return all(results)

    def sleep(self) -> None:
        """Compute nothing until woken, and forget what is cached: a GPU given away."""
        self.reset_prefix_cache()
        for rank in self.ranks:
            rank.is_asleep = True

    def wake_up(self) -> None:
        for rank in self.ranks:
            rank.is_asleep = False

    @property
    def is_asleep(self) -> bool:
        return any(rank.is_asleep for rank in self.ranks)

    def load_adapter(self, name: str, path: str) -> None:
        """Load weights under a name. Ids rise; in place of loaded ones they keep theirs."""
        known = self.adapters.get(name)
        if known is None:
            known = Adapter(self._next_adapter_id, path)
            self._next_adapter_id += 1
        self.adapters[name] = Adapter(known.id, path)

    def hashed_of_adapter(self, name: str | None) -> str | None:
        """What block hashes know of an adapter beside its name.

        Its path from 0.31 on, its id up to 0.11.0, nothing in between.
        """
        adapter = None if name is None else self.adapters.get(name)
        if adapter is None:
            return None
        release = self.settings.release
        if release >= _FIRST_RELEASE_HASHING_ADAPTER_PATHS:
            return adapter.path
        return str(adapter.id) if release < _FIRST_RELEASE_HASHING_ADAPTER_NAMES else None

    def unload_adapter(self, name: str) -> None:
        """Forget the name. What its requests left in the cache stays there."""
        if self.adapters.pop(name, None) is None:
            raise UnknownModelError(
                f"The lora adapter '{name}' cannot be found.", param="lora_name"
            )

    def find_adapter(self, model: str | None) -> tuple[str, str | None, int | None]:
        """Return the served name, the adapter and its id for a requested model."""
        settings = self.settings
        if not model or model == settings.model:
            return settings.model, None, None
        if model in self.adapters:
            return model, model, self.adapters[model].id
        raise UnknownModelError(f"The model `{model}` does not exist.", param="model")

    def pick_rank(self, header: str | None) -> EngineRank:
        """Return the rank a request is pinned to, else the least loaded."""
        if header is not None and header.strip().lstrip("-").isdecimal():
            wanted, ranks = int(header), len(self.ranks)
            if not 0 <= wanted < ranks:
                raise RequestRefusedError(
                    f"data_parallel_rank {wanted} is out of range [0, {ranks})."
                )
            return self.ranks[wanted]
        return min(self.ranks, key=lambda rank: rank.in_flight)

    def check_room(self, sequences: int) -> None:
        """Refuse what would exceed the queue limit."""
        limit = self.settings.max_queued_requests
        if limit is None:
            return
        in_flight = sum(rank.in_flight for rank in self.ranks)
        if in_flight + sequences > limit:
            self.rejected_requests += 1
            raise OverloadedError(
                f"The server is overloaded: {in_flight} requests are in flight, at most {limit} "
                "are accepted. Please retry later."
            )

    @property
    def engine_ids(self) -> list[str]:
        """Of the KV engines of its ranks, in their order."""
        return list(self._engine_ids)

    def read_handover(
        self, rank: EngineRank, request_id: str, params: Mapping[str, Any] | None
    ) -> Handover:
        """What a request's parameters mean on the rank that runs it."""
        return read_handover(self._sides[self.ranks.index(rank)], request_id, params)

    def decline_transfer(self, remote: RemotePrefill | None) -> None:
        """A request with blocks elsewhere was refused: from 0.21 on the other engine is told."""
        if remote is None or self.settings.release < _FIRST_RELEASE_TELLING_PEERS:
            return
        peer = self._directory.find(remote.engine_id)
        if peer is not None:
            peer.release(remote)

    def close(self) -> None:
        """End this life: leave the directories and free the event ports."""
        self.encoder.close()
        for engine_id in self._engine_ids:
            self._directory.leave(engine_id)
        for rank in self.ranks:
            rank.publisher.close()
