"""What starts a run on TPUs: the JobSet against its schema, the script against a stand-in for gcloud, flags
against the parser of experiments/run.py."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import shutil
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
    spec = importlib.util.spec_from_file_location("run_arguments", ROOT / "experiments" / "run_arguments.py")
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
        assert 20 < args.grace <= 0.9 * pod["terminationGracePeriodSeconds"]  # the rest is for saving
        assert (args.distributed, args.mesh, given in done.stdout) == (True, "fsdp=16", True)


def test_commands_of_the_readme_are_understood(parser):
    text = (TPU / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (script,) = re.findall(r"experiments/tpu/tpu_vm\.sh \S+ \S+ (.*)", text)
    (xpk,) = re.findall(r'--command "python experiments/run\.py (.*?)"', text)
    for flags in (script, xpk):
        args = parser(shlex.split(flags))
        assert args.mesh == "fsdp=16"
        assert (ROOT / args.workers).exists()


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_script_runs_the_same_command_on_all_hosts(tmp_path, parser):
    log = tmp_path / "log"
    program(
        tmp_path / "gcloud",
        f"#!{sys.executable}\nimport json, shutil, sys\n"
        f"print(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'))\n"
        f"if 'scp' in sys.argv: shutil.copy(sys.argv[5], {str(tmp_path / 'sent.tar.gz')!r})\n",
    )
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

    # On a host, with stand-ins for its Python, which is too old and has no uv, and for uv.
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "sent.tar.gz").rename(home / "lemon.tar.gz")
    host = tmp_path / "host"
    host.mkdir()
    for name in ("bash", "sh", "mkdir", "tar", "gzip", "cp"):
        (host / name).symlink_to(shutil.which(name))
    uv = "#!/bin/sh\necho uv $* >> $HOME/log\n"
    uv += "[ $1 != venv ] || { mkdir -p .venv/bin; cp $HOME/python .venv/bin/python; }\n"
    program(home / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program(tmp_path / "uv", uv)
    pip = f"mkdir -p $HOME/.local/bin && cp {tmp_path}/uv $HOME/.local/bin/"
    on_host = {"HOME": str(home), "PATH": str(host)}

    def run_there():
        return subprocess.run(
            ["bash", "-c", remote], env=on_host, cwd=home, check=False, capture_output=True, text=True
        )

    program(host / "python3", "#!/bin/sh\nexit 1\n")
    done = run_there()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: cannot install uv")
    program(host / "python3", f"#!/bin/sh\n{pip}\n")
    for _ in range(2):  # again, as after a stop
        done = run_there()
        assert done.stdout.splitlines() == ["experiments/run.py", "--distributed", *FLAGS]
    made, *installed = (home / "log").read_text().splitlines()
    assert made == "uv venv --quiet --python 3.12 .venv"
    assert installed == ["uv pip install --quiet --python .venv/bin/python -e .[tpu,gcs]"] * 2


def test_the_script_explains_itself():
    done = subprocess.run([str(TPU / "tpu_vm.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "experiments/tpu/tpu_vm.sh NAME ZONE" in done.stderr
