"""The grammar of forms: what clients send is read as engines read it, all else is refused."""

import json

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import UploadFile
from starlette.requests import Request

from balancer.core.errors import BadRequestError
from balancer.core.http.body import PiecedBody
from balancer.core.http.form_field import read_fields
from balancer.core.http.forwarded import read_body

TYPE = b"multipart/form-data; boundary=b"
FORBIDDEN = json.dumps({"kv_cache_report_mode": "full"}).encode()
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
FIELD = b'Content-Disposition: form-data; name="vllm_xargs"'


def form(
    head: bytes, value: bytes = FORBIDDEN, *, file: bytes = b"RIFF", by: bytes = b"b"
) -> bytes:
    """One with a file, and another part."""
    return b"--%b\r\n%b\r\n\r\n%b\r\n--%b\r\n%b\r\n\r\n%b\r\n--%b--\r\n" % (
        *(by, FILE, file),
        *(by, head, value, by),
    )


async def as_engine(content_type: bytes, body: bytes) -> dict[str, str | None]:
    """The fields of a form as vLLM reads them: by starlette, the last of each name; None: a file."""
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    async with Request(scope, receive).form() as read:
        return {
            name: None if isinstance(value, UploadFile) else value for name, value in read.items()
        }


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        pytest.param(
            TYPE, form(b'Content-Disposition: form-data; name="x"\r\n' + FIELD), id="twice"
        ),
        pytest.param(
            b'multipart/form-data; x="; boundary=z"; boundary=b', form(FIELD), id="in-quotes"
        ),
        pytest.param(
            b"multipart/form-data; boundary=z; boundary=b", form(FIELD), id="two-boundaries"
        ),
        pytest.param(
            b'multipart/form-data; boundary="b\\"q"', form(FIELD, by=b'b"q'), id="escaped-boundary"
        ),
        pytest.param(
            b"multipart/form-data; boundary =z; boundary=b", form(FIELD), id="spaced-boundary"
        ),
        pytest.param(b"multipart/form-data; boundary*=z; boundary=b", form(FIELD), id="boundary*"),
        pytest.param(TYPE, form(FIELD + b'; x="; filename=a"'), id="file-name-in-quotes"),
        pytest.param(TYPE, form(FIELD + b"; filename*=utf-8''a"), id="filename*"),
        pytest.param(
            TYPE,
            form(b'Content-Disposition: form-data; name="x"; name="vllm_xargs"'),
            id="two-names",
        ),
        pytest.param(
            TYPE,
            form(b'Content-Disposition: form-data; x="; name=y"; name="vllm_xargs"'),
            id="name-in-quotes",
        ),
        pytest.param(
            TYPE, form(b'Content-Disposition: form-data; name ="vllm_xargs"'), id="spaced-name"
        ),
        pytest.param(TYPE, form(b"Content-Disposition: form-data; name=<vllm_xargs>"), id="angles"),
        pytest.param(TYPE + b"; charset=utf-7", form(FIELD.replace(b"_", b"+AF8-")), id="utf-7"),
        pytest.param(TYPE + b"; charset=utf-16-be", form(FIELD), id="utf-16"),
        pytest.param(TYPE + b"; charset=cp037", form(FIELD), id="cp037"),
        pytest.param(
            TYPE,
            form(FIELD, file=b'\r\n--bX\r\nContent-Disposition: form-data; name="q"'),
            id="like-a-boundary",
        ),
        pytest.param(TYPE, form(b"X-Other: 1\r\n " + FIELD), id="folded"),
        pytest.param(TYPE, form(b"X-Other: 1\n" + FIELD), id="bare-line-feed"),
        pytest.param(TYPE, form(b"X-Other: 1"), id="no-disposition"),
        pytest.param(TYPE, form(b"X-Other: 1\r\n" * 8 + FIELD), id="many-lines"),
        pytest.param(TYPE, form(b"Content-Disposition: form-data"), id="no-name"),
        pytest.param(TYPE, form(b'Content-Disposition: file; name="vllm_xargs"'), id="no-field"),
        pytest.param(
            TYPE, form(b'Content-Disposition: form-data; name="vllm\\_xargs"'), id="escape"
        ),
        pytest.param(b"multipart/form-data", form(FIELD), id="no-boundary"),
        pytest.param(b"multipart/form-data; boundary=", form(FIELD), id="empty-boundary"),
        pytest.param(b'multipart/form-data; boundary=""', form(FIELD), id="quoted-empty"),
        pytest.param(
            b"multipart/form-data; boundary=" + b"k" * 201,
            form(FIELD, by=b"k" * 201),
            id="long-boundary",
        ),
        pytest.param(b"multipart/form-data-x; boundary=b", form(FIELD), id="another-type"),
    ],
)
def test_form_that_could_be_read_otherwise_is_refused(content_type: bytes, body: bytes) -> None:
    """On paths that run a prompt and on others."""
    for generates in (True, False):
        with pytest.raises(BadRequestError, match="the form can't be read"):
            read_body(content_type, PiecedBody((body,)), generates=generates)


@pytest.mark.parametrize(
    "value", [FORBIDDEN[:-1] + b', "z": "\xff"}', FORBIDDEN], ids=["byte", "plain"]
)
@pytest.mark.parametrize("charset", [b"", b"; charset=UTF-8", b"; charset=iso-8859-1"])
def test_forbidden_arguments_are_seen_in_any_bytes(value: bytes, charset: bytes) -> None:
    """Engines read what is no UTF-8 as latin-1."""
    with pytest.raises(BadRequestError, match="must not set"):
        read_body(TYPE + charset, PiecedBody((form(FIELD, value),)), generates=True)


@pytest.mark.parametrize(
    ("content_type", "boundary", "head"),
    [
        pytest.param(
            b"multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
            b"----WebKitFormBoundary7MA4YWxkTrZu0gW",
            b'Content-Disposition: form-data; name="model"',
            id="browser",
        ),
        pytest.param(
            b"multipart/form-data; boundary=0d4ba4c0b8e24ba8a2c9",
            b"0d4ba4c0b8e24ba8a2c9",
            b'Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"',
            id="aiohttp",
        ),
        pytest.param(
            b'multipart/form-data; boundary="6f1a-44"',
            b"6f1a-44",
            b"Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
            id="dotnet",
        ),
        pytest.param(
            b"multipart/form-data; charset=ISO-8859-1; boundary=httpclient_boundary_1",
            b"httpclient_boundary_1",
            b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: 8bit',
            id="java",
        ),
        pytest.param(
            b"Multipart/Form-Data ;\tBoundary=----=_Part_5_1.2 ",
            b"----=_Part_5_1.2",
            b'content-disposition:form-data ; NAME="model" ',
            id="loose",
        ),
    ],
)
async def test_forms_of_clients_are_read(content_type: bytes, boundary: bytes, head: bytes) -> None:
    """As an engine reads them."""
    body = form(head, b"whisper", by=boundary)

    assert read_fields(content_type, (body,), {b"model": 99}) == {b"model": b"whisper"}
    assert await as_engine(content_type, body) == {"file": None, "model": "whisper"}


@pytest.mark.parametrize("name", ["a.wav", "a b;c=d.wav", 'a"b.wav', "\u00e4.wav", "a\r\nb.wav"])
async def test_forms_of_our_own_client_are_read(name: str) -> None:
    """Of httpx, which is the openai client's, too: under whatever name of a file."""
    request = httpx.Request(
        "POST", "http://x/", data={"model": "whisper"}, files={"file": (name, b"RIFF")}
    )
    content_type, body = request.headers["content-type"].encode(), request.read()

    assert read_fields(content_type, (body,), {b"model": 99}) == {b"model": b"whisper"}
    assert await as_engine(content_type, body) == {"file": None, "model": "whisper"}


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="vllm_xargs"; filename="a"',
        b'form-data; name="vllm_xargs"; filename=""',
        b"form-data; name=vllm_xargs; filename=a; filename*=utf-8''%C3%A4",
        'form-data; name="vllm_xargs"; filename="\u00e4; name=x"'.encode(),
    ],
)
async def test_files_are_no_fields(disposition: bytes) -> None:
    """Whatever their names; nor are they to an engine."""
    body = form(b"Content-Disposition: " + disposition)

    assert read_body(TYPE, PiecedBody((body,)), generates=True).model == ""
    assert (await as_engine(TYPE, body))["vllm_xargs"] is None


_BITS = st.sampled_from(
    [
        *(
            b"Content-Disposition",
            b": ",
            b"form-data",
            b"; ",
            b"name",
            b"filename",
            b"=",
            b"*",
            b"\\",
        ),
        *(
            b'"',
            b"model",
            b"vllm_xargs",
            b"\r\n",
            b"\n",
            b" ",
            b"\t",
            b"x",
            b"--b",
            b"\xff",
            b"<",
            b">",
        ),
    ]
)


@given(st.lists(_BITS, max_size=16).map(b"".join), st.lists(_BITS, max_size=6).map(b"".join))
@example(b'Content-Disposition: form-data; name="vllm_xargs"', b"x")
async def test_what_passes_is_what_an_engine_reads(head: bytes, file: bytes) -> None:
    """Nothing is found there that wasn't seen here."""
    body = form(head, b"value", file=file)
    try:
        seen = read_fields(TYPE, (body,), {b"vllm_xargs": 99, b"model": 99})
    except BadRequestError:
        return

    told = await as_engine(TYPE, body)

    for name in ("vllm_xargs", "model"):
        field = told.get(name)
        assert seen.get(name.encode()) == (None if field is None else field.encode())
