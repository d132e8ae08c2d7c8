"""What PyTorch's own tests of its distributed checkpoints ask for, asked of Shardfast.

Layout changes of whole models are in ``test_reshard.py``, failures at each stage in ``test_failures.py``.
"""

import itertools
import math
import random
import types

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import Net, build, known, local, mine, plain_names, same_bits, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# Different shard plans

SHAPE = (12, 3)
PLANS = {
    # Rows of each rank, as runs in the order in which the rank keeps them.
    "even": [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]],
    "uneven": [[(0, 5)], [(5, 6)], [], [(6, 12)]],
    "several": [[(0, 1), (6, 8)], [(1, 4)], [(8, 9), (4, 5), (11, 12)], [(5, 6), (9, 11)]],
    "other ranks": [[(9, 12)], [(0, 3)], [(6, 9)], [(3, 6)]],
}


def sharded(plan, rank, source):
    """A tensor whose shards no placement tells: they are said by the chunk list that libraries attach."""
    runs = PLANS[plan][rank]
    block = torch.cat([source[start:stop] for start, stop in runs] or [source[:0]])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(block, mesh, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=(3, 1))
    chunks = [types.SimpleNamespace(offsets=(start, 0), sizes=(stop - start, 3)) for start, stop in runs]
    tensor._local_tensor.__create_chunk_list__ = lambda: chunks
    return tensor


def check_plans(rank, world, directory):
    whole, zeros = known("w", SHAPE), torch.zeros(SHAPE)
    wanted = {plan: local(sharded(plan, rank, whole)) for plan in PLANS}
    for saving in PLANS:
        sf.save(f"{directory}/{saving}", {"w": {"w": sharded(saving, rank, whole)}})
    for saving, loading in itertools.product(PLANS, PLANS):
        tensor = sharded(loading, rank, zeros)
        sf.load(f"{directory}/{saving}", {"w": {"w": tensor}})
        assert same_bits(local(tensor), wanted[loading]), (saving, loading)
    # Sharded to whole and back.
    plain = {"w": zeros.clone()}
    sf.load(f"{directory}/several", {"w": plain})
    assert same_bits(plain["w"], whole)
    sf.save(f"{directory}/whole", {"w": plain})
    tensor = sharded("several", rank, zeros)
    sf.load(f"{directory}/whole", {"w": {"w": tensor}})
    assert same_bits(local(tensor), wanted["several"])


def test_every_plan_loads_under_every_other(ranks, tmp_path):
    ranks(4)(check_plans, str(tmp_path))


def check_bad_plans(rank, world, directory):
    whole = known("w", SHAPE)
    PLANS["overlapping"] = [[(0, 3)], [(2, 6)], [(6, 9)], [(9, 12)]]
    PLANS["with a hole"] = [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 11)]]
    for plan, message in {
        "overlapping": r"w/w: .*\[2:6, 0:3\].*",
        "with a hole": r"w/w: .*11.*",
    }.items():
        with pytest.raises(sf.Invalid, match=message):
            sf.save(f"{directory}/{plan}", {"w": {"w": sharded(plan, rank, whole)}})


def test_plans_that_overlap_or_leave_a_hole_are_refused(ranks, tmp_path):
    ranks(4)(check_bad_plans, str(tmp_path))


def check_rows_to_columns(rank, world, url):
    mesh = init_device_mesh("cpu", (world,))
    whole = known("w", (9, 7))
    source = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    sf.save(url, {"w": source})
    for placement in (Shard(1), Replicate(), Shard(0)):
        tensor = distribute_tensor(torch.zeros_like(whole), mesh, [placement], src_data_rank=None)
        sf.load(url, {"w": {"w": tensor}})
        assert same_bits(local(tensor), mine(whole, tensor)), placement


def test_rows_to_columns(ranks, tmp_path):
    ranks(4)(check_rows_to_columns, f"{tmp_path}/checkpoint")


def check_part_of_the_ranks(rank, world, url):
    """Tensors that live on some of the ranks only, and one whose ranks are in another order, which nothing tells."""
    some, turned = DeviceMesh("cpu", [1, 3]), DeviceMesh("cpu", [2, 0, 3, 1])
    wholes = {"some": known("some", (5, 2)), "all": known("all", (6, 2))}

    def tensors(sources):
        on_some = {"some": distribute_tensor(sources["some"], some, [Shard(0)], src_data_rank=None)}
        on_all = {"all": distribute_tensor(sources["all"], turned, [Replicate()], src_data_rank=None)}
        return {**(on_some if rank in (1, 3) else {}), **on_all}

    sf.save(url, {"w": tensors(wholes)})
    loaded = tensors({name: torch.zeros_like(whole) for name, whole in wholes.items()})
    sf.load(url, {"w": loaded})
    for name, tensor in loaded.items():
        assert same_bits(local(tensor), mine(wholes[name], tensor)), name
    for source in (0, None):
        shards = distribute_tensor(wholes["all"], turned, [Shard(0)], src_data_rank=source)
        with pytest.raises(sf.Invalid, match=r"w\.all: .* lists ranks \[2, 0, 3, 1\]"):
            sf.save(f"{url}-{source}", {"w": {"all": shards}})
    return sorted(loaded)


def test_ranks_without_a_shard(ranks, tmp_path):
    url = f"{tmp_path}/checkpoint"
    names = ranks(4)(check_part_of_the_ranks, url)
    assert names == [["all"], ["all", "some"], ["all"], ["all", "some"]]
    plain = {"some": torch.zeros(5, 2), "all": torch.zeros(6, 2)}
    sf.load(url, {"w": plain})
    assert all(same_bits(tensor, known(name, tuple(tensor.shape))) for name, tensor in plain.items())


# Objects, and what ranks may do differently


def check_objects(rank, world, url):
    shared = {"list": [1, "two", 3.0], "nested": {"of": (rank * 0, None)}}
    state = {"extra": {**shared, f"only{rank}": [rank], "differs": {"rank": rank}}, "raw": bytes([rank]) * 5}
    sf.save(url, state)
    loaded = {"extra": dict.fromkeys(state["extra"]), "raw": None}
    sf.load(url, loaded)
    assert loaded == state


def test_objects_come_back_to_their_ranks(ranks, tmp_path):
    ranks(4)(check_objects, f"{tmp_path}/checkpoint")


def check_orders(rank, world, url):
    """Nothing depends on the order of keys, which Python's sets and conditions make differ."""
    mesh = init_device_mesh("cpu", (world,))
    names = [f"w{number}" for number in range(12)]
    random.Random(rank).shuffle(names)
    wholes = {name: known(name, (5, 2)) for name in names}
    tensors = {name: distribute_tensor(wholes[name], mesh, [Shard(0)], src_data_rank=None) for name in sorted(names)}
    keys = ["a", "b"] if rank % 2 else ["b", "a"]
    sf.save(url, {key: {name: tensors[name] for name in names} for key in keys}, timeout_s=20)
    zeros = {name: distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)], src_data_rank=None) for name in sorted(names)}
    names.reverse()
    sf.load(url, {"a": {name: zeros[name] for name in names}}, only="a", timeout_s=20)
    assert all(same_bits(local(zeros[name]), mine(wholes[name], zeros[name])) for name in names)


def test_keys_in_another_order_on_every_rank(ranks, tmp_path):
    ranks(4)(check_orders, f"{tmp_path}/checkpoint")


def check_overwriting(rank, world, directory):
    url = f"{directory}/one"
    first, second = {"w": {"w": torch.ones(3)}}, {"w": {"w": torch.zeros(3)}}
    sf.save(url, first)
    with pytest.raises(sf.Conflict, match=r"/one: a checkpoint is committed there already, and checkpoints are never"):
        sf.save(url, second)
    sf.load(url, second)
    assert second["w"]["w"].tolist() == [1.0] * 3
    sf.save(f"{directory}/two", second)


def test_nothing_is_overwritten(ranks, tmp_path):
    ranks(2)(check_overwriting, str(tmp_path))


def check_several_in_flight(rank, world, directory):
    """Six saves of one shape of state, two at a time, then another shape: what is remembered is never taken for new."""
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    pending, snapshots = [], []
    for number in range(6):
        train(model, optimizer, range(number, number + 1))
        state = {"model": model, "extra": {"number": number, **({"more": torch.full((2,), 9.0)} if number > 4 else {})}}
        snapshots.append({name: local(tensor).clone() for name, tensor in plain_names(model).items()})
        pending.append(sf.save_async(f"{directory}/{number}", state))
        if number % 2:
            for one in pending[-2:]:
                one.committed()
    for number, snapshot in enumerate(snapshots):
        other, _ = build("fsdp", seed=1)
        extra = {"number": None, **({"more": None} if number > 4 else {})}
        sf.load(f"{directory}/{number}", {"model": other, "extra": extra})
        assert extra["number"] == number
        assert [name for name, t in plain_names(other).items() if not same_bits(local(t), snapshot[name])] == []


def test_several_saves_in_flight(ranks, tmp_path):
    ranks(2)(check_several_in_flight, str(tmp_path))


# What fits and what does not


def check_misfits(rank, world, url):
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    sf.save(url, {"model": model, "optimizer": optimizer, "extra": {"seen": 3}})
    before = {name: local(tensor).clone() for name, tensor in plain_names(model).items()}
    mesh = init_device_mesh("cpu", (world,))
    wrong = {
        "tokens.weight": distribute_tensor(torch.zeros(12, 8), mesh, [Shard(0)], src_data_rank=None),
        "gain": distribute_tensor(torch.zeros(2, 8, dtype=torch.bfloat16), mesh, [Shard(1)], src_data_rank=None),
        "out.bias": torch.zeros(11),
        "fresh": torch.zeros(2),
        f"fresh{rank}": torch.zeros(2),
    }
    with pytest.raises(sf.Invalid) as caught:
        sf.load(url, {"model": wrong, "extra": {"unseen": None}})
    assert [name for name, t in plain_names(model).items() if not same_bits(local(t), before[name])] == []
    assert all(bool((local(tensor) == 0).all()) for tensor in wrong.values()), "nothing is filled"
    return str(caught.value)


def test_every_offender_is_in_one_error_on_every_rank(ranks, tmp_path):
    one, other = ranks(2)(check_misfits, f"{tmp_path}/checkpoint")
    assert one == other
    for words in [
        "shape: model/tokens.weight is [11, 8] in the checkpoint and [12, 8] here",
        "dtype: model/gain is F32 in the checkpoint and BF16 here",
        "missing: model/fresh is not in the checkpoint\n",
        "missing: model/fresh0 is not in the checkpoint (rank 0)",
        "missing: model/fresh1 is not in the checkpoint (rank 1)",
        "missing: extra/unseen",
        "unexpected: extra, all of it",
        "unexpected: model/blocks.1.down.weight",
        "unexpected: optimizer, all of it (40 leaves)",
        "cast=True",
        "strict=False",
    ]:
        assert words in one, one


def check_partial(rank, world, url):
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    sf.save(url, {"model": model, "optimizer": optimizer, "extra": {"seen": 3, "other": 4}})
    saved = {name: local(tensor).clone() for name, tensor in plain_names(model).items()}

    def loaded(state, target, **options):
        plan = sf.load(url, state, **options)
        return plan, [name for name, t in plain_names(target).items() if same_bits(local(t), saved[name])]

    everything, blocks = list(saved), [name for name in saved if name.startswith("blocks.1.")]
    fresh, _ = build("fsdp", seed=1)
    alike = [name for name, t in plain_names(fresh).items() if same_bits(local(t), saved[name])]  # such as the buffer
    extra = {"seen": None}
    # A part by keys, by leaves of a key, by one value.
    plan, same = loaded({"model": fresh, "extra": extra}, fresh, only="model/blocks.1.*")
    assert same == [name for name in saved if name in (*alike, *blocks)]
    assert (sorted(plan.tensors), plan.values, extra) == ([f"model/{n}" for n in sorted(blocks)], [], {"seen": None})
    plan, same = loaded({"model": fresh, "extra": extra}, fresh, only=["model", "extra/seen"])
    assert (same, plan.values, extra) == (everything, ["extra/seen"], {"seen": 3})
    # What is asked for and not there is still an error, what is not asked for is not.
    with pytest.raises(sf.Invalid, match="missing: extra/nothing"):
        sf.load(url, {"extra": {"nothing": None, "other": None}}, only="extra/*")
    extra = {"nothing": None, "other": None}
    plan, _ = loaded({"extra": extra}, fresh, strict=False)
    assert (extra, plan.missing) == ({"nothing": None, "other": 4}, ["extra/nothing"])
    assert "extra/seen" in plan.unexpected
    # A submodule alone, under a name of its own.
    block = fully_shard(Net().blocks[0], mesh=init_device_mesh("cpu", (world,)))
    plan = sf.load(url, {"block": block}, only="block", rename=lambda name: name.replace("model/blocks.1.", "block/"))
    for name, tensor in block.named_parameters():
        assert same_bits(local(tensor), saved[f"blocks.1.{name}"]), name
    assert plan.renamed["model/blocks.1.up.weight"] == "block/up.weight"


def test_a_part_of_a_checkpoint(ranks, tmp_path):
    ranks(2)(check_partial, f"{tmp_path}/checkpoint")


class Renamed(nn.Module):
    """The same model as grown-up code calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        inner = Net()
        self.embedding, self.layers, self.head = inner.tokens, inner.blocks, inner.out
        self.gain, self.temperature = inner.gain, nn.Buffer(inner.temperature)
        self.experts = inner.experts

    @staticmethod
    def name(saved: str) -> str:
        for old, new in {"tokens.": "embedding.", "blocks.": "layers.", "out.": "head."}.items():
            if saved.startswith(f"model/{old}"):
                return saved.replace(f"model/{old}", f"model/{new}", 1)
        return saved


def check_renamed_and_cast(rank, world, url):
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    sf.save(url, {"model": model, "optimizer": optimizer})
    names = plain_names(model)
    mesh = init_device_mesh("cpu", (world,))
    other = fully_shard(Renamed().to(torch.bfloat16), mesh=mesh)
    others = torch.optim.AdamW(other.parameters(), lr=9.0)
    state = {"model": other, "optimizer": others}
    dry = sf.plan_load(url, state, rename=Renamed.name)
    assert all("dtype: " in problem for problem in dry.problems)
    assert len(dry.problems) == len(names)
    plan = sf.load(url, state, rename=Renamed.name, cast=True)
    assert plan.cast["model/embedding.weight"] == ("F32", "BF16")
    assert others.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, tensor in names.items():
        here = plain_names(other)[Renamed.name(f"model/{name}").removeprefix("model/")]
        assert same_bits(local(here), local(tensor).to(torch.bfloat16)), name
        if isinstance(tensor, nn.Parameter):
            # Moments that did not exist yet are made as the optimizer makes them: of their parameter's type.
            moment, expected = others.state[here]["exp_avg"], optimizer.state[tensor]["exp_avg"]
            assert same_bits(local(moment), local(expected).to(torch.bfloat16)), name


def test_renamed_and_cast_with_its_optimizer(ranks, tmp_path):
    ranks(2)(check_renamed_and_cast, f"{tmp_path}/checkpoint")


# Kinds of jobs


def check_fine_tuning(rank, world, url):
    """A base model without its optimizer, frozen but for a new head."""
    base, optimizer = build("fsdp")
    train(base, optimizer, range(1))
    sf.save(url, {"model": base})
    tuned, _ = build("plain", seed=1)
    tuned.out = nn.Linear(8, 3)
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_(name.startswith("out."))
    tuned = fully_shard(tuned, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(sf.Invalid, match=r"shape: model/out\.weight is \[11, 8\] in the checkpoint and \[3, 8\] here"):
        sf.load(url, {"model": tuned})
    before = {name: local(tensor).clone() for name, tensor in tuned.named_parameters()}
    sf.load(url, {"model": tuned}, only=["model/tokens.*", "model/blocks.*", "model/experts.*", "model/gain"])
    for name, tensor in tuned.named_parameters():
        expected = before[name] if name.startswith("out.") else local(plain_names(base)[name])
        assert same_bits(local(tensor), expected), name
        assert tensor.requires_grad == name.startswith("out.")
    # Its own checkpoints: state of the trained parameters only, whether the optimizer knows of the others or not.
    for parameters in (list(tuned.parameters()), list(tuned.out.parameters())):
        head = torch.optim.AdamW(parameters, lr=0.1)
        tuned(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
        head.step()
        place = f"{url}-{len(parameters)}"
        sf.save(place, {"model": tuned, "optimizer": head})
        fresh = torch.optim.AdamW(parameters, lr=0.5)
        plan = sf.load(place, {"model": tuned, "optimizer": fresh})
        states = [name for name in plan.tensors if name.startswith("optimizer/")]
        assert {name.removeprefix("optimizer/state.").rsplit(".", 1)[0] for name in states} == {
            "out.weight",
            "out.bias",
        }
        assert len(fresh.state) == 2
        assert fresh.param_groups[0]["lr"] == 0.1


def test_fine_tuning(ranks, tmp_path):
    ranks(2)(check_fine_tuning, f"{tmp_path}/base")


def stages(rank, world):
    """The parts of the model that a pipeline's rank has: the first and the last one hold more."""
    whole = Net()
    part = nn.Module()
    if rank == 0:
        part.tokens, part.gain = whole.tokens, whole.gain
    part.blocks = nn.ModuleDict({str(rank): whole.blocks[rank]})
    if rank == world - 1:
        part.out, part.experts = whole.out, whole.experts
        part.register_buffer("temperature", whole.temperature)
    return part


def stepped(model, optimizer):
    for name, parameter in model.named_parameters():
        parameter.grad = known(f"{name}.grad", tuple(parameter.shape))
    optimizer.step()


def save_stages(rank, world, url):
    torch.manual_seed(0)
    part = stages(rank, world)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.1)
    stepped(part, optimizer)
    sf.save(url, {"model": part, "optimizer": optimizer, "extra": {"stage": sf.PerRank(rank)}})


def expect_stages(rank, world, url, layout):
    torch.manual_seed(0)
    whole = Net()
    reference = torch.optim.Adam(whole.parameters(), lr=0.1)
    stepped(whole, reference)
    model, _ = build(layout, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.7)
    extra = {"stage": sf.PerRank(None)}
    sf.load(url, {"model": model, "optimizer": optimizer, "extra": extra}, per_rank="index")
    assert extra["stage"].value == rank % 2
    assert optimizer.param_groups[0]["lr"] == 0.1
    wholes = plain_names(whole)
    for name, tensor in plain_names(model).items():
        assert same_bits(local(tensor), mine(wholes[name].detach(), tensor)), name
        for part, value in optimizer.state.get(tensor, {}).items():
            assert same_bits(local(value), mine(reference.state[wholes[name]][part], value)), (name, part)


def check_stages(rank, world, url):
    torch.manual_seed(1)
    part = stages(rank, world)
    sf.load(url, {"model": part}, only="model")
    torch.manual_seed(0)
    reference = stages(rank, world)
    stepped(reference, torch.optim.Adam(reference.parameters(), lr=0.1))
    assert all(same_bits(one, other) for one, other in zip(part.parameters(), reference.parameters(), strict=True))


def test_a_pipeline_loads_elsewhere(ranks, tmp_path):
    url = f"{tmp_path}/checkpoint"
    ranks(2)(save_stages, url)
    expect_stages(0, 1, url, "plain")
    ranks(2)(check_stages, url)
    ranks(4)(expect_stages, url, "fsdp")


def experts(rank, world):
    """Every rank owns other experts, under their own names, beside a router that all have."""
    model = nn.Module()
    model.router = nn.Linear(4, 8)
    owned = range(rank * 8 // world, (rank + 1) * 8 // world)
    model.experts = nn.ModuleDict({str(index): nn.Linear(4, 3) for index in owned})
    return model


def fill_experts(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(known(name, tuple(parameter.shape)))


def save_experts(rank, world, url):
    model = experts(rank, world)
    fill_experts(model)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    sf.save(url, {"model": model, "optimizer": optimizer})


def expect_experts(rank, world, url):
    model, expected = experts(rank, world), experts(rank, world)
    fill_experts(expected)
    reference, optimizer = torch.optim.Adam(expected.parameters()), torch.optim.Adam(model.parameters())
    stepped(expected, reference)
    sf.load(url, {"model": model, "optimizer": optimizer})
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert same_bits(one, other)
        assert same_bits(optimizer.state[one]["exp_avg"], reference.state[other]["exp_avg"])


def test_experts_with_other_owners(ranks, tmp_path):
    """Keys only on their owners; no rank asks for all that is saved, but together they do."""
    url = f"{tmp_path}/checkpoint"
    ranks(4)(save_experts, url)
    expect_experts(0, 1, url)
    ranks(2)(expect_experts, url)


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, tokens):
        return self.out(self.tokens(tokens))


def check_tied(rank, world, url):
    mesh = init_device_mesh("cpu", (world,))

    def make(tied):
        model = fully_shard(Tied(tied), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(True)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    sf.save(url, {"model": model, "optimizer": optimizer})
    again, its_optimizer = make(True)
    plan = sf.load(url, {"model": again, "optimizer": its_optimizer})
    assert again.out.weight is again.tokens.weight
    assert same_bits(local(again.out.weight), local(model.out.weight))
    assert sorted(plan.tensors)[:2] == ["model/out.weight", "model/tokens.weight"]
    # In a model where they are two, both are filled; their optimizer's state is there for one.
    untied, _ = make(False)
    sf.load(url, {"model": untied}, only="model")
    assert same_bits(local(untied.out.weight), local(model.out.weight))
    assert same_bits(local(untied.tokens.weight), local(model.out.weight))
    # And the other way round: two different tensors do not silently become one.
    different, _ = make(False)
    sf.save(f"{url}-untied", {"model": different})
    with pytest.raises(
        sf.Invalid, match=r"tied: model/tokens\.weight and model/out\.weight|tied: model/out\.weight and"
    ):
        sf.load(f"{url}-untied", {"model": again})


def test_tied_weights(ranks, tmp_path):
    ranks(2)(check_tied, f"{tmp_path}/checkpoint")


class Counting(nn.Linear):
    """A layer with state that is no tensor, another one on every rank."""

    def __init__(self, seen) -> None:
        super().__init__(4, 6)
        self.seen = seen

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def check_extra_state(rank, world, url):
    def make(seen, amax):
        model = nn.Sequential(Counting(seen), Counting({"amax": amax}))
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

    sf.save(url, {"model": make({"rank": rank, "history": [1, rank]}, torch.tensor([0.5, 2.0]))})
    model = make(None, torch.zeros(2))
    sf.load(url, {"model": model})
    assert model[0].seen == {"rank": rank, "history": [1, rank]}
    assert model[1].seen["amax"].tolist() == [0.5, 2.0]


def test_extra_state(ranks, tmp_path):
    ranks(2)(check_extra_state, f"{tmp_path}/checkpoint")


def check_meta(rank, world, url):
    """Built without memory, sharded, given memory, loaded: nothing is initialised twice."""
    model, _ = build("fsdp")
    sf.save(url, {"model": model})
    with torch.device("meta"):
        empty = Net()
    empty = fully_shard(empty, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(sf.Invalid, match=r"model/\w+: a tensor on the meta device has no memory"):
        sf.load(url, {"model": empty}, timeout_s=20)
    assert sf.plan_load(url, {"model": empty}).problems == []
    empty.to_empty(device="cpu")
    sf.load(url, {"model": empty})
    names = plain_names(model)
    assert [name for name, t in plain_names(empty).items() if not same_bits(local(t), local(names[name]))] == []


def test_models_built_without_memory(ranks, tmp_path):
    ranks(2)(check_meta, f"{tmp_path}/checkpoint")


def check_compiled(rank, world, url):
    """Wrappers leave no trace: saved compiled and sharded, loaded into the bare model, and the other way round."""
    model, optimizer = build("fsdp")
    train(model, optimizer, range(1))
    compiled = torch.compile(model, backend="eager")
    sf.save(url, {"model": compiled, "optimizer": optimizer})
    other = nn.parallel.DistributedDataParallel(Net())
    sf.load(url, {"model": torch.compile(other)}, only="model")
    names = plain_names(model)
    assert [
        n for n, t in plain_names(other).items() if not same_bits(mine(t.detach(), names[n]), local(names[n]))
    ] == []


def test_compiled_models(ranks, tmp_path):
    ranks(2)(check_compiled, f"{tmp_path}/checkpoint")


# Optimizers


def grouped(model, order, rate):
    """Two groups: what is decayed and what is not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": rate}]
    return torch.optim.AdamW([groups[index] for index in order], lr=torch.tensor(rate), foreach=False)


def check_groups(rank, world, url):
    model, _ = build("fsdp")
    optimizer = grouped(model, (0, 1), 0.5)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[1].update(lr=0.125, initial_lr=0.75)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step, last_epoch=-1)
    sf.save(url, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    other, _ = build("fsdp", seed=1)
    turned = grouped(other, (1, 0), 9.0)
    its_scheduler = torch.optim.lr_scheduler.LambdaLR(turned, lambda step: 0.5**step)
    rate = turned.param_groups[1]["lr"]
    sf.load(url, {"model": other, "optimizer": turned, "scheduler": its_scheduler})
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.1]
    assert turned.param_groups[0]["initial_lr"] == 0.75
    assert float(turned.param_groups[0]["lr"]) == float(optimizer.param_groups[1]["lr"])
    assert turned.param_groups[1]["lr"] is rate, "a rate that is a tensor stays that tensor"
    assert float(rate) == float(optimizer.param_groups[0]["lr"])
    assert len(turned.param_groups[1]["params"]) == len(optimizer.param_groups[0]["params"])
    for one, other_parameter in zip(model.parameters(), other.parameters(), strict=True):
        saved, loaded = optimizer.state[one], turned.state[other_parameter]
        assert sorted(saved) == sorted(loaded) == ["exp_avg", "exp_avg_sq", "step"]
        assert (loaded["step"].shape, loaded["step"].item()) == ((), 1.0)
        assert all(same_bits(local(saved[part]), local(loaded[part])) for part in saved)
    assert its_scheduler.last_epoch == scheduler.last_epoch


def test_groups_in_another_order_with_rates_that_are_tensors(ranks, tmp_path):
    ranks(2)(check_groups, f"{tmp_path}/checkpoint")


KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
    "Adafactor": torch.optim.Adafactor,
}


def check_kinds(rank, world, directory):
    for kind, make in KINDS.items():
        models = [nn.parallel.DistributedDataParallel(Net()) for _ in range(2)]
        optimizers = [make(model.parameters()) for model in models]
        train(models[0], optimizers[0], range(2))
        url = f"{directory}/{kind}"
        sf.save(url, {"model": models[0], "optimizer": optimizers[0]})
        sf.load(url, {"model": models[1], "optimizer": optimizers[1]})
        losses = [train(model, optimizer, range(2, 4)) for model, optimizer in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1], kind
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert same_bits(one, other), kind
            assert {name: type(value) for name, value in optimizers[0].state[one].items()} == {
                name: type(value) for name, value in optimizers[1].state[other].items()
            }, kind


def test_every_kind_of_optimizer_goes_on(ranks, tmp_path):
    ranks(2)(check_kinds, str(tmp_path))


def zero(rank, world, url, resume):
    """Two steps and a save, or a load, with optimizer state of which every rank holds other parameters' (ZeRO 1)."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=9.0 if resume else 0.01
    )
    if resume:
        sf.load(url, {"model": model, "optimizer": optimizer})
    else:
        train(model, optimizer, range(2))
        sf.save(url, {"model": model, "optimizer": optimizer})
    return train(model, optimizer, range(2, 5))


def test_optimizers_whose_parameters_are_dealt_out(ranks, tmp_path):
    url = f"{tmp_path}/checkpoint"
    straight = ranks(2)(zero, url, False)
    resumed = ranks(2)(zero, url, True) + ranks(4)(zero, url, True)
    assert resumed == straight[:1] * 6
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    sf.load(url, {"model": model, "optimizer": optimizer})
    assert train(model, optimizer, range(2, 5)) == pytest.approx(straight[0], rel=1e-6)


def check_forecast(rank, world, url):
    """A rank's load reads its part and little more."""
    whole = known("w", (1 << 10, 1 << 10))
    mesh = init_device_mesh("cpu", (world,))
    sf.save(url, {"w": {"w": whole}})
    loaded = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)], src_data_rank=None)}
    plan = sf.plan_load(url, {"w": loaded})
    part = math.prod(whole.shape) * 4 // world
    assert plan.bytes_wanted == part
    assert part <= plan.bytes_read <= part + 2 * 65536
    assert not bool(local(loaded["w"]).any()), "a plan reads nothing"
    assert f"{part:,} bytes wanted" in str(plan)
    sf.load(url, {"w": loaded})
    assert same_bits(local(loaded["w"]), mine(whole, loaded["w"]))


def test_a_part_is_read_for_a_part(ranks, tmp_path):
    ranks(4)(check_forecast, f"{tmp_path}/checkpoint")
