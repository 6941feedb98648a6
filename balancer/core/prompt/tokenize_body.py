"""Questions to an engine's `/tokenize`: a prompt in the fields that it knows.

Rules:

1. It has no fields for documents, reasoning effort and thinking; as template variables it takes them all.
2. It doesn't truncate, and knows no `reasoning_content`: shapes have neither by then.
3. It doesn't heed the flag that leaves tools out with `tool_choice: none`: we leave them out.
4. What Anthropic's messages leave to the template can't be asked about.

Cost: nothing is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from balancer.core.prompt.shape import ChatShape, TextShape, Unscorable, UnscorableError
from balancer.core.prompt.template_inputs import client_variables
from balancer.core.settings.control import EngineFlags


def tokenize_bodies(
    shape: TextShape | ChatShape, model: str, flags: EngineFlags | None = None
) -> Sequence[Mapping[str, Any]]:
    """Bodies for the engine's `/tokenize`, one per prompt. Raises UnscorableError."""
    if isinstance(shape, TextShape):
        return [
            {"model": model, "prompt": text, "add_special_tokens": shape.add_special_tokens}
            for text in shape.texts
        ]
    if shape.merges_system or shape.thinking_is_off:  # what is meant depends on the template
        raise UnscorableError(Unscorable.UNSUPPORTED_FIELD)
    body = {
        "model": model,
        "messages": shape.messages,
        "add_generation_prompt": shape.add_generation_prompt,
        "continue_final_message": shape.continue_final_message,
        "add_special_tokens": shape.add_special_tokens,
    }
    drops_tools = flags is not None and flags.exclude_tools_when_tool_choice_none
    if shape.tools is not None and not (drops_tools and shape.tools_are_off):
        body["tools"] = shape.tools
    if shape.chat_template is not None:
        body["chat_template"] = shape.chat_template
    if variables := client_variables(shape):
        body["chat_template_kwargs"] = variables
    return [body]
