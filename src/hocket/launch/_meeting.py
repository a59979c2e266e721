"""How the launchers of a job meet, then their ranks: alone on one host, else by a store that asks for a secret.

torch.distributed.elastic would open TCPStores, which ask nobody who he is, and unpickle what it finds in them.
"""

import errno
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from hocket.comm import rendezvous, torch_adapter
from hocket.comm.secret_store import SecretStore, StoreServer

from ._facts import free_port
from ._failure import ArgumentError, LaunchError

_PORT = 29400  # torchrun's for c10d
_C10D_S, _STATIC_S = 60.0, 600.0  # torchrun's time-outs for who looks for the store


class Meeting:
    """How one launcher meets the others, and its ranks all ranks."""

    def __init__(self, handler: RendezvousHandler, directory: str, place: str = "", server: Any = None) -> None:
        self.handler = handler  # what elastic asks
        self._directory = directory  # of the job
        self._place = place  # where the ranks meet; "" in a file of the directory
        self._server: StoreServer | None = server

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return what a rank's environment must have besides, from what elastic gives it."""
        attempt, address, port = (given[k] for k in ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"))
        if not self._place:
            return rendezvous.environment(address, port, os.path.join(self._directory, f"rendezvous-{attempt}"))
        secret = {rendezvous.SECRET_FILE_VARIABLE: secret_file(self._directory)}
        return {**rendezvous.environment(address, port, f"{self._place}/{port}/{attempt}"), **secret}

    def close(self) -> None:
        """End the store, if it is this launcher's."""
        if self._server is not None:
            self._server.close()


class _Elsewhere(Meeting):
    """A rendezvous of another kind, etcd say: all is as elastic has it."""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {}


class _Numbered(RendezvousHandler):
    """Launchers that have been told their numbers, one of one host among them: there is nothing to find out."""

    def __init__(self, config: LaunchConfig, number: int, hosts: int, store: Any, place: RendezvousStoreInfo) -> None:
        self._config, self._number, self._hosts, self._store, self._place = config, number, hosts, store, place

    def get_backend(self) -> str:
        return self._config.rdzv_backend

    def next_rendezvous(self) -> RendezvousInfo:
        # Alone, each attempt begins with an empty store.
        store = torch_adapter.HashStore() if self._store is None else self._store
        return RendezvousInfo(store, self._number, self._hosts, self._place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._config.run_id

    def shutdown(self) -> bool:
        return True


def secret_file(directory: str) -> str:
    """Return the file by which a job's ranks get its secret."""
    return os.path.join(directory, "secret")


def meet(config: LaunchConfig, directory: str, *, one_host: bool) -> Meeting:
    """Find out where the launchers of a job meet, or raise LaunchError, and open the store if it is to be here."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    if config.rdzv_backend not in ("static", "c10d"):
        try:
            return _Elsewhere(rendezvous_registry.get_rendezvous_handler(parameters), directory)
        except RendezvousError as error:
            raise not_met(config, error) from error
        except ValueError as error:
            raise ArgumentError(f"--rdzv-backend {config.rdzv_backend}, --rdzv-endpoint: {error}") from error
    if one_host:
        place = RendezvousStoreInfo(config.local_addr or "localhost", free_port())
        return Meeting(_Numbered(config, 0, 1, None, place), directory)
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_PORT)
    static = config.rdzv_backend == "static"
    here = config.rdzv_configs.get("rank") == 0 if static else parameters.get_as_bool("is_host")
    patience_s = _STATIC_S if static else float(parameters.get_as_int("read_timeout", int(_C10D_S)) or _C10D_S)
    try:
        secret = _secret(directory)
        server = _server(host, port, secret, here)
        store = SecretStore(host, port, secret, patience_s)
    except (OSError, rendezvous.NoSecretError) as error:
        raise not_met(config, error) from error
    where = f"tcp://{f'[{host}]' if ':' in host else host}:{port}/{quote(config.run_id, safe='')}"
    if static:
        shared = torch_adapter.PrefixStore(config.run_id, store)
        info = RendezvousStoreInfo(host, port)
        handler: RendezvousHandler = _Numbered(config, config.rdzv_configs["rank"], config.max_nodes, shared, info)
    else:
        handler = create_handler(store, C10dRendezvousBackend(store, config.run_id), parameters)
    return Meeting(handler, directory, where, server)


def _secret(directory: str) -> bytes:
    """Return the job's secret, and lay it into the job's directory for its ranks."""
    secret = rendezvous.job_secret() or rendezvous.read_secret(rendezvous.own_secret_file())
    with open(os.open(secret_file(directory), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)
    return secret


def _server(host: str, port: int, secret: bytes, here: bool | None) -> StoreServer | None:
    """Open the store if it is to be here; if nobody has said where, then on the host that has the address."""
    if here is False:
        return None
    try:
        return rendezvous.serve(host, port, secret, anyhow=bool(here))
    except OSError as error:
        if here or error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        return None


def not_met(config: LaunchConfig, error: Exception, *, again: bool = False) -> LaunchError:
    """Return what a launcher says whose job has not met, or whose store goes while it asks there.

    Args:
        config: What was asked for.
        error: What happened.
        again: Whether they had met before.
    """
    cause = error.__cause__ if isinstance(error, RendezvousConnectionError) else None  # which says more
    text = str(cause or error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        text += "; another job may have that port: name another one on all hosts"
    elif not text or isinstance(error, torch_adapter.DistStoreError):  # which names keys of the store
        text = "not all came in time"
    hosts = "the hosts no longer meet" if again else "the hosts did not meet"
    return LaunchError(f"{hosts} at {config.rdzv_endpoint!r}: {text}")
