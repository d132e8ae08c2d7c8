"""Loaders of Grain and of Energon: the same samples again, or refused by name; each sample once under other ranks.

The packages are no part of the environment: `scripts/frameworks.sh with grain==VERSION ...` brings one, a step of the
campaigns each.
"""

import importlib.util
import inspect
import io
import itertools
import tarfile
import textwrap
from pathlib import Path

import pytest
import shardfast as sf
from shardfast.adapters import stands_for

GUIDE = Path(__file__).parents[2] / "docs/guide/loaders.md"
SIZE = 96

needs_grain = pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="needs the package grain")
needs_energon = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.energon") is None,
    reason="needs the package megatron-energon",
)


# Grain


def resharded(states, count):
    """States of slices ``[rank::ranks]`` for slices of others."""
    positions = [state["next_index"] * len(states) + rank for rank, state in enumerate(states)]
    if max(positions) - min(positions) >= len(states):
        raise ValueError(f"ranks have not read as much: {positions}")
    return [{"next_index": max(0, -((rank - min(positions)) // count))} for rank in range(count)]


def grain_iterator(kind, rank, ranks, workers):
    # It starts threads, and ranks are forked from a process without.
    import grain.python
    from grain.experimental import ElasticIterator

    shards, several = grain.sharding.ShardOptions(rank, ranks), grain.multiprocessing.MultiprocessingOptions(workers)
    if kind == "loader":
        source = grain.python.RangeDataSource(0, SIZE, 1)
        sampler = grain.python.IndexSampler(SIZE, shards, shuffle=True, num_epochs=1, seed=1)
        batches = [grain.python.Batch(2)]
        return iter(
            grain.python.DataLoader(data_source=source, sampler=sampler, operations=batches, worker_count=workers)
        )
    dataset = grain.MapDataset.range(SIZE).shuffle(seed=3)
    if kind == "elastic":
        return iter(ElasticIterator(dataset, 12, shards, multiprocessing_options=several if workers else None))
    dataset = dataset[rank::ranks].to_iter_dataset()
    if kind == "mixed":  # of several sources, each with its position
        dataset = grain.IterDataset.mix([dataset, grain.MapDataset.range(9).to_iter_dataset()], [2, 1])
    dataset = dataset.batch(2)
    return iter(dataset.mp_prefetch(several) if workers else dataset)


def as_state(kind, iterator, rank, ranks):
    return {"dataloader": sf.Sharded(iterator, rank, ranks, reshard=resharded if kind == "resharded" else None)}


def grain_reads(rank, ranks, kind, workers, place, batches, resume):
    """Goes on behind ``resume``, reads so many batches, or all, saves at ``place``; the samples or the load's error."""
    iterator = grain_iterator(kind, rank, ranks, workers)
    state = as_state(kind, iterator, rank, ranks)
    try:
        if resume is not None:
            sf.load(resume, state)
        got = [int(sample) for batch in itertools.islice(iterator, batches) for sample in batch]
    except Exception as error:  # the package's own, too
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    if place is not None:
        sf.save(place, state)
    if hasattr(iterator, "close"):
        iterator.close()
    return got


@needs_grain
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["loader", "dataset", "mixed", "elastic"])
def test_grain_goes_on_with_the_next_sample(ranks, tmp_path, kind, workers):
    place = str(tmp_path / "a")
    whole = ranks(2)(grain_reads, kind, workers, None, None, None)
    got = ranks(2)(grain_reads, kind, workers, place, 3, None)
    rest = ranks(2)(grain_reads, kind, workers, None, None, place)
    assert [one + other for one, other in zip(got, rest, strict=True)] == whole
    if kind != "mixed":
        assert sorted(itertools.chain(*whole)) == list(range(SIZE))


@needs_grain
@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_grain_under_other_ranks_is_refused_by_name(ranks, tmp_path, kind):
    place = str(tmp_path / "a")
    ranks(2)(grain_reads, kind, 0, place, 3, None)
    for error in ranks(1)(grain_reads, kind, 0, None, None, place):
        assert error.startswith("Invalid")
        assert "dataloader/value was saved in 2 pieces, this job has 1" in error
        assert "pass reshard= to Sharded" in error


@needs_grain
@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_grain_with_other_workers_is_refused(ranks, tmp_path, kind):
    place = str(tmp_path / "a")
    for saved, others in ((2, (0, 1, 3)), (0, (2,))):
        ranks(1)(grain_reads, kind, saved, f"{place}-{saved}", 3, None)
        for workers in others:
            (error,) = ranks(1)(grain_reads, kind, workers, None, None, f"{place}-{saved}")
            assert str(error).startswith("Invalid: dataloader: it reads with"), "samples under other workers"
            assert "load with as many, or take grain.experimental.ElasticIterator" in error


@needs_grain
@pytest.mark.parametrize(("kind", "workers"), [("elastic", (0, 2, 0, 1)), ("resharded", (0, 0, 0, 0))])
def test_grain_by_a_position_of_all_ranks_reads_each_sample_once(ranks, tmp_path, kind, workers):
    got, resume = [], None
    for number, (world, batches) in enumerate(((4, 2), (2, 3), (3, 1), (1, None))):
        place = str(tmp_path / str(number))
        read = ranks(world)(grain_reads, kind, workers[number], place, batches, resume)
        got += itertools.chain(*read)
        resume = place
    assert sorted(got) == list(range(SIZE))


def source(size=24, seed=1):
    import grain.python

    return grain.MapDataset.range(size).shuffle(seed=seed)


def elastic(dataset, batch=4):
    import grain.python
    from grain.experimental import ElasticIterator

    return iter(ElasticIterator(dataset, batch, grain.sharding.ShardOptions(0, 1)))


def mixed(weights):
    import grain.python

    return iter(grain.IterDataset.mix([source().to_iter_dataset(), source(9).to_iter_dataset()], weights))


def windowed(seed):
    from grain.experimental import WindowShuffleIterDataset

    return iter(WindowShuffleIterDataset(source().to_iter_dataset(), window_size=4, seed=seed))


def plain(dataset):
    return iter(dataset.to_iter_dataset())


@needs_grain
@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            lambda: elastic(source()),
            lambda: plain(source()),
            "position is an ElasticIterator's in .* another iterator's",
        ),
        (
            lambda: plain(source()),
            lambda: elastic(source()),
            "position is another iterator's in .* an ElasticIterator's",
        ),
        (lambda: elastic(source()), lambda: elastic(source(seed=2)), "seed=1.* here.*seed=2"),
        (lambda: elastic(source()), lambda: elastic(source(25)), "24 samples.* here.*25 samples"),
        (lambda: elastic(source()), lambda: elastic(source()._parents[0]), r"Shuffle.* here\['24 samples'\]"),
        (lambda: plain(source()), lambda: plain(source(seed=2)), "seed=1.* here.*seed=2"),
        (lambda: plain(source()), lambda: plain(source(25)), "24 samples.* here.*25 samples"),
        (lambda: plain(source().batch(2)), lambda: plain(source().batch(3)), "batch_size=2.* here.*batch_size=3"),
        (lambda: mixed([1, 1]), lambda: mixed([1, 3]), "proportions=.* here.*proportions="),
        (lambda: windowed(1), lambda: windowed(2), "seed=1.* here.*seed=2"),
    ],
)
def test_grain_in_another_order_is_refused_by_name(tmp_path, saved, here, message):
    iterator, other, again = saved(), here(), saved()
    got = [str(one) for one in itertools.islice(iterator, 2)]
    sf.save(tmp_path / "a", {"dataloader": sf.Sharded(iterator, 0, 1)})
    message = message.replace("* here", "* in the checkpoint and from ")
    with pytest.raises(sf.Invalid, match=f"^dataloader: its .*{message}"):
        sf.load(tmp_path / "a", {"dataloader": sf.Sharded(other, 0, 1)})
    sf.load(tmp_path / "a", {"dataloader": sf.Sharded(again, 0, 1)})
    assert got + [str(one) for one in again] == [str(one) for one in saved()]


@needs_grain
@pytest.mark.parametrize("begin", [elastic, plain])
def test_grain_with_other_functions_goes_on(tmp_path, begin):
    iterator = begin(source().map(int))
    got = [next(iterator)]
    sf.save(tmp_path / "a", {"dataloader": sf.Sharded(iterator, 0, 1)})
    again = begin(source())
    sf.load(tmp_path / "a", {"dataloader": sf.Sharded(again, 0, 1)})
    assert [str(one) for one in (*got, *again)] == [str(one) for one in begin(source())]


@needs_grain
@pytest.mark.parametrize("begin", [elastic, plain])
def test_a_state_of_grain_without_its_order_goes_on(begin):
    """States had none before the order was noted."""
    iterator, again = begin(source()), begin(source(25))
    next(iterator)
    state = iterator.get_state()
    stands = stands_for(again)
    state = {"replicated": state, "units": []} if begin is elastic else state
    stands.check(state)
    stands.load_state_dict(state)
    assert again.get_state() == iterator.get_state()


@needs_grain
@pytest.mark.parametrize("begin", [elastic, plain])
def test_grain_gets_its_own_state_back(monkeypatch, begin):
    iterator, seen = begin(source()), []
    monkeypatch.setattr(type(iterator), "set_state", lambda _, state: seen.append(state))
    stands = stands_for(iterator)
    stands.load_state_dict(stands.state_dict())
    assert seen == [iterator.get_state()]


@needs_grain
def test_a_grain_iterator_by_itself_is_refused_with_what_to_do(tmp_path):
    for wrapped in (lambda it: it, sf.PerRank):
        with pytest.raises(sf.Invalid, match=r"^dataloader: a .* is a data loader: .*shardfast\.Sharded\("):
            sf.save(tmp_path / "a", {"dataloader": wrapped(grain_iterator("dataset", 0, 1, 0))})


@needs_grain
def test_what_grain_refuses_comes_with_its_place(tmp_path):
    sf.save(tmp_path / "a", {"dataloader": sf.Sharded(grain_iterator("loader", 0, 1, 0), 0, 1)})
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match") as raised:
        sf.load(tmp_path / "a", {"dataloader": sf.Sharded(grain_iterator("loader", 0, 2, 0), 0, 1)})
    assert "which stands at dataloader" in raised.value.__notes__[0]


def test_the_guide_has_this_function():
    assert textwrap.dedent(inspect.getsource(resharded)) in GUIDE.read_text()


# Energon


@pytest.fixture(scope="module")
def webdataset(tmp_path_factory):
    """A dataset of 8 shards with 10 texts each."""
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    root = tmp_path_factory.mktemp("webdataset")
    (root / ".nv-meta").mkdir()
    names = [f"shard-{number}.tar" for number in range(8)]
    for number, name in enumerate(names):
        with tarfile.open(root / name, "w") as shard:
            for sample in range(10 * number, 10 * number + 10):
                text = str(sample).encode()
                entry = tarfile.TarInfo(f"{sample:04}.txt")
                entry.size = len(text)
                shard.addfile(entry, io.BytesIO(text))
    BaseWebdatasetFactory.prepare_dataset(root, names, split_parts_ratio=[("train", 1.0)], workers=1)
    said = "__module__: megatron.energon\n__class__: TextWebdataset\nfield_map:\n  text: txt\n"
    (root / ".nv-meta/dataset.yaml").write_text(said)
    return root


def energon_loader(root, rank, ranks, workers, size=None, buffer=5):
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

    dataset = get_train_dataset(
        root,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=workers),
        batch_size=size,
        shuffle_buffer_size=buffer,
        max_samples_per_sequence=None,
    )
    return get_savable_loader(dataset, watchdog_timeout_seconds=None)


def energon_reads(rank, ranks, root, workers, place, batches, resume, size=None, buffer=5):
    """As :func:`grain_reads`; by worker of this rank what it gave out."""
    loader = energon_loader(root, rank, ranks, workers, size, buffer)
    state = {"dataloader": sf.Sharded(loader, rank, ranks)}
    try:
        if resume is not None:
            sf.load(resume, state)
    except sf.Error as error:
        return f"{type(error).__name__}: {error}"
    got = [batch.text for batch in itertools.islice(loader, batches)]  # iter() even for none
    if place is not None:
        sf.save(place, state)
    return got


def by_worker(read, workers):
    """What each worker of all ranks gave out, where each rank's began with its first."""
    return [one[number::workers] for one in read for number in range(workers)]


@needs_energon
@pytest.mark.parametrize(("workers", "size"), [(0, None), (2, None), (2, 3), (0, 3)])
def test_energon_goes_on_bit_for_bit(ranks, tmp_path, webdataset, workers, size):
    place = str(tmp_path / "a")
    whole = ranks(2)(energon_reads, webdataset, workers, None, 12, None, size)
    got = ranks(2)(energon_reads, webdataset, workers, place, 5, None, size)
    rest = ranks(2)(energon_reads, webdataset, workers, None, 7, place, size)
    assert [one + other for one, other in zip(got, rest, strict=True)] == whole


@needs_energon
def test_energons_workers_go_on_in_other_ranks(ranks, tmp_path, webdataset):
    whole = by_worker(ranks(1)(energon_reads, webdataset, 4, None, 80, None), 4)
    got, resume = [[], [], [], []], None
    for number, (world, workers, batches) in enumerate(((2, 2, 5), (4, 1, 4), (1, 4, 12), (2, 2, 6))):
        place = str(tmp_path / str(number))
        read = ranks(world)(energon_reads, webdataset, workers, place, batches, resume)
        for one, more in zip(got, by_worker(read, workers), strict=True):
            one += more
        resume = place
    assert [len(one) for one in got] == [13, 12, 13, 12]
    assert got == [of[: len(one)] for of, one in zip(whole, got, strict=True)]


@needs_energon
def test_energon_with_more_or_fewer_workers_is_refused(ranks, tmp_path, webdataset):
    place = str(tmp_path / "a")
    ranks(2)(energon_reads, webdataset, 2, place, 5, None)
    for world, workers in ((2, 3), (2, 0), (3, 1), (1, 2), (5, 1)):
        for error in ranks(world)(energon_reads, webdataset, workers, None, 1, place):
            assert error.startswith("Invalid")
            assert "dataloader: this data rank gets the states of" in error
            assert "as many workers on all data ranks together as saved" in error


@needs_energon
@pytest.mark.parametrize(("saved", "here"), [((1, 1), (1, 0)), ((1, 0), (1, 1)), ((2, 0), (1, 2)), ((1, 2), (2, 0))])
def test_energon_without_workers_and_with_is_refused(ranks, tmp_path, webdataset, saved, here):
    place = str(tmp_path / "a")
    ranks(saved[0])(energon_reads, webdataset, saved[1], place, 5, None)
    kind = "some" if saved[1] else "none"
    for error in ranks(here[0])(energon_reads, webdataset, here[1], None, 1, place):
        assert error.startswith("Invalid")
        assert "dataloader: the states of worker processes are of another kind than that of none" in error
        assert f"it was saved with {kind}, and its loader has {here[1]}: load as saved" in error


@needs_energon
@pytest.mark.parametrize("workers", [0, 2])
def test_energon_with_other_settings_is_refused_by_name(ranks, tmp_path, webdataset, workers):
    place = str(tmp_path / "a")
    ranks(2)(energon_reads, webdataset, workers, place, 5, None, 2, 5)
    for error in ranks(2)(energon_reads, webdataset, workers, None, 1, place, 2, 8):
        assert error.startswith("Invalid")
        assert "dataloader: its " in error
        assert "ShuffleBufferDataset.size is 5 in the checkpoint and 8 here" in error
    for error in ranks(2)(energon_reads, webdataset, workers, None, 1, place, 2, None):
        assert error.startswith("Invalid")
        assert "in the checkpoint and" in error


@needs_energon
def test_energon_goes_on_with_a_smaller_batch(tmp_path, webdataset):
    """It multiplies what it has to skip."""
    place = str(tmp_path / "a")
    whole = energon_reads(0, 1, webdataset, 1, None, 8, None, 4)
    got = energon_reads(0, 1, webdataset, 1, place, 3, None, 4)
    rest = energon_reads(0, 1, webdataset, 1, None, 10, place, 2)
    assert [*itertools.chain(*got, *rest)] == [*itertools.chain(*whole)]


@needs_energon
def test_a_state_of_energon_without_settings_goes_on(tmp_path, webdataset):
    """States had none before settings were noted."""
    whole = energon_reads(0, 1, webdataset, 0, None, 8, None)
    loader, again = energon_loader(webdataset, 0, 1, 0), energon_loader(webdataset, 0, 1, 0)
    got = [batch.text for batch in itertools.islice(loader, 3)]
    stands, stands_again = stands_for(loader), stands_for(again)
    state = stands.state_dict()
    del state["replicated"]["settings"]
    stands_again.check(state)
    stands_again.load_state_dict(state)
    assert got + [batch.text for batch in itertools.islice(again, 5)] == whole


@needs_energon
def test_energon_that_has_not_begun_begins(ranks, tmp_path, webdataset):
    place = str(tmp_path / "a")
    whole = ranks(2)(energon_reads, webdataset, 2, None, 5, None)
    ranks(2)(energon_reads, webdataset, 2, place, 0, None)
    assert ranks(2)(energon_reads, webdataset, 2, None, 5, place) == whole


@needs_energon
@pytest.mark.parametrize("workers", [0, 2])
def test_energon_is_loaded_before_it_is_read(tmp_path, webdataset, workers):
    loader = energon_loader(webdataset, 0, 1, workers)
    samples = iter(loader)
    for step in range(2):
        if workers or step:
            sf.save(tmp_path / str(step), {"dataloader": sf.Sharded(loader, 0, 1)})
            with pytest.raises(sf.Invalid, match=r"dataloader: it has begun, .*: load before iter\(\)"):
                sf.load(tmp_path / str(step), {"dataloader": sf.Sharded(loader, 0, 1)})
        next(samples)


@needs_energon
def test_energon_in_the_piece_of_another_rank_is_refused(tmp_path, webdataset):
    loader = energon_loader(webdataset, 1, 2, 0)
    with pytest.raises(sf.Invalid, match=r"data: expected Sharded\(index=1, count=2\).* found index=0, count=2"):
        sf.save(tmp_path / "a", {"data": sf.Sharded(loader, 0, 2)})


@needs_energon
def test_energon_by_itself_is_refused_with_what_to_do(tmp_path, webdataset):
    loader = energon_loader(webdataset, 0, 1, 0)
    with pytest.raises(sf.Invalid, match=r"^dataloader: a SavableDataLoader is a data loader: .*shardfast\.Sharded\("):
        sf.save(tmp_path / "a", {"dataloader": loader})
    state = sf.Stateful(loader.save_state_rank, loader.restore_state_rank)
    with pytest.raises(sf.Invalid, match=r"^dataloader\.worker_states\[0\]: a .*FlexState cannot be stored"):
        sf.save(tmp_path / "a", {"dataloader": sf.Sharded(state, 0, 1)})
