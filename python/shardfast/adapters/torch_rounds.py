"""Bytes between the ranks of a load, through the job's own process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..catalog import Rounds

_FINISHED = -1
"""Sent in place of a number of bytes by a rank that needs no more rounds."""


def carries(world: int) -> bool:
    """Whether there is a process group of all ``world`` ranks that moves bytes between devices of several machines.

    On the host the ranks' own connections are faster, and ranks of one machine share memory.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world):
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") != str(world) and _device().type == "cuda"


def carry(rounds: Rounds) -> None:
    """Carries out rounds until no rank needs more. Every rank calls it, while no other collective runs on the group."""
    device = _device()
    while True:
        round_ = rounds.next()
        if not rounds.is_shared:
            return
        sizes, outgoing = round_ or ([_FINISHED] * dist.get_world_size(), bytearray())
        sent = torch.tensor(sizes, dtype=torch.int64, device=device)
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent)
        coming: list[int] = found.tolist()
        if all(size == _FINISHED for size in coming):
            return
        coming = [max(size, 0) for size in coming]
        incoming = bytearray(sum(coming))
        there = _bytes(incoming).to(device)
        dist.all_to_all_single(there, _bytes(outgoing).to(device), coming, [max(size, 0) for size in sizes])
        # On the host the bytes are there already: nothing was copied for the call.
        _bytes(incoming).copy_(there)
        if round_ is not None:
            rounds.received(coming, incoming)


def _bytes(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)


def _device() -> torch.device:
    """Where the group moves bytes: on devices if it can, since theirs is the faster network.

    The path over devices is untested.
    """
    # "cpu:gloo,cuda:nccl", or "cuda:nccl" alone
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config().split(","))
    if backends.get("cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
