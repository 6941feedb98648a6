"""`kvlb explain`: asks a running balancer where it would send a request, and shows why."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from balancer.fleet.engine_sockets import tls_context
from kvlb.balancer_url import balancer_url
from kvlb.errors import PeerError, SettingsError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TIMEOUT_S = 30.0
MOST_RECENT = 100
"""A balancer tells the terms of so many."""
MOST_CANDIDATES = 6
"""Columns that fit a terminal; cheapest first."""


def explain(request: str, *, url: str, path: str | None, as_json: bool) -> None:
    """Print the plan for `request`, given as JSON, as a file or as `-` for standard input."""
    body = _read_request(request)
    chosen_path = path or (CHAT if "messages" in body else COMPLETIONS)
    plan = _call("POST", balancer_url(url), "/explain", {"path": chosen_path, "body": body})
    if as_json:
        sys.stdout.write(json.dumps(plan, indent=2) + "\n")
        return
    _show(plan, Console())


def explain_finished(request_id: str, *, url: str, as_json: bool) -> None:
    """Print why a request that has finished went where it went."""
    page = _call("GET", balancer_url(url), f"/explain/recent?limit={MOST_RECENT}", None)
    decisions = page.get("decisions")
    found = [each for each in decisions or () if each.get("request_id") == request_id]
    if not found:
        raise PeerError(
            f"none of the last {MOST_RECENT} finished requests has the id {request_id!r}; it is the "
            "`x-request-id` of the answer"
        )
    if as_json:
        sys.stdout.write(json.dumps(found[0], indent=2) + "\n")
        return
    _show_finished(found[0], Console())


def _read_request(request: str) -> dict[str, Any]:
    text = request
    if request == "-":
        text = sys.stdin.read()
    elif not request.lstrip().startswith(("{", "[")):
        try:
            text = Path(request).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{request!r} is neither JSON nor a file that can be read; write "
                '\'{"model": "...", "messages": [...]}\''
            ) from error
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise SettingsError("the request must be a JSON object, the body of an OpenAI request")
    return body


def _call(method: str, url: str, path: str, question: Mapping[str, Any] | None) -> dict[str, Any]:
    key = os.environ.get("KVLB_ADMIN_API_KEY")
    headers = {"X-API-Key": key} if key else {}
    try:
        # Proxies of the environment are for other hosts than a balancer.
        with httpx.Client(trust_env=False, verify=tls_context(), timeout=TIMEOUT_S) as client:
            answer = client.request(method, f"{url}{path}", json=question, headers=headers)
            body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PeerError(
            f"no balancer answers at {url} ({error}); start one with `kvlb up`, "
            "or name another with --url"
        ) from error
    except ValueError as error:
        raise PeerError(f"{url} is not a kvlb balancer: it answered no JSON") from error
    if answer.status_code != httpx.codes.OK:
        raise PeerError(_refusal(url, answer.status_code, body))
    if not isinstance(body, dict):
        raise PeerError(f"{url} is not a kvlb balancer: it answered {body!r}")
    return body


def _refusal(url: str, status: int, body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    hint = "; set KVLB_ADMIN_API_KEY" if status in {401, 403} else ""
    return f"{url}/explain answered {status}: {message or 'no reason given'}{hint}"


def _show(plan: Mapping[str, Any], console: Console) -> None:
    prompt = plan["prompt"]
    tokens = prompt["tokens"] if prompt["tokens"] is not None else "unknown"
    console.print(f"model   {plan['model']}", highlight=False, markup=False)
    console.print(f"prompt  {tokens} tokens ({_source(prompt)})", highlight=False, markup=False)
    console.print(f"reason  [bold]{plan['reason']}[/]: {plan['meaning']}", highlight=False)
    if plan.get("ways"):
        console.print(f"ways    {plan['ways']}", highlight=False, markup=False)
    for item in (plan.get("encode") or {}).get("items", ()):
        where = item["instance"] or "where the prompt is computed"
        line = f"encode  item {item['item']}: {where} ({item['reason']})"
        console.print(line, highlight=False, markup=False)
    for name in ("decode", "prefill"):
        if plan[name] is not None:
            _show_leg(name, plan[name], console)


def _show_finished(decision: Mapping[str, Any], console: Console) -> None:
    tokens = decision["prompt_tokens"] if decision["prompt_tokens"] is not None else "unknown"
    cached = decision["cached_tokens"] if decision["cached_tokens"] is not None else "unknown"
    console.print(f"prompt  {tokens} tokens, {cached} were cached", highlight=False, markup=False)
    console.print(f"status  {decision['status']}", highlight=False, markup=False)
    console.print(f"reason  [bold]{decision['reason']}[/]", highlight=False)
    if decision.get("ways"):
        console.print(f"ways    {decision['ways']}", highlight=False, markup=False)
    for name, leg in (decision.get("plan") or {}).items():
        if leg is not None:
            _show_leg(name, leg, console)


def _source(prompt: Mapping[str, Any]) -> str:
    return prompt["unscorable"] or f"from {prompt['source']}"


def _show_leg(name: str, leg: Mapping[str, Any], console: Console) -> None:
    """One column per candidate, so that a dozen terms fit a terminal."""
    candidates: Sequence[Mapping[str, Any]] = leg["considered"]
    shown = candidates[:MOST_CANDIDATES]
    table = Table(title=f"\n{name} leg", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for each in shown:
        is_chosen = _identity(each) == _identity(leg["chosen"])
        heading = f"{'→ ' if is_chosen else ''}{each['instance']}/{each['rank']}"
        table.add_column(heading, justify="right", style="bold" if is_chosen else None)
    for fact in ("overlap_tokens", "predicted_tokens", "trust"):
        table.add_row(fact.replace("_", " "), *(str(each[fact]) for each in shown))
    reasons = [each.get("trust_reason") for each in shown]  # an older balancer tells none
    if any(reasons):
        table.add_row("because", *(reason or "" for reason in reasons))
    table.add_section()
    for term in dict.fromkeys(term for each in shown for term in each["terms"]):
        table.add_row(term, *(_number(each["terms"].get(term, 0)) for each in shown))
    table.add_section()
    table.add_row("cost", *(_number(each["cost"]) for each in shown))
    console.print(table)
    if len(candidates) > len(shown):
        console.print(f"and {len(candidates) - len(shown)} more; see --format json")
    console.print(leg["why"], highlight=False, markup=False)


def _identity(candidate: Mapping[str, Any]) -> tuple[str, int]:
    return candidate["instance"], candidate["rank"]


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4g}"
