"""The shape of any request's prompt, by the path it came on.

Cost: that of the path's own reading.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from balancer.core.prompt.messages_shape import shape_messages
from balancer.core.prompt.request_shape import shape_chat, shape_completion, shape_tokens
from balancer.core.prompt.responses_shape import shape_responses
from balancer.core.prompt.shape import PromptShape, Unscorable, UnscorableError
from balancer.core.request import Endpoint, GenerateRequest

_SHAPES: Final[Mapping[Endpoint, Callable[[Mapping[str, Any]], PromptShape]]] = {
    Endpoint.CHAT: shape_chat,
    Endpoint.COMPLETIONS: shape_completion,
    Endpoint.MESSAGES: shape_messages,
    Endpoint.RESPONSES: shape_responses,
    Endpoint.TOKENS: shape_tokens,
}


def shape_prompt(request: GenerateRequest) -> PromptShape:
    """Read the prompt-shaping fields of `request`. Raises UnscorableError."""
    if not request.is_unicode:
        raise UnscorableError(Unscorable.NOT_UNICODE)
    if request.ids is not None:
        return shape_completion(request.body, request.ids.ids)
    return _SHAPES[request.endpoint](request.body)
