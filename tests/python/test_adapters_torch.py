"""The torch adapter against torch itself: what a rank holds, in every layout, is what slices of the whole say."""

import itertools
import math
import types
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from older import HIDDEN, IS_OLDER
from shardfast.adapters.torch import DTYPES, TorchAdapter
from shardfast.adapters.torch import memory as torch_memory
from shardfast.adapters.torch import placement as torch_placement
from shardfast.adapters.torch.optimizers import Optimizers
from shardfast.state.catalog import Destination, Flat, Layout, Memory, Origin, Part, Refused, Region, Source, Target
from shardfast.state.parts import names_of
from shardfast.testing import assemble, check_announced, check_tensor, check_writes_are_seen, restore, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

ADAPTER = TorchAdapter()


def data(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def gather(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


# Plain tensors


def every_dtype():
    return [pytest.param(dtype, id=str(dtype)) for dtype in DTYPES]


@pytest.mark.parametrize("dtype", every_dtype())
def test_every_dtype_is_taken_bit_by_bit(dtype):
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).reshape(4, 6)
    layout = ADAPTER.layout(tensor)
    assert (layout.dtype, layout.shape, layout.text) == (DTYPES[dtype], (4, 6), "")
    assert check_tensor(ADAPTER, tensor) == bytes(raw.tolist())


def views():
    block = torch.arange(120.0).reshape(4, 5, 6)
    return {
        "transposed": block.transpose(0, 2),
        "permuted": block.permute(2, 0, 1),
        "sliced": block[1:, ::2, 1::3],
        "one column": block[:, 2, 3],
        "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "zero-dimensional": torch.tensor(3.5),
        "one of a vector": torch.arange(9.0)[4],
        "empty": torch.empty(3, 0, 2),
        "empty slice": block[2:2],
        "ones in the shape": torch.arange(6.0).reshape(1, 6, 1),
        "parameter": nn.Parameter(torch.arange(6.0)),
        "imaginary parts": torch.view_as_real(torch.complex(torch.arange(6.0), torch.ones(6)))[:, 1],
    }


@pytest.mark.parametrize("name", views())
def test_views_are_described_as_they_lie(name):
    tensor = views()[name]
    assert check_tensor(ADAPTER, tensor) == data(tensor)
    source = ADAPTER.source(tensor)
    assert [memory.pointer for memory in source.memory] == ([tensor.data_ptr()] if tensor.numel() else []), "no copy"


def test_a_whole_tensor_has_one_region():
    assert ADAPTER.layout(torch.empty(2, 3)).regions == (Region((0, 0), (2, 3)),)
    assert ADAPTER.layout(torch.tensor(1)).regions == (Region((), ()),)
    assert ADAPTER.layout(torch.empty(0, 3)).regions == ()


def test_lazily_conjugated_and_negated_values_are_resolved():
    conjugated = torch.arange(6).to(torch.complex64).mul(1j).conj()
    negated = conjugated.imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    assert check_tensor(ADAPTER, conjugated) == data(conjugated)
    assert check_tensor(ADAPTER, negated) == data(negated) == data(-torch.arange(6.0))


def test_loading_converts_on_the_way():
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16).t()
    restore(ADAPTER, tensor, data(torch.arange(12.0).reshape(4, 3)), "F32")
    assert torch.equal(tensor, torch.arange(12.0).reshape(4, 3).to(torch.bfloat16))


def test_autograd_and_inference_mode_are_not_in_the_way():
    leaf = nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        frozen = torch.zeros(4)
    for tensor in (leaf, frozen):
        restore(ADAPTER, tensor, data(torch.arange(4.0)))
        assert torch.equal(tensor.detach(), torch.arange(4.0))
        restore(ADAPTER, tensor, data(torch.ones(4, dtype=torch.float64)), "F64")
        ADAPTER.fill(tensor, torch.full((4,), 2.0))
        assert tensor.tolist() == [2.0] * 4
    assert leaf.requires_grad


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still there
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


class Wrapping(torch.Tensor):
    """A tensor subclass that has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (quantized(), "quantized"),
        (torch.ones(3, dtype=torch.complex128), "torch.complex128"),
        (nn.parameter.UninitializedParameter(), "UninitializedParameter has no shape yet"),
        (Wrapping(torch.ones(3)), "Wrapping wraps other tensors"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor, why):
    with pytest.raises(Refused, match=why):
        ADAPTER.layout(tensor)


def test_memory_that_is_not_there_or_not_its_own_is_refused():
    with pytest.raises(Refused, match="meta device"):
        ADAPTER.source(torch.empty(3, device="meta"))
    with pytest.raises(Refused, match="meta device"):
        ADAPTER.target(torch.empty(3, device="meta"), "F32")
    expanded = torch.ones(1, 3).expand(2, 3)
    assert assemble([snapshot(ADAPTER, expanded)]) == data(expanded)
    with pytest.raises(Refused, match="expanded tensor"):
        ADAPTER.target(expanded, "F32")


def test_identity_is_same_elements_in_same_memory():
    one = torch.arange(12.0)
    assert ADAPTER.identity(one) == ADAPTER.identity(one.detach())
    assert ADAPTER.identity(one) == ADAPTER.identity(one.reshape(12))
    for other in (one.clone(), one[:6], one.reshape(3, 4), one.view(torch.int32), one[::2]):
        assert ADAPTER.identity(one) != ADAPTER.identity(other)
    empty = torch.empty(0)
    assert ADAPTER.identity(empty) == ADAPTER.identity(empty) != ADAPTER.identity(torch.empty(0))


# The rule of torch.chunk


def chunked(index: torch.Tensor, parts: int, which: int) -> torch.Tensor:
    chunks = torch.chunk(index, parts)
    return chunks[which] if which < len(chunks) else index[:0]


def held(shape, cuts) -> list[torch.Tensor]:
    """Per dimension the indices of a rank, by cutting index vectors as torch cuts data."""
    indices = [torch.arange(size) for size in shape]
    for dim, parts, which, split in cuts:
        groups = torch.chunk(indices[dim], split)
        indices[dim] = torch.cat([chunked(group, parts, which) for group in groups])
    return indices


@st.composite
def shapes_and_cuts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    cuts = []
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.integers(1, 4))
        dim, which = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, parts - 1))
        cuts.append((dim, parts, which, draw(st.sampled_from([1, 1, 2, 3, 4]))))
    return shape, tuple(cuts)


@settings(max_examples=400, deadline=None)
@given(shapes_and_cuts())
def test_index_runs_are_those_of_torch_chunk(case):
    shape, cuts = case
    regions, starts, local_shape = torch_placement.cut(shape, cuts)
    indices = held(shape, cuts)
    assert local_shape == tuple(map(len, indices))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    local = whole[torch.meshgrid(*indices, indexing="ij")]
    seen = torch.zeros(local_shape, dtype=torch.int32)
    for region, start in zip(regions, starts, strict=True):
        there = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.lengths, strict=True))
        here = tuple(slice(o, o + n) for o, n in zip(start, region.lengths, strict=True))
        assert torch.equal(whole[there], local[here])
        seen[here] += 1
    assert bool((seen == 1).all())


def test_index_runs_do_not_depend_on_size():
    regions, _, _ = torch_placement.cut((1 << 40, 8), ((0, 2, 1, 1), (0, 1 << 10, 3, 1), (1, 2, 0, 1)))
    assert regions == (Region(((1 << 39) + 3 * (1 << 29), 0), (1 << 29, 4)),)


# DTensors on four ranks


# PyTorch 2.7 cuts evenly where a placement is strided.
SHAPES = [(48, 36)] if IS_OLDER else [(16, 6), (10, 7), (3, 5), (1, 2)]


def placements(ndim):
    kinds = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    return itertools.product(kinds, repeat=ndim)


def check_placements(rank, world, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    cases, mine = [], []
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        for chosen in placements(len(mesh_shape)):
            # Cut locally: scattering by an uneven _StridedShard fails in torch itself.
            tensor = distribute_tensor(whole, mesh, list(chosen), src_data_rank=None)
            cases.append((whole, chosen))
            mine.append(snapshot(ADAPTER, tensor))
            assert mine[-1].layout.shape == shape
            assert "mesh(" in mine[-1].layout.text
    everyone = gather(mine)
    for number, (whole, chosen) in enumerate(cases) if rank == 0 else ():
        assert assemble([theirs[number] for theirs in everyone]) == data(whole), (chosen, whole.shape)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (4, 1), (2, 1, 2)], ids=str)
def test_dtensors_say_what_they_hold(ranks, mesh_shape):
    ranks(4)(check_placements, mesh_shape)


def check_scattered_and_restored(rank, world):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(16 if IS_OLDER else 10, 6)
    dist.broadcast(whole, 0)
    cases = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [_StridedShard(0, split_factor=2)]),
        (square, [Replicate(), Shard(0)]),
        (square, [_StridedShard(0, split_factor=2), Shard(0)]),
        (square, [_StridedShard(0, split_factor=2), Shard(1)]),
        (square, [Shard(0), Shard(1)]),
    ]
    for mesh, chosen in cases:
        tensor = nn.Parameter(distribute_tensor(whole.clone(), mesh, chosen, src_data_rank=None))
        assert check_tensor(ADAPTER, tensor, gather) == data(whole), chosen
        ADAPTER.fill(tensor, whole + 1)
        assert torch.equal(tensor.full_tensor(), whole + 1), chosen
        restore(ADAPTER, tensor, data(whole.double()), "F64")
        assert torch.equal(tensor.full_tensor(), whole), chosen
    assert ADAPTER.layout(tensor).text == "mesh(dp=2, tp=2) [Shard(0), Shard(1)]"
    several = distribute_tensor(torch.arange(32.0).reshape(16, 2), line, [_StridedShard(0, split_factor=2)])
    rows = [(region.offsets[0], region.lengths[0]) for region in ADAPTER.layout(several).regions]
    assert rows == [(2 * rank, 2), (8 + 2 * rank, 2)]


def test_dtensors_are_filled_where_they_lie(ranks):
    ranks(4)(check_scattered_and_restored)


def check_refusals(rank, world):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(Refused, match=r"Partial\(sum\) on mesh dimension 0 is an unreduced partial sum"):
        ADAPTER.layout(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    # Another library's uneven shards: the right number of elements in all, at other places than the placements say.
    uneven = torch.ones((5, 2) if rank == 0 else (1, 2))
    tensor = DTensor.from_local(uneven, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 2)), stride=(2, 1))
    with pytest.raises(
        Refused, match=r"local tensor has shape \(\d, 2\), where its mesh and placements .* give \(3, 2\)"
    ):
        ADAPTER.layout(tensor)
    with pytest.raises(Refused, match="a DTensor cannot be part of a value"):
        ADAPTER.lower_value(tensor)

    def chunks():
        return [types.SimpleNamespace(offsets=torch.Size((0 if rank == 0 else 5, 0)), sizes=uneven.shape)]

    tensor._local_tensor.__create_chunk_list__ = chunks
    tensor.to_local().copy_(torch.arange(12.0).reshape(6, 2)[slice(0, 5) if rank == 0 else slice(5, 6)])
    assert check_tensor(ADAPTER, tensor, gather) == data(torch.arange(12.0))
    # A rank outside of the mesh holds nothing.
    alone = init_device_mesh("cpu", (1,)) if world == 1 else None
    assert alone is None
    # PyTorch's collectives take these shards in the order of ranks, and its coordinates in that of the mesh.
    turned = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 0])
    with pytest.raises(Refused, match=r"which lists ranks \[1, 0\].* in that of \[0, 1\]: make the mesh of ranks that"):
        ADAPTER.layout(distribute_tensor(torch.ones(4), turned, [Shard(0)]))
    assert ADAPTER.layout(distribute_tensor(torch.ones(4), turned, [Replicate()])).shape == (4,)
    half = torch.distributed.device_mesh.DeviceMesh("cpu", [0])
    tensor = distribute_tensor(torch.ones(4), half, [Shard(0)])
    assert len(ADAPTER.layout(tensor).regions) == (1 if rank == 0 else 0)


def test_layouts_that_placements_do_not_tell(ranks):
    ranks(2)(check_refusals)


def test_several_chunks_of_one_flat_local_tensor(monkeypatch):
    """Ragged shards keep a one-dimensional local tensor, cut into boxes front to back."""
    whole = torch.arange(24.0).reshape(4, 6)
    local = torch.cat([whole[1, 2:], whole[2:].reshape(-1)])
    boxes = [((1, 2), (1, 4)), ((2, 0), (2, 6)), ((4, 0), (0, 6))]
    chunks = [types.SimpleNamespace(offsets=offsets, sizes=sizes) for offsets, sizes in boxes]
    local.__create_chunk_list__ = lambda: chunks
    tensor = types.SimpleNamespace(shape=whole.shape, _local_tensor=local)
    monkeypatch.setattr(torch_placement, "is_dtensor", lambda tensor: True)
    found = torch_placement.views(tensor, local)
    assert [(region.offsets, region.lengths) for region, _ in found] == boxes[:2]
    for region, view in found:
        there = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.lengths, strict=True))
        assert torch.equal(view, whole[there])
    with pytest.raises(Refused, match="has 15 elements, where the attached chunk list gives 16"):
        torch_placement.views(tensor, local[:15])


def test_a_local_tensor_that_a_collective_still_fills_is_waited_for(monkeypatch):
    class InFlight(torch.Tensor):
        def trigger_wait(self):
            raise AssertionError("not needed")

        def wait(self):
            return self.as_subclass(torch.Tensor)

    local = torch.arange(4.0).as_subclass(InFlight)
    tensor = types.SimpleNamespace(_local_tensor=local, to_local=lambda: local)
    monkeypatch.setattr(torch_placement, "is_dtensor", lambda tensor: True)
    assert type(torch_placement.local_of(tensor)) is torch.Tensor


class ShardOrderEntry(NamedTuple):
    tensor_dim: int
    mesh_dims: tuple[int, ...]


def test_a_mesh_is_remembered_as_itself():
    """Two meshes that are alike are two: what is remembered of one is not said of the other."""

    class Mesh(types.SimpleNamespace):
        def __eq__(self, other):
            raise AssertionError("comparing meshes takes long")

        __hash__ = None

    meshes = [Mesh(shape=(2,), mesh_dim_names=(name,), get_coordinate=lambda: (0,)) for name in "ab"]
    tensors = [types.SimpleNamespace(device_mesh=mesh, placements=(Shard(0),), shape=(8,)) for mesh in meshes]
    first, second = map(torch_placement.placed, tensors)
    assert (first.text, second.text) == ("mesh(a=2) [Shard(0)]", "mesh(b=2) [Shard(0)]")
    assert torch_placement.placed(tensors[0]) is first, "and it is remembered"
    one, other = map(torch_placement._Same, meshes)
    assert one == torch_placement._Same(meshes[0])
    assert one != other and one != meshes[0] and other != "a mesh"


def test_another_order_of_sharding_is_honoured():
    mesh = types.SimpleNamespace(shape=(2, 2), mesh_dim_names=None, get_coordinate=lambda: [0, 1])
    entry = ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0))
    spec = types.SimpleNamespace(shard_order=(entry,))
    tensor = types.SimpleNamespace(device_mesh=mesh, placements=(Shard(0), Shard(0)), shape=(8,), _spec=spec)
    assert torch_placement.placed(tensor).regions == (Region((4,), (2,)),)  # second half first, of that the first half
    spec.shard_order = ()
    assert torch_placement.placed(tensor).regions == (Region((2,), (2,)),)


def test_a_placement_of_a_subclass_is_not_taken_for_one_of_its_base():
    class Interleaved(Shard):
        def is_shard(self, dim=None):
            return False

    def of(placement):
        return torch_placement.placed(types.SimpleNamespace(device_mesh=mesh, placements=(placement,), shape=(8,)))

    mesh = types.SimpleNamespace(shape=(2,), mesh_dim_names=None, get_coordinate=lambda: [0])
    assert Interleaved(0) == Shard(0)
    assert of(Shard(0)).regions == (Region((0,), (4,)),)
    with pytest.raises(Refused, match="of an unknown kind"):
        of(Interleaved(0))


def test_what_is_remembered_of_a_placement_is_not_taken_for_another():
    def regions(coordinate, shape, *placements):
        mesh.get_coordinate = lambda: coordinate
        return torch_placement.placed(
            types.SimpleNamespace(device_mesh=mesh, placements=placements, shape=shape)
        ).regions

    mesh = types.SimpleNamespace(shape=(2, 2), mesh_dim_names=None)
    assert regions([0, 1], (8,), Shard(0), Shard(0)) == (Region((2,), (2,)),)
    assert regions([1, 1], (8,), Shard(0), Shard(0)) == (Region((6,), (2,)),)
    assert regions([1, 1], (12,), Shard(0), Shard(0)) == (Region((9,), (3,)),)
    assert regions([0, 1], (8,), Replicate(), Shard(0)) == (Region((4,), (4,)),)
    strided = _StridedShard(0, split_factor=2)
    assert regions([0, 1], (8,), strided, Shard(0)) == (Region((4,), (2,)),)
    mesh = types.SimpleNamespace(shape=(1, 4), mesh_dim_names=None)
    assert regions([0, 1], (8,), Replicate(), Shard(0)) == (Region((2,), (2,)),)
    assert regions(None, (8,), Replicate(), Shard(0)) == ()


# Modules


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8, hidden: int = HIDDEN, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width)
        self.layers = nn.ModuleDict({str(i): Block(width, hidden) for i in range(layers)})
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 11)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.out(x)


def names(module) -> list[str]:
    return list(ADAPTER.module(module).bundle.tensors())


def test_wrappers_leave_no_trace_in_names():
    plain = list(Net().state_dict())
    assert names(Net()) == plain
    assert names(torch.compile(Net())) == plain
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inside = Net()
    for name, layer in inside.layers.items():
        inside.layers[name] = checkpoint_wrapper(torch.compile(layer))
    assert names(inside) == plain
    assert list(ADAPTER.module(inside).parameters) == [name for name, _ in Net().named_parameters()]


def check_ddp(rank, world):
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert names(wrapped) == list(model.state_dict())
    # Only the wrapper's own component goes: a submodule may be called `module` too.
    outer = nn.ModuleDict({"module": nn.Linear(2, 2), "inner": nn.parallel.DistributedDataParallel(nn.Linear(2, 2))})
    assert names(outer) == ["module.weight", "module.bias", "inner.weight", "inner.bias"]


def test_ddp_is_unwrapped(ranks):
    ranks(2)(check_ddp)


def test_values_of_a_module_go_in_by_its_own_door():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": self.count, "table": torch.ones(2)}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = nn.Sequential(Counting(2, 2))
    model[0].count = 7
    bundle = ADAPTER.module(model).bundle
    assert list(bundle.tensors()) == ["0.weight", "0.bias"]
    assert bundle.values()["0._extra_state"]["count"] == 7
    install = bundle.restore({}, {"0._extra_state": {"count": 9, "table": torch.ones(2)}}, str, strict=True).install
    assert model[0].count == 7
    install()
    assert model[0].count == 9


def test_tensors_that_a_hook_makes_are_given_back_through_the_module():
    """A state dict may hold tensors that are no parameter or buffer: filling those alone would load nothing."""

    class Folded(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "weight_t"] = self.weight.detach().t().contiguous()

        def _load_from_state_dict(self, state, prefix, *rest):
            with torch.no_grad():
                self.weight.copy_(state[prefix + "weight_t"].t())

    model = Folded(2, 3)
    bundle = ADAPTER.module(model).bundle
    (tensor,) = bundle.tensors().values()
    tensor.fill_(5)
    bundle.restore({}, {}, str, strict=True).install()
    assert bool((model.weight == 5).all())


def test_stages_are_one_module():
    first, last = Net(), Net()
    last.emb = None
    del last.layers["0"]
    with pytest.raises(Refused, match=r"its stages \[0\] and \[1\] both have 'layers\.1\.up\.weight'"):
        names([first, last])
    del first.layers["1"]
    first.norm = first.out = None
    assert sorted(names([first, last])) == sorted(Net().state_dict())
    last.emb = first.emb  # the very same module in two stages is no conflict
    assert sorted(names([first, last])) == sorted(Net().state_dict())


def check_fsdp2(rank, world, dims):
    torch.manual_seed(0)
    model, whole = Net(), Net()
    whole.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (4,) if dims == 1 else (2, 2), mesh_dim_names=("dp", "tp")[:dims])
    for layer in model.layers.values():
        if dims == 2:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()  # leaves the root's parameters unsharded
    optimizer = torch.optim.AdamW(model.parameters(), fused=not IS_OLDER, foreach=False)  # as in layouts.build
    optimizer.step()
    module = ADAPTER.module(model)
    assert list(module.bundle.tensors()) == list(whole.state_dict())
    for name, tensor in module.bundle.tensors().items():
        mine = snapshot(ADAPTER, tensor)
        everyone = gather(mine)
        if isinstance(tensor, DTensor):
            whole_tensor = tensor.detach().full_tensor()
            assert assemble(everyone) == data(whole_tensor), name
    bundle = ADAPTER.optimizer(optimizer, names_of(module.parameters))
    for name, tensor in bundle.tensors().items():
        assert assemble(gather(snapshot(ADAPTER, tensor))), name
    assert {name for name in bundle.tensors() if name.endswith("exp_avg")} == {
        f"state.{fqn}.exp_avg" for fqn, _ in whole.named_parameters() if not fqn.startswith("norm.")
    }
    made = bundle.create("state.layers.0.up.weight.exp_avg", "F32", (HIDDEN, 8), dry=False)
    like = bundle.tensors()["state.layers.0.up.weight.exp_avg"]
    assert (made.placements, made.device_mesh, made.to_local().shape) == (
        like.placements,
        like.device_mesh,
        like.to_local().shape,
    )
    assert ADAPTER.layout(bundle.create("state.out.bias.exp_avg", "F32", (11,), dry=True)) == ADAPTER.layout(
        bundle.tensors()["state.out.bias.exp_avg"]
    )


@pytest.mark.parametrize("dims", [1, 2])
def test_fsdp2_with_and_without_tensor_parallelism(ranks, dims):
    ranks(4)(check_fsdp2, dims)


# Optimizers


def stepped(optimizer, skip=()):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not any(parameter is other for other in skip):
                parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def fqns(model):
    return names_of(dict(model.named_parameters()))


def test_state_is_named_by_parameters():
    model = Net(layers=1)
    model.emb.weight.requires_grad_(False)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.1}, {"params": rest, "weight_decay": 0.0}])
    bundle = ADAPTER.optimizer(stepped(optimizer, skip=[model.norm.bias]), fqns(model))
    trained = {
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "norm.weight",
        "out.weight",
        "out.bias",
    }
    expected = {f"state.{fqn}.{name}" for fqn in trained for name in ("step", "exp_avg", "exp_avg_sq")}
    assert set(bundle.tensors()) == expected
    (groups,) = bundle.values().values()
    assert [group["params"] for group in groups] == [
        [name for name, p in model.named_parameters() if p.ndim == 2],
        [name for name, p in model.named_parameters() if p.ndim != 2],
    ]
    assert (groups[0]["lr"], groups[1]["weight_decay"]) == (0.1, 0.0)


def test_a_parameter_of_no_module_is_refused():
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3, 4))]}]
    )
    named = names_of({"w": optimizer.param_groups[0]["params"][0]})
    with pytest.raises(Refused, match=r"shape \(3, 4\) in param_groups\[1\] belongs to no module of the state"):
        ADAPTER.optimizer(optimizer, named)


def test_two_parameters_of_one_name_are_refused():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(Refused, match="two of its parameters are called 'w'"):
        ADAPTER.optimizer(torch.optim.SGD([one, other]), names_of({"w": one}) | names_of({"w": other}))


def test_state_is_created_as_the_optimizer_would():
    model = nn.Linear(4, 3)
    bundle = ADAPTER.optimizer(torch.optim.Adam(model.parameters()), fqns(model))
    assert bundle.accepts("state.weight.exp_avg")
    assert not bundle.accepts("state.other.exp_avg")
    assert not bundle.accepts("elsewhere")
    moment = bundle.create("state.weight.exp_avg", "BF16", (3, 4), dry=False)
    assert (moment.shape, moment.dtype, moment.requires_grad) == ((3, 4), torch.bfloat16, False)
    step = bundle.create("state.weight.step", "F32", (), dry=False)
    assert (step.shape, step.device.type) == ((), "cpu")
    assert bundle.create("state.weight.factor", "F32", (3,), dry=False).shape == (3,)
    assert bundle.create("state.weight.exp_avg", "F32", (3, 4), dry=True).device.type == "meta"


def test_step_counters_stay_on_the_host_unless_the_step_runs_on_the_device():
    model = nn.Linear(4, 3, device="meta")  # stands for a device
    optimizer = torch.optim.Adam(model.parameters())

    def devices():
        bundle = ADAPTER.optimizer(optimizer, fqns(model))
        made = (
            bundle.create(f"state.bias.{name}", "F32", shape, dry=False)
            for name, shape in [("step", ()), ("sum", (9,))]
        )
        return [tensor.device.type for tensor in made]

    assert devices() == ["cpu", "meta"]
    optimizer.param_groups[0]["fused"] = True
    assert devices() == ["meta", "meta"]


def test_the_order_of_parameters_in_a_group_is_not_stored():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.named_parameters()], lr=0.5)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    (saved,) = ADAPTER.optimizer(optimizer, fqns(model)).values()["param_groups"]
    assert "param_names" not in saved
    other = torch.optim.SGD([*reversed(list(model.named_parameters()))], lr=0.1)
    ADAPTER.optimizer(other, fqns(model)).restore({}, {"param_groups": [[saved]]}, str, strict=True).install()
    assert (other.param_groups[0]["lr"], other.param_groups[0]["param_names"]) == (0.5, ["bias", "weight"])


def group(params, **hyperparameters):
    return {"params": params, "lr": 0.1, **hyperparameters}


def test_groups_take_the_hyper_parameters_of_their_parameters():
    model = Net(layers=1)
    both = [[group(["emb.weight", "out.weight"], lr=0.5, fresh=(1, 2))], [group(["out.bias"], lr=0.25)]]
    optimizer = torch.optim.SGD(
        [{"params": [model.out.bias]}, {"params": [model.emb.weight, model.out.weight]}, {"params": [model.norm.bias]}],
        lr=9,
    )
    bundle = ADAPTER.optimizer(optimizer, fqns(model))
    with pytest.raises(Refused, match=r"no saved parameter group has 'norm\.bias': strict=False leaves it"):
        bundle.restore({}, {"param_groups": both}, str, strict=True)
    install = bundle.restore({}, {"param_groups": both}, str, strict=False).install
    assert optimizer.param_groups[0]["lr"] == 9
    install()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5, 9]
    assert optimizer.param_groups[1]["fresh"] == (1, 2)
    assert optimizer.param_groups[1]["params"] == [model.emb.weight, model.out.weight]
    # Parameters of one group here that were saved in groups that differ.
    optimizer = torch.optim.SGD([model.out.bias, model.out.weight], lr=9)
    bundle = ADAPTER.optimizer(optimizer, fqns(model))
    with pytest.raises(Refused, match=r"'out\.bias' and 'out\.weight'.*lr = 0\.25 and 0\.5"):
        bundle.restore({}, {"param_groups": both}, str, strict=True)
    # One parameter that ranks saved with different values.
    differ = [[group(["out.bias"], lr=0.25)], [group(["out.bias"], lr=0.5)]]
    with pytest.raises(Refused, match=r"parameter 'out\.bias' was saved in two groups with different hyper-parameters"):
        bundle.restore({}, {"param_groups": differ}, str, strict=True)


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    bundle = ADAPTER.optimizer(optimizer, fqns(model))
    for saved in (torch.tensor(0.125), 0.0625):
        groups = [[group(["weight", "bias"], lr=saved)]]
        bundle.restore({}, {"param_groups": groups}, str, strict=True).install()
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == float(saved)
    with pytest.raises(Refused, match=r"\[2\] where the state has one of torch.float32 \[\]"):
        bundle.restore({}, {"param_groups": [[group(["weight", "bias"], lr=torch.ones(2))]]}, str, strict=True)


# The contract kit itself


class Flattened:
    """An adapter of byte strings, cut into runs: what the kit must accept, and break on purpose."""

    refers = False

    def __init__(self, start, stop, numel):
        self.run, self.numel = (start, stop), numel

    def is_tensor(self, value):
        return isinstance(value, np.ndarray)

    def layout(self, tensor):
        return Layout("U8", (2, self.numel // 2), (Flat(*self.run),), "flat")

    def source(self, tensor):
        return Source((Memory(tensor.ctypes.data),), tensor)

    def origin(self, tensor):
        return Origin(self.layout(tensor), self.identity(tensor), self.source(tensor))

    def target(self, tensor, dtype):
        return Target((Memory(tensor.ctypes.data),), tensor)

    def destination(self, tensor, dtype):
        return Destination(self.layout(tensor), self.identity(tensor), self.target(tensor, dtype))

    def identity(self, tensor):
        return id(tensor)


def test_the_kit_accepts_flat_runs():
    snapshots = [snapshot(Flattened(a, b, 10), np.arange(a, b, dtype=np.uint8)) for a, b in [(0, 3), (3, 10)]]
    assert assemble(snapshots) == bytes(range(10))
    here = np.arange(3, dtype=np.uint8)
    assert check_tensor(Flattened(0, 3, 10), here, lambda mine: [mine, *whole_less(3, mine)]) == bytes(
        [0, 1, 2, *[0] * 7]
    )


def whole_less(first, mine):
    """The other rank of two, whose elements are all zero, or flipped as the kit flips them."""
    flipped = mine.contents[0] == bytes(byte ^ 1 for byte in range(first))
    rest = snapshot(Flattened(first, 10, 10), np.full(10 - first, int(flipped), dtype=np.uint8))
    return [rest]


@pytest.mark.parametrize(
    ("runs", "broken"),
    [
        ([(0, 3), (4, 10)], "1 of 10 elements are in no rank's parts"),
        ([(0, 10), (2, 5)], "rank 1: another value of element 2"),
        ([(0, 11)], "rank 0: .* in "),
    ],
)
def test_the_kit_finds_what_is_wrong(runs, broken):
    snapshots = [snapshot(Flattened(a, b, 10), np.full(b - a, i, dtype=np.uint8)) for i, (a, b) in enumerate(runs)]
    with pytest.raises(AssertionError, match=broken):
        assemble(snapshots)


# What bundles announce


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_announce_their_steps(kind):
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    step()
    bundle = ADAPTER.optimizer(optimizer, names_of(dict(model.named_parameters())))
    check_announced(ADAPTER, bundle, step)
    check_writes_are_seen(ADAPTER, bundle, lambda tensor: tensor.detach().add_(1))


def test_new_buffers_are_zero_where_nothing_is_loaded():
    """Padding of flat parameters would else be what lay in that memory before."""
    buffer, other, number = torch.ones(20), torch.ones(3), torch.ones(())
    torch_memory.zero_rest([buffer, other, number], [buffer[12:15], buffer[2:7], number, torch.ones(20)[:9]])
    kept = [*range(2, 7), *range(12, 15)]
    assert buffer.tolist() == [float(place in kept) for place in range(20)]
    assert (other.tolist(), number.item()) == ([0.0] * 3, 1.0)


def test_a_load_leaves_nothing_of_earlier_memory_in_padding(monkeypatch):
    """A flat buffer of moments has elements that belong to no parameter."""
    made = []

    def dirty(size, *, dtype=None, device=None):
        made.append(torch.full(tuple(size), float("nan"), dtype=dtype, device=device))
        return made[-1]

    flat = nn.Parameter(torch.zeros(10))
    names = {id(flat): [("w", Part(flat.detach()[2:6], (4,), (Flat(0, 4),), within=flat, start=2, length=10))]}
    optimizers = Optimizers([torch.optim.SGD([flat], lr=0.1, momentum=0.9)], names)
    monkeypatch.setattr(torch, "empty", dirty)
    moment = optimizers.create("state.w.momentum_buffer", "F32", (4,), dry=False)
    moment.tensor.fill_(5)
    optimizers.restore({"state.w.momentum_buffer": moment}, {}, lambda name: name, strict=False).install()
    assert len(made) == 1
    assert made[0].tolist() == [0, 0, 5, 5, 5, 5, 0, 0, 0, 0]
