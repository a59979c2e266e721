"""`hocket run --kubernetes`: the manifests are valid for the operators, and their command trains as they stand."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
from hocket.launch import ArgumentError, parse_arguments, write_manifests
from hocket.testing import deadline

yaml = pytest.importorskip("yaml", reason="reads the manifests with PyYAML")

TRAIN = """
import os
own = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MARK", "API_TOKEN")]
total = "-"
if own[1] == "0":  # of each pod one rank meets that of the other, and imports torch
    os.environ.update(RANK=os.environ["GROUP_RANK"], WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    import torch
    from torch import distributed as dist
    dist.init_process_group("hocket")
    total = torch.ones(1); dist.all_reduce(total); total = total.item()
    dist.destroy_process_group()
print(*own, total)
"""
CRDS = {
    "ClusterTrainingRuntime": "trainer-clustertrainingruntimes-crd.yaml",
    "TrainJob": "trainer-trainjobs-crd.yaml",
    "JobSet": "jobset-crd.yaml",
}


@pytest.fixture
def written(script: Any, tmp_path: Path) -> tuple[list[Any], list[Any]]:
    """The documents of both files for two pods of two ranks."""
    script(TRAIN, "My train.py")
    words = ["--nnodes=2", "-n=2", "-x", "MARK=7: #", "-x", "API_TOKEN=t", "--max-restarts=1", "--image=me/mine:1"]
    place = tmp_path / "job.yaml"
    arguments = parse_arguments([*words, f"--kubernetes={place}", str(tmp_path / "My train.py"), "--lr", "0.1"])
    files = write_manifests(arguments)
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert files == (place, tmp_path / "job.jobset.yaml")
    first, second = (list(yaml.safe_load_all(file.read_text())) for file in files)
    return first, second


def containers(document: Any) -> Any:
    """Return the container of the pods of a runtime or of a JobSet."""
    spec = document["spec"].get("template", document)["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def test_manifests_say_what_the_command_line_said(written: Any, tmp_path: Path) -> None:
    (secret, runtime, job), (_, job_set) = written
    words = ["--max-restarts=1", "--", str(tmp_path / "My train.py"), "--lr", "0.1"]
    trainer = job["spec"]["trainer"]
    assert containers(runtime)["command"] == containers(job_set)["command"] == ["hocket", "run"]
    assert trainer["args"] == containers(job_set)["args"] == words
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 2, "me/mine:1")
    assert {"name": "MARK", "value": "7: #"} in trainer["env"]
    assert secret["stringData"]["API_TOKEN"] == "t"
    assert len(secret["stringData"]["HOCKET_SECRET"]) == 64
    assert job["metadata"]["name"] == "my-train"


def test_words_reach_the_script_as_they_are_and_older_files_are_closed_to_others(script: Any, tmp_path: Path) -> None:
    place = tmp_path / "job.yaml"
    place.touch(0o644)
    words = ["$(HOME)", "a$$b", "100$", "\U0001f600 \u00e9\x7f\\ud83d\n"]
    more = [f"-x=MARK={words[0]}", "--timeout=1234567.5", "--run-dir=off"]
    for path in write_manifests(parse_arguments([*more, f"--kubernetes={place}", script(""), *words])):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        job = list(yaml.safe_load_all(path.read_text()))[-1]
        container = job["spec"]["trainer"] if job["kind"] == "TrainJob" else containers(job)
        # As Kubernetes reads them: https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
        assert [word.replace("$$", "$") for word in container["args"][-4:]] == words
        assert "--no-run-dir" in container["args"]
        assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", word) for word in container["args"])
        assert container["args"][0] == "--timeout=1234567.5"
        assert {"name": "MARK", "value": "$$(HOME)"} in container["env"]


def test_what_pods_cannot_be_is_refused(script: Any) -> None:
    for nodes in ("1:4", "0"):
        with pytest.raises(ArgumentError, match=f"--nnodes {nodes}: .*give the number of pods"):
            parse_arguments(["--kubernetes=job.yaml", f"--nnodes={nodes}", script("")])
    for flags in (["--hosts=a,b"], ["--fabric=star:hosts=2"]):
        with pytest.raises(ArgumentError, match="--kubernetes says where all ranks are"):
            parse_arguments(["--kubernetes=job.yaml", *flags, script("")])


def faults(value: Any, schema: Any, path: str = "") -> list[str]:
    """Return where a document breaks the schema of a CustomResourceDefinition, fields that it would drop included."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: {value!r}"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]) or value not in schema.get("enum", [value]):
        return [f"{path}: {value!r} is no {schema['type']} of {schema.get('enum')}"]
    if isinstance(value, list):
        return [
            fault for index, item in enumerate(value) for fault in faults(item, schema["items"], f"{path}[{index}]")
        ]
    if not isinstance(value, dict):
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    found = [f"{path}: no {name}" for name in schema.get("required", []) if name not in value]
    for name, item in value.items():
        if name in known or isinstance(rest, dict):
            found += faults(item, known.get(name, rest), f"{path}.{name}")
        elif not (rest or schema.get("x-kubernetes-preserve-unknown-fields") or path in ("", ".metadata")):
            found.append(f"{path}.{name} is not known")
    return found


def test_manifests_fit_the_operators_definitions(written: Any) -> None:
    folder = os.environ.get("HOCKET_KUBERNETES_CRDS")
    if folder is None:
        pytest.skip(f"HOCKET_KUBERNETES_CRDS names no folder with {', '.join(CRDS.values())}")
    for document in [*written[0][1:], written[1][1]]:
        (crd,) = [one for one in yaml.safe_load_all((Path(folder) / CRDS[document["kind"]]).read_text()) if one]
        (version,) = [one for one in crd["spec"]["versions"] if one["served"]]
        assert document["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
        schema = version["schema"]["openAPIV3Schema"]
        assert faults(document, schema) == []
        document["spec"]["surprise"] = document["spec"].get("template", 1)
        assert faults(document, schema) == [".spec.surprise is not known"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["TrainJob", pytest.param("JobSet", marks=pytest.mark.long)])
def test_the_command_of_each_manifest_trains_with_the_variables_that_its_operator_sets(written: Any, kind: str) -> None:
    """Each pod is an emulated host; its variables are the manifest's, and those of Trainer's torch runtime."""
    pytest.importorskip("pyroute2", reason="fabrics need the extra `fabric`")
    try:
        fabric = Fabric(load("star:hosts=2"))
    except (FabricError, PermissionError) as error:
        pytest.skip(f"no fabrics here: {error}")
    (secret, runtime, job), (own_secret, job_set) = written
    words, variables, kept = {
        "TrainJob": (
            containers(runtime)["command"] + job["spec"]["trainer"]["args"], job["spec"]["trainer"]["env"], secret,
        ),
        "JobSet": (
            containers(job_set)["command"] + containers(job_set)["args"], containers(job_set)["env"], own_secret,
        ),
    }[kind]  # fmt: skip
    values = {one["name"]: one["value"] for one in variables if "value" in one}
    asked = {one["name"]: kept["stringData"][one["name"]] for one in variables if "secretKeyRef" in str(one)}
    operator = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29400"}
    with fabric:
        hosts = fabric.wiring.hosts
        started = []
        for rank, host in enumerate(hosts):
            pod = {**operator, **values, **asked, "PET_NODE_RANK": str(rank)}
            pod["PET_MASTER_ADDR"] = fabric.address(hosts[0])  # what the pod's name resolves to
            environment = [f"{name}={value}" for name, value in pod.items()]
            command = ["env", *environment, sys.executable, "-m", *words]
            started.append(fabric.run_in_host(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        try:
            ended = [process.communicate(timeout=deadline(120)) for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], ended
        lines = sorted(line.partition("] ")[2] for out, _ in ended for line in out.splitlines())
        totals = (2.0, "-", 2.0, "-")
        assert lines == [f"{rank} {rank % 2} 4 7: # t {total}" for rank, total in enumerate(totals)], json.dumps(ended)
