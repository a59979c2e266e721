"""Ray Train: `TorchTrainer(loop, torch_config=hocket.integrations.RayConfig(), scaling_config=...)`."""

import os
import secrets
from dataclasses import dataclass
from typing import Any

from ray.train.torch import TorchConfig

from hocket.comm import rendezvous


@dataclass
class RayConfig(TorchConfig):  # type: ignore[misc, unused-ignore]  # Ray may not be installed
    """Ray's TorchConfig with the backend "hocket": in the loop the group is there, as `hocket.distribute` asks for it.

    The workers find each other in a store that asks for a secret, which is new for each start of the workers.

    Attributes:
        backend: "hocket", or another of torch's, whose workers then have the same store.
        init_method: "env"; see Ray's TorchConfig.
        timeout_s: Seconds until an operation of the group gives up.
    """

    backend: str | None = "hocket"

    @property
    def backend_cls(self) -> type:
        """Return Ray's own class of the backend, which hands out the secret first."""
        return _with_secret(super().backend_cls)


def _with_secret(plain: type) -> type:
    class SecretBackend(plain):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            secret = rendezvous.job_secret() or secrets.token_hex(32).encode()
            worker_group.execute(_keep, secret.decode())
            super().on_start(worker_group, backend_config)

    return SecretBackend


def _keep(secret: str) -> None:
    os.environ[rendezvous.SECRET_VARIABLE] = secret
