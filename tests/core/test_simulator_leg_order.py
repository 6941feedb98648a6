"""A decode rank gets blocks only when they have been computed, whenever its leg comes: in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.handover import Side, read_handover
from simulator.core.settings import ConnectorName, EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import EngineRequest, TokenOutput

BOOTSTRAP = "http://p:8998"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
COMES = {"do_remote_prefill": True, "do_remote_decode": False}
DECODE_ZMQ = {"remote_host": "d", "remote_handshake_port": 1, "remote_notify_port": 1}
PREFILL_ZMQ = {"remote_host": "p", "remote_handshake_port": 1, "remote_notify_port": 1}
NAMED = "___prefill_addr_p:1___decode_addr_d:1_" + 32 * "0"
PROMPT = list(range(600))
POLL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Legs:
    """What both legs are told by a connector whose legs may run at once."""

    connector: ConnectorName
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ids: str = "r-0"


AT_ONCE = {
    "mooncake": Legs(
        connector="mooncake",
        prefill={**KEEP, "transfer_id": "x"},
        decode={
            **COMES,
            "transfer_id": "x",
            "remote_engine_id": "p",
            "remote_bootstrap_addr": BOOTSTRAP,
        },
    ),
    "nixl_push": Legs(
        connector="nixl_push",
        prefill=KEEP,
        decode={
            **COMES,
            "remote_engine_id": "p",
            "remote_host": "p",
            "remote_port": 1,
            "tp_size": 1,
        },
    ),
    "moriio": Legs(
        connector="moriio",
        prefill={**KEEP, **DECODE_ZMQ, "transfer_id": "x"},
        decode={**COMES, **PREFILL_ZMQ, "transfer_id": "x"},
    ),
    "p2p_nccl": Legs(
        connector="p2p_nccl", ids=NAMED, settings={"version": "0.23.0", "randomizes_ids": False}
    ),
    "offloading": Legs(
        connector="offloading",
        prefill={"remote_decoder": {"kv_request_id": "x"}},
        decode={"remote_prefiller": {"remote_host": "p", "remote_port": 1, "kv_request_id": "x"}},
    ),
}


class Stage:
    """A prefill and a decode rank that step as they come, on one clock."""

    def __init__(self, legs: Legs, **changes: Any) -> None:
        self.legs = legs
        speeds = {"prefill_tokens_per_s": 1000.0, "transfer_tokens_per_s": 1e5, "num_blocks": 400}
        fields: dict[str, Any] = {**speeds, "inter_token_ms": 10.0, "max_num_batched_tokens": 256}
        self.settings = EngineSettings(
            kv_connector=legs.connector, **(fields | legs.settings | changes)
        )
        self.directory = TransferDirectory()
        self.cores = {name: self._create(name) for name in "pd"}
        self.directory.register(BOOTSTRAP, "p")
        self.outputs: dict[str, list[tuple[float, TokenOutput]]] = {"p": [], "d": []}

    def _channel(self, name: str) -> SideChannel:
        return SideChannel(engine_id=name, host=name, port=1)

    def _create(self, name: str) -> EngineCore:
        channel = self._channel(name)
        core = EngineCore(
            self.settings, none_hash=b"seed", channel=channel, directory=self.directory
        )
        self.directory.enter(name, core.reservations)
        return core

    def ask(self, name: str, params: Any, now_s: float) -> None:
        channel = self._channel(name)
        side = Side(
            settings=self.settings, channel=channel, directory=self.directory, decodes=name == "d"
        )
        # As an engine does it: the client's id and a random end.
        request_id = f"{self.legs.ids}-0123456{name}"
        handover = read_handover(side, request_id, params)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            sampler=FixedTokens(range(1000, 1100)),
            max_tokens=1 if name == "p" else 2,
            keep=handover.keep,
            remote=handover.remote,
        )
        self.cores[name].add(request, now_s)

    def play(self, at: dict[float, Callable[[float], None]]) -> None:
        """Run both ranks and what is planned for certain times until all is done."""
        todo = sorted(at.items(), key=lambda each: each[0])
        next_s = dict.fromkeys(self.cores, 0.0)
        now_s = 0.0
        while todo or any(core.has_work for core in self.cores.values()):
            assert now_s < 60
            while todo and todo[0][0] <= now_s:
                todo.pop(0)[1](now_s)
            for name, core in self.cores.items():
                if next_s[name] <= now_s and core.has_work:
                    next_s[name] = self.step(name, now_s)
            times = [todo[0][0]] if todo else []
            times += [max(each, now_s + POLL_S / 8) for each in next_s.values() if each > now_s]
            now_s = min(times, default=now_s + POLL_S)

    def step(self, name: str, now_s: float) -> float:
        result = self.cores[name].step(now_s)
        end_s = now_s + result.duration_s
        self.outputs[name] += [(end_s, output) for output in result.outputs]
        return end_s if result.scheduled_tokens else now_s + POLL_S

    def ended_s(self) -> float:
        """When the prefill leg's only token was there."""
        ((end_s, output),) = self.outputs["p"]
        assert output.finish_reason == "length"
        return end_s

    def loaded_tokens(self) -> int:
        return self.cores["d"].statistics.external_cache_hits_tokens


every_connector = pytest.mark.parametrize("legs", list(AT_ONCE.values()), ids=list(AT_ONCE))


@every_connector
@given(decode_s=st.floats(0, 2, allow_nan=False), prefill_s=st.floats(0, 1, allow_nan=False))
def test_no_token_comes_before_the_prefill_has_ended(
    decode_s: float, prefill_s: float, legs: Legs
) -> None:
    """Whichever leg comes first, and wherever in a step of the other the second one comes."""
    stage = Stage(legs)
    stage.play(
        {
            prefill_s: lambda now_s: stage.ask("p", legs.prefill, now_s),
            decode_s + 1e-6: lambda now_s: stage.ask("d", legs.decode, now_s),
        }
    )

    first_s, first = stage.outputs["d"][0]
    assert (first.token_id, stage.loaded_tokens()) == (1000, len(PROMPT) - 1)
    assert first_s > stage.ended_s() + stage.settings.transfer_latency_ms / 1000


@every_connector
def test_a_last_step_that_is_never_ended_gives_nothing(legs: Legs) -> None:
    """The prefill engine dies in it: a decode leg that waited fails or waits on, it says nothing."""
    stage = Stage(legs)
    stage.ask("p", legs.prefill, 0.0)
    stage.ask("d", legs.decode, 0.0)
    prefill, decode = stage.cores["p"], stage.cores["d"]
    now_s = begun_s = 0.0
    while prefill.has_work:  # after the last step was scheduled there is none
        begun_s, now_s = now_s, now_s + prefill.step(now_s).duration_s
    decode.step((begun_s + now_s) / 2)
    stage.directory.leave("p")
    outputs = [output for _ in range(100) for output in decode.step(now_s + 1).outputs]

    assert [output.finish_reason for output in outputs] in ([], ["error"])


@pytest.mark.parametrize("connector", ["nixl", "moriio"])
def test_a_reading_decode_leg_starts_with_what_the_prefill_leg_answered(
    connector: ConnectorName,
) -> None:
    """It can't come before."""
    settings = {"reads": True} if connector == "moriio" else {}
    stage = Stage(Legs(connector=connector, settings=settings))
    params = KEEP if connector == "nixl" else {**KEEP, **DECODE_ZMQ}
    stage.play({0.0: lambda now_s: stage.ask("p", params, now_s)})
    answered = stage.outputs["p"][0][1].transfer_params
    end_s = stage.ended_s()
    # However early the answer got out.
    stage.ask("d", answered, end_s - 0.02)
    now_s = end_s - 0.02
    while stage.cores["d"].has_work:
        now_s = stage.step("d", now_s)

    first_s, first = stage.outputs["d"][0]
    assert (first.token_id, stage.loaded_tokens()) == (1000, len(PROMPT) - 1)
    assert first_s > end_s


@pytest.mark.parametrize("connector", ["example", "lmcache"])
@pytest.mark.parametrize(("late_s", "finds"), [(-0.001, False), (0.0, True)])
def test_a_storage_has_a_prompt_when_it_has_been_computed(
    connector: ConnectorName, late_s: float, finds: bool
) -> None:
    """Who looks a moment before computes it."""
    stage = Stage(Legs(connector=connector))
    stage.play({0.0: lambda now_s: stage.ask("p", {}, now_s)})
    now_s = stage.ended_s() + late_s
    stage.ask("d", {}, now_s)
    while stage.cores["d"].has_work:
        now_s = stage.step("d", now_s)

    assert bool(stage.loaded_tokens()) is finds
    assert stage.outputs["d"][0][1].token_id == 1000


def test_what_a_peer_is_computing_is_read_when_it_has_it() -> None:
    """A probe finds blocks of the present step; the read waits for its end."""
    stage = Stage(Legs(connector="offloading"))
    source = {"remote_host": "p", "remote_port": 1, "kv_request_id": "x"}
    stage.ask("p", {}, 0.0)
    end_s = stage.step("p", 0.0)
    stage.ask("d", {"remote_kv_source": source}, end_s / 2)
    decode, now_s = stage.cores["d"], end_s / 2
    while not stage.loaded_tokens():
        now_s = stage.step("d", now_s)

    assert stage.loaded_tokens() == 256
    assert now_s > end_s
    assert decode.statistics.failed_loads == 0
