"""Python values through real files and real ranks: every kind, every rank's own, and worlds that changed."""

import collections
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from layouts import known, same_bits
from test_values import ARRAYS, PLAIN, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "reader"))
import shardfast_objects as objects
import shardfast_reader as reader


def alike(one, other):
    """As ``same``, and bit by bit for tensors, whose NaNs and conjugations equality does not see."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, np.generic):
        return type(one) is type(other) and one.tobytes() == other.tobytes()
    return same(one, other)


# Every kind but tensors of a type that safetensors has not, which stand alone only within PerRank.
EVERYTHING = [value for value in [*PLAIN, *ARRAYS] if getattr(value, "dtype", None) is not torch.complex128]


def by_number(values):
    return {f"v{number}": value for number, value in enumerate(values)}


def test_every_kind_of_value_comes_back_from_a_checkpoint(tmp_path):
    values = by_number(EVERYTHING)
    sf.save(tmp_path / "one", {"extra": values, "nested": {"deep": [values, (values,)]}, "alone": values["v37"]})
    state = {"extra": dict.fromkeys(values), "nested": {"deep": None}, "alone": None}
    plan = sf.load(tmp_path / "one", state)
    assert [name for name, value in values.items() if not alike(state["extra"][name], value)] == []
    first, (second,) = state["nested"]["deep"]
    for inner in (first, second):
        assert list(inner) == list(values)
        assert [name for name, value in values.items() if not alike(inner[name], value)] == []
    assert alike(state["alone"], values["v37"])
    assert sorted(plan.values + plan.tensors) == sorted([*(f"extra/{n}" for n in values), "nested/deep", "alone/value"])


class Migrating(torch.nn.Module):
    """A layer of a second version; of the first one, it was saved in another unit."""

    _version = 2

    def __init__(self, value=0.0):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((40_000,), value))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}w"] = state_dict[f"{prefix}w"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Trainer:
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"model": self.model.state_dict(), "step": 3}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])


def test_a_state_dict_keeps_the_versions_that_stand_in_an_attribute_of_it(tmp_path):
    for number, given in enumerate([Trainer, lambda model: sf.Stateful(model.state_dict, model.load_state_dict)]):
        saved, loaded = Migrating(1.0), Migrating()
        sf.save(tmp_path / f"{number}", {"it": given(saved)})
        sf.load(tmp_path / f"{number}", {"it": given(loaded)})
        assert bool((loaded.w == 1.0).all())


def test_tensors_in_attributes_are_leaves(tmp_path):
    value = collections.OrderedDict(a=torch.arange(140_000))
    value.more = {"b": torch.arange(150_000), "a": value["a"]}
    sf.save(tmp_path / "one", {"extra": {"it": [value]}})
    with sf.mapped(tmp_path / "one") as checkpoint:
        assert {"extra/it.0.a", "extra/it.0.__dict__.more.b"} <= set(checkpoint)
    state = {"extra": {"it": None}}
    sf.load(tmp_path / "one", state)
    (back,) = state["extra"]["it"]
    assert type(back) is collections.OrderedDict and vars(back).keys() == {"more"}
    assert torch.equal(back["a"], value["a"]) and torch.equal(back.more["b"], value.more["b"])
    assert back.more["a"] is back["a"]


def tags_in(value):
    """What the independent reader leaves as tagged data, because the standard library has no type for it."""
    if isinstance(value, objects.Tagged):
        return {value.name, *tags_in(value.payload)}
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return set().union(*map(tags_in, parts)) if isinstance(value, (dict, list, tuple)) else set()


def test_large_and_small_bytes_stand_side_by_side(tmp_path):
    dice = random.Random(0)
    sizes = [0, 1, 4095, 4096, 4097, 70_000, 3, 1 << 20]
    for value in ([dice.randbytes(size) for size in sizes], {"a": dice.randbytes(5000)}, dice.randbytes(5000)):
        url = tmp_path / str(dice.random())
        sf.save(url, {"extra": {"it": value, "many": [value] * 3}})
        state = {"extra": {"it": None, "many": None}}
        sf.load(url, state)
        assert state["extra"] == {"it": value, "many": [value] * 3}


def test_somebody_else_reads_the_same_values(tmp_path):
    values = by_number(EVERYTHING)
    sf.save(tmp_path / "one", {"extra": values})
    opened = reader.Checkpoint(tmp_path / "one")
    tags, read = set(), 0
    for name, value in values.items():
        if opened.leaf("extra", name).kind == "tensor":
            continue  # an empty one
        found = opened.value("extra", name, rank=0)
        below = tags_in(found)
        tags |= below
        if not below:
            assert same(found, value) or found == value, value  # a path is a pure one to the reader
            read += 1
    assert read > 50
    assert tags == {
        *("named_tuple", "namespace", "dataclass", "enum", "default_dict"),
        *("array", "numpy_scalar", "dtype", "torch_size", "torch_device"),
    }


def save_shared(rank, world, url):
    values = by_number(EVERYTHING)
    sf.save(url, {"extra": values})
    own = {name: sf.PerRank(value) for name, value in values.items()}
    sf.save(f"{url}-declared", {"extra": own})


def test_equal_values_are_stored_once(ranks, tmp_path):
    """Whatever the order of sets and the addresses of objects in each process."""
    ranks(3)(save_shared, str(tmp_path / "one"))
    for url in ("one", "one-declared"):
        opened = reader.Checkpoint(tmp_path / url)
        assert {len(leaf.values) for leaf in opened.leaves if leaf.kind == "object"} == {1}
        assert len(list((tmp_path / url / "extra").glob("*.safetensors"))) == 1


def turned(rank):
    """Other values on every rank; those of rank 2 are those of rank 0."""
    shift = rank % 2
    return by_number(EVERYTHING[shift:] + EVERYTHING[:shift])


def keep_own(rank, world, url, declared):
    mark = sf.PerRank if declared else lambda value: value
    values = turned(rank)
    sf.save(url, {"extra": {name: mark(value) for name, value in values.items()}, "shared": {"step": 3}})
    holders = {name: mark(None) for name in values}
    sf.load(url, {"extra": holders, "shared": {"step": None}})
    loaded = {name: holder.value if declared else holder for name, holder in holders.items()}
    assert [name for name, value in values.items() if not alike(loaded[name], value)] == []


def load_in_another_world(rank, world, url):
    names = list(turned(0))
    holders, shared = dict.fromkeys(names), {"step": None}
    with pytest.raises(sf.Invalid) as caught:
        sf.load(url, {"extra": holders, "shared": shared}, timeout_s=20)
    problems = [line for line in str(caught.value).splitlines() if line.startswith("  per rank: ")]
    assert len(problems) == len(names), "all of them, in one error"
    assert f"was saved by 3 ranks with 2 different values, and this job has {world} ranks" in problems[0]
    assert 'per_rank="rank0"' in str(caught.value)
    assert 'per_rank="index"' in str(caught.value)
    assert (set(map(id, holders.values())), shared["step"]) == ({id(None)}, None), "nothing was changed"
    for choice, saving_rank in (("rank0", 0), ("index", rank % 3)):
        holders = dict.fromkeys(names)
        sf.load(url, {"extra": holders, "shared": shared}, per_rank=choice)
        expected = turned(saving_rank)
        assert [name for name, value in expected.items() if not alike(holders[name], value)] == [], choice
    assert shared["step"] == 3


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "found out"])
def test_every_kind_of_value_comes_back_to_its_own_rank(ranks, tmp_path, declared):
    url = str(tmp_path / "one")
    ranks(3)(keep_own, url, declared)
    # Two ranks of three hold the same, which is stored once.
    ranges = {leaf.name: [copy.ranks for copy in leaf.values] for leaf in reader.Checkpoint(url).leaves}
    assert ranges["step"] == [[range(3)]]
    assert all(ranges[name] == [[range(1), range(2, 3)], [range(1, 2)]] for name in turned(0))


def test_another_world_asks_for_a_choice_and_never_mixes(ranks, tmp_path):
    url = str(tmp_path / "one")
    ranks(3)(keep_own, url, False)
    ranks(2)(load_in_another_world, url)
    ranks(4)(load_in_another_world, url)


def check_own_leaves(rank, world, url):
    """Values that only some ranks have, and a load that asks for one that another rank saved."""
    sf.save(url, {"extra": {f"only{rank}": [rank] * 3, "all": "same"}})
    extra = dict.fromkeys(["only0", "only1", "all"])
    sf.load(url, {"extra": extra})
    assert extra == {"only0": [0] * 3, "only1": [1] * 3, "all": "same"}


def test_values_of_some_ranks_only(ranks, tmp_path):
    ranks(2)(check_own_leaves, str(tmp_path / "one"))


class Loader:
    """A data loader: a position, a random state, and samples it has fetched already, different on every rank."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)
        self.buffer = [known(f"sample {rank} {number}", (50, 7)) for number in range(rank)]
        self.tokens = torch.arange(5) + rank
        self.position = {"epoch": 1, "offset": 100 * rank}

    def state_dict(self):
        state = {"position": self.position, "generator": self.generator.get_state(), "tokens": self.tokens}
        return {**state, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.position, self.buffer, self.tokens = state["position"], state["buffer"], state["tokens"]
        self.generator.set_state(state["generator"])


def check_loaders(rank, world, url):
    loader = Loader(rank)
    sf.save(url, {"dataloader": sf.PerRank(loader)})
    expected = torch.rand(3, generator=loader.generator)
    other = Loader(7)
    sf.load(url, {"dataloader": sf.PerRank(other)})
    assert torch.equal(torch.rand(3, generator=other.generator), expected)
    assert other.position == {"epoch": 1, "offset": 100 * rank}
    assert other.tokens.tolist() == [rank + number for number in range(5)]
    assert len(other.buffer) == rank
    assert all(same_bits(sample, known(f"sample {rank} {n}", (50, 7))) for n, sample in enumerate(other.buffer))


def test_data_loaders_go_on_on_their_ranks(ranks, tmp_path):
    ranks(3)(check_loaders, str(tmp_path / "one"))


def check_mixed(rank, world, url):
    """Large and sharded tensors inside values become tensors of the checkpoint; the value refers to them."""
    mesh = init_device_mesh("cpu", (world,))
    big, whole = known("big", (600, 500)), known("sharded", (5, 3))
    sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    value = {"queue": [big, {"again": big, "label": "x"}], "tuple": (torch.ones(2), 3), "rank": 0}
    with pytest.raises(sf.Invalid, match=r"extra\.own.*a DTensor cannot be part of a value"):
        sf.save(f"{url}-own", {"extra": {"own": sf.PerRank([sharded])}}, timeout_s=20)
    sf.save(url, {"extra": {"value": value}, "ema": {"shadow": {"w": sharded}, "decay": 0.5}})
    standing = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None)
    state = {"extra": {"value": None}, "ema": {"shadow": {"w": standing}, "decay": None}}
    sf.load(url, state)
    loaded = state["extra"]["value"]
    assert same_bits(loaded["queue"][0], big)
    assert loaded["queue"][1]["again"] is loaded["queue"][0], "one tensor stays one"
    assert (loaded["queue"][1]["label"], loaded["tuple"][1], loaded["rank"]) == ("x", 3, 0)
    assert loaded["tuple"][0].tolist() == [1.0, 1.0]
    assert state["ema"]["decay"] == 0.5
    assert same_bits(standing.to_local(), sharded.to_local())
    dist.barrier()
    names = {f"{leaf.key}/{leaf.name}": leaf.kind for leaf in reader.Checkpoint(url).leaves}
    assert names["extra/value.queue.0"] == "tensor"
    assert sum(kind == "tensor" for kind in names.values()) == 2


def test_tensors_inside_values(ranks, tmp_path):
    ranks(2)(check_mixed, str(tmp_path / "one"))


class Odd:
    """What no data says."""

    def __init__(self, number):
        self.number = number


def check_pickles(rank, world, url):
    with pytest.raises(sf.Invalid, match=r"rank 0: extra\.odd: a test_values_end_to_end\.Odd cannot be stored"):
        sf.save(url, {"extra": {"odd": Odd(1)}}, timeout_s=20)
    sf.save(url, {"extra": {"odd": Odd(rank), "even": 2}}, pickle=True)
    extra = {"odd": None, "even": None}
    with pytest.raises(sf.Invalid, match=r"extra\.odd: stored as a pickle, which can run any code"):
        sf.load(url, {"extra": extra}, timeout_s=20)
    assert extra == {"odd": None, "even": None}
    sf.load(url, {"extra": extra}, only="extra/even")
    assert extra == {"odd": None, "even": 2}
    sf.load(url, {"extra": extra}, pickle=True)
    assert extra["odd"].number == rank


def test_pickles_by_the_word_only(ranks, tmp_path):
    url = str(tmp_path / "one")
    ranks(2)(check_pickles, url)
    program = Path(sys.executable).with_name("shardfast")
    done = subprocess.run([program, "inspect", url], capture_output=True, text=True, timeout=240)
    assert "pickle" in done.stdout, "whoever looks is told"


def test_keys_that_print_alike_or_not_at_all_keep_their_tensors(tmp_path):
    """A tensor inside a value is known by its keys, not by how they print."""
    long = 10**5000
    keys = [1, "1", 2.0, "2.0", long, str(hex(long)), (1, long), None, "None"]

    def state(fill):
        return {"extra": {"v": {key: torch.full((2,), fill(n)) for n, key in enumerate(keys)} | {"n": 1}}}

    sf.save(tmp_path / "one", state(float))
    for loaded in (state(lambda n: -1.0), {"extra": {"v": None}}):
        sf.load(tmp_path / "one", loaded)
        assert [loaded["extra"]["v"][key].tolist() for key in keys] == [[n, n] for n in range(len(keys))]
    large = {"extra": {"v": {long: torch.ones(400_000), "n": 1}}}
    sf.save(tmp_path / "two", large)
    large["extra"]["v"][long].zero_()
    sf.load(tmp_path / "two", large)
    assert large["extra"]["v"][long].sum() == 400_000


LONE = "lone \ud800"


def with_a_name(name):
    model = torch.nn.Module()
    model.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    return model


@pytest.mark.parametrize(
    ("place", "state"),
    [
        (r"the state's key .lone \\ud800.", {LONE: 1}),
        (r"extra\.lone \\ud800", {"extra": {LONE: 1}}),
        (r"extra\.a\.lone \\ud800", {"extra": {"a": {LONE: torch.ones(3)}}}),
        (r"extra\.a\.0\.lone \\ud800", {"extra": {"a": [{LONE: torch.ones(400_000)}]}}),
        (r"model\.lone \\ud800", {"model": with_a_name(LONE)}),
    ],
)
def test_names_with_lone_surrogates_are_refused_by_name(tmp_path, place, state):
    with pytest.raises(sf.Invalid, match=rf"^{place}: .*found a lone surrogate \(U\+D800\)"):
        sf.save(tmp_path / "one", state)
    sf.save(tmp_path / "two", {"extra": {"a": 1}})
    if "a" not in state.get("extra", {}):  # there the load puts what was saved
        with pytest.raises(sf.Invalid, match=r"found a lone surrogate \(U\+D800\)"):
            sf.load(tmp_path / "two", state, strict=False)


def failing_with_a_surrogate(rank, world, url):
    class Loader:
        def state_dict(self):
            if rank == 1:
                raise OSError("no file \udcff")
            return {}

        def load_state_dict(self, state):
            pass

    try:
        sf.save(url, {"loader": Loader()}, timeout_s=20)
    except (sf.Error, OSError) as error:
        return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")


def test_a_failure_whose_text_has_a_lone_surrogate_reaches_all_ranks(ranks, tmp_path):
    one, other = ranks(2)(failing_with_a_surrogate, str(tmp_path / "one"))
    assert one.startswith(b"Invalid: ")
    assert b"OSError: no file \\udcff" in one
    assert other == b"OSError: no file \\udcff"  # its own code's


def test_complex128_is_refused_with_what_to_do(tmp_path):
    wide = torch.ones(3, dtype=torch.complex128)
    for state in ({"model": {"w": wide}}, {"extra": {"v": [wide]}}, {"w": wide}):
        with pytest.raises(sf.Invalid, match=r"complex128 cannot be stored, .*: store torch\.view_as_real\(\) of it"):
            sf.save(tmp_path / "one", state)
    sf.save(tmp_path / "one", {"model": {"w": torch.view_as_real(wide)}, "extra": {"v": [np.ones(3, np.complex128)]}})
    other = torch.zeros(3, dtype=torch.complex128)
    state = {"model": {"w": torch.view_as_real(other)}, "extra": {"v": None}}
    sf.load(tmp_path / "one", state)
    assert torch.equal(other, wide)
    assert state["extra"]["v"][0].tolist() == [1 + 0j] * 3
