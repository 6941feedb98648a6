"""Engines whose certificate is of an authority of one's own, and a process without files to open."""

import asyncio
import json
import resource
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from balancer.core.errors import EngineUnreachableError, NoFilesError
from balancer.core.fleet.probe_state import ProbeOutcome
from balancer.dataplane.upstream import Upstream
from balancer.fleet.engine_client import EngineClient
from balancer.fleet.engine_sockets import tls_context
from indexer.core.types import InstanceId
from kvlb.engine_http import CallFailedError, EngineHttp

CARDS = {"object": "list", "data": [{"id": "m", "object": "model", "root": "m", "parent": None}]}


@pytest.fixture
async def url(certificate: tuple[Path, Path]) -> AsyncIterator[str]:
    """A healthy engine over TLS."""
    key, chain = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(chain, key)
    body = json.dumps(CARDS).encode()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=serving)
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"


@contextmanager
def upstream() -> Iterator[Upstream]:
    yield Upstream(connect_timeout_s=2, first_byte_timeout_s=5, idle_timeout_s=5)


async def test_authority_that_the_environment_names_is_trusted(
    url: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By probes, by proxied requests, and by the doctor."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with (
        EngineClient(api_keys={}, timeout_s=5) as client,
        httpx.AsyncClient(trust_env=False, verify=tls_context()) as http,
    ):
        probed = await client.probe(InstanceId(url))
        asked = await EngineHttp(url, http, None).get("/health")
        with upstream() as engines:
            answer = await engines.send(url, "GET", "/v1/models", (), b"")
            passed = await answer.read(1000)
            await engines.close()

    assert (probed.outcome, probed.reason) == (ProbeOutcome.OK, None)
    assert asked.is_ok
    assert json.loads(passed) == CARDS


async def test_unknown_authority_is_told_as_that(url: str) -> None:
    """The engine is up: that nobody is there would send its operator the wrong way."""
    async with (
        EngineClient(api_keys={}, timeout_s=5) as client,
        httpx.AsyncClient(trust_env=False, verify=tls_context()) as http,
    ):
        probed = await client.probe(InstanceId(url))
        with pytest.raises(CallFailedError, match="name it in SSL_CERT_FILE"):
            await EngineHttp(url, http, None).get("/health")
        with upstream() as engines:
            with pytest.raises(EngineUnreachableError, match="certificate isn't trusted"):
                await engines.send(url, "GET", "/v1/models", (), b"")
            await engines.close()

    assert (probed.outcome, probed.reason) == (ProbeOutcome.FAILED, "engine_untrusted")


@contextmanager
def no_files() -> Iterator[None]:
    """This process may open nothing more."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as newest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (newest.fileno(), most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


async def test_who_may_open_no_files_doesnt_blame_the_engine() -> None:
    """Neither by an error that another engine would be asked for, nor as the state of the engine."""
    url = "http://127.0.0.1:9"
    async with EngineClient(api_keys={}, timeout_s=5) as client:
        with upstream() as engines, no_files():
            probed = await client.probe(InstanceId(url))
            with pytest.raises(NoFilesError) as caught:
                await engines.send(url, "GET", "/", (), b"")
        await engines.close()

    assert probed.reason == "no_files"
    assert (caught.value.status, caught.value.code) == (503, "no_files")
