"""Carries out /v1/completions and /v1/chat/completions on one engine."""

from collections.abc import Sequence

from simulator.answers import (
    AnswerOptions,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    render_encoded,
)
from simulator.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_generation,
    check_limits,
    decode_body,
    has_field,
)
from simulator.core.errors import GenerationFailedError, RequestRefusedError
from simulator.core.generation import seed_answer
from simulator.core.handover import Handover, read_remote_prefill
from simulator.core.types import EngineRequest
from simulator.encoder import media_names
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange
from simulator.generation import ChunkGeneration, Generation, MakeGeneration, making
from simulator.prompts import Prompt, read_chat_prompt, read_completion_prompts
from simulator.text_output import TextOutput


async def complete(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer a completion request."""
    content_type = exchange.headers.get("content-type", "")
    body = decode_body(exchange.body, content_type, CompletionBody)
    if engine.encoder.encodes:
        raise RequestRefusedError(
            "This engine runs the encoder only, and a completion has no media."
        )
    await generate(engine, exchange, body, making(ChunkGeneration, CompletionAnswer))


async def chat(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer a chat request."""
    content_type = exchange.headers.get("content-type", "")
    body = decode_body(exchange.body, content_type, ChatBody)
    if engine.encoder.encodes:
        await _encode(engine, exchange, body)
    else:
        await generate(engine, exchange, body, making(ChunkGeneration, ChatAnswer))


async def invoke(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer SageMaker's path: as a chat what has messages, as a completion all else."""
    await (chat if has_field(exchange.body, "messages") else complete)(engine, exchange)


async def _encode(engine: SimulatedEngine, exchange: Exchange, body: ChatBody) -> None:
    """Answer an encode leg: nothing is sampled."""
    check_generation(body)
    served, _, _ = engine.find_adapter(body.model)
    prompt = read_chat_prompt(body, engine.settings.context_tokens, takes_media=True)
    params = await engine.encoder.encode(_media(body), body.ec_transfer_params or {})
    await exchange.send_json(
        render_encoded(
            response_id=_name_response(engine, exchange, body),
            created_unix_s=int(engine.wall_clock()),
            model=served,
            prompt_tokens=len(prompt.token_ids),
            ec_transfer_params=params,
        )
    )


def _media(body: ChatBody) -> list[str]:
    return media_names(body.messages, body.mm_processor_kwargs)


async def generate(
    engine: SimulatedEngine,
    exchange: Exchange,
    body: CompletionBody | ChatBody,
    make: MakeGeneration,
) -> None:
    """Run what `make` makes of the request."""
    attempt = engine.history.begin(
        engine.places.name, exchange.headers.get("x-request-id", ""), engine.clock()
    )
    attempt.outcome = "refused"
    try:
        generation = _prepare(engine, exchange, body, make)
        attempt.outcome = "left"
        if isinstance(body, ChatBody) and not generation.loads_prompt:
            rank = engine.ranks.index(generation.rank)
            await engine.encoder.provide(_media(body), body.ec_transfer_params or {}, rank)
        attempt.outcome = "complete" if await generation.run() else "failed"
    except GenerationFailedError:
        attempt.outcome = "failed"
        raise
    finally:
        attempt.ended_s = engine.clock()


def _prepare(
    engine: SimulatedEngine,
    exchange: Exchange,
    body: CompletionBody | ChatBody,
    make: MakeGeneration,
) -> Generation:
    """Check everything that can be refused before a token is computed."""
    try:
        return _check(engine, exchange, body, make)
    except RequestRefusedError:
        engine.decline_transfer(read_remote_prefill(body.kv_transfer_params))
        raise


def _check(
    engine: SimulatedEngine,
    exchange: Exchange,
    body: CompletionBody | ChatBody,
    make: MakeGeneration,
) -> Generation:
    check_generation(body)
    if engine.settings.force_include_usage and body.stream:
        body.stream_options = {"include_usage": True, "continuous_usage_stats": True}
    served, adapter, adapter_id = engine.find_adapter(body.model)
    context_tokens = engine.settings.context_tokens
    if isinstance(body, ChatBody):
        takes_media = engine.settings.takes_media
        prompts = [read_chat_prompt(body, context_tokens, takes_media=takes_media)]
    else:
        prompts = read_completion_prompts(body, context_tokens)
    limits = [check_limits(body, len(prompt.token_ids), context_tokens) for prompt in prompts]
    rank = engine.pick_rank(exchange.headers.get("x-data-parallel-rank"))
    per_prompt = body.n or 1
    engine.check_room(len(prompts) * per_prompt)
    response_id = _name_response(engine, exchange, body)
    choices = _create_choices(engine, body, prompts, response_id)
    requests = [
        _create_request(
            exchange,
            body,
            choice,
            max_tokens=limits[choice.index // per_prompt],
            adapter=(adapter, adapter_id, engine.hashed_of_adapter(adapter)),
            handover=engine.read_handover(rank, choice.request_id, body.kv_transfer_params),
        )
        for choice in choices
    ]
    options = AnswerOptions(
        settings=engine.settings,
        response_id=response_id,
        created_unix_s=int(engine.wall_clock()),
        model=served,
        echoes=bool(body.echo),
        returns_token_ids=bool(body.return_token_ids),
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    return make(rank, exchange, body, options, list(zip(choices, requests, strict=True)))


def _name_response(
    engine: SimulatedEngine, exchange: Exchange, body: CompletionBody | ChatBody
) -> str:
    prefix = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    given = exchange.headers.get("x-request-id") or body.request_id
    return f"{prefix}-{given or engine.random_hex(16)}"


def _create_choices(
    engine: SimulatedEngine, body: GenerationBody, prompts: Sequence[Prompt], response_id: str
) -> list[Choice]:
    """Create one choice per prompt and answer; ids inside the engine are never used twice."""
    per_prompt = body.n or 1
    choices: list[Choice] = []
    for index in range(len(prompts) * per_prompt):
        number = "" if isinstance(body, ChatBody) else f"-{index // per_prompt}"
        child = f"{index % per_prompt}_" if per_prompt > 1 else ""
        choices.append(
            Choice(
                index=index,
                request_id=f"{child}{response_id}{number}-{engine.random_hex(8)}",
                prompt=prompts[index // per_prompt],
                output=TextOutput(body.stop_strings),
            )
        )
    return choices


def _create_request(
    exchange: Exchange,
    body: CompletionBody | ChatBody,
    choice: Choice,
    *,
    max_tokens: int,
    adapter: tuple[str | None, int | None, str | None],
    handover: Handover,
) -> EngineRequest:
    session_id = exchange.headers.get("x-session-id") or body.session_id
    return EngineRequest(
        request_id=choice.request_id,
        prompt_token_ids=choice.prompt.token_ids,
        sampler=seed_answer(choice.prompt.token_ids, choice.index % (body.n or 1)),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        lora_name=adapter[0],
        lora_id=adapter[1],
        lora_hashed=adapter[2],
        cache_salt=body.cache_salt,
        session_id=session_id,
        reads_cache=_reads_cache(body),
        reports_full=body.reports_full,
        keep=handover.keep,
        remote=handover.remote,
    )


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Completions ask with a number, chat with a flag."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def _reads_cache(body: CompletionBody | ChatBody) -> bool:
    """Log probabilities of the prompt need every position computed."""
    echoes_logprobs = bool(body.echo) and _logprobs(body) is not None
    return body.prompt_logprobs is None and not echoes_logprobs
