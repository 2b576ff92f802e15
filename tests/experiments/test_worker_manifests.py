"""Worker files for servers, and the manifests that start these, fit each other and their schemas."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from lemon_jax.backends import load_worker_file

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "experiments" / "workers"


def places(name: str) -> set[str]:
    """host:port of every server of a worker file."""
    models = load_worker_file(WORKERS / name).models.values()
    return {urlsplit(url).netloc for model in models for url in model.base_urls}


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((WORKERS / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted(WORKERS.glob("*.toml")), ids=lambda path: path.stem)
def test_worker_files_are_valid(path):
    assert load_worker_file(path).capacities.keys() == {"small", "medium", "large"}


@pytest.mark.parametrize("name", ["vllm", "vllm_tpu", "sglang", "kubernetes"])
def test_several_servers_per_capacity(name):
    config = load_worker_file(WORKERS / f"{name}.toml")
    assert all(len(config.models[c.model].base_urls) >= 2 for c in config.capacities.values())


def test_the_readme_starts_what_the_files_name():
    text = (WORKERS / "README.md").read_text(encoding="utf-8")
    for section, name in (("## vLLM on GPUs", "vllm.toml"), ("## SGLang", "sglang.toml")):
        commands = text.partition(section)[2].partition("\n## ")[0]
        assert {f"localhost:{port}" for port in re.findall(r"--port (\d+)", commands)} == places(name)
    assert all(f"`{path.name}`" in text for path in WORKERS.iterdir() if path.name != "README.md")


def test_compose_publishes_the_servers_of_its_worker_file():
    (compose,) = documents("compose.yaml")
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert {port.removeprefix("127.0.0.1:").removesuffix(":8000") for port in ports} == {
        place.removeprefix("localhost:") for place in places("vllm.toml")
    }
    models = {m.model for m in load_worker_file(WORKERS / "vllm.toml").models.values()}
    served = " ".join(word for service in compose["services"].values() for word in service["command"])
    assert all(model in served for model in models)
    devices = [
        gpu
        for service in compose["services"].values()
        for gpu in service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    ]
    assert len(devices) == len(set(devices)) == 7


def test_compose_fits_its_schema():
    compose_spec = pytest.importorskip("compose_spec", reason="needs the extra manifests")
    text = json.dumps(documents("compose.yaml")[0])  # YAML's anchors and merges resolved
    parsed = compose_spec.PyCompose.from_json(text)
    parsed.validate()
    assert parsed.to_spec().services.keys() == documents("compose.yaml")[0]["services"].keys()
    for wrong in (text.replace("healthcheck", "healtcheck"), text.replace('"10s"', '"soon"')):
        with pytest.raises(ValueError, match=r"healtcheck|duration"):
            compose_spec.PyCompose.from_json(wrong)


def test_kubernetes_names_the_servers_of_its_worker_file():
    service, stateful = documents("kubernetes.yaml")
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    host = f"{stateful['metadata']['name']}-{{}}.{service['metadata']['name']}:8000"
    assert places("kubernetes.toml") == {host.format(i) for i in range(stateful["spec"]["replicas"])}
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels


def test_kubernetes_fits_its_schema():
    schema = pytest.importorskip("kubernetes_validate", reason="needs the extra manifests")
    for document in documents("kubernetes.yaml"):
        schema.validate(document, "1.35", strict=True)
    document["spec"]["template"]["spec"]["containers"][0]["imaeg"] = "x"
    with pytest.raises(schema.ValidationError, match="imaeg"):
        schema.validate(document, "1.35", strict=True)


def test_the_benchmark_of_replicas_runs():
    command = [sys.executable, str(ROOT / "experiments" / "bench" / "replicas.py")]
    command += ["--replicas", "1", "2", "--seconds", "0.2", "--latency-ms", "10", "--slots", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["1", "39"], ["2", "81"]]
