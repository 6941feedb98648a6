"""A simulated rank's scheduler in virtual time."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import (
    BlockRemoved,
    BlockStored,
    EngineRequest,
    KvEvent,
    StepResult,
    TokenOutput,
)

SETTINGS = EngineSettings(
    block_size=4,
    num_blocks=101,
    max_num_batched_tokens=64,
    prefill_tokens_per_s=1000.0,
    inter_token_ms=10.0,
)


class Bench:
    """A core with a clock that follows its steps."""

    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self.now_s = 0.0
        self.events: list[KvEvent] = []
        self.outputs: list[TokenOutput] = []
        self.core = EngineCore(
            settings,
            none_hash=b"seed",
            channel=SideChannel(engine_id="engine", host="host", port=1),
            directory=TransferDirectory(),
        )

    def add(self, request_id: str, prompt: Sequence[int], **changes: Any) -> None:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampler": FixedTokens(range(1000, 2000)),
            "max_tokens": 1,
        }
        self.core.add(EngineRequest(**(fields | changes)), self.now_s)

    def step(self) -> StepResult:
        result = self.core.step(self.now_s)
        self.now_s += result.duration_s
        self.events.extend(result.events)
        self.outputs.extend(result.outputs)
        return result

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def ask(self, request_id: str, prompt: Sequence[int], **changes: Any) -> TokenOutput:
        """Run one request to its end and return its last output."""
        self.add(request_id, prompt, **changes)
        self.run()
        return self.outputs[-1]

    def stored(self) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored)]

    def removed(self) -> list[BlockRemoved]:
        return [event for event in self.events if isinstance(event, BlockRemoved)]


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    """A core that has done nothing yet."""
    return Bench


@pytest.fixture(scope="session")
def change() -> Callable[..., EngineSettings]:
    """The usual settings, but for these."""

    def settings(**changes: Any) -> EngineSettings:
        return msgspec.structs.replace(SETTINGS, **changes)

    return settings
