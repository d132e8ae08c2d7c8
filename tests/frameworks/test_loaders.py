"""torchdata's loaders: each sample once, whatever number of data ranks and workers goes on."""

import itertools
import json
import multiprocessing
import random
import shutil
from pathlib import Path

import datasets
import loader_jobs as jobs
import pytest
import shardfast as sf
import torch
from datasets.distributed import split_dataset_by_node
from loader_jobs import Packed
from shardfast.data import DistributedSampler, Stream
from torchdata.stateful_dataloader import StatefulDataLoader

DOCUMENTS = [3, 9, 1, 14, 6, 2, 22, 5, 8, 4, 4, 17, 1, 30]


def tokens_of(documents):
    return sorted(1000 * number + at for number, size in enumerate(documents) for at in range(size))


@pytest.mark.parametrize("kind", ["packed", "iterating"])
def test_each_token_once_under_other_workers(tmp_path, kind):
    got, resume = [], None
    for number, workers in enumerate((2, 3, 0, 1, 0, 2, 2)):
        place = str(tmp_path / str(number))
        got += jobs.reads(0, 1, place, DOCUMENTS, workers, 2, resume, kind)
        resume = place
    got += jobs.reads(0, 1, None, DOCUMENTS, 3, None, resume, kind)
    assert sorted(got) == tokens_of(DOCUMENTS)


def test_equal_workers_go_on_bit_for_bit(tmp_path):
    whole = jobs.reads(0, 1, None, DOCUMENTS, 2, None, None)
    got = jobs.reads(0, 1, str(tmp_path / "a"), DOCUMENTS, 2, 3, None)
    got += jobs.reads(0, 1, None, DOCUMENTS, 2, None, str(tmp_path / "a"))
    assert got == whole


@pytest.mark.smoke
def test_histories_of_ranks_and_workers(ranks, tmp_path):
    histories(ranks, tmp_path, seeds=range(2))


@pytest.mark.parametrize("first", range(2, 62, 10))
def test_more_histories_of_ranks_and_workers(ranks, tmp_path, first):
    histories(ranks, tmp_path, seeds=range(first, first + 10))


def histories(ranks, tmp_path, seeds):
    for seed in seeds:
        dice = random.Random(seed)
        documents = [dice.choice([1, 2, 5, 9, 14, 40]) for _ in range(dice.randint(6, 40))]
        got, resume, rest = [], None, 2
        for step in range(dice.randint(2, 4)):
            world, workers, batches = dice.randint(1, 4), dice.randint(0, 3), dice.randint(1, 3)
            place = str(tmp_path / f"{seed}-{step}")
            if step % 2 == 1:
                with pytest.raises(AssertionError, match="died without a word"):
                    kill_ms = dice.choice([0, 1, 5, 20, 50])
                    ranks(world)(jobs.reads, place, documents, workers, batches, resume, "packed", 1, kill_ms)
                if not (Path(place) / "COMMIT").exists():
                    continue
            else:
                ranks(world)(jobs.reads, place, documents, workers, batches, resume)
            found = [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(world)]
            got += itertools.chain(*(one["got"] for one in found))
            resume = place
            if any(one["ended"] for one in found):  # under as many ranks these would begin their next pass
                rest = 0 if all(one["ended"] for one in found) else world % 4 + 1
                break
        if rest:
            got += itertools.chain(*ranks(rest)(jobs.reads, None, documents, 1, None, resume))
        assert sorted(got, key=str) == sorted(tokens_of(documents), key=str), seed  # an error is a text


def test_ranks_that_have_read_all_and_others_go_on_together(ranks, tmp_path):
    documents = [4, 40]
    got = ranks(2)(jobs.reads, str(tmp_path / "a"), documents, 0, 3, None)
    assert [len(tokens) for tokens in got] == [4, 24]
    for workers in (0, 1):
        (rest,) = ranks(1)(jobs.reads, None, documents, workers, None, str(tmp_path / "a"))
        assert sorted([*itertools.chain(*got), *rest]) == tokens_of(documents)


def test_an_opaque_state_needs_equal_loaders(ranks, tmp_path):
    place = str(tmp_path / "a")
    whole = ranks(2)(jobs.reads, None, DOCUMENTS, 2, None, None, "opaque")
    got = ranks(2)(jobs.reads, place, DOCUMENTS, 2, 2, None, "opaque")
    rest = ranks(2)(jobs.reads, None, DOCUMENTS, 2, None, place, "opaque")
    assert [one + other for one, other in zip(got, rest, strict=True)] == whole
    for error in ranks(2)(jobs.reads, None, DOCUMENTS, 3, None, place, "opaque"):
        assert "saved with 2 workers, this loader has 3, and the state of Opaque is opaque" in error
    for error in ranks(1)(jobs.reads, None, DOCUMENTS, 2, None, place, "opaque"):
        assert "dataloader/value was saved in 2 pieces, this job has 1, and the state of Opaque is opaque" in error
        assert "(one problem)" in error


def test_states_that_are_some_batches_old_need_equal_loaders(tmp_path, caplog):
    whole = jobs.reads(0, 1, None, DOCUMENTS, 2, None, None)
    place = str(tmp_path / "a")
    got = jobs.reads(0, 1, place, DOCUMENTS, 2, 5, None, "packed", 3)
    assert "its workers' states are 2 batches old (snapshot_every_n_steps=3)" in caplog.text
    assert got + jobs.reads(0, 1, None, DOCUMENTS, 2, None, place, "packed", 3) == whole
    error = jobs.reads(0, 1, None, DOCUMENTS, 1, None, place, "packed", 3)
    assert "states are 2 batches old" in error
    assert "snapshot_every_n_steps" in error


class Counted(Packed):
    """Counts what its workers are asked for their states."""

    def __init__(self, documents, rank, ranks, asked):
        super().__init__(documents, rank, ranks)
        self.asked = asked

    def state_dict(self):
        with self.asked.get_lock():
            self.asked.value += 1
        return super().state_dict()


def counted(asked, workers, every=0):
    dataset = Counted(DOCUMENTS * 12, 0, 1, asked)
    return StatefulDataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        snapshot_every_n_steps=every,
        multiprocessing_context="fork" if workers else None,
    )


@pytest.mark.parametrize(("batches_a_step", "workers"), [(1, 2), (2, 3), (3, 1)])
def test_workers_send_their_states_for_a_save_that_is_due_alone(tmp_path, caplog, batches_a_step, workers):
    asked = multiprocessing.get_context("fork").Value("i", 0)
    loader = counted(asked, workers)
    seen, got, steps = {}, [], 0
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(30)) as ckpt:
        state = {"loader": sf.Sharded(loader, 0, 1)}
        for number, batch in enumerate(loader, 1):
            got += batch.tolist()
            if number % batches_a_step == 0:
                steps += 1
                ckpt.step(steps, state)
                seen[steps] = len(got)
            if steps == 95:
                break
    # Each worker at its start, and around three batches; for the fourth save it is too early.
    assert asked.value <= workers * (1 + 3 * (2 + 2))
    assert asked.value < number / 2, "few of all"
    assert "batches old" not in caplog.text
    for step in (30, 60, 90):
        for other in (0, workers, workers + 1):
            into = counted(asked, other, every=1)
            sf.load(tmp_path / f"run/step-{step:08}", {"loader": sf.Sharded(into, 0, 1)})
            rest = [token for batch in into for token in batch.tolist()]
            assert sorted(token for token in got[: seen[step]] + rest if token >= 0) == tokens_of(DOCUMENTS * 12)


def test_a_save_that_is_not_due_says_how_old_the_states_are(tmp_path, caplog):
    asked = multiprocessing.get_context("fork").Value("i", 0)
    loader = counted(asked, 2)
    with sf.Checkpointer(tmp_path / "run", every=sf.steps(30)) as ckpt:
        state = {"loader": sf.Sharded(loader, 0, 1)}
        for step, _ in enumerate(loader, 1):
            ckpt.step(step, state)
            if step == 47:
                ckpt.save(step, state)
            if step == 62:
                break
    assert caplog.text.count("batches old") == 1
    with pytest.raises(sf.Invalid, match="17 batches old"):
        sf.load(tmp_path / "run/step-00000047", {"loader": sf.Sharded(counted(asked, 3, every=1), 0, 1)})
    for step in (30, 60):
        sf.load(tmp_path / f"run/step-{step:08}", {"loader": sf.Sharded(counted(asked, 3, every=1), 0, 1)})


def test_a_load_behind_iter_is_refused(tmp_path):
    place = str(tmp_path / "a")
    jobs.reads(0, 1, place, DOCUMENTS, 2, 2, None)
    for wrapped in (lambda loader: sf.Sharded(loader, 0, 1), lambda loader: loader):
        loader = jobs.loader_of(DOCUMENTS, 0, 1, 2)
        sf.save(f"{place}-{wrapped(loader) is loader}", {"dataloader": wrapped(loader)})
        place_of = f"{place}-{wrapped(loader) is loader}"
        batches = iter(loader)
        next(batches)
        with pytest.raises(sf.Invalid, match=r"dataloader.*: its iterator was made before this .* before iter\(\)"):
            sf.load(place_of, {"dataloader": wrapped(loader)})
        del batches
        sf.load(place_of, {"dataloader": wrapped(loader)})
        assert len([*loader]) == len([*jobs.loader_of(DOCUMENTS, 0, 1, 2)])


def test_a_loader_that_has_not_begun(tmp_path):
    place = str(tmp_path / "a")
    loader = jobs.loader_of(DOCUMENTS, 0, 1, 2)
    sf.save(place, {"dataloader": sf.Sharded(loader, 0, 1)})
    assert loader._iterator is None  # a save starts no workers
    assert sorted(jobs.reads(0, 1, None, DOCUMENTS, 3, None, place)) == tokens_of(DOCUMENTS)


def test_the_end_of_the_data_is_followed_by_a_new_pass(tmp_path):
    place = str(tmp_path / "a")
    jobs.reads(0, 1, place, DOCUMENTS, 2, None, None)
    for workers in (2, 1):
        assert sorted(jobs.reads(0, 1, None, DOCUMENTS, workers, None, place)) == tokens_of(DOCUMENTS), workers


# A sampler's position


def sampled(size, ranks, workers, batch, *, epoch=0, resume=None, batches=None, every=1, **named):
    """Reads of each rank's loader so many batches; returns them in the order of the steps, and rank 0's state."""
    loaders = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(size), ranks, rank, **named)
        loader = StatefulDataLoader(
            torch.arange(size),
            batch_size=batch,
            sampler=sampler,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=every,
        )
        loaders.append(loader)
    for loader in loaders:
        if resume is not None:
            sf.load(resume, {"dataloader": jobs.of_all_ranks(loader)})
        loader.sampler.set_epoch(epoch)
    its = [iter(loader) for loader in loaders]
    got = []
    while batches is None or batches > 0:
        step = [next(it, None) for it in its]
        if step[0] is None:
            break
        got += [row.tolist() for row in step]
        batches = None if batches is None else batches - 1
    return got, loaders[0]


def test_the_sampler_is_pytorchs():
    for size, ranks, shuffle, drop_last in itertools.product((1, 7, 12), (1, 3, 5), (True, False), (True, False)):
        for rank, epoch in itertools.product(range(ranks), (0, 3)):
            ours = DistributedSampler(range(size), ranks, rank, shuffle, 5, drop_last)
            theirs = torch.utils.data.DistributedSampler(range(size), ranks, rank, shuffle, 5, drop_last)
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert [*ours] == [*theirs]
            assert len(ours) == len(theirs)


def test_a_sampler_goes_on_under_other_ranks_workers_and_batches(tmp_path):
    dice = random.Random(1)
    for number in range(12):
        size = dice.randint(50, 90)
        whole = sorted(itertools.chain(*sampled(size, 1, 0, 5)[0]))
        got, resume = [], None
        for step in range(3):
            ranks, workers, batch = dice.randint(1, 3), dice.choice([0, 0, 2]), dice.randint(1, 4)
            read, loader = sampled(size, ranks, workers, batch, resume=resume, batches=dice.randint(1, 3))
            got += itertools.chain(*read)
            resume = str(tmp_path / f"{number}-{step}")
            sf.save(resume, {"dataloader": jobs.of_all_ranks(loader)})
        got += itertools.chain(*sampled(size, 1, 0, 5, resume=resume)[0])
        assert sorted(got) == whole


def test_a_sampler_counts_batches_behind_the_last_snapshot(tmp_path):
    place = str(tmp_path / "a")
    read, loader = sampled(60, 2, 2, 3, batches=5, every=3)
    sf.save(place, {"dataloader": jobs.of_all_ranks(loader)})
    rest = sampled(60, 3, 1, 2, resume=place)[0]
    assert sorted(itertools.chain(*read, *rest)) == list(range(60))


def test_a_sampler_at_an_epochs_end(tmp_path):
    place = str(tmp_path / "a")
    for workers, drop_last in itertools.product((0, 2), (True, False)):
        read, loader = sampled(11, 3, workers, 2, drop_last=drop_last, batches=2)
        assert len(read) == 6
        sf.save(place, {"dataloader": jobs.of_all_ranks(loader)})
        same = sampled(11, 3, workers, 2, drop_last=drop_last, resume=place)[0]
        assert not same  # the epoch that was announced has ended
        next_one = sampled(11, 3, workers, 2, drop_last=drop_last, resume=place, epoch=1)[0]
        assert next_one == sampled(11, 3, workers, 2, drop_last=drop_last, epoch=1)[0]
        sampler = DistributedSampler(range(11), 3, 0, drop_last=drop_last)
        sampler.load_state_dict(loader.sampler.state_dict())
        assert len([*sampler]) == len(sampler)  # without an announcement a new pass begins
        shutil.rmtree(place)


def test_a_sampler_of_another_order_is_refused(tmp_path, caplog):
    place = str(tmp_path / "a")
    sf.save(place, {"dataloader": sf.Sharded(sampled(30, 1, 0, 2, batches=3)[1], 0, 1)})
    for named, problem in (
        ({"seed": 2}, "seed is 0 in the checkpoint and 2 here"),
        ({"shuffle": False}, "shuffle is True in the checkpoint and False here"),
    ):
        with pytest.raises(sf.Invalid, match=problem):
            sampled(30, 1, 0, 2, resume=place, **named)
    with pytest.raises(sf.Invalid, match="length is 30 in the checkpoint and 29 here"):
        sampled(29, 1, 0, 2, resume=place)
    with pytest.raises(sf.Invalid, match=r"saved with a shardfast\.data\.DistributedSampler, and this loader has none"):
        sf.load(place, {"dataloader": sf.Sharded(StatefulDataLoader(torch.arange(30)), 0, 1)})
    assert "is left out" not in caplog.text
    sampled(30, 1, 0, 2, resume=place, epoch=4)
    assert "of which 6 of 30 samples were read: the rest is left out" in caplog.text


def test_a_plain_loader_with_the_sampler_goes_on(tmp_path):
    place = str(tmp_path / "a")
    whole = [*itertools.chain(*sampled(30, 1, 2, 2)[0])]
    got, loader = sampled(30, 1, 2, 2, batches=4)
    sf.save(place, {"dataloader": loader})
    sampler = DistributedSampler(range(30), 1, 0)
    again = StatefulDataLoader(torch.arange(30), batch_size=2, sampler=sampler, num_workers=2)
    sf.load(place, {"dataloader": again})
    assert [*itertools.chain(*got), *itertools.chain(*(row.tolist() for row in again))] == whole


# Streams of datasets

TOKENS = sorted(one["token"] + 7 for one in jobs.lines_of(range(11)))


@pytest.mark.parametrize("buffer", [0, 6])
def test_a_stream_goes_on_under_other_ranks_and_workers(ranks, tmp_path, buffer):
    got, resume = [], None
    for number, (world, workers, batches) in enumerate(((2, 2, 3), (3, 1, 2), (1, 0, 4), (1, 2, 3))):
        place = str(tmp_path / str(number))
        got += itertools.chain(*ranks(world)(jobs.streams, place, workers, batches, resume, buffer))
        resume = place
    got += itertools.chain(*ranks(2)(jobs.streams, None, 0, None, resume, buffer))
    assert sorted(got) == TOKENS


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_as_if_never_stopped(tmp_path, workers):
    whole = jobs.streams(0, 1, None, workers, None, None, 6)
    got = jobs.streams(0, 1, str(tmp_path / "a"), workers, 7, None, 6)
    got += jobs.streams(0, 1, None, workers, None, str(tmp_path / "a"), 6)
    assert got == whole
    assert whole != jobs.streams(0, 1, None, workers, None, None, 0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ended", [False, True])
def test_a_stream_at_the_end_of_a_pass(ranks, tmp_path, size, ended):
    """Its eight samples are even batches of two; of three, the last one is in part."""
    for saved, workers in itertools.product((0, 1, 2), (0, 1, 2)):
        place = str(tmp_path / f"{saved}-{workers}")
        jobs.at_the_end(0, 1, place, saved, size, ended, None)
        found = jobs.at_the_end(0, 1, None, workers, size, ended, place)
        assert found == ([8, 8] if ended else [0, 8]), (saved, workers)
    for found in (ranks(2)(jobs.at_the_end, None, 0, size, ended, str(tmp_path / "0-0")),):
        assert [sum(of) for of in zip(*found, strict=True)] == ([8, 8] if ended else [0, 8])


def test_a_stream_with_a_batched_map_goes_on_from_anywhere():
    """Datasets' own state leaves out the end of a shard there."""
    rows = datasets.Dataset.from_dict({"x": list(range(26))}).to_iterable_dataset(num_shards=3)

    def made():
        doubled = rows.map(lambda one: {"x": [*one["x"], *one["x"]]}, batched=True, batch_size=4)
        return Stream(doubled.map(lambda one: {"x": one["x"] + 1}), 0, 1)

    whole = [one["x"] for one in made()]
    assert sorted(whole) == sorted(2 * list(range(1, 27)))
    for number in range(len(whole) - 5):
        stream, again, last = made(), made(), made()
        got = [one["x"] for one in itertools.islice(stream, number)]
        again.load_state_dict(stream.state_dict())
        got += [one["x"] for one in itertools.islice(again, 5)]
        last.load_state_dict(again.state_dict())
        assert got + [one["x"] for one in last] == whole


def test_a_shard_that_is_shorter_now_is_named():
    def made(size):
        rows = datasets.IterableDataset.from_generator(jobs.numbers_of, gen_kwargs={"sizes": [size]})
        return Stream(rows.map(lambda one: one, batched=True), 0, 1)

    long, short = made(5), made(2)
    list(itertools.islice(long, 3))
    short.load_state_dict(long.state_dict())
    with pytest.raises(sf.Invalid, match="shard 0 of the stream: 3 samples were read of it, and it has 2 here"):
        list(short)


def same(one, *_):
    return one


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda stream: stream.shuffle(seed=1).map(same),
            r"its shuffle\(\) keeps samples in a buffer that is in no state",
        ),
        (lambda stream: stream.skip(2).map(same), r"its skip\(\) counts over all shards: hold samples out by filter"),
        (lambda stream: stream.map(same).take(2), r"its take\(\) counts over all shards: hold samples out by filter"),
        (lambda stream: stream.repeat(2), r"its repeat\(\) would repeat each shard"),
        (lambda stream: stream.map(same, with_indices=True), "its with_indices=True counts over all shards"),
        (lambda stream: stream.filter(same, with_indices=True), "its with_indices=True counts over all shards"),
        (
            lambda stream: stream.batch(2, drop_last_batch=True),
            "its drop_last_batch=True would drop samples of each shard",
        ),
        (lambda stream: datasets.interleave_datasets([stream, stream]), "its Cycling.* gives other samples"),
        (lambda stream: datasets.concatenate_datasets([stream, stream.skip(1)]), r"its skip\(\) counts"),
    ],
)
def test_a_stream_that_does_not_go_shard_by_shard_is_refused(changed, message):
    stream = datasets.IterableDataset.from_generator(jobs.lines_of, gen_kwargs={"shards": [1, 2]})
    with pytest.raises(sf.Invalid, match=message):
        Stream(changed(stream), 0, 1)


def test_streams_of_other_kinds_are_refused():
    stream = datasets.IterableDataset.from_generator(jobs.lines_of, gen_kwargs={"shards": [1, 2]})
    with pytest.raises(sf.Invalid, match="split_dataset_by_node"):
        Stream(split_dataset_by_node(stream, 0, 2), 0, 1)
    with pytest.raises(sf.Invalid, match=r"expected a datasets\.IterableDataset"):
        Stream([1, 2], 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("begun", [False, True])
def test_an_epoch_that_is_announced_and_not_begun_is_whole_after_a_load(tmp_path, workers, begun):
    def made():
        numbers = list(range(10))
        sampler = DistributedSampler(numbers, 1, 0, seed=1)
        return StatefulDataLoader(numbers, batch_size=4, sampler=sampler, num_workers=workers, drop_last=True)

    loader = made()
    loader.sampler.set_epoch(0)
    list(loader)
    loader.sampler.set_epoch(1)
    iterator = iter(loader) if begun else None
    sf.save(str(tmp_path / "a"), {"data": sf.Sharded(loader, 0, 1)})
    expected = list(loader if iterator is None else iterator)
    again = made()
    sf.load(str(tmp_path / "a"), {"data": sf.Sharded(again, 0, 1)})
    again.sampler.set_epoch(1)
    assert [one.tolist() for one in again] == [one.tolist() for one in expected]


def test_a_loader_as_it_is_needs_as_many_workers(tmp_path):
    def made(workers):
        return StatefulDataLoader(torch.arange(12), batch_size=2, num_workers=workers)

    for saved, here in ((2, 1), (2, 0), (0, 2)):
        loader, place = made(saved), str(tmp_path / f"{saved}-{here}")
        next(iter(loader))
        sf.save(place, {"data": loader, "extra": {"step": 1}})
        state = {"data": made(here), "extra": {"step": 0}}
        with pytest.raises(sf.Invalid, match=f"data: it was saved with {saved} workers, this loader has {here}: "):
            sf.load(place, state)
        assert state["extra"] == {"step": 0}


class Own(StatefulDataLoader):
    """A loader with a state of its own, as torchtitan's."""

    def state_dict(self):
        return {"pickled": b"a"}

    def load_state_dict(self, state):
        self.loaded = state


def test_a_loader_with_a_state_of_its_own_reads_it_itself(tmp_path):
    sf.save(tmp_path / "a", {"data": Own(torch.arange(4), num_workers=2)})
    loader = Own(torch.arange(4), num_workers=1)
    sf.load(tmp_path / "a", {"data": loader})
    assert loader.loaded == {"pickled": b"a"}


class Inner(StatefulDataLoader):
    def load_state_dict(self, state):
        raise AssertionError("the trainer's loader around this one knows the form of its state")


class Outer(StatefulDataLoader):
    """A trainer's loader around another one, as those of torchtitan and accelerate."""

    def __init__(self, loader):
        object.__setattr__(self, "base_dataloader", loader)

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "base_dataloader"), name)

    def state_dict(self):
        return StatefulDataLoader.state_dict(self.base_dataloader)

    def load_state_dict(self, state):
        StatefulDataLoader.load_state_dict(self.base_dataloader, state)


@pytest.mark.smoke
def test_what_is_dealt_out_goes_through_a_trainers_loader(tmp_path):
    def made(workers):
        context = "fork" if workers else None
        dataset = jobs.Packed(DOCUMENTS, 0, 1)
        return Outer(Inner(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context))

    for saved, here in ((0, 1), (2, 0)):
        loader, again, place = made(saved), made(here), tmp_path / f"{saved}-{here}"
        got = next(iter(loader.base_dataloader)).flatten().tolist()
        sf.save(place, {"data": sf.Sharded(loader, 0, 1)})
        sf.load(place, {"data": sf.Sharded(again, 0, 1)})
        got += [token for batch in again.base_dataloader for token in batch.flatten().tolist()]
        assert sorted(token for token in got if token >= 0) == tokens_of(DOCUMENTS)


def test_a_sampler_of_another_length_is_named(tmp_path):
    place = str(tmp_path / "a")
    sf.save(place, {"sampler": sf.Sharded(DistributedSampler(range(9), 1, 0), 0, 1)})
    with pytest.raises(sf.Invalid, match=r"length is 9 in the checkpoint and 8 here .*stands at sampler"):
        sf.load(place, {"sampler": sf.Sharded(DistributedSampler(range(8), 1, 0), 0, 1)})
