"""What was decided for one request, with its bookings."""

from types import TracebackType
from typing import Self

from balancer.core.load.ledger import LegGuard, LoadLedger
from balancer.core.routing.forecast import Forecast
from balancer.core.routing.plan import Choice, RoutePlan
from balancer.routing.question import Question


class Route:
    """A plan and its bookings. Use as a context manager that lives as long as the request."""

    def __init__(self, question: Question, plan: RoutePlan, ledger: LoadLedger) -> None:
        self.question = question
        self._ledger = ledger
        self.plan = plan
        self.prefill_attempts = 0
        self.prefill_guard: LegGuard | None = None
        if plan.prefill:
            self.hold_prefill(plan.prefill)
        kind = "decode" if plan.prefill else "whole"
        self.decode_guard: LegGuard = ledger.hold(question.leg(plan.decode, kind))

    def forecast(self, kind: str, *, loads: bool) -> Forecast | None:
        """What the index promised of the leg of that kind, as it is planned now; None: nothing.

        `loads`: it takes blocks of another engine, too.
        """
        prefill = self.plan.prefill
        choice = prefill if prefill is not None and kind == "prefill" else self.plan.decode
        is_after_transfer = loads or (prefill is not None and choice is self.plan.decode)
        return self.question.forecast(choice.candidate.rank, is_after_transfer=is_after_transfer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.decode_guard.__exit__(kind, error, traceback)
        if self.prefill_guard:
            self.prefill_guard.__exit__(kind, error, traceback)

    def prefill_cached(self, tokens: int | None) -> None:
        """What the prefill engine took from its cache; None: it didn't tell."""
        if self.prefill_guard is not None and tokens is not None:
            self.prefill_guard.cached(tokens)

    def end_prefill(self) -> None:
        """The prefill leg did its work: its rank is free, its blocks are expected to be there."""
        if self.prefill_guard is not None:
            self.prefill_guard.first_token()
            self.prefill_guard.__exit__(None, None, None)
        if self.plan.prefill is not None:
            self.decode_guard.handed_over(self.plan.prefill.candidate.rank)

    def drop_prefill(self, failed: BaseException) -> None:
        """Withdraw the prefill leg, which `failed` ended."""
        if self.prefill_guard:
            self.prefill_guard.__exit__(type(failed), failed, failed.__traceback__)

    def hold_prefill(self, choice: Choice) -> None:
        """Book one more attempt at a prefill leg."""
        self.prefill_attempts += 1
        self.prefill_guard = self._ledger.hold(self.question.leg(choice, "prefill"))


class UnreadRoute(Route):
    """Of a request whose prompt nobody has read: the index promised nothing."""

    def __init__(self, plan: RoutePlan, guard: LegGuard) -> None:
        self.plan = plan
        self.prefill_attempts = 0
        self.prefill_guard = None
        self.decode_guard = guard

    def forecast(self, kind: str, *, loads: bool) -> None:  # noqa: ARG002 - as of any route
        return None
