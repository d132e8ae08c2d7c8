"""Streams of datasets: what they refuse, how they deal out shards, and the epochs of their workers."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import datasets
import loader_jobs as jobs
import pytest
import shardfast as sf
import shardfast.data.streams
from shardfast.data import Stream
from torchdata.stateful_dataloader import StatefulDataLoader

SIZES = [9, 9]


def same(one, *_):
    return one


def rows(sizes=SIZES):
    return datasets.IterableDataset.from_generator(jobs.numbers_of, gen_kwargs={"sizes": sizes})


def table(sizes=SIZES):
    """Rows that are read as Arrow tables."""
    return datasets.Dataset.from_dict({"x": list(range(sum(sizes)))}).to_iterable_dataset(num_shards=len(sizes))


def is_small(one):
    return one["x"] < 7


# Another stream than the one that was saved

CHANGES = {
    "a larger batch": (rows, lambda one: one.batch(2), lambda one: one.batch(3)),
    "a smaller batch": (rows, lambda one: one.batch(3), lambda one: one.batch(2)),
    "another batch of a map": (
        rows,
        lambda one: one.map(same, batched=True, batch_size=3),
        lambda one: one.map(same, batched=True, batch_size=4),
    ),
    "a filter": (rows, lambda one: one, lambda one: one.filter(is_small)),
    "no filter": (rows, lambda one: one.filter(is_small), lambda one: one),
    "a batched map": (rows, lambda one: one, lambda one: one.map(same, batched=True)),
    "a map": (rows, lambda one: one, lambda one: one.map(same)),
    "another source": (rows, lambda one: one, lambda _: table()),
    "a format": (rows, lambda one: one, lambda one: one.with_format("numpy")),
    "a column's type": (rows, lambda one: one, lambda one: one.cast(datasets.Features({"x": datasets.Value("int32")}))),
    "more shards": (rows, lambda one: one, lambda _: rows([9, 9, 1])),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_another_stream_is_refused_by_name(tmp_path, changed):
    source, before, after = CHANGES[changed]
    stream = Stream(before(source()), 0, 1)
    next(iter(stream))
    sf.save(tmp_path / "a", {"data": sf.Sharded(stream, 0, 1)})
    other = Stream(after(source()), 0, 1)
    message = r"Stream: it is another stream.* in the checkpoint, .* here\): load into the same steps"
    with pytest.raises(sf.Invalid, match=message):
        sf.load(tmp_path / "a", {"data": sf.Sharded(other, 0, 1)})
    assert len([*other]) == len([*Stream(after(source()), 0, 1)]), "nothing was taken up"


@pytest.mark.parametrize("workers", [0, 1])
def test_another_stream_in_a_loader_is_refused_by_name(tmp_path, workers):
    def made(size):
        context = "fork" if workers else None
        stream = Stream(rows().batch(size), 0, 1)
        return StatefulDataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)

    loader = made(3)
    got = [next(iter(loader))["x"]]
    sf.save(tmp_path / "a", {"data": sf.Sharded(loader, 0, 1)})
    again, other = made(3), made(2)
    for one in (again, other):
        sf.load(tmp_path / "a", {"data": sf.Sharded(one, 0, 1)})
    with pytest.raises(sf.Invalid, match=r"batch_size=3.* in the checkpoint, .*batch_size=2.* here"):
        next(iter(other))
    assert sorted(itertools.chain(*got, *(one["x"] for one in again))) == sorted([*range(9), *range(9)])


def test_other_functions_and_columns_go_on():
    stream = Stream(rows().map(same).filter(is_small), 0, 1)
    first = next(iter(stream))["x"]
    again = Stream(rows().map(lambda one: {"x": one["x"], "y": 1}).filter(lambda one: one["x"] < 5), 0, 1, buffer=2)
    again.load_state_dict(stream.state_dict())
    assert sorted([first, *(one["x"] for one in again)]) == sorted([*range(5), *range(5)])


@pytest.mark.parametrize("change", [("with_format", "numpy"), ("cast_column", "x", datasets.Value("int32"))])
def test_what_leaves_positions_as_they_are_goes_on(change):
    stream = Stream(table(), 0, 1)
    list(itertools.islice(stream, 4))
    again = Stream(getattr(table(), change[0])(*change[1:]), 0, 1)
    again.load_state_dict(stream.state_dict())
    assert [int(one["x"]) for one in again] == list(range(4, 18))


def test_a_state_without_steps_goes_on():
    """States had none before steps were noted."""
    stream = Stream(rows(), 0, 1)
    got = [one["x"] for one in itertools.islice(stream, 4)]
    state = stream.state_dict()
    del state["replicated"]["steps"]
    again = Stream(rows(), 0, 1)
    again.load_state_dict(state)
    assert got + [one["x"] for one in again] == [*range(9), *range(9)]


def test_a_state_of_another_object_is_refused():
    for state in ({"replicated": {"epoch": 0}, "units": []}, {"replicated": None, "units": []}, {"x": 1}, 3):
        with pytest.raises(sf.Invalid, match="Stream: what is stored is no state of a Stream"):
            Stream(rows(), 0, 1).load_state_dict(state)


# Loads and iterators


class Step:
    """A value that a load fills in place."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: sf.Sharded(one, 0, 1)])
def test_a_load_while_an_iterator_runs_is_refused(tmp_path, wrapped):
    stream = Stream(rows(), 0, 1)
    list(itertools.islice(stream, 3))
    sf.save(tmp_path / "a", {"data": wrapped(stream), "step": Step(5)})
    again = Stream(rows(), 0, 1)
    iterator = iter(again)
    next(iterator)
    step = Step(0)
    with pytest.raises(sf.Invalid, match=r"its iterator runs and would .*: load before iter\(\)"):
        sf.load(tmp_path / "a", {"data": wrapped(again), "step": step})
    assert step.number == 0, "nothing was loaded"
    with pytest.raises(sf.Invalid, match=r"Stream: its iterator runs and would .*: load before iter\(\)"):
        again.load_state_dict(stream.state_dict())
    assert [one["x"] for one in iterator] == [*range(1, 9), *range(9)], "it goes on as it did"
    for unused in (again, copy.deepcopy(again)):  # a pass has ended
        sf.load(tmp_path / "a", {"data": wrapped(unused)}, only="data")
        assert [one["x"] for one in unused] == [*range(3, 9), *range(9)]


def test_what_is_made_and_not_read_takes_up_a_load(tmp_path):
    stream = Stream(rows(), 0, 1)
    list(itertools.islice(stream, 3))
    again = Stream(rows(), 0, 1)
    iterator = iter(again)
    again.load_state_dict(stream.state_dict())
    assert [one["x"] for one in iterator] == [*range(3, 9), *range(9)]


def test_a_copy_of_what_is_read_can_be_loaded():
    stream = Stream(rows(), 0, 1)
    iterator = iter(stream)
    next(iterator)
    state = stream.state_dict()
    for other in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        other.load_state_dict(state)
        assert len([*other]) == 17
    assert len([*iterator]) == 17


# Shards


def ids_of(shards, rank, ranks, worker, workers, monkeypatch):
    info = SimpleNamespace(id=worker, num_workers=workers) if workers else None
    monkeypatch.setattr(shardfast.data.streams, "get_worker_info", lambda: info)
    return [unit["id"] for unit in Stream(rows([1] * shards), rank, ranks).state_dict()["units"]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1, 3, 4])
def test_no_rank_gets_two_shards_more_than_another(monkeypatch, ranks, workers):
    for shards in (1, 2, 5, 8, 13):
        dealt = [
            [ids_of(shards, rank, ranks, worker, workers, monkeypatch) for worker in range(max(workers, 1))]
            for rank in range(ranks)
        ]
        assert sorted(itertools.chain(*itertools.chain(*dealt))) == list(range(shards))
        counts = [sum(map(len, of)) for of in dealt]
        assert max(counts) - min(counts) <= 1, (shards, counts)


def test_a_state_names_its_shards():
    """So a state of other dealing goes on with its own."""
    state = Stream(rows([2, 2, 2, 2]), 0, 2).state_dict()
    state["units"] = [{**unit, "id": number} for unit, number in zip(state["units"], (0, 1), strict=True)]
    again = Stream(rows([2, 2, 2, 2]), 0, 2)
    again.load_state_dict(state)
    iter(again)
    assert [unit["id"] for unit in again.state_dict()["units"]] == [0, 1]


# Epochs


def orders(stream, epochs, persistent):
    workers = {} if persistent is None else {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = StatefulDataLoader(stream, batch_size=None, persistent_workers=bool(persistent), **workers)
    found = []
    for epoch in epochs:
        if epoch is not None:
            stream.set_epoch(epoch)
        found.append([one["x"] for one in loader])
    return found


@pytest.mark.parametrize("copied", [same, copy.deepcopy])
def test_an_epoch_reaches_persistent_workers(copied):
    made = [orders(copied(Stream(rows(), 0, 1, buffer=6, seed=1)), (0, 1, 2, 0, 1), kept) for kept in (False, True)]
    first, second, third, *again = made[0]
    assert first != second != third != first
    assert again == [first, second]
    assert made[0] == made[1]


@pytest.mark.parametrize("persistent", [None, False, True])
def test_an_epoch_stays_until_another_one_is_announced(persistent):
    found = orders(Stream(rows(), 0, 1, buffer=6, seed=1), (None, 0, None, 1, None), persistent)
    assert found[0] == found[1] == found[2] != found[3] == found[4]


def test_an_epoch_that_is_announced_in_a_pass_is_that_of_the_next():
    def made():
        return Stream(rows(), 0, 1, buffer=6, seed=1)

    whole = orders(made(), (1, 2), None)
    stream = made()
    stream.state_dict()  # begins nothing
    found = []
    for epoch in (1, 2):
        stream.set_epoch(epoch)
        iterator = iter(stream)
        found.append([next(iterator)["x"]])
        stream.set_epoch(epoch + 1)
        found[-1] += [one["x"] for one in iterator]
    assert found == whole


# Arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: Stream(one, "0", 1), r"Stream\(rank='0'\): expected a whole number from 0 on, found a str"),
        (lambda one: Stream(one, 0, 1.5), r"Stream\(ranks=1.5\): expected a whole number from 0 on, found a float"),
        (lambda one: Stream(one, -1, 1), r"Stream\(rank=-1\): expected a whole number from 0 on"),
        (lambda one: Stream(one, 0, True), r"Stream\(ranks=True\): expected a whole number"),
        (lambda one: Stream(one, 0, 1, buffer="3"), r"Stream\(buffer='3'\): expected a whole number from 0 on"),
        (lambda one: Stream(one, 0, 1, buffer=-1), r"Stream\(buffer=-1\): expected a whole number from 0 on"),
        (lambda one: Stream(one, 1, 1), r"Stream\(rank=1, ranks=1\): expected one of the data ranks"),
        (lambda one: Stream(one, 0, 0), r"Stream\(rank=0, ranks=0\): expected one of the data ranks"),
        (lambda one: Stream(one, 0, 1).set_epoch("1"), r"Stream\.set_epoch\('1'\): expected a whole number from 0 on"),
    ],
)
def test_an_argument_of_another_kind_is_refused_at_once(call, message):
    with pytest.raises(sf.Invalid, match=message):
        call(rows())


def test_a_stream_in_the_piece_of_another_rank_is_refused(tmp_path):
    stream = Stream(rows(), rank=1, ranks=2)
    for value in (stream, StatefulDataLoader(stream, batch_size=None)):
        with pytest.raises(sf.Invalid, match=r"data: expected Sharded\(index=1, count=2\).* found index=0, count=2"):
            sf.save(tmp_path / "a", {"data": sf.Sharded(value, index=0, count=2)})
