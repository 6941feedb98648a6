"""docker-compose files and Dockerfile: valid in every combination, closed, pinned, consistent.

What the services' command lines do is shown by tests/e2e/test_compose_processes.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
ENVIRONMENT = {"GRAFANA_PASSWORD": "chosen"}
BASE = ("docker-compose.yml",)
VLLM = (*BASE, "docker-compose.vllm.yml")

COMBINATIONS = [
    pytest.param(BASE, (), id="simulated"),
    pytest.param(BASE, ("load",), id="simulated-load"),
    pytest.param(VLLM, ("aggregated",), id="aggregated"),
    pytest.param(VLLM, ("aggregated", "load"), id="aggregated-load"),
    pytest.param(VLLM, ("pd",), id="pd"),
    pytest.param(VLLM, ("pd", "load"), id="pd-load"),
]
WITHOUT_LOAD = [each for each in COMBINATIONS if "load" not in each.values[1]]  # type: ignore[operator]


def compose(
    files: tuple[str, ...], profiles: tuple[str, ...], *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the real docker-compose; only what is given here is in its environment."""
    options = [option for file in files for option in ("--file", file)]
    options += [option for profile in profiles for option in ("--profile", profile)]
    return subprocess.run(
        [PROGRAMS / "docker-compose", "--env-file", os.devnull, *options, *command],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )


@cache
def resolved(files: tuple[str, ...], profiles: tuple[str, ...]) -> dict[str, Any]:
    """What docker-compose makes of the files: anchors, overrides and variables resolved."""
    done = compose(files, profiles, "config", "--format", "json", **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = json.loads(done.stdout)
    return config


def addresses(config: dict[str, Any], network: str) -> set[str]:
    """Host names that a container in `network` can use."""
    found: set[str] = set()
    for name, service in config["services"].items():
        if network in service["networks"]:
            aliases = (service["networks"][network] or {}).get("aliases", ())
            found |= {name, *aliases}
    return found


def kvlb_file(config: dict[str, Any], service: str) -> dict[str, Any]:
    """The configuration that a service finds at the path its command line names."""
    described = config["services"][service]
    path = described["command"][described["command"].index("--config") + 1]
    (source,) = [each["source"] for each in described["configs"] if each["target"] == path]
    content: dict[str, Any] = yaml.safe_load(config["configs"][source]["content"])
    return content


def role_of(config: dict[str, Any], command: str) -> str:
    """The service that runs `kvlb <command>`."""
    names: list[str] = [
        name
        for name, service in config["services"].items()
        if "build" in service and service["command"][0] == command
    ]
    assert len(names) == 1
    return names[0]


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_files_are_valid(files: tuple[str, ...], profiles: tuple[str, ...]) -> None:
    """`docker-compose config` has nothing to say, not even a warning."""
    done = compose(files, profiles, "config", "--quiet", **ENVIRONMENT)

    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_grafana_has_no_password_of_its_own() -> None:
    """Whoever doesn't choose one is told so, instead of getting a known one."""
    done = compose(BASE, (), "config", "--quiet")

    # This binary exits 0 whatever it has to say.
    assert "GRAFANA_PASSWORD" in done.stderr


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_only_balancer_and_grafana_are_published(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """Anything else is reached from this machine only, or not at all."""
    config = resolved(files, profiles)
    public = {
        name
        for name, service in config["services"].items()
        for port in service.get("ports", ())
        if port.get("host_ip") != "127.0.0.1"
    }

    assert public == {"grafana", role_of(config, "balancer")}
    assert not any(service.get("network_mode") for service in config["services"].values())
    assert config["networks"]["index"]["internal"] is True
    assert config["services"]["redis"]["networks"].keys() == {"index"}


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_every_service_is_watched_restarted_and_pinned(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """A health check, a restart rule, bounded logs, and a version instead of `latest`."""
    for name, service in resolved(files, profiles)["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert name == "load" or service["healthcheck"]["test"][0] == "CMD", name
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_our_processes_need_no_rights(files: tuple[str, ...], profiles: tuple[str, ...]) -> None:
    """No capability, a read-only file system, bounded memory, nothing of the host."""
    ours = [each for each in resolved(files, profiles)["services"].values() if "build" in each]

    assert len(ours) >= 2
    for service in ours:
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert int(service["mem_limit"]) > 0
        assert "volumes" not in service


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_nothing_waits_for_another_to_be_healthy(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """A Redis that keeps failing must not keep the balancer from being started."""
    for name, service in resolved(files, profiles)["services"].items():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_started", f"{name} waits for {other}"


def named_hosts(config: dict[str, Any], service: dict[str, Any]) -> set[str]:
    """Hosts in the URLs of a service's command, entrypoint, environment, health check and files."""
    parts = [service.get("command"), service.get("entrypoint"), service.get("environment")]
    parts.append(service.get("healthcheck"))
    parts += [config["configs"][each["source"]]["content"] for each in service.get("configs", ())]
    urls = re.findall(r"\b\w+://(\[[^]]*\]|[^\s/:\"'\\]+)", json.dumps(parts))
    return {host for host in urls if host not in {"*", "127.0.0.1"}}


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_every_named_host_is_a_service_in_reach(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """A name with a typing error is nobody's; a service of another network isn't found either."""
    config = resolved(files, profiles)
    found = set()
    for name, service in config["services"].items():
        hosts = named_hosts(config, service)
        reachable = set().union(*(addresses(config, each) for each in service["networks"]))
        assert hosts <= reachable, name
        found |= hosts

    assert "redis" in found
    assert ("balancer" in found) is ("load" in profiles)


def test_redis_keeps_the_index_and_evicts_nothing() -> None:
    """It persists, refuses to grow past its limit, and has room to rewrite its log."""
    redis = resolved(BASE, ())["services"]["redis"]
    options = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))

    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--lazyfree-lazy-expire"] == "yes"
    assert int(options["--maxmemory"].removesuffix("mb")) * 2**21 <= int(redis["mem_limit"])
    assert [each["target"] for each in redis["volumes"]] == ["/data"]


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
@pytest.mark.parametrize("command", ["indexer", "balancer"])
def test_configuration_names_services_that_run(
    files: tuple[str, ...], profiles: tuple[str, ...], command: str
) -> None:
    """Each engine and Redis by a name that this process can resolve; no engine is left out."""
    config = resolved(files, profiles)
    settings = kvlb_file(config, role_of(config, command))
    networks = config["services"][role_of(config, command)]["networks"]
    reachable = set().union(*(addresses(config, network) for network in networks))
    engines = {each["url"].split("/")[2].partition(":")[0] for each in settings["instances"]}
    redis = settings["redis"]["url"].split("/")[2].partition(":")[0]

    assert engines | {redis} <= reachable
    assert engines == {name for name in config["services"] if name.startswith(("engines", "vllm"))}


@pytest.mark.parametrize(("files", "profiles"), COMBINATIONS)
def test_prometheus_scrapes_services_that_run(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """Indexer and balancer under the names in dashboards/prometheus.yml."""
    config = resolved(files, profiles)
    scraped = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text())["scrape_configs"]
    hosts = {
        target.partition(":")[0]
        for job in scraped
        for static in job["static_configs"]
        for target in static["targets"]
    }

    assert hosts == {"indexer", "balancer"}
    assert hosts <= addresses(config, "monitoring")
    assert "monitoring" in config["services"]["prometheus"]["networks"]


def test_mounted_files_exist_where_grafana_looks() -> None:
    """A bind mount of a path that isn't there silently makes an empty directory."""
    services = resolved(BASE, ())["services"]
    mounts = {
        volume["target"]: Path(volume["source"])
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume["type"] == "bind"
    }
    provider = yaml.safe_load(
        (mounts["/etc/grafana/provisioning/dashboards"] / "kvlb.yml").read_text()
    )["providers"][0]
    source = yaml.safe_load(
        (mounts["/etc/grafana/provisioning/datasources"] / "prometheus.yml").read_text()
    )["datasources"][0]
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    assert all(path.exists() for path in mounts.values())
    assert (mounts[provider["options"]["path"]] / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    assert "monitoring" in services["grafana"]["networks"]


@pytest.mark.parametrize(("files", "profiles"), WITHOUT_LOAD[1:])
def test_real_engines_publish_what_kvlb_reads(
    files: tuple[str, ...], profiles: tuple[str, ...]
) -> None:
    """Events with replay, cached tokens in usage, a GPU each; NIXL where prefill is elsewhere."""
    services = resolved(files, profiles)["services"]
    engines = {name: each for name, each in services.items() if name.startswith("vllm")}
    gpus = []
    for engine in engines.values():
        arguments = dict(each.partition("=")[::2] for each in engine["command"][1:])
        events = json.loads(arguments["--kv-events-config"])
        transfer = json.loads(arguments.get("--kv-transfer-config", "{}"))
        assert events["enable_kv_cache_events"] is True
        # Anything but a wildcard and vLLM connects instead of binding.
        assert events["endpoint"] == "tcp://*:5557"
        assert events["replay_endpoint"] == "tcp://*:5657"
        assert "--enable-prompt-tokens-details" in arguments
        assert (transfer.get("kv_connector") == "NixlConnector") is (profiles == ("pd",))
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in engine["entrypoint"][2]
        (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        gpus += device["device_ids"]

    assert len(engines) == len(set(gpus)) == 2


def test_engine_starts_with_the_address_it_announces() -> None:
    """The shell line of the entrypoint hands every argument on, and exports an IP address."""
    engine = resolved(VLLM, ("pd",))["services"]["vllm-p0"]
    script = engine["entrypoint"][2].replace("$$", "$")
    stub = 'hostname() { echo "10.1.2.3 10.4.5.6"; }; vllm() { :; }\n' + script.replace(
        "exec vllm", 'echo "$VLLM_NIXL_SIDE_CHANNEL_HOST" "$#" #'
    )
    done = subprocess.run(
        [*engine["entrypoint"][:2], stub, "vllm", *engine["command"]],
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
    )

    assert done.stdout.split() == ["10.1.2.3", str(len(engine["command"]))]
    assert script.rstrip().endswith('exec vllm serve "$@"')


def test_dockerfile_is_clean() -> None:
    """The linter has nothing to say."""
    done = subprocess.run(
        [PROGRAMS / "hadolint", "--no-color", "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def dockerfile() -> list[list[str]]:
    """Instructions of the Dockerfile, lines joined and split into words."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [shlex.split(line) for line in lines]


def test_image_runs_as_nobody_in_particular() -> None:
    """A number, so that an orchestrator can check that it isn't root."""
    users = [words[1] for words in dockerfile() if words[0] == "USER"]

    assert users == ["10001:10001"]


def test_image_is_built_from_what_the_wheel_holds() -> None:
    """Every package is copied, nothing else is, and .dockerignore lets exactly that through."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {
        source
        for words in dockerfile()
        if words[0] == "COPY" and not words[1].startswith("--from")
        for source in words[1:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert copied == {*packages, "requirements.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
