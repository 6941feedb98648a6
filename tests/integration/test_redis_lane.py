"""Connections to Redis: shared, opened ahead, cut short, refused, encrypted, or not to a Redis."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from indexer.core.index import IndexUnavailableError
from indexer.redis_index.connection import RedisConnection
from indexer.redis_index.server_check import check_server
from indexer.redis_index.settings import RedisSettings

Connecting = Callable[..., Any]


@pytest.fixture
def connecting() -> Connecting:
    """Make a connection that is closed when its block ends."""

    @asynccontextmanager
    async def run(settings: RedisSettings) -> AsyncIterator[RedisConnection]:
        connection = RedisConnection(settings)
        try:
            yield connection
        finally:
            await connection.aclose()

    return run


def clients(server: Any) -> int:
    """How many of ours are connected."""
    return str(server.command("CLIENT", "LIST")).count("name=kvlb ")


async def test_everybody_shares_one_connection(connecting: Connecting, own_redis: Any) -> None:
    """Answers come to who asked."""
    server = own_redis()
    server.start()
    async with connecting(server.settings()) as connection:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(connection.ask("ECHO", f"word {n}")) for n in range(200)]
        answers = [task.result().decode() for task in asked]

        assert answers == [f"word {n}" for n in range(200)]
        assert clients(server) == 1


def test_processes_run_on_another_loop(redis_server: Any) -> None:
    """Uvloop's transports and futures are its own; also with a connection that was killed."""

    async def ask() -> list[bytes]:
        connection = RedisConnection(redis_server.settings())
        answers = [await connection.ask("ECHO", "one")]
        redis_server.command("CLIENT", "KILL", "TYPE", "normal")
        answers.append(await connection.ask("ECHO", "two"))
        await connection.aclose()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == [b"one", b"two"]


async def test_deadline_costs_only_who_missed_it(connecting: Connecting, own_redis: Any) -> None:
    """The connection stays, and the next answer isn't the last question's."""
    server = own_redis()
    server.start()
    async with connecting(server.settings(write_timeout_s=1.0)) as connection:
        await connection.ping()
        server.pause()
        with pytest.raises(IndexUnavailableError, match="in time"):
            await connection.ask("ECHO", "late")
        server.resume()

        assert await connection.ask("ECHO", "next") == b"next"
        assert "cmdstat_client|setname:calls=1," in server.command("INFO", "commandstats")


async def test_connection_is_open_before_it_is_needed(
    connecting: Connecting, own_redis: Any, eventually: Any
) -> None:
    """Also after Redis was restarted: a lookup's deadline is too short for opening one."""
    server = own_redis()
    server.start()
    async with connecting(server.settings()) as connection, asyncio.TaskGroup() as group:
        ahead = group.create_task(connection.run_ahead())
        await eventually(lambda: clients(server) == 1)
        server.stop()
        server.start()
        await eventually(lambda: clients(server) == 1)
        ahead.cancel()


async def test_something_else_on_that_port_is_no_index(connecting: Connecting) -> None:
    """It speaks another protocol: told as a connection that failed."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connecting(RedisSettings(connect_timeout_s=20.0, url=url)) as connection:
            with pytest.raises(IndexUnavailableError, match="no connection"):
                await connection.ping()


async def test_database_is_the_url_s(connecting: Connecting, own_redis: Any) -> None:
    """On a unix socket as `?db=`; one that isn't there is refused with the key to change."""
    server = own_redis()
    server.start()
    async with connecting(server.settings(url=f"{server.url}?db=3")) as connection:
        await connection.ask("SET", "here", "1")
    assert server.command("-n", "3", "GET", "here") == "1"
    async with connecting(server.settings(url=f"{server.url}?db=99")) as connection:
        with pytest.raises(IndexUnavailableError, match=r"redis\.url"):
            await connection.ping()


@pytest.fixture
def identity(tmp_path: Path) -> tuple[Path, Path]:
    """Key and certificate of a server on this machine."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    name = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *name, *files], check=True, capture_output=True)
    return key, certificate


async def test_encrypted_connection_checks_who_answers(
    connecting: Connecting, own_redis: Any, identity: tuple[Path, Path], unused_url: str
) -> None:
    """By the authorities of the system, or by one that the URL names."""
    key, certificate = identity
    port = unused_url.rpartition(":")[2]
    server = own_redis("--tls-port", port, "--tls-auth-clients", "no")
    server.start("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    url = f"rediss://localhost:{port}/2"
    async with connecting(
        RedisSettings(connect_timeout_s=20.0, url=f"{url}?ssl_ca_certs={certificate}")
    ) as connection:
        await connection.ask("SET", "here", "1")
    async with connecting(RedisSettings(connect_timeout_s=20.0, url=url)) as connection:
        with pytest.raises(IndexUnavailableError, match="SSLCertVerificationError"):
            await connection.ping()
    async with connecting(
        RedisSettings(connect_timeout_s=20.0, url=f"{url}?ssl_cert_reqs=none")
    ) as connection:
        await connection.ping()

    assert server.command("-n", "2", "GET", "here") == "1"


async def test_server_may_want_to_know_who_asks(
    connecting: Connecting, own_redis: Any, identity: tuple[Path, Path], unused_url: str
) -> None:
    """A certificate of our own, from the URL."""
    key, certificate = identity
    port = unused_url.rpartition(":")[2]
    server = own_redis("--tls-port", port, "--tls-ca-cert-file", str(certificate))
    server.start("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    url = f"rediss://localhost:{port}?ssl_ca_certs={certificate}"
    ours = f"&ssl_certfile={certificate}&ssl_keyfile={key}"
    async with connecting(RedisSettings(connect_timeout_s=20.0, url=url + ours)) as connection:
        await connection.ping()
    async with connecting(RedisSettings(connect_timeout_s=20.0, url=url)) as connection:
        with pytest.raises(IndexUnavailableError, match="no connection"):
            await connection.ping()


def test_certificate_that_is_not_there_is_refused() -> None:
    """Before anything connects, by the key to change."""
    with pytest.raises(ValueError, match="url"):
        RedisConnection(
            RedisSettings(connect_timeout_s=20.0, url="rediss://localhost?ssl_ca_certs=/nowhere")
        )


async def test_server_that_evicts_is_warned_of(connecting: Connecting, own_redis: Any) -> None:
    """Once, when an indexer starts; a server that isn't there is no reason to fail."""
    server = own_redis("--maxmemory-policy", "allkeys-lru", "--lazyfree-lazy-expire", "yes")
    server.start()
    with capture_logs() as logs:
        async with connecting(server.settings()) as connection:
            await check_server(connection)
            server.stop()
            await check_server(connection)

    assert [each["event"] for each in logs] == ["redis_should_be_set_up_otherwise"]
    assert "noeviction" in logs[0]["advice"]
