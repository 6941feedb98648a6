"""Loads code of the operator's own by its import path: `package.module:name`.

What is wrong is told at start, by the key, the path and what is missing.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast, get_args

from balancer.core.handlers import CompletionHandler
from balancer.core.routing.own_policy import OwnPolicy
from balancer.core.routing.policies import Policy, named_policy
from balancer.core.settings.errors import ConfigError, nearest
from balancer.core.settings.routing import PolicyName

NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

_POLICY_METHODS = {"choose": ("shape", "candidates", "draw"), "chosen": ("rank",)}


def load_policy(name: str, on_failure: Callable[[BaseException], None] = lambda _: None) -> Policy:
    """The policy of `routing.policy`, one of ours or one's own. Raises ConfigError."""
    key = "routing.policy"
    for each in NAMES:
        if each == name:
            return named_policy(each)
    if ":" not in name:
        hint = "or one's own as `package.module:Class`"
        raise ConfigError(f"`{key}`: no policy `{name}`{nearest(name, NAMES)}, {hint}")
    made = _made(_load(name, key), name, key)
    for method, arguments in _POLICY_METHODS.items():
        found = getattr(made, method, None)
        _check_callable(found, arguments, f"`{key}`: {name}", method)
        if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
            raise ConfigError(f"`{key}`: {name}: {method} is async; nobody would wait for it")
    return OwnPolicy(cast("Policy", made), on_failure)


def load_handler(path: str | None, key: str) -> CompletionHandler | None:
    """A handler of `handlers`, None if there is none. Raises ConfigError."""
    if path is None:
        return None
    loaded = _load(path, key)
    made = _made(loaded, path, key) if inspect.isclass(loaded) else loaded
    function = made if inspect.isfunction(made) else getattr(made, "__call__", None)  # noqa: B004
    _check_callable(function, ("request",), f"`{key}`: {path}", "__call__")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"`{key}`: {path} is not an async function, nor are its calls")
    return cast("CompletionHandler", made)


def _load(path: str, key: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"`{key}`: {path!r} is no import path; write `package.module:name`")
    try:
        found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever their module does while it is imported; `sys.exit()` would end us without a word.
        why = f"{type(error).__name__}: {error}"
        hint = "is it installed, or its folder in PYTHONPATH?"
        raise ConfigError(f"`{key}`: {path}: can't import {module!r} ({why}); {hint}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"`{key}`: {path}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def _made(loaded: Any, path: str, key: str) -> Any:
    """An instance of a class; anything else is what it is."""
    if not inspect.isclass(loaded):
        return loaded
    try:
        return loaded()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"`{key}`: {path}() fails ({why}); it is made without arguments"
        ) from error


def _check_callable(found: Any, arguments: tuple[str, ...], where: str, name: str) -> None:
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(found):
        raise ConfigError(f"{where} has no method {wanted}")
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {name} can't be called as {wanted}: {error}") from error
