"""What every connection to an engine has in common: who is trusted, and when none can be had.

Over TLS the authorities of the system are trusted, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR`
name, which are OpenSSL's own variables. HTTP clients of engines take nothing else from the environment:
a proxy variable meant for the internet must not catch calls to engines.
"""

import errno
import ssl
from collections.abc import Iterator
from typing import Final

NO_FILES_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""`errno` of who may open no more files: not a word about the engine."""

UNTRUSTED: Final = "its certificate isn't trusted here: add its authority to the system's, or name it in SSL_CERT_FILE"


def tls_context() -> ssl.SSLContext:
    """What connections to engines are made with. Reading the authorities takes milliseconds."""
    return ssl.create_default_context()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what is behind it: HTTP clients wrap what a connection failed with."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_untrusted(error: BaseException) -> bool:
    """Whether the engine's certificate was refused."""
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in causes(error))
