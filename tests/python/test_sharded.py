"""Values in pieces: each back by its index whatever the ranks are, units dealt out again, all else refused by name."""

import time

import pytest
import shardfast as sf
import torch
from shardfast.adapters.torch import TorchAdapter


class Loader:
    """A loader whose state is units; ``is_opaque`` if it does not say so."""

    def __init__(self, units=(), is_opaque=False):
        self.units = list(units)
        self.is_opaque = is_opaque
        self.epoch = 0

    def state_dict(self):
        if self.is_opaque:
            return {"position": len(self.units)}
        return {"replicated": {"epoch": self.epoch}, "units": list(self.units)}

    def load_state_dict(self, state):
        self.loaded = state
        self.units = state.get("units")


class Raw(Loader):
    """A loader whose units are any value."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def state_dict(self):
        return {"replicated": {}, "units": self.units}


class Splitting(Loader):
    def split(self, unit, count):
        first, last = unit["range"]
        size = -(-(last - first) // count)
        cuts = [(at, min(at + size, last)) for at in range(first, last, size)]
        return [{"range": cut, "weight": cut[1] - cut[0]} for cut in cuts]


def piece(number, count=3):
    """Units of a piece, with a small tensor and a large one."""
    return [
        {
            "id": (number, unit),
            "weight": 1 + unit,
            "buffer": torch.full((300_000 if unit == 0 else 3,), 10 * number + unit, dtype=torch.int64),
        }
        for unit in range(count + number)
    ]


def error_of(call, *args, **named):
    try:
        call(*args, **named)
    except sf.Error as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saves(rank, world, place, pieces, kind="units"):
    index = rank * pieces // world
    loader = Loader(piece(index), is_opaque=kind == "opaque")
    sf.save(f"{place}/{kind}", {"dataloader": sf.Sharded(loader, index, pieces), "extra": {"step": 3}})


def loads(rank, world, place, pieces):
    loader = Loader()
    sf.load(
        f"{place}/units", {"dataloader": sf.Sharded(loader, rank * pieces // world, pieces), "extra": {"step": None}}
    )
    return [(unit["id"], unit["weight"], unit["buffer"].tolist()[:3], len(unit["buffer"])) for unit in loader.units]


def expected(number):
    return [(unit["id"], unit["weight"], unit["buffer"].tolist()[:3], len(unit["buffer"])) for unit in piece(number)]


@pytest.mark.parametrize("ranks_before", [2, 4])
def test_each_piece_comes_back_under_an_equal_count(ranks, tmp_path, ranks_before):
    ranks(ranks_before)(saves, str(tmp_path), 2)
    for world in (2, 4):
        found = ranks(world)(loads, str(tmp_path), 2)
        assert found == [expected(rank * 2 // world) for rank in range(world)]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_units_are_dealt_out_again_each_once_and_evenly(ranks, tmp_path, count):
    ranks(2)(saves, str(tmp_path), 2)
    found = ranks(count)(loads, str(tmp_path), count)
    assert [unit for units in found for unit in units] == expected(0) + expected(1)
    if count == 1:
        loader = Loader()
        plan = sf.plan_load(tmp_path / "units", {"dataloader": sf.Sharded(loader, 0, 1), "extra": {"step": None}})
        assert (plan.problems, sorted(plan.values), loader.units) == ([], ["dataloader/value", "extra/step"], [])
    weights = [sum(weight for _, weight, _, _ in units) for units in found]
    assert max(weights) - min(weights) <= 2 * max(weight for _, weight, _, _ in expected(1))


def wrong(rank, world, place):
    found = {}
    opaque = Loader(piece(rank), is_opaque=True)
    sf.save(f"{place}/opaque", {"dataloader": sf.Sharded(opaque, rank, world)})
    for name, state in {
        "index": {"loader": sf.Sharded(Loader(piece(0)), 0, 2)},
        "count": {"loader": sf.Sharded(Loader(piece(0)), 0, 1 + rank)},
        "counts": {"loader": sf.Sharded(Loader(piece(0)), rank, 2 + rank)},
        "differ": {"loader": sf.Sharded(Loader(piece(rank)), 0, 1)},
        "weight": {"loader": sf.Sharded(Loader([{"weight": 0.5}]), rank, 2)},
        "twice": {"loader": sf.Sharded(Loader([{"id": 1}, {"id": 1}]), rank, 2)},
        "tuple": {"loader": sf.Sharded(Raw(({"id": rank},)), rank, 2)},
        "tensor": {"loader": sf.Sharded(Raw(torch.arange(3)), rank, 2)},
        "deep": {"extra": {"a": {"b": sf.Sharded(3, rank, 2)}}},
        "owned": {"loader": [sf.Sharded(Loader([7]), 0, 1), sf.PerRank(Loader([7]))][rank]},
        "shared": {"loader": [Loader([7]), sf.Sharded(Loader([7]), 0, 1)][rank]},
    }.items():
        found[name] = error_of(sf.save, f"{place}/{name}", state)
    sf.save(f"{place}/ids", {"loader": sf.Sharded(Loader([{"id": ("a", 7)}]), rank, 2)})
    alone = error_of(sf.load, f"{place}/ids", {"loader": sf.Sharded(Loader(), 0, 1)})
    found["ids"] = alone
    found["lacking"] = error_of(sf.load, f"{place}/ids", {"loader": sf.Sharded(Loader(), 0, 2)})
    sf.save(f"{place}/plain", {"loader": {"a": rank}})
    return found


def test_bad_input_is_refused_on_every_rank_before_anything_changes(ranks, tmp_path):
    one, other = ranks(2)(wrong, str(tmp_path))
    assert one == other
    assert "no rank has piece 1 of 2" in one["index"]
    assert "found piece 0 of 1 on rank 0, piece 0 of 2 on rank 1" in one["count"]
    assert "loader/value: ranks say that it has 2 and 3 pieces" in one["counts"]
    assert "piece 0 of 1 differs between rank 0 and rank 1" in one["differ"]
    assert "weight is 0.5: expected a whole number" in one["weight"]
    assert "units 0 and 1 have one id, 1: each sample would come twice" in one["twice"]
    assert "found a tuple as units" in one["tuple"]
    assert "found a Tensor as units" in one["tensor"]
    assert "directly below it, not deeper" in one["deep"]
    for name, rank in (("owned", 1), ("shared", 0)):
        assert "loader/value: expected a piece of it on every rank, found Sharded on some" in one[name]
        assert f"on rank {rank}: use Sharded" in one[name]
    assert "units 0 and 1 have one id, ('tuple', ['a', 7])" in one["ids"]
    assert "no rank here has piece 1 of the 2 of loader/value" in one["lacking"]


def test_an_opaque_state_needs_units_or_a_function(ranks, tmp_path):
    ranks(2)(saves, str(tmp_path), 2, "opaque")
    error = error_of(sf.load, tmp_path / "opaque", {"dataloader": sf.Sharded(Loader(), 0, 1), "extra": {"step": 0}})
    assert "dataloader/value was saved in 2 pieces, this job has 1, and the state of Loader is opaque" in error
    loader = Loader()
    summed = sf.Sharded(
        loader, 0, 1, reshard=lambda states, count: [{"position": sum(state["position"] for state in states)}] * count
    )
    sf.load(tmp_path / "opaque", {"dataloader": summed, "extra": {"step": 0}})
    assert loader.loaded == {"position": 7}


def test_units_are_split_where_pieces_outnumber_them(tmp_path):
    sf.save(tmp_path / "a", {"loader": sf.Sharded(Splitting([{"range": (0, 100), "weight": 100}]), 0, 1)})
    with pytest.raises(sf.Invalid, match="no rank here has piece 1, 2 of the 3"):
        sf.load(tmp_path / "a", {"loader": sf.Sharded(Splitting(), 0, 3)})


@pytest.mark.parametrize("only", ["extra", "extra/loader", ["model", "extra/*"]])
def test_only_takes_all_pieces_of_a_name(ranks, tmp_path, only):
    sf.save(tmp_path / "a", {"model": {"w": torch.ones(2)}, "extra": {"loader": sf.Sharded(Loader(piece(1)), 0, 1)}})
    for count in (1, 3):
        found = ranks(count)(loads_only, str(tmp_path / "a"), only)
        assert [unit for ids in found for unit in ids] == [(1, unit) for unit in range(4)]
    loader = Loader([7])
    plan = sf.load(
        tmp_path / "a", {"model": {"w": torch.zeros(2)}, "extra": {"loader": sf.Sharded(loader, 0, 1)}}, only="model"
    )
    assert (loader.units, plan.values) == ([7], [])


def loads_only(rank, world, place, only):
    loader = Loader()
    sf.load(place, {"model": {"w": torch.zeros(2)}, "extra": {"loader": sf.Sharded(loader, rank, world)}}, only=only)
    return [unit["id"] for unit in loader.units]


def splits(rank, world, place):
    loader = Splitting()
    sf.load(place, {"loader": sf.Sharded(loader, rank, world)})
    return [unit["range"] for unit in loader.units]


def test_parts_of_units_are_each_given_once(ranks, tmp_path):
    sf.save(tmp_path / "a", {"loader": sf.Sharded(Splitting([{"range": (0, 100), "weight": 100}]), 0, 1)})
    found = ranks(3)(splits, str(tmp_path / "a"))
    covered = [number for units in found for first, last in units for number in range(first, last)]
    assert covered == list(range(100))


def fails_on_one(rank, world, place):
    def reshard(states, count):
        if rank == 1:
            raise KeyError("no such file")
        return states * count

    loader = Loader()
    state = {"dataloader": sf.Sharded(loader, rank, world, reshard=reshard), "extra": {"step": None}}
    return error_of(sf.load, f"{place}/opaque", state), loader.units, state["extra"]["step"]


def test_a_function_that_fails_on_one_rank_fails_the_load_of_all(ranks, tmp_path):
    ranks(1)(saves, str(tmp_path), 1, "opaque")
    for error, units, step in ranks(2)(fails_on_one, str(tmp_path)):
        assert "rank 1: dataloader: its own function raised KeyError: 'no such file'" in error
        assert (units, step) == ([], None)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 1), (0, 0), (True, 2), (0, 1.0), (0, 1 << 21)])
def test_a_piece_is_one_of_its_number(index, count):
    with pytest.raises(sf.Invalid, match="expected a number of pieces from 1 to"):
        sf.Sharded(None, index, count)


def differing(rank, world, place):
    loader = Loader([{"id": rank}])
    loader.epoch = rank
    sf.save(place, {"loader": sf.Sharded(loader, rank, world)})


def test_what_pieces_share_is_the_same_in_all_that_are_dealt_out(ranks, tmp_path):
    ranks(2)(differing, str(tmp_path / "a"))
    error = error_of(sf.load, tmp_path / "a", {"loader": sf.Sharded(Loader(), 0, 1)})
    assert 'loader/value: "replicated" of piece 1 is not that of piece 0' in error
    with pytest.raises(sf.Invalid, match="compared nowhere"):
        large = sf.Stateful(lambda: {"replicated": {"t": torch.zeros(300_000)}, "units": []}, lambda state: None)
        sf.save(tmp_path / "b", {"loader": sf.Sharded(large, 0, 1)})


def shares_a_tensor(rank, world, place):
    """Saves two units of one tensor, and one without, of each rank."""
    tensor = torch.arange(400_000) + rank
    units = [{"id": (rank, 0), "t": tensor}, {"id": (rank, 1)}, {"id": (rank, 2), "t": tensor}]
    sf.save(place, {"loader": sf.Sharded(Loader(units), rank, world)})


def finds_the_tensor(rank, world, place):
    loader = Loader()
    plan = sf.load(place, {"loader": sf.Sharded(loader, rank, world)})
    tensors = [unit["t"] for unit in loader.units if "t" in unit]
    assert plan.bytes_read + plan.bytes_received >= sum({id(one): one.nbytes for one in tensors}.values())
    assert all(torch.equal(unit["t"], torch.arange(400_000) + unit["id"][0]) for unit in loader.units if "t" in unit)
    return [unit["id"] for unit in loader.units], len({id(tensor) for tensor in tensors})


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_units_may_share_a_tensor(ranks, tmp_path, count):
    ranks(2)(shares_a_tensor, str(tmp_path / "a"))
    found = ranks(count)(finds_the_tensor, str(tmp_path / "a"))
    assert [one for ids, _ in found for one in ids] == [(rank, number) for rank in range(2) for number in range(3)]
    assert sum(tensors for _, tensors in found) == (2 if count < 3 else 4)


def lacks_memory_for_a_unit(rank, world, place):
    """Loads two units, of which that of rank 0 has a tensor; then saves."""
    if rank == 0:
        TorchAdapter.allocate = lambda *_: (_ for _ in ()).throw(sf.Exhausted("no memory for it"))
    loader, began = Loader(), time.monotonic()
    error = error_of(sf.load, place, {"loader": sf.Sharded(loader, rank, world)}, timeout_s=60)
    sf.save(f"{place}-next", {"step": 1}, timeout_s=60)
    return error, loader.units, time.monotonic() - began < 30


def test_a_failure_between_two_reads_of_one_rank_is_that_of_all_at_once(ranks, tmp_path):
    sf.save(tmp_path / "a", {"loader": sf.Sharded(Loader([{"t": torch.arange(400_000)}, {}]), 0, 1)})
    for error, units, is_soon in ranks(2)(lacks_memory_for_a_unit, str(tmp_path / "a")):
        assert "Exhausted: " in error
        assert "no memory for it" in error
        assert (units, is_soon) == ([], True)


class Arbitrary(Splitting):
    rank = 0

    def split(self, unit, count):
        first, last = unit["range"]
        cut = first + 30 + self.rank
        return [{"range": (first, cut), "weight": cut - first}, {"range": (cut, last), "weight": last - cut}]


def splits_by_rank(rank, world, place):
    loader = Arbitrary()
    loader.rank = rank
    return error_of(sf.load, place, {"loader": sf.Sharded(loader, rank, world)}), loader.units


def test_parts_that_depend_on_the_rank_are_refused(ranks, tmp_path):
    sf.save(tmp_path / "a", {"loader": sf.Sharded(Splitting([{"range": (0, 100), "weight": 100}]), 0, 1)})
    for error, units in ranks(2)(splits_by_rank, str(tmp_path / "a")):
        assert "loader/value: split() made other parts of unit 0 on another rank" in error
        assert units == []


class Renaming(Splitting):
    """Splits a unit into parts with ids of its choice."""

    def __init__(self, units=(), ids=None):
        super().__init__(units)
        self.ids = ids

    def split(self, unit, count):
        return [{**part, "id": one} for part, one in zip(super().split(unit, count), self.ids[unit["id"]], strict=True)]


def renames(rank, world, place, ids):
    loader = Renaming(ids=ids)
    return error_of(sf.load, place, {"loader": sf.Sharded(loader, rank, world)}), [unit["id"] for unit in loader.units]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ({("a", 1): [("a", 1), 3]}, [("a", 1), 3, "b"]),
        ({("a", 1): [1, "b"], "b": [2, 3]}, [1, "b", 2, 3]),  # the unit of that id is split, too
        ({("a", 1): ["b", 3]}, None),
        ({("a", 1): [1, 2], "b": [2, 3]}, None),
    ],
)
def test_parts_have_ids_of_their_own_on_all_ranks(ranks, tmp_path, ids, found):
    two = [{"range": (0, 100), "weight": 100, "id": ("a", 1)}, {"range": (100, 200), "weight": 100, "id": "b"}]
    sf.save(tmp_path / "a", {"loader": sf.Sharded(Renaming(two), 0, 1)})
    for error, own in ranks(2 + len(ids))(renames, str(tmp_path / "a"), ids):
        if found is None:
            assert "loader/value: behind split(), units" in error
            assert "have one id, " in error
            assert "give each part an id of its own" in error
            assert own == []
        else:
            assert (error, own) == ("", [found.pop(0)])


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("a", "str of no state"),
        (None, "NoneType of no state"),
        ([print], "list of builtin_function_or_method"),
        ([], "list"),
    ],
)
def test_a_function_that_makes_no_states_is_refused(ranks, tmp_path, made, found):
    ranks(2)(saves, str(tmp_path), 2, "opaque")
    loader = Loader()
    state = {"dataloader": sf.Sharded(loader, 0, 1, reshard=lambda states, count: made), "extra": {"step": 0}}
    error = error_of(sf.load, tmp_path / "opaque", state)
    assert f"dataloader: reshard() made a {found}" in error
    assert "expected a list of states, one for each piece" in error
    assert loader.units == []


def test_a_value_is_a_piece_in_the_save_and_in_the_load(tmp_path):
    for wrapped in (lambda value: value, sf.PerRank):
        loader = Loader([1])
        place = tmp_path / wrapped.__name__
        sf.save(place / "piece", {"loader": sf.Sharded(loader, 0, 1)})
        sf.save(place / "plain", {"loader": wrapped(loader)})
        into = Loader()
        error = error_of(sf.load, place / "piece", {"loader": wrapped(into)})
        assert "(one problem):\n  pieces: loader/value was saved in 1 piece: load it as shardfast.Sharded(" in error
        error = error_of(sf.load, place / "plain", {"loader": sf.Sharded(into, 0, 1)})
        assert (
            "(one problem):\n  pieces: loader/value was saved without shardfast.Sharded: load it without, and" in error
        )
        assert into.units == []
        sf.load(place / "plain", {"loader": sf.Sharded(into, 0, 1)}, strict=False)
        sf.load(place / "plain", {"loader": wrapped(into)})
        assert into.units == [1]
