"""A request that is handed over whole, and what the operator's own handler makes of it.

Rules:

1. The handler sees whatever it is: a body that is no JSON object (a form with audio, none at all) is shown
   as an empty one.
2. A changed body is read as if the client had sent it. A form can't be changed: that is a handler's fault.
"""

from dataclasses import dataclass, replace

from balancer.core.errors import BadRequestError
from balancer.core.fleet.model_lookup import find_model
from balancer.core.fleet.snapshot import Fleet
from balancer.core.handlers import Amend, Reply, SeenRequest, amended_headers, headers_as_text
from balancer.core.http.body import PiecedBody, whole
from balancer.core.http.engine_paths import EnginePath
from balancer.core.http.forwarded import ReadBody, read_body
from balancer.core.http.headers import Headers
from balancer.core.http.rewrite import decode_body, encode_body
from balancer.core.record import RequestRecord
from balancer.core.verdicts import UnusableVerdictError
from balancer.dataplane.handling import Handling

_JSON = b"application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """A request to hand over."""

    use: EnginePath
    method: str
    path: str
    query: str
    """With its question mark, or empty."""
    headers: Headers
    body: PiecedBody


async def judge_forwarded(
    handling: Handling, fleet: Fleet, request: Forwarded, read: ReadBody, record: RequestRecord
) -> tuple[Forwarded, ReadBody] | Reply:
    """What to go on with, or the answer. Raises BalancerError."""

    def amend(verdict: Amend) -> tuple[Forwarded, ReadBody]:
        amended = replace(request, headers=amended_headers(request.headers, verdict.headers))
        if verdict.body is None:
            return amended, read
        if not read.is_json:
            raise UnusableVerdictError("only a JSON body can be changed")
        body = PiecedBody((encode_body(verdict.body),))
        again = read_body(_JSON, body, generates=request.use.generates)
        return replace(amended, body=body), again

    shown = _seen(fleet, request, read, record)
    told = await handling.judge_forwarded(shown, amend)
    return (request, read) if told is None else told


def _seen(fleet: Fleet, request: Forwarded, read: ReadBody, record: RequestRecord) -> SeenRequest:
    model = base_model = ""
    adapter = None
    if read.model is not None:
        meant = find_model(fleet, read.model)
        model, base_model, adapter = meant.model, meant.base_model, meant.lora
        record.model, record.base_model = model, base_model
    try:
        body = decode_body(whole(read.body)).value if read.is_json else {}
    except BadRequestError:  # the engine will say what is wrong with it
        body = {}
    return SeenRequest(
        request_id=record.request_id,
        method=request.method,
        path=request.path,
        model=model,
        base_model=base_model,
        adapter=adapter,
        stream=read.stream,
        body=body,
        headers=headers_as_text(request.headers),
    )
