"""Calls of tools to one engine: `kvlb doctor`, `kvlb record`. Failures are values of one error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from balancer.core.http.own_mark import BALANCER
from balancer.fleet.engine_sockets import UNTRUSTED, is_untrusted

_DATA = "data: "


class CallFailedError(Exception):
    """One call brought no answer; the text says why, without headers or addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status, text and decoded JSON; None where it is no JSON."""

    status: int
    body: Any
    text: str
    is_balancers: bool = False
    """It is a kvlb balancer's, not an engine's."""

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK

    def stream_payloads(self) -> list[str]:
        """What stands behind `data:` in a stream, `[DONE]` included."""
        lines = self.text.splitlines()
        return [line.removeprefix(_DATA) for line in lines if line.startswith(_DATA)]


class EngineHttp:
    """One engine's address, with its key."""

    def __init__(self, url: str, http: httpx.AsyncClient, key: str | None) -> None:
        self.url = url
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def get(self, path: str) -> Answer:
        """Raises CallFailedError."""
        return await self._call("GET", path, None, {})

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Raises CallFailedError."""
        return await self._call("POST", path, body, headers or {})

    async def read(self, path: str) -> Any:
        """JSON of a page; None if there is none, for whatever reason."""
        try:
            answer = await self.get(path)
        except CallFailedError:
            return None
        return answer.body if answer.is_ok else None

    async def tokenize(self, body: Mapping[str, Any]) -> Sequence[int] | None:
        """Ids that `/tokenize` makes of a body; None if it refuses."""
        try:
            answer = await self.post("/tokenize", body)
        except CallFailedError:
            return None
        tokens = answer.body.get("tokens") if isinstance(answer.body, Mapping) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return None
        return tokens

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> Answer:
        try:
            answer = await self._http.request(
                method, self.url + path, json=body, headers={**self._headers, **headers}
            )
        except httpx.TimeoutException as error:
            raise CallFailedError("no answer in time") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            if is_untrusted(error):
                raise CallFailedError(UNTRUSTED) from None
            # Its type alone: the text of some holds the headers, and so the key.
            raise CallFailedError(f"no connection ({type(error).__name__})") from None
        try:
            read = msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, RecursionError):
            read = None
        return Answer(
            status=answer.status_code,
            body=read,
            text=answer.text,
            is_balancers=BALANCER in answer.headers,
        )
