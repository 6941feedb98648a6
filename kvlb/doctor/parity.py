"""Holds our tokenizer and chat template of a model against the engine's `/tokenize`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from balancer.core.prompt.shape import ChatShape, TextShape, UnscorableError
from balancer.core.prompt.tokenize_body import tokenize_bodies
from balancer.core.settings.control import TokensSettings
from balancer.tokens.directory import load_tokenizer
from balancer.tokens.local import LocalTokenizer
from kvlb.doctor.core.facts import Tokenized
from kvlb.engine_http import EngineHttp

PROBE_TEXTS: Mapping[str, TextShape | ChatShape] = {
    "plain text": TextShape(texts=("The cache of an engine keeps what it has read.",)),
    "other scripts": TextShape(texts=("Größe, naïve, 東京, привет, 🙂",)),
    "white space": TextShape(texts=("def f(x):\n\treturn  x\r\n\n  # done",)),
    "numbers": TextShape(texts=("1234567890 3.14159 0x7fff 1,000,000",)),
    "a chat": ChatShape(
        messages=(
            {"role": "user", "content": "Is this a cache?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "And this?"},
        )
    ),
    "a chat with a system message": ChatShape(
        messages=(
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "Is this a cache?"},
        )
    ),
}


class OwnTokenizers:
    """The tokenizers that a configuration names, loaded once."""

    def __init__(self, settings: TokensSettings) -> None:
        """Read every directory. Raises TokenizerLoadError."""
        self._directories = settings.models
        self._loaded = {
            model: load_tokenizer(Path(directory), _strftime_now, settings.engine_flags.get(model))
            for model, directory in settings.models.items()
        }

    async def compare(self, engine: EngineHttp, model: str) -> Tokenized | None:
        """Tokens of a few texts, ours beside the engine's; None if we have no tokenizer for it."""
        ours = self._loaded.get(model)
        if ours is None:
            return None
        directory = self._directories[model]
        for name, shape in PROBE_TEXTS.items():
            own = _encode(ours, shape)
            (body,) = tokenize_bodies(shape, model)
            theirs = await engine.tokenize(body)
            if own is not None and theirs is not None and list(own) != list(theirs):
                return Tokenized(
                    directory=directory, differs_at=name, ours=len(own), theirs=len(theirs)
                )
        return Tokenized(directory=directory)


def _encode(tokenizer: LocalTokenizer, shape: TextShape | ChatShape) -> Sequence[int] | None:
    try:
        return tokenizer.encode(shape)[0]
    except UnscorableError:
        return None


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
