"""Manifests for Kubernetes whose command is `hocket run`: for Kubeflow's Trainer, and for JobSet alone.

Trainer's torch runtime tells each pod PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and
PET_MASTER_PORT, which `hocket run` reads as torchrun does; the plain JobSet says the same of itself.
Sources: https://www.kubeflow.org/docs/components/trainer/, https://jobset.sigs.k8s.io/docs/.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket.comm.rendezvous import SECRET_VARIABLE

from ._arguments import LaunchArguments
from ._facts import MASTER_PORT
from ._run_directory import is_secret

_RUNTIME = "hocket"


def write_manifests(arguments: LaunchArguments) -> tuple[Path, Path]:
    """Write a TrainJob with its ClusterTrainingRuntime, and the same job as a JobSet; return the two files.

    Nobody but the user may read the files: they hold the secret by which the pods know each other.

    Raises:
        OSError: They cannot be written.
    """
    assert arguments.kubernetes is not None
    first = Path(arguments.kubernetes)
    second = first.with_suffix(f".jobset{first.suffix}")
    for path, documents in ((first, train_job(arguments)), (second, job_set(arguments))):
        text = "---\n".join("".join(f"{line}\n" for line in _yaml(document)) for document in documents)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # an older file may have been open to others
            file.write(text)
    return first, second


def train_job(arguments: LaunchArguments) -> list[dict[str, Any]]:
    """Return a Secret, a ClusterTrainingRuntime for any script, and the TrainJob of this one."""
    secret, variables = _secret(arguments)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": _RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    "network": {"publishNotReadyAddresses": True},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": {"backoffLimit": 0, "template": {"spec": _pod({"image": arguments.image})}},
                            },
                        }
                    ],
                }
            },
        },
    }
    counted = {} if arguments.ranks_of_pod == "auto" else {"numProcPerNode": arguments.nproc}
    trainer = {
        "image": arguments.image,
        "numNodes": _nodes(arguments),
        **counted,
        "args": _words(arguments),
        "resourcesPerNode": _resources(arguments),
        "env": variables,
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _name(arguments)},
        "spec": {"runtimeRef": {"name": _RUNTIME}, "trainer": trainer},
    }
    return [secret, runtime, job]


def job_set(arguments: LaunchArguments) -> list[dict[str, Any]]:
    """Return a Secret and a JobSet, for clusters without Trainer."""
    secret, variables = _secret(arguments)
    name, nodes = _name(arguments), _nodes(arguments)
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    variables = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": arguments.ranks_of_pod},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
        *variables,
    ]
    container = {
        "image": arguments.image, "args": _words(arguments), "env": variables, "resources": _resources(arguments),
    }  # fmt: skip
    job = {
        "backoffLimit": 0, "completionMode": "Indexed", "completions": nodes, "parallelism": nodes,
        "template": {"spec": _pod(container)},
    }  # fmt: skip
    return [
        secret,
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
            },
        },
    ]


def _pod(container: dict[str, Any]) -> dict[str, Any]:
    # A container's own /dev/shm has 64 MiB, too little for workers of data loaders.
    mounts = [{"name": "dev-shm", "mountPath": "/dev/shm"}]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,  # for ranks that save a checkpoint when they get SIGTERM
        "containers": [{"name": "node", "command": ["hocket", "run"], **container, "volumeMounts": mounts}],
        "volumes": [{"name": "dev-shm", "emptyDir": {"medium": "Memory"}}],
    }


def _words(arguments: LaunchArguments) -> list[str]:
    """Return what follows `hocket run`; numbers of pods and ranks are in variables, as are those of `-x`."""
    limit = [] if arguments.timeout_s is None else [f"--timeout={arguments.timeout_s}"]
    place = [f"--run-dir={arguments.flags.run_dir}"] if arguments.flags.run_dir else []
    place += ["--no-run-dir"] if arguments.flags.no_run_dir else []
    words = [*limit, *place, *arguments.host_flags, "--", arguments.target, *arguments.arguments]
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Return what Kubernetes makes this text of: it puts variables for $(NAME), and $ for $$."""
    return text.replace("$", "$$")


def _resources(arguments: LaunchArguments) -> dict[str, Any]:
    """Return what a pod asks for: a GPU for each rank where `-n gpu` says that they have one, else a core."""
    if arguments.ranks_of_pod == "gpu":
        return {"limits": {"nvidia.com/gpu": arguments.nproc}}
    return {"requests": {"cpu": arguments.nproc}}


def _secret(arguments: LaunchArguments) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a Secret with what nobody else may know, and the container's variables."""
    name = f"{_name(arguments)}-hocket"
    kept = {SECRET_VARIABLE: secrets.token_hex(32)}
    variables: list[dict[str, Any]] = []
    for key, value in arguments.environment.items():
        if is_secret(key):
            kept[key] = value
        else:
            variables.append({"name": key, "value": _literal(value)})
    for key in kept:
        variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": kept}, variables


def _name(arguments: LaunchArguments) -> str:
    """Return the job's name: a label of DNS that leaves space for what controllers append."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(arguments.target).name.removesuffix(".py").lower()).strip("-")[:30]
    return stem.strip("-") if stem[:1].isalpha() else f"hocket-{stem}".strip("-")


def _nodes(arguments: LaunchArguments) -> int:
    return int(str(arguments.flags.nnodes).removeprefix("1:"))


def _yaml(value: dict[str, Any], pad: str = "") -> Iterator[str]:
    """Yield the lines of a mapping as YAML; scalars and lists of them as JSON, which is YAML."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{pad}{key}:"
            yield from _yaml(item, f"{pad}  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            yield f"{pad}{key}:"
            for entry in item:
                first, *rest = _yaml(entry, f"{pad}    ")
                yield f"{pad}  - {first.lstrip()}"
                yield from rest
        else:
            # JSON writes what is beyond 16 bits as two surrogates, which YAML refuses.
            written = re.sub(r"[^ -~]", lambda one: f"\\U{ord(one[0]):08x}", json.dumps(item, ensure_ascii=False))
            yield f"{pad}{key}: {written}"
