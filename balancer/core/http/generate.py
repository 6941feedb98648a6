"""From a chat or completions body to a `GenerateRequest`: checked, cleaned, its model looked up.

Rules:

1. Errors name the field and never quote the body; what only engines can judge is left to them.
2. What a client must not set is gone from `body` and `raw_body` alike.
"""

from balancer.core.fleet.model_lookup import find_model
from balancer.core.fleet.snapshot import Fleet
from balancer.core.http.forbidden import CONVERSATION, without_forbidden
from balancer.core.http.headers import Headers
from balancer.core.http.ids_body import read_ids_body
from balancer.core.http.rewrite import (
    check_generate_body,
    decode_body,
    encode_body,
)
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.request import Endpoint, GenerateRequest

_COMPLETIONS = Endpoint.COMPLETIONS


def read_generate(
    endpoint: Endpoint,
    raw: bytes,
    fleet: Fleet,
    *,
    request_id: str,
    headers: Headers = (),
    texts: IdTexts | None = None,
) -> GenerateRequest:
    """Understand `raw`. Raises RequestError or NoInstanceError.

    `texts`: what may know the prompt's ids; then `prompt` of such a body is left as it came.
    """
    decoded = None
    if texts is not None and endpoint is _COMPLETIONS:
        decoded = read_ids_body(raw, texts)
    if decoded is None:
        decoded = decode_body(raw)
    body = decoded.value
    check_generate_body(endpoint, body)
    clean = without_forbidden(body)
    conversation = body.get(CONVERSATION)
    meant = find_model(fleet, clean.get("model"))
    return GenerateRequest(
        request_id=request_id,
        endpoint=endpoint,
        body=clean,
        raw_body=raw if clean is body else encode_body(clean),
        headers=headers,
        model=meant.model,
        base_model=meant.base_model,
        lora=meant.lora,
        conversation=conversation if isinstance(conversation, str) else None,
        is_unicode=decoded.is_unicode,
        ids=decoded.ids,
    )
