"""What the fork server loads once, so that every rank starts with it."""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining  # seconds of imports that every rank of a test would pay anew

import hocket.comm.group

torch.set_num_threads(1)  # a thread pool would not survive the fork

__all__ = ["hocket"]
