"""What starts a run on TPUs: the JobSet against its schema, the script against a stand-in for gcloud, flags
against the parser of experiments/run.py."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TPU = ROOT / "experiments" / "tpu"
FLAGS = ["--bench", "gsm8k", "--mesh", "fsdp=16", "--remat", "--out", "runs/with space", "--policy", "it's"]


@pytest.fixture(scope="module")
def parser():
    spec = importlib.util.spec_from_file_location("run_for_flags", ROOT / "experiments" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse_arguments


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((TPU / "jobset.yaml").read_text(encoding="utf-8"))


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def arguments(command):
    """What run.py is given in a command of a shell."""
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("experiments/run.py") + 1 :]


def test_jobset_fits_its_schema(jobset):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra manifests")
    model = models.JobsetV1alpha2JobSet
    # The model drops what it does not know: what comes back is all that the schema has.
    assert model.from_dict(jobset).to_dict() == jobset
    wrong = yaml.safe_load(
        (TPU / "jobset.yaml").read_text(encoding="utf-8").replace("maxRestarts", "maxRestart")
    )
    assert model.from_dict(wrong).to_dict() != wrong
    with pytest.raises(ValueError, match="replicas"):
        model.from_dict(
            jobset | {"spec": {"replicatedJobs": [{"name": "a", "replicas": "b", "template": {}}]}}
        )


def test_its_job_fits_the_schema_of_kubernetes(jobset):
    schema = pytest.importorskip("kubernetes_validate", reason="needs the extra manifests")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}, "spec": job_of(jobset)}
    schema.validate(job, "1.35", strict=True)
    job["spec"]["template"]["spec"]["nodeSelectors"] = {}
    with pytest.raises(schema.ValidationError, match="nodeSelectors"):
        schema.validate(job, "1.35", strict=True)
    del job["spec"]["template"]["spec"]["nodeSelectors"]


def test_hosts_chips_and_mesh_agree(jobset, parser):
    job = job_of(jobset)
    pod = job["template"]["spec"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    (container,) = pod["containers"]
    assert job["completions"] == job["parallelism"]
    assert chips == job["completions"] * int(container["resources"]["limits"]["google.com/tpu"])
    script = container["args"][0]
    assert f"--mesh fsdp={chips}" in script
    # Both branches of the script are commands that run.py takes.
    for condition, given in (("false", "--bench"), ("true", "--resume")):
        echo = script.replace("[ -e /runs/big/manifest.json ]", condition).replace(
            "exec python", "echo python"
        )
        done = subprocess.run(["sh", "-c", echo], capture_output=True, text=True, check=True)
        args = parser(arguments(done.stdout))
        assert (args.distributed, args.mesh, given in done.stdout) == (True, "fsdp=16", True)


def test_commands_of_the_readme_are_understood(parser):
    text = (TPU / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (script,) = re.findall(r"experiments/tpu/tpu_vm\.sh \S+ \S+ (.*)", text)
    (xpk,) = re.findall(r'--command "python experiments/run\.py (.*?)"', text)
    for flags in (script, xpk):
        args = parser(shlex.split(flags))
        assert args.mesh == "fsdp=16"
        assert (ROOT / args.workers).exists()


def test_the_script_runs_the_same_command_on_all_hosts(tmp_path, parser):
    log = tmp_path / "log"
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(
        f"#!{sys.executable}\nimport json, shutil, sys\n"
        f"print(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'))\n"
        f"if 'scp' in sys.argv: shutil.copy(sys.argv[5], {str(tmp_path / 'sent.tar.gz')!r})\n"
    )
    gcloud.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(TPU / "tpu_vm.sh"), "slice", "zone-a", *FLAGS]
    subprocess.run(command, env=environ, check=True, capture_output=True, cwd=tmp_path)
    copy, start = (yaml.safe_load(line) for line in log.read_text().splitlines())
    assert copy[:4] == ["compute", "tpus", "tpu-vm", "scp"]
    assert start[:5] == ["compute", "tpus", "tpu-vm", "ssh", "slice"]
    assert all({"--zone=zone-a", "--worker=all"} <= set(words) for words in (copy, start))
    with tarfile.open(tmp_path / "sent.tar.gz") as archive:
        assert {"pyproject.toml", "experiments/run.py"} <= set(archive.getnames())
    (remote,) = (word.removeprefix("--command=") for word in start if word.startswith("--command="))
    assert subprocess.run(["bash", "-n", "-c", remote], check=False).returncode == 0
    assert arguments(remote) == ["--distributed", *FLAGS]
    assert parser(arguments(remote)).out == Path("runs/with space")


def test_the_script_explains_itself():
    done = subprocess.run([str(TPU / "tpu_vm.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "experiments/tpu/tpu_vm.sh NAME ZONE" in done.stderr
