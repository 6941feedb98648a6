"""Pictures, sounds and films inside a prompt: what an engine made of them once, put into prompts here.

Rules:

1. A template that sees parts writes one token for a medium. The engine puts a run of tokens in its
   place, as long as the medium needs, and hashes the blocks that it reaches into with the medium's
   identifier. Length and identifier are its model's secret: they are learned from one that renders.
2. An answer is believed if, but for the runs, it is our own rendering to the last token.
3. Media are told apart by the `uuid` that the client gave them: engines take the same for the same, too.
   Without it they hash what they decoded, so it would have to be fetched to know it.
4. Where a text says a medium's token itself, nobody can tell which is which: such a prompt isn't made.

Cost: linear in the prompt's tokens.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from balancer.core.prompt.content_parts import MEDIA_PARTS, is_medium, part_kind
from balancer.core.prompt.rendered import Rendered
from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.hashing import MediumPlace


class MediumName(msgspec.Struct, frozen=True, gc=False):
    """By which a medium is known again, within a model."""

    kind: str
    uuid: str


class MediumRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one medium becomes."""

    stand_in: int
    """The token that the template writes for it."""
    ids: "array[int]"
    identifier: str


def media_names(request: GenerateRequest) -> Sequence[MediumName]:
    """Of all media of a chat, in their order; none if one of them has no name."""
    if request.endpoint is not Endpoint.CHAT:
        return ()
    names: list[MediumName] = []
    for part in _media(request.body["messages"]):
        uuid = part.get("uuid")
        if not isinstance(uuid, str) or not uuid:
            return ()
        names.append(MediumName(MEDIA_PARTS[part_kind(part) or ""], uuid))
    return names


def learn_runs(own: Sequence[int], rendered: Rendered, count: int) -> Sequence[MediumRun] | None:
    """The runs of `count` media in an engine's answer; None if it isn't ours but for them."""
    theirs = rendered.token_ids
    at = end = 0
    runs: list[MediumRun] = []
    for place in rendered.media:
        text = theirs[end : place.offset_tokens]
        end = place.offset_tokens + place.tokens
        ids = theirs[place.offset_tokens : end]
        if list(own[at : at + len(text)]) != list(text) or len(ids) != place.tokens:
            return None
        at += len(text)
        if at >= len(own):
            return None
        runs.append(MediumRun(stand_in=own[at], ids=array("I", ids), identifier=place.identifier))
        at += 1
    is_ours = list(own[at:]) == list(theirs[end:])
    return runs if is_ours and len(runs) == count else None


def put_runs(
    own: Sequence[int], runs: Sequence[MediumRun]
) -> tuple["array[int]", Sequence[MediumPlace]] | None:
    """The prompt with its media, and where they stand; None if that can't be told."""
    wanted = Counter(run.stand_in for run in runs)
    if Counter(token for token in own if token in wanted) != wanted:
        return None
    ids, places = array("I"), []
    waiting = list(reversed(runs))
    for token in own:
        if token not in wanted:
            ids.append(token)
            continue
        run = waiting.pop()
        if run.stand_in != token:
            return None
        places.append(
            MediumPlace(identifier=run.identifier, offset_tokens=len(ids), tokens=len(run.ids))
        )
        ids.extend(run.ids)
    return ids, places


def _media(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if is_medium(part))
