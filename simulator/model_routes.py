"""Which paths a simulated engine has for the kind of model that it serves."""

import re
from collections.abc import Awaitable, Callable

from simulator import batch_api, cohere_api, messages_api, pooling_api, responses_api
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange
from simulator.generation_api import chat, complete, invoke
from simulator.scale_out_api import SCALE_OUT, refuse_scale_out
from simulator.speech_api import transcribe

Route = Callable[[Exchange], Awaitable[None]]
_Answer = Callable[[SimulatedEngine, Exchange], Awaitable[None]]

_GENERATE: dict[str, _Answer] = {
    "/v1/completions": complete,
    "/v1/chat/completions": chat,
    "/v1/messages": messages_api.create_message,
    "/v1/messages/count_tokens": messages_api.count_tokens,
    "/v1/responses": responses_api.create_response,
    "/v1/chat/completions/batch": batch_api.chat_batch,
    "/generative_scoring": batch_api.score_next,
    "/invocations": invoke,
}
_POOLING: dict[str, _Answer] = {
    "/v1/embeddings": pooling_api.embed,
    "/v2/embed": cohere_api.embed,
    "/invocations": pooling_api.invoke,
    "/pooling": pooling_api.pool,
    "/classify": pooling_api.classify,
    "/score": pooling_api.score,
    "/v1/score": pooling_api.score,
    "/rerank": pooling_api.rerank,
    "/v1/rerank": pooling_api.rerank,
    "/v2/rerank": pooling_api.rerank,
}
_TRANSCRIPTION: dict[str, _Answer] = {
    "/v1/audio/transcriptions": transcribe,
    "/v1/audio/translations": transcribe,
}
_KINDS = {"generate": _GENERATE, "pooling": _POOLING, "transcription": _TRANSCRIPTION}
_KEPT = re.compile(r"/v1/responses/([^/]+)(/cancel)?")


def model_routes(engine: SimulatedEngine) -> dict[str, dict[str, Route]]:
    """The paths of the engine's kind of model, by method."""
    found = dict(_KINDS[engine.settings.serves])
    if engine.settings.serves == "generate":
        is_on = engine.settings.scale_out
        found |= SCALE_OUT if is_on else dict.fromkeys(SCALE_OUT, refuse_scale_out)
    return {path: {"POST": _bind(engine, answer)} for path, answer in found.items()}


def kept_response_routes(engine: SimulatedEngine, path: str) -> dict[str, Route] | None:
    """What can be asked about one answer of the Responses API; None if the path is another."""
    match = _KEPT.fullmatch(path)
    if match is None or engine.settings.serves != "generate":
        return None
    response_id, cancels = match.groups()
    if cancels:
        return {"POST": lambda _: responses_api.cancel_response(engine, response_id)}
    return {"GET": lambda each: responses_api.read_response(engine, each, response_id)}


def _bind(engine: SimulatedEngine, answer: _Answer) -> Route:
    return lambda exchange: answer(engine, exchange)
