"""What `/openapi.json` tells of the engines' paths."""

import re

import pytest

from balancer.core.errors import BalancerError, ClientGoneError, EngineRefusedError
from balancer.core.http.described_paths import _PATHS, describe_engine_paths
from balancer.core.http.engine_paths import PathUse, every_path
from balancer.core.http.lax_bool import FALSE_WORDS, TRUE_WORDS


def test_what_is_described_is_what_is_proxied() -> None:
    """Neither a path nor a method more or less."""
    assert set(_PATHS) == set(every_path())

    for path, item in describe_engine_paths()["paths"].items():
        use = every_path()[path]
        methods = {each.upper() for each in item} - {"PARAMETERS"}
        assert methods == ({"GET"} if use.use is PathUse.SESSION else set(use.methods))
        assert ("parameters" in item) == ("{response_id}" in path)


def test_operations_have_ids_of_their_own() -> None:
    """Clients are generated from them."""
    items = describe_engine_paths()["paths"].values()
    ids = [
        each["operationId"] for item in items for key, each in item.items() if key != "parameters"
    ]

    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_]+", each) for each in ids)


def _tree(kind: type[BalancerError]) -> set[type[BalancerError]]:
    return {kind}.union(*(_tree(each) for each in kind.__subclasses__()))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_every_status_of_ours_is_described(path: str) -> None:
    """But for those that only administration has, a bug's, and what nobody is there to read."""
    responses = describe_engine_paths()["paths"][path]["post"]["responses"]
    elsewhere = {401, 403, 405, 409, 422, 500}

    ours = {each.status for each in _tree(BalancerError) - {ClientGoneError, EngineRefusedError}}

    assert {str(each) for each in ours - elsewhere} <= set(responses)


def test_flags_are_described_as_they_are_read() -> None:
    """By every word, in any case."""
    paths = describe_engine_paths()["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    pattern = body["schema"]["properties"]["stream"]["anyOf"][2]["pattern"]

    for word in TRUE_WORDS | FALSE_WORDS:
        assert re.search(pattern, word)
        assert re.search(pattern, word.upper())
    assert not re.search(pattern, "enable")
