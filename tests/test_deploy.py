"""The files for deployment: they parse, hold to what docs/deploying.md says, and name what there is."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outrider.server.metrics import Metrics

ROOT = Path(__file__).parent.parent
DRAIN = 30  # seconds that the server gives running requests after SIGTERM
DEADLINE = 600  # and any request in all
USER = "10001"
LOCKS = ("torch", "server", "build")
OPTIONS = {
    "--host", "--port", "--api-key-file", "--max-model-len", "--speculative-model", "--num-speculative-tokens",
}  # fmt: skip
METRICS = {  # what the server exports: name -> labels; histograms by their name without a suffix
    sample.name.removeprefix("outrider_") + ("_total" if sample.type == "counter" else ""): sample.labels
    for sample in Metrics().described()
}
HISTOGRAMS = {one.name.removeprefix("outrider_") for one in Metrics().described() if one.type == "histogram"}
TARGET_LABELS = {"job", "instance"}  # of every metric, by Prometheus


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def options_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


# --- the dashboard


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text("deploy/grafana.json"))
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def exported(name: str) -> str:
    """The metric whose sample this is."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in HISTOGRAMS else name


def test_the_dashboard_shows_every_metric_and_no_other(dashboard: dict[str, Any]) -> None:
    queries = [one["query"] for one in dashboard["templating"]["list"][1:]]
    told = expressions(dashboard) + [one["query"] for one in queries]
    used = {exported(name) for one in told for name in re.findall(r"outrider_(\w+)", one)}
    assert used == set(METRICS)


def test_rates_are_taken_of_counters_and_labels_exist(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        for whole, name in re.findall(r"((?:rate\()?outrider_(\w+))", expression):
            base = exported(name)
            assert whole.startswith("rate(") == (name.endswith("_total") or base in HISTOGRAMS), expression
            assert base not in HISTOGRAMS or name != base, f"a histogram has no sample of its own name: {expression}"
            labels = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", by)}
            assert labels <= {*METRICS[base], "le"}, expression
            assert "le" not in labels or name.endswith("_bucket"), expression
        matched = set(re.findall(r"(\w+)=~", expression))
        assert matched == TARGET_LABELS, expression
        assert expression.count("(") == expression.count(")")


def test_panels_have_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert x + w <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {"instance", *sum(METRICS.values(), ())}


# --- the image


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instruction and rest of each line of the Dockerfile."""
    lines = [line for line in text("Dockerfile").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def test_images_come_from_docker_hub_by_default(steps: list[tuple[str, str]]) -> None:
    names = [rest.split()[0] for step, rest in steps if step == "FROM"]
    assert names
    assert not [name for name in names if "/" in name or "." in name.split(":")[0]], "a registry is named"


def test_the_server_is_process_one_and_not_root(steps: list[tuple[str, str]]) -> None:
    last = max(place for place, (step, _) in enumerate(steps) if step == "FROM")
    final = dict(steps[last:])
    assert final["USER"] == f"{USER}:{USER}"
    command = json.loads(final["ENTRYPOINT"])  # exec form: no shell keeps SIGTERM from it
    assert command[:2] == ["outrider", "serve"]
    assert options_in(command) <= OPTIONS
    assert "CMD" not in final
    assert final["STOPSIGNAL"] == "SIGTERM"
    check = json.loads(final["HEALTHCHECK"].partition("CMD")[2])
    port = command[command.index("--port") + 1]
    assert f":{port}/ready" in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")
    assert final["EXPOSE"] == port


def test_what_the_image_is_built_from_is_not_ignored(steps: list[tuple[str, str]]) -> None:
    kept = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
    copied = {name for step, rest in steps if step == "COPY" and "--from" not in rest for name in rest.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.fixture(scope="module")
def locked() -> dict[str, dict[str, tuple[str, set[str]]]]:
    """File -> name -> version and hashes."""
    found: dict[str, dict[str, tuple[str, set[str]]]] = {}
    for file in LOCKS:
        joined = text(f"scripts/{file}.lock").replace("\\\n", " ")
        entries = [re.split(r"\s+--hash=", line) for line in joined.splitlines()]
        pins = [(Requirement(first.strip()), {one.strip() for one in hashes}) for first, *hashes in entries]
        assert all(str(pin.specifier).startswith("==") for pin, _ in pins), file
        found[file] = {canonicalize_name(pin.name): (str(pin.specifier)[2:], hashes) for pin, hashes in pins}
        assert len(found[file]) == len(pins), f"{file} names something twice"
    return found


def test_all_that_the_image_installs_is_pinned_by_hash(
    locked: dict[str, dict[str, tuple[str, set[str]]]], steps: list[tuple[str, str]]
) -> None:
    for file, pins in locked.items():
        for name, (_, hashes) in pins.items():
            assert hashes, f"{file}: {name}"
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), f"{file}: {name}"
        words = text(f"scripts/{file}.lock")
        assert "://" not in words
        assert "index" not in words.lower()
        commands = [rest for step, rest in steps if step == "RUN" and f"{file}.lock" in rest]
        assert len(commands) == 1
        assert f"--no-deps --require-hashes --requirement /src/scripts/{file}.lock" in commands[0]
    assert not locked["torch"].keys() & locked["server"].keys()
    assert all(re.match(r"torch$|triton$|nvidia-|cuda-", name) for name in locked["torch"])


def test_what_is_pinned_is_what_the_package_asks_for(locked: dict[str, dict[str, tuple[str, set[str]]]]) -> None:
    project = tomllib.loads(text("pyproject.toml"))
    asked = project["project"]["dependencies"]
    asked += [one for extra in ("server", "otel") for one in project["project"]["optional-dependencies"][extra]]
    pins = {name: version for pins in (locked["torch"], locked["server"]) for name, (version, _) in pins.items()}
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    for requirement in map(Requirement, project["build-system"]["requires"]):
        assert requirement.specifier.contains(locked["build"][canonicalize_name(requirement.name)][0]), requirement
    bounds = [line for line in text("scripts/constraints.txt").splitlines() if not line.startswith("#")]
    for requirement in map(Requirement, bounds):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), f"{requirement}, pinned at {version}"
    default = re.search(r"torch==[0-9.]+", text("scripts/setup"))
    assert default
    assert default[0] == f"torch=={pins['torch']}"
    assert default[0] in text("Dockerfile")


# --- systemd


def test_the_unit_drains_before_it_kills() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text("deploy/outrider.service"))
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) > DRAIN
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    words = service["ExecStart"].split()
    assert words[0].startswith("/")
    assert words[1] == "serve"
    assert options_in(words) <= OPTIONS
    assert service["DynamicUser"] == service["NoNewPrivileges"] == service["PrivateTmp"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


# --- Kubernetes


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {one["kind"]: one for one in yaml.safe_load_all(text("deploy/kubernetes.yaml"))}


def test_the_pod_has_time_to_drain(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(hook[1]) + DRAIN + 5
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/live", "readiness": "/ready"}
    ports = {port["name"] for port in container["ports"]}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in paths} == ports


def test_the_pod_has_no_rights_that_it_does_not_need(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == USER  # as in the image
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert "/" not in container["image"]
    assert options_in(container["args"]) <= OPTIONS


def test_what_belongs_together_is_named_alike(objects: dict[str, Any]) -> None:
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    pod = deployment["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(volumes) == set(mounts)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    image = text("Dockerfile")
    assert f'"{mounts["api-keys"]}"' in image  # the entry point's key file
    assert f"VOLUME {mounts['models']}" in image


# --- nginx


def settings_of(block: str) -> dict[str, str]:
    """Directives of an nginx block, without those of the blocks in it."""
    return dict(line.strip().rstrip(";").split(None, 1) for line in block.splitlines() if line.rstrip().endswith(";"))


def test_streams_pass_nginx_unbuffered_and_long_answers_in_time() -> None:
    lines = [re.sub(r"\s*#.*", "", line) for line in text("deploy/nginx.conf").splitlines()]
    config = "\n".join(line for line in lines if line.strip())
    assert config.count("{") == config.count("}")
    assert all(line.rstrip().endswith(("{", "}", ";")) for line in config.splitlines())
    opened = [line.count("{") - line.count("}") for line in config.splitlines()]
    depths = [sum(opened[:end]) for end in range(len(opened) + 1)]
    assert min(depths) == depths[-1] == 0
    assert all(abs(one - other) <= 1 for one, other in pairwise(depths))
    found = re.search(r"location /v1/ {(.*?)\n\s*}", config, re.DOTALL)
    assert found is not None
    proxied = settings_of(found[1])
    assert proxied["proxy_buffering"] == "off"
    assert proxied["proxy_http_version"] == "1.1"
    assert int(proxied["proxy_read_timeout"].removesuffix("s")) > DEADLINE
    assert proxied["proxy_next_upstream"] == "off"
    assert "client_max_body_size 4m;" in config
