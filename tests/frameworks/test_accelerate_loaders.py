"""Positions in the data of an attached accelerator: no sample is lost or comes twice, and no old one is read."""

from pathlib import Path

import accelerate
import pytest
import shardfast as sf
from accelerate_jobs import ROWS, Job, Rows, Stream, jobs_alone, kept, streams

job = pytest.fixture(jobs_alone)


def reads(rank, world, root, steps, options):
    """The samples of so many steps, after a load if there is something."""
    job = Job(root, **options)
    if list(Path(root).glob("checkpoints/*")):
        job.accelerator.load_state()
    job.data.read.clear()
    job.train(steps)
    job.accelerator.save_state()
    job.accelerator.end_training = lambda: None
    job.accelerator.load_state()  # waits
    return job.seen, job.data.read


def epoch_of(ranks, root, plan, **options):
    """The samples in the order of steps, of jobs that go on after each other."""
    found = []
    for world, steps, more in plan:
        of_ranks = ranks(world)(reads, root, steps, {"data_seed": 3, **options, **more})
        found += [number for seen, _ in of_ranks for number in seen]
        is_reader = not {**options, **more}.get("workers")
        assert not is_reader or all(read[: len(seen)] == seen for seen, read in of_ranks)
    return found


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"shuffle": False}], ids=str)
def test_each_sample_comes_once(ranks, tmp_path, options):
    plan = [(2, 3, {}), (4, 2, {"workers": 1}), (1, 2, {"batch": 4}), (1, 1, {"batch": 4}), (2, 2, {})]
    found = epoch_of(ranks, str(tmp_path), plan, **options)
    assert sorted(found) == list(range(ROWS))
    assert sorted(epoch_of(ranks, str(tmp_path), [(2, 12, {})], **options)) == list(range(ROWS))  # another epoch


def skips(rank, world, root, steps):
    """A loader without a state: the user skips, as accelerate's examples do."""
    job = Job(root, stateful=False, seed=7 if steps == 3 else 0)
    job.model.eval()
    first = None
    if steps == 3:
        job.accelerator.load_state()
        job.data.read.clear()
        first = job.accelerator.skip_first_batches(job.loader, job.counter.steps - 12)
    losses = job.train(steps, save_at=[15], first=first)
    job.wait()
    return losses, job.seen


@pytest.mark.skipif(
    tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 15), reason="its skip_first_batches() begins epoch 0"
)
def test_a_loader_without_a_state_is_in_the_same_epoch(ranks, tmp_path):
    (losses, seen), _ = ranks(2)(skips, str(tmp_path), 18)
    (more, rest), _ = ranks(2)(skips, str(tmp_path), 3)
    assert more == losses[15:] and rest == seen[30:]


def streams_on(rank, world, root, is_again):
    job = streams(root, 7 * is_again, dispatch_batches=False)
    if is_again:
        job.accelerator.load_state()
    losses = job.train(5 if is_again else 9, save_at=[4])
    job.wait()
    return losses, job.seen


def test_a_stream_goes_on(ranks, tmp_path):
    """Each process reads all of it, and takes its part."""
    whole = ranks(2)(streams_on, str(tmp_path), False)
    for (losses, seen), (more, rest) in zip(whole, ranks(2)(streams_on, str(tmp_path), True), strict=True):
        assert more == losses[4:] and rest == seen[8:]


def test_a_stream_with_a_position_goes_on(job, tmp_path):
    one = streams(tmp_path)
    losses = one.train(12, save_at=[4])
    one.wait()
    again = streams(tmp_path, 7)
    again.accelerator.load_state()
    assert again.train(8) == losses[4:] and again.seen == list(range(8, 24))


def dispatches(rank, world, root, is_again, kind, options):
    """Process 0 reads for all; accelerate's own state of these is at another place."""
    options = {"dispatch_batches": True, "seed": 7 * is_again, **options}
    job = streams(root, **options) if kind is Stream else Job(root, data_seed=3, **options)
    if is_again:
        job.accelerator.load_state()
    losses = job.train(4 if is_again else 7, save_at=[3])
    job.wait()
    return losses, job.seen


@pytest.mark.parametrize("kind", [Rows, Stream])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"workers": 1}], ids=str)
def test_dispatched_batches_go_on(ranks, tmp_path, kind, options):
    whole = ranks(2)(dispatches, str(tmp_path), False, kind, options)
    for (losses, seen), (more, rest) in zip(
        whole, ranks(2)(dispatches, str(tmp_path), True, kind, options), strict=True
    ):
        assert rest == seen[len(seen) - len(rest) :] and more == losses[3:]


def test_dispatched_batches_go_on_elsewhere(ranks, tmp_path):
    (_, one), (_, other) = ranks(2)(dispatches, str(tmp_path), False, Rows, {})
    behind = [*one[6:], *other[6:]]
    ((_, rest),) = ranks(1)(dispatches, str(tmp_path), True, Rows, {"batch": 4, "workers": 1})
    assert sorted(rest) == sorted(behind)


def test_what_is_saved_before_the_first_step(job, tmp_path):
    one = job()
    one.accelerator.save_state()
    losses = one.train(30)
    one.wait()
    again = job(seed=7)
    again.accelerator.load_state()
    assert again.train(30) == losses


def test_the_state_of_a_dataset_is_not_dealt_out(job, tmp_path, monkeypatch):
    monkeypatch.setattr(Rows, "state_dict", lambda rows: {"read": len(rows.read)}, raising=False)
    monkeypatch.setattr(Rows, "load_state_dict", lambda rows, state: None, raising=False)
    one = job()
    one.train(3, save_at=[2])
    one.wait()
    job(seed=7).accelerator.load_state()
    with pytest.raises(sf.Invalid, match="the dataset's own state is opaque: load with as many processes and workers"):
        job(batch=4).accelerator.load_state()


def test_what_is_loaded_is_saved_again_before_anything_is_read(job, tmp_path):
    first = job()
    expected = first.train(8, save_at=[5])[5:]
    first.wait()
    for _ in range(2):
        again = job(seed=7)
        again.accelerator.load_state()
        again.accelerator.save_state()
        again.wait()
    again = job(seed=7, batch=1)
    again.accelerator.load_state()
    again.accelerator.save_state()
    last = job(seed=7)
    again.wait()
    last.accelerator.load_state()
    assert kept(tmp_path) == [f"checkpoint_{number}" for number in range(4)]
    assert last.train(3) == pytest.approx(expected)  # its iterator was made anew
    assert last.seen == first.seen[10:]


def test_a_loader_in_use_is_refused(job):
    one = job()
    one.train(3, save_at=[2])
    rows = iter(one.loader)
    next(rows)
    with pytest.raises(sf.Invalid, match=r"its iterator was made before this load .* load before iter"):
        one.accelerator.load_state()
    del rows
    one.accelerator.load_state()
    assert one.counter.steps == 2


def test_another_dataset_is_refused(job):
    one = job()
    one.train(3, save_at=[2])
    one.wait()
    with pytest.raises(sf.Invalid, match="an epoch had 48 samples, and has 46 here"):
        job(rows=46).accelerator.load_state()


def test_an_order_that_is_not_saved_is_named(job, caplog):
    one = job(use_seedable_sampler=False)
    one.train(3, save_at=[2])
    assert "its shuffled order is not saved" in caplog.text and "use_seedable_sampler=True" in caplog.text
    one.wait()
    with pytest.raises(sf.Invalid, match="its shuffled order is not in the checkpoint"):
        job(use_seedable_sampler=False, batch=4).accelerator.load_state()
