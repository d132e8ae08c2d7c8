"""Objects of classes that never called the ``__init__`` of a base in C++: to read anything of that base may end the
process. They are refused by name, and the process goes on."""

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from older import IS_OLDER
from test_accounts import held
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Unmade:
    def __init__(self):
        pass


def is_false(*_):
    return False


# Of Placement itself nothing can be asked; what a class of one's own says need not be read from its base.
ANSWERS = {"is_partial": is_false, "is_replicate": is_false, "is_shard": is_false}


def placements():
    for base in (Placement, Shard, Replicate, Partial, _StridedShard):
        for answers in ({}, ANSWERS, {**ANSWERS, "__hash__": lambda self: 1, "__eq__": lambda self, other: True}):
            yield type("Odd", (Unmade, base), {"__module__": "odd", **answers})()


def check_placements(url):
    dist.init_process_group("gloo", init_method=f"file://{url}/meet", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def sharded():
        return DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False)

    model = nn.Module()
    model.weight = nn.Parameter(sharded())
    optimizer = torch.optim.Adagrad(model.parameters())
    sf.save(f"{url}/sound", {"model": model, **held(optimizer)})
    optimizer.state[model.weight]["odd"] = [torch.ones(3)]  # whether it may stand there hangs on the placements
    tensor, spec = sharded(), model.weight._spec
    said = r"a placement of class odd\.Odd on mesh dimension 0"
    for odd in placements():
        tensor._spec.placements = (odd,)
        with pytest.raises(sf.Invalid, match=said):
            sf.save(f"{url}/odd", {"a": {"tensor": tensor}})
        with pytest.raises(sf.Invalid, match=said):
            sf.load(f"{url}/sound", {"model": {"weight": tensor}}, only="model")
        spec.placements = (odd,)
        for state in ({"model": model}, {"model": model, **held(optimizer)}):
            with pytest.raises(sf.Invalid, match=said):
                sf.save(f"{url}/odd", state)
            with pytest.raises(sf.Invalid, match=said):
                sf.load(f"{url}/sound", state)
        spec.placements = (Replicate(),)
    if not IS_OLDER:  # which does not make such a group
        group = type("Group", (Unmade, dist.ProcessGroup), {})()
        with pytest.raises(sf.Invalid, match="process_group: this process does not know its ranks"):
            sf.save(f"{url}/odd", {"a": 1}, process_group=group)
    tensor = sharded()
    tensor._spec.mesh = type("Mesh", (Unmade, DeviceMesh), {})()
    with pytest.raises(sf.Invalid, match=r"PyTorch cannot inspect a DTensor: AttributeError"):
        sf.save(f"{url}/odd", {"a": {"tensor": tensor}})


def test_placements_meshes_and_groups_without_their_base_are_refused_by_name(alone, tmp_path):
    alone(check_placements, f"{tmp_path}")
