"""Ranks of one machine that take each other for ranks of several hosts."""

import os

import torch.distributed as dist

from hocket.testing import run_ranks


def on_hosts(layout, action, *args):
    """On one rank: opens the group as a rank of its host in `layout`, then does something."""
    os.environ["HOCKET_HOST"] = f"host{layout[int(os.environ['RANK'])]}"
    dist.init_process_group("hocket")
    try:
        return action(*args)
    finally:
        dist.destroy_process_group()


def run(layout, action, *args, **settings):
    """Calls `action(*args)` on as many ranks as `layout` has numbers, which say on which host each is."""
    return run_ranks(on_hosts, len(layout), layout, action, *args, backend=None, timeout_s=100, **settings)
