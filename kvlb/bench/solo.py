"""One virtual engine that is sent calls at fixed times; a run is resumed where its calls begin to differ.

Rules:

1. Calls come in order of time, and before whatever else happens at the same moment.
2. A checkpoint is the state before a call, and only earlier calls made it. So a run that has the same
   calls before it goes on from there, and comes to the same figures, to the last bit.
3. A run ends with the last first token: nothing behind it counts.

Cost: a checkpoint copies the engine, O(blocks); so does going on from one.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from kvlb.bench.calls import Call
from kvlb.bench.engine import Job, VirtualEngine
from simulator.core.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call, and when it is sent, in virtual seconds."""

    at_s: float
    call: Call


class Solo:
    """One engine by itself. It is its clock, too: of an engine's actions only the newest counts."""

    def __init__(self, settings: EngineSettings) -> None:
        self.now_s = 0.0
        self.firsts_s: list[float] = []
        """When first tokens came, in order."""
        self.uncached_tokens = 0
        """Of prompts with a first token."""
        self._when_s = 0.0
        self._action: Callable[[], None] | None = None
        self._engine = VirtualEngine(settings, self, _ignore)

    def copy(self) -> "Solo":
        """Another one in the same state, which goes on by itself."""
        twin = copy(self)
        twin.firsts_s = self.firsts_s.copy()
        vars(twin)["_action"] = None  # the copied engine asks for its own
        twins: dict[int, Job] = {}

        def twin_of(job: Job) -> Job:
            made = twins.get(id(job))
            if made is None:
                made = twins[id(job)] = job.copy()
                made.on_first = twin.on_first
            return made

        vars(twin)["_engine"] = self._engine.copy(twin, twin_of)
        return twin

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`, in place of what was to be run."""
        self._when_s, self._action = when_s, action

    def send(self, arrival: Arrival) -> None:
        """Go on until a call comes, and submit it."""
        while self._action is not None and self._when_s < arrival.at_s:
            self._act()
        self.now_s = arrival.at_s
        call = arrival.call
        self._engine.submit(
            Job(
                keys=call.keys,
                prompt_tokens=call.prompt.tokens,
                output_tokens=call.output_tokens,
                on_first=self.on_first,
                on_end=_ignore,
            )
        )

    def finish(self, calls: int) -> None:
        """Go on until each of so many calls has its first token."""
        while len(self.firsts_s) < calls:
            self._act()

    def on_first(self, job: Job) -> None:
        """Note a first token."""
        self.firsts_s.append(self.now_s)
        self.uncached_tokens += job.prompt_tokens - (job.cached_tokens or 0)

    def _act(self) -> None:
        action, self._action = self._action, None
        assert action is not None  # noqa: S101 - an engine with calls goes on
        self.now_s = self._when_s
        action()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state before arrival `number`, which is never run itself."""

    number: int
    solo: Solo


@dataclass(frozen=True, slots=True)
class Served:
    """One engine's run."""

    uncached_tokens: int
    ttft_s: float
    """Added up over its calls."""
    checkpoints: Sequence[Checkpoint] = ()

    def before(self, number: int) -> Sequence[Checkpoint]:
        """Those that a change of arrival `number` leaves as they are."""
        return [each for each in self.checkpoints if each.number <= number]


def serve(
    settings: EngineSettings,
    arrivals: Sequence[Arrival],
    numbers: Sequence[int],
    *,
    every: int,
    checkpoints: Sequence[Checkpoint] = (),
) -> Served:
    """Run one engine with those of `arrivals` that have `numbers`, which go up.

    `every`: arrivals between checkpoints. `checkpoints`: of a run with the same calls before the last one.
    """
    made = [*checkpoints]
    begin, solo = (made[-1].number, made[-1].solo.copy()) if made else (0, Solo(settings))
    for number in numbers:
        if number < begin:
            continue
        if number >= (made[-1].number if made else 0) + every:
            made.append(Checkpoint(number, solo.copy()))
        solo.send(arrivals[number])
    solo.finish(len(numbers))
    # In the order of a run from the start: sums of floats depend on it.
    ttft_s = 0.0
    for number in numbers:
        ttft_s -= arrivals[number].at_s
    for first_s in solo.firsts_s:
        ttft_s += first_s
    return Served(solo.uncached_tokens, ttft_s, made)


def _ignore(_: object) -> None:
    pass
