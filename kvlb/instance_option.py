"""`--instance http://host:port[,events=tcp://…][,role=prefill]…`: one engine on one line.

Rules:

1. The first part is the engine's address; every other part is `name=value`, each name once.
2. `transfer.KEY=VALUE` is one key of the connector's own settings (docs/connectors.md); a number and
   `true` or `false` are no text there. A value with a comma in it has no place on the line; several
   `ec_zmq_addrs` are joined by `+`.
3. An error names the part at fault and what would be right there.
4. No message repeats a password or a key; a key has no place on the command line at all.
5. The value is what a configuration file would hold under `instances:`; checking values against
   the settings' types is left to `kvlb.settings`, so both ways in give the same answers.

Cost: none worth naming; runs once per option.
"""

import re
from difflib import get_close_matches
from urllib.parse import urlsplit

from kvlb.errors import SettingsError

ENDPOINTS = ("events", "replay")
NUMBERS = ("ranks", "rank_base")
WORDS = ("role", "alias", "connector")
LISTS = ("ec_zmq_addrs",)
TRANSFER = "transfer."
NAMES = (*ENDPOINTS, *WORDS, *NUMBERS, *LISTS)
KEY = re.compile(
    r",\s*[a-z_-]*(key|token|secret|password)[a-z_-]*\s*=.*", re.IGNORECASE | re.DOTALL
)
CREDENTIALS = re.compile(r"(?<=://).*@|^(?!.*://).*@", re.DOTALL)
ROLES = ("prefill", "decode", "mixed", "encode")


def parse_instance(text: str) -> dict[str, object]:
    """Read one `--instance` value into the keys of an `instances:` entry."""
    _refuse_secrets(text)
    url, *parts = (part.strip() for part in text.split(","))
    entry: dict[str, object] = {"url": _checked_url(url, text)}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise SettingsError(
                f"--instance {text}: {part!r} is not name=value; names are {', '.join(NAMES)}"
            )
        if name.startswith(TRANSFER):
            _add_transfer(entry, name, value, text)
            continue
        if name not in NAMES:
            raise SettingsError(f"--instance {text}: unknown name {name!r}; {_nearest(name)}")
        if name in entry:
            raise SettingsError(f"--instance {text}: {name!r} is given twice")
        entry[name] = _checked_value(name, value, text)
    return entry


def _add_transfer(entry: dict[str, object], name: str, value: str, text: str) -> None:
    settings = entry.setdefault("transfer", {})
    assert isinstance(settings, dict)  # noqa: S101 - for the type checker
    key = name.removeprefix(TRANSFER)
    if key in settings:
        raise SettingsError(f"--instance {text}: {name!r} is given twice")
    settings[key] = _plain(value)


def _plain(value: str) -> object:
    """What YAML would make of it, as far as settings go."""
    if value.isdecimal():
        return int(value)
    return {"true": True, "false": False}.get(value, value)


def _refuse_secrets(text: str) -> None:
    shown = KEY.sub("", text)
    safe = CREDENTIALS.sub("***@", shown)
    if shown != text:
        raise SettingsError(
            f"--instance {safe}: everybody on this machine could see a key here; name the variable "
            "that holds it with `api_key_env` in the file, or set KVLB_ENGINE_API_KEY"
        )
    if safe != text:
        raise SettingsError(
            f"--instance {safe}: an instance address holds no credentials; use `api_key_env` in "
            "the file"
        )


def _checked_url(url: str, text: str) -> str:
    try:
        parts = urlsplit(url)
        complete = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        complete = False
    if not complete:
        raise SettingsError(
            f"--instance {text}: {url!r} is not an engine's address; write http://host:port"
        )
    return url


def _checked_value(name: str, value: str, text: str) -> str | int | list[str]:
    if name in LISTS:
        return value.split("+")
    if name in NUMBERS:
        if not value.isdecimal():
            raise SettingsError(f"--instance {text}: {name}={value} is not a whole number")
        return int(value)
    if name == "role" and value not in ROLES:
        raise SettingsError(f"--instance {text}: role={value}; roles are {', '.join(ROLES)}")
    if name in ENDPOINTS and "://" not in value:
        raise SettingsError(
            f"--instance {text}: {name}={value} is no ZMQ endpoint; write {name}=tcp://host:port"
        )
    return value


def _nearest(name: str) -> str:
    close = get_close_matches(name, NAMES, n=1)
    known = f"names are {', '.join(NAMES)}, {TRANSFER}KEY"
    return f"did you mean {close[0]!r}? {known}" if close else known
