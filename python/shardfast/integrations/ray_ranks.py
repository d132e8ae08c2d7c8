"""Workers of Ray Train that are in no process group of ``torch.distributed``: where their ranks meet."""

from __future__ import annotations

import os
import secrets
import socket
import sys

import ray
import ray.train
import ray.train.collective

ROOT, TOKEN = "SHARDFAST_ROOT", "SHARDFAST_TOKEN"


def meet() -> None:
    """Sets the variables by which ranks without a process group find each other. Every worker calls it.

    Nothing is set for one worker, with a process group, or where the job has set them.
    """
    context, distributed = ray.train.get_context(), sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if has_group or context.get_world_size() == 1 or ROOT in os.environ:
        return
    with socket.create_server(("", 0)) as free:  # which rank 0 takes when it makes its first call
        place = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    # Rank 0's: the number of workers on a node, from which all compute the same tree, can differ.
    offer = place, secrets.token_hex(16), context.get_local_world_size()
    root, token, local_world = ray.train.collective.broadcast_from_rank_zero(offer)
    os.environ.update(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_WORLD_SIZE": str(local_world),
            ROOT: root,
            TOKEN: token,
        }
    )
