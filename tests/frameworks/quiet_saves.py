"""Saves without PyTorch's collectives: none is there while one begins."""

import functools

import shardfast as sf
import torch.distributed as dist

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)


def without_collectives():
    """Has this process's saves run so; returns a list that grows by the URL of each."""
    original, urls = sf.save_async, []

    @functools.wraps(original)
    def save_async(url, *args, **named):
        kept = {name: getattr(dist, name) for name in COLLECTIVES}
        for name in kept:
            setattr(dist, name, None)
        try:
            return original(url, *args, **named)
        finally:
            urls.append(str(url))
            for name, call in kept.items():
                setattr(dist, name, call)

    sf.save_async = save_async
    return urls
