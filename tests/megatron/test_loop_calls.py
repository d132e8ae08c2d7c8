"""Megatron's `save_checkpoint` and `load_checkpoint` on Shardfast, with its own arguments."""

import shutil
from pathlib import Path

import pytest
import shardfast as sf

pytest.importorskip(
    "megatron.training",
    reason="megatron.training cannot be imported: megatron-core has it from 0.17 on, before 0.19 with more packages",
)

import loops
import torch
from megatron.core.rerun_state_machine import RerunState
from megatron.training import checkpointing
from shardfast.integrations.megatron_places import expect_free
from shardfast.integrations.megatron_trackers import trackers as trackers_of_places
from shardfast.integrations.places import directory_of, expect_place


def saving(place, *more):
    return ["--save", str(place), "--save-interval", "2", *more]


def flags(training):
    """Two iterations are saved and loaded again with each of the arguments that say what is loaded."""
    args, found = training.args, {}
    training.step(1)
    training.save(1)
    first = training.weights(), training.optimizer_state()
    training.step(2)
    training.save(2)
    training.save(2)  # as Megatron does where the number of microbatches changes
    second = training.weights(), training.optimizer_state()
    draws, trackers = loops.draws(), loops.tracker_states()

    def spoil():
        training.step(9)
        loops.tensor_parallel.get_cuda_rng_tracker().states_["model-parallel-rng"].add_(1)
        args.consumed_train_samples, args.iteration, training.scheduler.num_steps = 99, 99, 0
        return training.weights(), training.optimizer_state(), loops.draws()

    args.load = args.save
    spoil()
    assert training.load() == (2, 2000)
    assert args.consumed_train_samples == 8
    assert loops.same(training.weights(), second[0]) and loops.same(training.optimizer_state(), second[1])
    assert (loops.draws(), loops.tracker_states()) == (draws, trackers)

    args.ckpt_step = 1
    spoil()
    assert training.load() == (1, 1000)
    assert args.consumed_train_samples == 4
    assert loops.same(training.weights(), first[0]) and loops.same(training.optimizer_state(), first[1])
    args.ckpt_step = None

    args.no_load_optim = args.no_load_rng = True
    _, state, drawn = spoil()
    random_states = loops.tracker_states()
    assert training.load() == (2, 2000)
    now = training.optimizer_state()
    assert args.consumed_train_samples == 8 and training.scheduler.num_steps == 0
    assert loops.same(training.weights(), second[0]) and not loops.same(now, state) and not loops.same(now, second[1])
    assert loops.tracker_states() == random_states and loops.draws() not in (drawn, draws)
    args.no_load_optim = args.no_load_rng = None

    args.tensor_model_parallel_size = 1  # the checkpoint is of 2: this job's random states stay
    spoil()
    random_states = loops.tracker_states(), torch.get_rng_state().tolist()
    assert training.load() == (2, 2000)
    assert (loops.tracker_states(), torch.get_rng_state().tolist()) == random_states
    args.tensor_model_parallel_size = 2

    args.finetune = True
    spoil()
    random_states = loops.tracker_states()
    assert training.load() == (0, 2000)
    assert args.consumed_train_samples == 99 and training.scheduler.num_steps == 0
    assert loops.same(training.weights(), second[0]) and loops.tracker_states() == random_states
    args.finetune = False

    args.load, args.pretrained_checkpoint = f"{args.save}/nothing", args.save
    for args.ckpt_step, expected in ((1, first), (None, second)):
        spoil()
        assert training.load() == (0, 2000 if args.ckpt_step is None else 1000) and args.finetune
        assert loops.same(training.weights(), expected[0])
    args.load, args.pretrained_checkpoint, args.finetune = args.save, None, False

    args.no_save_optim = args.no_save_rng = True
    training.save(3)
    training.step(3)
    found["without an optimizer"] = training.error_of(training.load)
    args.no_save_optim = args.no_save_rng = None
    args.no_load_optim = True
    random_states = loops.tracker_states()
    assert training.load() == (3, 3000)
    assert loops.same(training.weights(), training.weights()) and loops.tracker_states() == random_states
    return found


def test_arguments_mean_what_they_meant(ranks, tmp_path):
    for found in ranks(2)(loops.call, flags, saving(tmp_path, "--tensor-model-parallel-size", "2")):
        assert "--no-save-optim" in found["without an optimizer"]
        assert "--no-load-optim" in found["without an optimizer"]
    with sf.mapped(tmp_path / "iter_0000003") as checkpoint:
        assert not [name for name in checkpoint if name.startswith("optimizer/")]
        assert not [name for name in checkpoint.value_names() if name.startswith("random/")]
    with sf.mapped(tmp_path / "iter_0000002") as checkpoint:
        names = sorted(name for name in checkpoint.value_names() if name.startswith("random/"))
        assert names == ["random/tp0-pp0-ep0-etp0", "random/tp1-pp0-ep0-etp1"]
        assert checkpoint.value("training/args")["consumed_train_samples"] == 8


def refusals(training):
    args, found = training.args, {}
    training.step(1)
    training.save(1)
    training.step(2)
    training.save(2)
    weights = training.weights()
    training.step(3)
    args.load = args.save
    found["taken"] = training.error_of(training.save, 2)
    args.async_save = True
    training.save(3)
    args.iteration = args.curr_iteration = 9
    training.step(4)
    training.finish()
    torch.distributed.barrier()  # rank 0 writes it
    found["tracker"] = (Path(args.save) / "latest_checkpointed_iteration.txt").read_text()
    found["taken later"] = training.error_of(lambda: (training.save(2), training.finish()))
    args.async_save = False
    args.num_layers = 7
    found["layers"] = training.error_of(training.load)
    args.num_layers = 2
    args.ckpt_step = 5
    found["no such step"] = training.error_of(training.load)
    args.ckpt_step = None
    for name, text in (("missing", "4"), ("garbage", "four")):
        if training.rank == 0:
            with open(f"{args.save}/latest_checkpointed_iteration.txt", "w") as file:
                file.write(text)
        torch.distributed.barrier()
        found[name] = training.error_of(training.load)
        torch.distributed.barrier()
    if training.rank == 0:
        with open(f"{args.save}/latest_checkpointed_iteration.txt", "w") as file:
            file.write("1")
    torch.distributed.barrier()
    assert not loops.same(training.weights(), weights)
    found["arguments"] = training.error_of(checkpointing.load_args_from_checkpoint, args)
    if training.rank == 0:
        (Path(args.save) / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
        (Path(args.save) / "iter_0000006").mkdir()
    torch.distributed.barrier()
    for iteration in (1, 2, 3, 4):
        if iteration == 1 and training.rank == 0:
            shutil.move(f"{args.save}/iter_0000002", f"{args.save}/away")
        if iteration == 2 and training.rank == 0:
            shutil.move(f"{args.save}/away", f"{args.save}/iter_0000002")
        torch.distributed.barrier()
        args.iteration = iteration
        found["free", iteration] = training.error_of(expect_free, args, trackers_of_places(), checkpointing)
    found["release"] = training.error_of(training.save, 8, release=True)
    found["passing"] = training.error_of(training.save, 8, non_persistent_ckpt=True)
    return found


def test_what_cannot_be_done_is_refused_by_name(ranks, tmp_path):
    for found in ranks(2)(loops.call, refusals, saving(tmp_path)):
        assert "Conflict" in found["taken"] and "iter_0000002" in found["taken"]
        assert "Conflict" in found["taken later"] and "iter_0000002" in found["taken later"]
        assert found["tracker"] == "3"
        assert "num_layers value from checkpoint (2) is not equal to the input argument value (7)" in found["layers"]
        assert "--ckpt-step 5 names iteration 5" in found["no such step"]
        assert "NotFound" in found["missing"] and "names iteration 4" in found["missing"]
        assert "latest_checkpointed_iteration.txt" in found["missing"] and "iter_0000004" in found["missing"]
        assert "expected an iteration, found 'four'" in found["garbage"]
        assert "--use-checkpoint-args" in found["arguments"]
        assert all("iter_0000004 is there already" in found["free", iteration] for iteration in (1, 2, 3))
        assert not found["free", 4]
        assert "release=True" in found["release"] and "non_persistent_ckpt=True" in found["passing"]
    # The tracker says 1, and iteration 2 is committed: a training towards it ends before its first step.
    with pytest.raises(AssertionError, match="iter_0000002 is there already, and the training begins at iteration 1 "):
        ranks(2)(loops.train, saving(tmp_path, "--load", str(tmp_path)))


def schedules(training):
    """What a job whose groups have other ends of the learning rate gets from a load."""
    args, found = training.args, {}
    training.step(1)
    training.save(1)
    args.load = args.save
    groups = training.optimizer.param_groups

    def asked(**flags):
        args.override_opt_param_scheduler = flags.get("override", False)
        args.use_checkpoint_opt_param_scheduler = flags.get("keep", False)
        for group in groups:
            group["max_lr"], group["min_lr"] = 0.125, 0.0625
        error = training.error_of(training.load)
        return error, {(group["max_lr"], group["min_lr"]) for group in groups}

    saved = {(group.get("max_lr"), group.get("min_lr")) for group in groups}
    found["neither"] = asked()
    found["override"] = asked(override=True)
    found["keep"] = asked(keep=True)
    return saved, found


def test_the_schedule_of_groups_is_the_one_that_arguments_ask_for(ranks, tmp_path):
    for saved, found in ranks(2)(loops.call, schedules, saving(tmp_path)):
        assert "max_lr is" in found["neither"][0] and "--override-opt-param-scheduler" in found["neither"][0]
        assert found["override"] == ("", {(0.125, 0.0625)})
        assert found["keep"] == ("", saved)


@pytest.mark.parametrize(
    ("place", "read"),
    [("file:///x/e%20f", "/x/e f"), ("file://localhost/x/l", "/x/l"), ("~/run", f"{Path.home()}/run"), ("/x", "/x")],
)
def test_a_place_has_one_reading(place, read):
    assert str(directory_of(place)) == read


@pytest.mark.parametrize("place", ["file://rel/c", "memory://x", "s4://bucket/run"])
def test_other_places_are_refused_by_each_rank(place):
    with pytest.raises(sf.Invalid, match=place):
        expect_place(place)


def random_by_rank(training):
    """Each data-parallel rank has its own random state."""
    args = training.args
    training.step(1)
    training.save(1)
    draws, trackers = loops.draws(), loops.tracker_states()
    loops.draws()
    args.load = args.save
    training.load()
    assert (loops.draws(), loops.tracker_states()) == (draws, trackers)
    args.data_parallel_size = 3
    found = training.error_of(training.load)
    args.no_load_rng = True
    assert not training.error_of(training.load)
    return draws, found


def test_random_states_by_data_parallel_rank(ranks, tmp_path):
    (first, refused), (second, _) = ranks(2)(
        loops.call, random_by_rank, saving(tmp_path, "--data-parallel-random-init")
    )
    assert first != second
    assert "of which the checkpoint has 2 and this job 3: pass --no-load-rng" in refused


def rerun(training):
    """A step that the rerun state machine wants to be repeated by another job, by each rank with its own findings."""
    args = training.args
    machine = checkpointing.get_rerun_state_machine()
    machine.state, machine.current_iteration = RerunState.WILL_RERUN_FROM_CHECKPOINT, 1
    machine.suspicious_node, machine.initial_result = f"node-{training.rank}", 0.5 + training.rank
    machine.checkpoint_requested = True
    training.step(1)
    training.save(1)
    machine.state, machine.current_iteration = RerunState.NOT_RUNNING_YET, -1
    machine.suspicious_node = machine.initial_result = None
    args.load = args.save
    args.data_parallel_size = 1
    training.load()
    assert machine.state is RerunState.NOT_RUNNING_YET  # of another job's ranks
    args.data_parallel_size = 2
    training.load()
    assert machine.state is RerunState.WILL_RERUN_FROM_CHECKPOINT and machine.current_iteration == 1
    return machine.suspicious_node, machine.initial_result


def test_a_rerun_that_is_pending_goes_on_on_each_rank(ranks, tmp_path):
    assert ranks(2)(loops.call, rerun, saving(tmp_path)) == [("node-0", 0.5), ("node-1", 1.5)]


def test_what_is_refused_is_refused_at_the_start(ranks):
    given = ["--save-retain-interval", "4", "--non-persistent-ckpt-type", "global", "--ckpt-format", "torch"]
    with pytest.raises(AssertionError) as refused:
        ranks(1)(loops.train, saving("s3://nowhere/run", *given, "--log-progress"))
    said = str(refused.value)
    assert "--save-retain-interval is 4" in said
    assert "--non-persistent-ckpt-type is 'global'" in said
    assert "--ckpt-format is 'torch'" in said
    assert "--log-progress: Megatron writes into --save itself, which is s3://nowhere/run here" in said
    assert "in initialize" in said and "set_up" not in said


def test_nothing_is_replaced_before_attach_and_all_once(alone):
    assert alone(loops.replaced)
