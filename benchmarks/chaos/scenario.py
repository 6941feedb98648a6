"""How one run is set up: the seed decides everything. Pure.

Limits are short, so that a run is: what a fleet meets in an hour happens within a minute. An engine
hangs for up to 7 s; that is longer than the limits of silence, shorter than the leases. (An engine
that hangs for longer than the other's lease reads blocks that are somebody else's by then, as soon
as it goes on: nothing outside of it can help that, and its client has long been answered.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.core.settings import ConnectorName, EngineSettings
from simulator.service import RunningEngine

FLEET = "4p4d"
CONNECTORS: tuple[ConnectorName, ...] = ("nixl", "mooncake", "nixl_push", "example")
LEASE_S = 9.0
_FIXED_LEASES_S: Mapping[ConnectorName, float] = {"moriio": 60.0, "offloading": 60.0}
DEADLINE_S = 30.0
"""Every limit of a request in a row: see `settings`."""
_LIMITS = {
    "connect_timeout_s": 2.0,
    "first_byte_timeout_s": 5.0,
    "idle_timeout_s": 5.0,
}
_PATIENT = {"retries": 6}
_PREFILL_ATTEMPTS = {"prefill_attempts": 4}
_RELIABILITY = {"retry_share": 1.0, "least_retries": 1000}
"""Something befalls an engine every 0.7 s: the usual budget of retries is for calmer times."""
_PROBES = {"interval_s": 0.5, "timeout_s": 2.0, "unhealthy_after": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    seed: int
    requests: int
    rate_per_s: float
    connector: ConnectorName
    always_remote: bool
    """Every prompt takes a prefill leg, as long as somebody runs it."""
    stands_in: bool
    """A decode engine may prefill if the prefill engines fail."""
    is_usual: bool = False
    """As many retries as kvlb makes unless told otherwise."""

    @classmethod
    def of(
        cls,
        seed: int,
        *,
        requests: int,
        rate_per_s: float,
        connector: ConnectorName | None,
        is_usual: bool = False,
    ) -> "Scenario":
        """Over four seeds each connector has its turn, and over eight both ways of each."""
        turn = seed // len(CONNECTORS)
        return cls(
            seed=seed,
            requests=requests,
            rate_per_s=rate_per_s,
            connector=connector or CONNECTORS[seed % len(CONNECTORS)],
            always_remote=(seed + turn) % 2 == 0,
            stands_in=turn % 2 == 0,
            is_usual=is_usual,
        )

    @property
    def duration_s(self) -> float:
        return self.requests / self.rate_per_s

    @property
    def lease_s(self) -> float:
        """How long an engine keeps what nobody fetches; some connectors know one time only."""
        return _FIXED_LEASES_S.get(self.connector, LEASE_S)

    def engine(self) -> EngineSettings:
        """What every engine is started with."""
        return EngineSettings(
            kv_connector=self.connector,
            version="0.23.0" if self.connector == "p2p_nccl" else "0.33.0",
            randomizes_ids=self.connector != "p2p_nccl",
            prefill_tokens_per_s=20_000.0,
            inter_token_ms=15.0,
            num_blocks=2048,
            kv_lease_s=LEASE_S,
            transfer_abort_s=LEASE_S,
        )

    def settings(self, engines: Sequence[RunningEngine]) -> dict[str, Any]:
        """The balancer's file."""
        return {
            "instances": [self._entry(each) for each in engines],
            "dataplane": _LIMITS if self.is_usual else _LIMITS | _PATIENT,
            "probes": _PROBES,
            "reliability": {} if self.is_usual else _RELIABILITY,
            "tokens": {"deadline_s": 0.3},
            "pd": {
                "force": "remote" if self.always_remote else "auto",
                "local_prefill_max_tokens": 128,
                "allow_local_on_failure": self.stands_in,
                **({} if self.is_usual else _PREFILL_ATTEMPTS),
            },
        }

    def _entry(self, engine: RunningEngine) -> dict[str, Any]:
        return {
            "url": engine.url,
            "alias": engine.name,
            "role": engine.role,
            "connector": self.connector,
            "transfer": self._transfer(engine),
        }

    def _transfer(self, engine: RunningEngine) -> dict[str, Any]:
        """What the operator has to say of an engine's side of transfers."""
        match self.connector:
            case "nixl":
                return {"lease_s": LEASE_S * 0.8}
            case "mooncake":
                return {"bootstrap_port": engine.bootstrap_port}
            case "moriio" | "p2p_nccl":
                return {"zmq_address": engine.zmq_address}
            case "offloading":
                return {"p2p_host": "127.0.0.1", "p2p_port": engine.side_port}
            case _:
                return {}

    def needed(self, roles: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """The roles without which nobody is served."""
        kept = ("decode",) if self.stands_in else ("decode", "prefill")
        return {role: roles[role] for role in kept}
