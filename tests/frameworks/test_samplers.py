"""Samplers and loaders whose position would be lost, counted wrongly or taken for another one: refused by name."""

import copy
import pickle

import pytest
import shardfast as sf
import torch
from shardfast.data import DistributedSampler
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler

NUMBERS = list(range(12))


def ours(**named):
    return DistributedSampler(NUMBERS, 1, 0, shuffle=False, **named)


def loader_of(sampler=None, batch=2, workers=0, dataset=NUMBERS, **named):
    context = "fork" if workers else None
    if sampler is not None:
        named["sampler"] = sampler
    collate = list if batch else None
    return StatefulDataLoader(
        dataset, batch, num_workers=workers, multiprocessing_context=context, collate_fn=collate, **named
    )


def saved(place, loader, batches, wrapped):
    """Reads so many batches, and saves; returns what was read."""
    iterator = iter(loader)
    read = [next(iterator) for _ in range(batches)]
    sf.save(place, {"data": wrapped(loader)})
    return read


def piece(value):
    return sf.Sharded(value, 0, 1)


def bare(value):
    return value


def refused(place, into, match, wrapped=piece):
    with pytest.raises(sf.Invalid, match=match):
        sf.load(place, {"data": wrapped(into)})


class Batches:
    """A batch sampler of the user's own, without a state."""

    def __init__(self, sampler, size):
        self.sampler, self.size = sampler, size

    def __iter__(self):
        batch = []
        for one in self.sampler:
            batch.append(one)
            if len(batch) == self.size:
                yield batch
                batch = []

    def __len__(self):
        return len(self.sampler) // self.size


class Stating(Batches):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Units(IterableDataset):
    def __init__(self):
        self.units = [{"id": number, "weight": 3} for number in range(3)]

    def __iter__(self):
        while self.units:
            unit = self.units[0]
            unit["weight"] -= 1
            if not unit["weight"]:
                del self.units[0]
            yield unit["id"], unit["weight"]

    def state_dict(self):
        return {"replicated": {}, "units": [dict(unit) for unit in self.units]}

    def load_state_dict(self, state):
        self.units = [dict(unit) for unit in state["units"]]


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Remembering(Plain):
    """Its iterator has the state."""

    def __iter__(self):
        return Remembered()


class Remembered(Units):
    def __init__(self):
        super().__init__()
        self.items = super().__iter__()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


class Indexed:
    """A dataset with an index, and a state of its own."""

    def __len__(self):
        return len(NUMBERS)

    def __getitem__(self, number):
        return number

    def state_dict(self):
        return {"replicated": {}, "units": [1]}

    def load_state_dict(self, state):
        self.loaded = state


def theirs():
    return torch.utils.data.DistributedSampler(NUMBERS, 1, 0, shuffle=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrapped", [piece, bare])
def test_the_position_of_another_sampler_is_refused(tmp_path, wrapped, workers):
    for number, made in enumerate((theirs, lambda: None, lambda: torch.utils.data.RandomSampler(NUMBERS))):
        saved(tmp_path / str(number), loader_of(made(), workers=workers), 3, wrapped)
        problem = "torchdata.BatchSampler of shardfast.DistributedSampler: load with the same"
        problem = problem if wrapped is piece else "with another kind of sampler or batch sampler: load with the same"
        refused(tmp_path / str(number), loader_of(ours(), workers=workers), problem, wrapped)
    saved(tmp_path / "ours", loader_of(ours(), workers=workers), 3, wrapped)
    refused(tmp_path / "ours", loader_of(theirs(), workers=workers), "[sS]ampler.*: load with the same", wrapped)


@pytest.mark.parametrize(
    ("before", "here", "problem"),
    [
        ({"sampler": theirs}, {}, "BatchSampler of torch.DistributedSampler, this loader has .*SequentialSampler"),
        (
            {"batch": None},
            {"batch": 2},
            r"saved with torch.SequentialSampler .12 batches of None., this loader has torchdata",
        ),
        ({"shuffle": True}, {}, "BatchSampler of torchdata.RandomSampler, this loader has"),
        ({"size": 2}, {"size": 3}, r"test_samplers.Batches of torch.SequentialSampler .6 batches.*has .*.4 batches"),
        ({"stream": 2}, {"stream": 3}, "saved with batch_size=2, this loader has batch_size=3"),
    ],
)
def test_a_position_without_units_needs_the_same_order(tmp_path, before, here, problem):
    def made(sampler=None, size=None, stream=None, **named):
        if stream is not None:
            return loader_of(dataset=Plain(), batch=stream)
        if size is not None:
            return loader_of(batch=1, batch_sampler=Batches(torch.utils.data.SequentialSampler(NUMBERS), size))
        return loader_of(sampler and sampler(), **named)

    read = saved(tmp_path / "a", made(**before), 2, piece)
    refused(tmp_path / "a", made(**here), problem)
    again = made(**before)
    sf.load(tmp_path / "a", {"data": piece(again)})
    rest = [*read, *again]
    rest = sorted(one for batch in rest for one in (batch if isinstance(batch, list) else [batch]))
    assert rest == (NUMBERS if "stream" not in before else list(range(9)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "here"), [(None, 2), (2, None), (None, None), (3, 2)])
def test_samples_without_batches_are_counted_too(tmp_path, workers, before, here):
    for every in (1, 3):
        place = tmp_path / str(every)
        read = saved(place, loader_of(ours(), before, workers, snapshot_every_n_steps=every), 2, piece)
        for others in (0, workers, 3):
            again = loader_of(ours(), here, others)
            sf.load(place, {"data": piece(again)})
            rest = [one for batch in [*read, *again] for one in (batch if isinstance(batch, list) else [batch])]
            assert rest == NUMBERS


@pytest.mark.parametrize("wrapped", [piece, bare])
def test_a_bare_loader_goes_on_with_the_same_batches_alone(tmp_path, wrapped):
    saved(tmp_path / "a", loader_of(ours(), None), 3, bare)
    refused(tmp_path / "a", loader_of(ours(), 2), "another kind of sampler or batch sampler", bare)
    again = loader_of(ours(), None)
    sf.load(tmp_path / "a", {"data": again})
    assert [*again] == NUMBERS[3:]


@pytest.mark.parametrize("wrapped", [piece, bare])
def test_a_batch_sampler_without_a_state_is_refused(tmp_path, wrapped):
    def state(kind, *size):
        return {"data": wrapped(loader_of(batch=1, batch_sampler=kind(ours(), *size)))}

    class Grouping(BatchSampler):
        def __iter__(self):
            yield from sorted(super().__iter__())

    for kind, size in ((Batches, [2]), (torch.utils.data.BatchSampler, [2, False]), (Grouping, [2, False])):
        problem = f"data: {kind.__name__} has no state, and how far"
        with pytest.raises(sf.Invalid, match=problem):
            sf.save(tmp_path / "a", state(kind, *size))
        sf.save(tmp_path / kind.__name__, {"data": wrapped(loader_of(ours()))})
        with pytest.raises(sf.Invalid, match=problem):
            sf.load(tmp_path / kind.__name__, state(kind, *size))
    for number, (kind, size) in enumerate(((Stating, [2]), (BatchSampler, [2, False]))):
        loader = state(kind, *size)
        batches = iter(getattr(loader["data"], "value", loader["data"]))
        next(batches)
        sf.save(tmp_path / str(number), loader)
        sf.load(tmp_path / str(number), state(kind, *size))


def test_a_loaders_state_is_no_datasets(tmp_path):
    for begun in (0, 2):
        saved(tmp_path / str(begun), loader_of(dataset=Units(), batch=1), begun, piece)
        refused(tmp_path / str(begun), Units(), "data: it was saved from a StatefulDataLoader: load it into a")
        by_functions = sf.Stateful(dict, print)
        refused(tmp_path / str(begun), by_functions, "data: it was saved from a StatefulDataLoader: load it into a")
    saved(tmp_path / "opaque", loader_of(), 2, piece)
    refused(tmp_path / "opaque", Units(), "data: it was saved from a StatefulDataLoader")


@pytest.mark.parametrize("value", [Units(), {"a": 1}, {"replicated": 5}, 3])
def test_a_datasets_state_is_no_loaders(tmp_path, value):
    sf.save(tmp_path / "a", {"data": piece(value)})
    refused(
        tmp_path / "a", loader_of(dataset=Units()), "^data: it was not saved from a StatefulDataLoader: load it into"
    )


@pytest.mark.parametrize("wrapped", [piece, bare])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_does_not_take_the_state_is_refused(tmp_path, wrapped, workers):
    makes = {
        "units": lambda: loader_of(dataset=Units(), batch=1, workers=workers),
        "plain": lambda: loader_of(dataset=Plain(), batch=1, workers=workers),
        "remembering": lambda: loader_of(dataset=Remembering(), batch=1, workers=workers),
        "index": lambda: loader_of(ours(), workers=workers),
        "indexed": lambda: loader_of(dataset=Indexed(), workers=workers),
    }
    for name, made in makes.items():
        saved(tmp_path / name, made(), 2, wrapped)
        sf.load(tmp_path / name, {"data": wrapped(made())})
    kinds = {"units": "dataset_state", "plain": "none", "remembering": "dataset_iter_state", "indexed": "dataset_state"}
    for before, here in (
        ("units", "plain"),
        ("units", "remembering"),
        ("units", "index"),
        ("remembering", "units"),
        ("remembering", "plain"),
        ("plain", "units"),
        ("plain", "remembering"),
        ("indexed", "index"),
    ):
        problem = f"here has another kind of state: expected {kinds[before]}, as in the checkpoint, found"
        refused(tmp_path / before, makes[here](), problem, wrapped)


def test_units_of_a_dataset_with_an_index_are_not_dealt_out(tmp_path):
    saved(tmp_path / "a", loader_of(ours(), dataset=Indexed()), 2, piece)
    problem = "saved with 0 workers, this loader has 2, and the state of Indexed is opaque: take a shardfast.data"
    refused(tmp_path / "a", loader_of(ours(), dataset=Indexed(), workers=2), problem)
    again = loader_of(ours(), dataset=Indexed())
    sf.load(tmp_path / "a", {"data": piece(again)})
    assert sorted(one for batch in again for one in batch) == NUMBERS[4:]


@pytest.mark.parametrize("wrapped", [piece, bare])
def test_a_load_into_a_sampler_in_use_is_refused(tmp_path, wrapped):
    sampler = ours()
    samples = iter(sampler)
    assert [next(samples) for _ in range(3)] == [0, 1, 2]
    sf.save(tmp_path / "a", {"data": wrapped(sampler)})
    into = ours()
    samples = iter(into)
    next(samples)
    refused(
        tmp_path / "a", into, r"data/value: its iterator was made before this load .* load before iter\(\)", wrapped
    )
    assert [*samples] == NUMBERS[1:]
    sf.load(tmp_path / "a", {"data": wrapped(into)})  # it has ended
    assert [*into] == NUMBERS[3:]
    for copied in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert copied.state_dict() == sampler.state_dict()
        sf.load(tmp_path / "a", {"data": wrapped(copied)})


def test_a_piece_that_contradicts_its_sampler_is_refused(tmp_path):
    one = DistributedSampler(NUMBERS, 2, 1)
    sf.save(tmp_path / "a", {"data": piece(loader_of(ours()))})
    for value in (loader_of(one), one):
        problem = r"data: expected Sharded\(index=1, count=2\), the rank and .*, found index=0, count=1"
        with pytest.raises(sf.Invalid, match=problem):
            sf.save(tmp_path / "b", {"data": piece(value)})
        refused(tmp_path / "a", value, problem)


@pytest.mark.parametrize("wrapped", [piece, bare])
def test_a_sampler_of_two_loaders_is_refused(tmp_path, wrapped):
    sampler = ours()
    for other in (loader_of(sampler, 3), sampler):
        state = {"data": {"a": wrapped(loader_of(sampler)), "b": wrapped(other)}}
        with pytest.raises(sf.Invalid, match=r"data\.b: its sampler is that of data\.a, too: give each loader"):
            sf.save(tmp_path / "a", state)


@pytest.mark.parametrize("wrapped", [piece, bare])
def test_a_sampler_that_iterates_in_its_own_way_is_refused(tmp_path, wrapped):
    class Sorting(DistributedSampler):
        def __iter__(self):
            return iter(sorted(super().__iter__()))

    class Named(DistributedSampler):
        pass

    for value in (Sorting(NUMBERS, 1, 0), loader_of(Sorting(NUMBERS, 1, 0))):
        with pytest.raises(sf.Invalid, match="data: Sorting has an __iter__ of its own"):
            sf.save(tmp_path / "a", {"data": wrapped(value)})
    sf.save(tmp_path / "a", {"data": wrapped(Named(NUMBERS, 1, 0))})


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_announced_while_one_is_read_is_not_that_of_the_save(tmp_path, workers):
    loader = loader_of(ours(), workers=workers)
    batches = iter(loader)
    read = [next(batches)]
    loader.sampler.set_epoch(1)
    read.append(next(batches))
    sf.save(tmp_path / "a", {"data": piece(loader)})
    for epoch, expected in ((0, NUMBERS[4:]), (1, NUMBERS)):
        again = loader_of(ours(), workers=workers)
        sf.load(tmp_path / "a", {"data": piece(again)})
        again.sampler.set_epoch(epoch)
        assert [one for batch in again for one in batch] == expected
    assert len([*batches]) == 4
    assert loader.sampler.state_dict()["epoch"] == 1
    sampler = ours()
    next(iter(sampler))  # dropped
    sampler.set_epoch(2)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (2, 0)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: ours(seed="a"), "seed: expected a whole number, found 'a'"),
        (lambda: ours().set_epoch("1"), "epoch: expected a whole number, found '1'"),
        (lambda: DistributedSampler(NUMBERS, 1.5, 0), "num_replicas: expected a whole number, found 1.5"),
        (lambda: DistributedSampler(NUMBERS, 1, None), "expected num_replicas and rank, or a process group"),
        (lambda: DistributedSampler(iter(NUMBERS), 1, 0), r"\(dataset\): expected .* a length, found list_iterator"),
    ],
)
def test_arguments_of_other_kinds_are_refused_at_once(call, problem):
    with pytest.raises(sf.Invalid, match=problem):
        call()


class Cutting(Units):
    """Splits units, all of which are then 5, in its workers."""

    def split(self, unit, parts):
        return [{"id": 5 + number, "weight": 3 // parts} for number in range(parts)]


def test_parts_for_workers_have_ids_of_their_own(tmp_path):
    dataset = Cutting()
    dataset.units = [{"id": 1, "weight": 3}, {"id": 6, "weight": 1}]
    saved(tmp_path / "a", loader_of(dataset=dataset, batch=1), 0, piece)
    loader = loader_of(dataset=dataset, batch=None)
    iterator = iter(loader)
    sf.save(tmp_path / "b", {"data": piece(loader)})
    del iterator
    again = loader_of(dataset=Cutting(), batch=None, workers=4)
    refused(tmp_path / "b", again, "units 1 and 3 have one id, 6")
