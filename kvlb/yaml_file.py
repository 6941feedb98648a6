"""Reads a configuration file: YAML whose mappings name each key once.

YAML's own readers keep the last of two equal keys without a word, and half a fleet may be gone.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kvlb.errors import SettingsError

MERGE_TAG = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's keys and values. Raises SettingsError that names file and fault."""
    try:
        # A safe loader, with one more check.
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_OnceLoader)  # noqa: S506
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except _RepeatedKeyError as error:
        raise SettingsError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: holds no keys; begin with `instances:`")
    return values


class _RepeatedKeyError(Exception):
    """A mapping has a key twice; the text says which and where."""


class _OnceLoader(yaml.SafeLoader):
    """Builds plain values of mappings without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == MERGE_TAG or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                raise _RepeatedKeyError(
                    f"line {line}: key `{key.value}` is in line {first[key.value]} already"
                )
            first[key.value] = line
        return super().construct_mapping(node, deep=deep)
