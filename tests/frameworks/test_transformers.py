"""transformers' Trainer with `shardfast.integrations.transformers.attach()`."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # ranks are forked from a process of one thread

import peft
import pytest
import shardfast as sf
import tokenizers
import torch
import torch.distributed as dist
import transformers
from quiet_saves import without_collectives
from shardfast.integrations import directories, transformers_places
from shardfast.integrations import transformers as integration
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers.distributed import DistributedConfig

warnings.filterwarnings("ignore", message=".*pin_memory.*")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH = 12
FILES = {"config.json", "generation_config.json", "shardfast", "trainer_state.json", "training_args.bin"}


def prepare(rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def language_model(seed=0, dropout=0.2):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=1,
            eos_token_id=2,
            attention_dropout=dropout,
            attn_implementation="eager",
        )
    )


class Texts(torch.utils.data.Dataset):
    def __init__(self, size=64):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        ids = torch.randint(60, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class Watch(transformers.TrainerCallback):
    """What the trainer holds when it begins to train and when it saves; stops after a step."""

    def __init__(self, stop=None):
        self.stop, self.trainer, self.seen = stop, None, {}

    def on_train_begin(self, args, state, control, **more):
        self.seen["begin"] = state.global_step, held(self.trainer)

    def on_save(self, args, state, control, **more):
        self.seen[state.global_step] = held(self.trainer)

    def on_step_end(self, args, state, control, **more):
        if self.stop is not None and state.global_step >= self.stop:
            control.should_training_stop = True


def whole(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def held(trainer):
    """The trainer's model, optimizer and schedule, as copies."""
    optimizer = trainer.optimizer.optimizer
    named = dict(trainer.model.named_parameters())
    return {
        **{f"model/{name}": whole(one) for name, one in trainer.model.state_dict().items()},
        **{f"{k}/{n}": whole(v) for n, p in named.items() for k, v in optimizer.state.get(p, {}).items()},
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups if group["params"]
        ],
        "schedule": trainer.lr_scheduler.state_dict(),
    }


def differences(one, other):
    same = [
        name
        for name in one.keys() & other.keys()
        if (torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name])
    ]
    return sorted((one.keys() | other.keys()) - set(same))


def losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def made(place, *, kind=transformers.Trainer, model=None, attached=True, stop=None, data=64, more=None, **options):
    """A trainer, and what watches it."""
    watch = Watch(stop)
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "save_steps": 2,
        "save_strategy": "steps",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    trainer = kind(
        language_model() if model is None else model,
        transformers.TrainingArguments(str(place), **arguments),
        train_dataset=Texts(data) if isinstance(data, int) else data,
        **{"callbacks": [watch], **(more or {})},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    watch.trainer = trainer
    if attached:
        integration.attach(trainer)
    return trainer, watch


def kill_in_the_save_of(step, killed):
    """Makes rank ``killed`` end in a save that the other ranks have begun or will begin; earlier ones are durable."""
    original, begun = sf.save_async, []

    def save_async(url, state, **named):
        if named["step"] == step and (not dist.is_initialized() or dist.get_rank() == killed):
            for pending in begun:
                pending.committed()
            os.kill(os.getpid(), signal.SIGKILL)
        begun.append(original(url, state, **named))
        return begun[-1]

    sf.save_async = save_async


def train(rank, world, place, options=None, resume=None, killed=None):
    prepare(rank, world)
    trainer, watch = made(place, **(options or {}))
    if killed is not None:
        kill_in_the_save_of(killed, 1)
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer), watch.seen


def committed(place):
    return sorted(path.name for path in Path(place).glob("checkpoint-*") if directories.is_committed(path))


@pytest.mark.smoke
def test_a_training_that_is_killed_in_a_save_goes_on(ranks, tmp_path):
    expected, _ = ranks(2)(train, f"{tmp_path}/whole")[0]
    with pytest.raises(AssertionError):
        ranks(2)(train, f"{tmp_path}/run", None, True, 4)
    assert committed(tmp_path / "run") == ["checkpoint-2"]
    assert (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").exists()
    found, seen = ranks(2)(train, f"{tmp_path}/run", {"model": language_model(7)}, True)[0]
    assert found == expected
    assert seen["begin"][0] == 2
    assert committed(tmp_path / "run") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for number in (2, 4, 6):
        assert {path.name for path in (tmp_path / "run" / f"checkpoint-{number}").iterdir()} == FILES


def saves_alone(rank, world, place):
    prepare(rank, world)
    urls = without_collectives()
    trainer, _ = made(place)
    trainer.train()
    return len(urls)


def test_saves_run_no_collective(ranks, tmp_path):
    assert ranks(2)(saves_alone, str(tmp_path)) == [3, 3]
    assert committed(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


# Other worlds, and the trainer's own directories


OWN_RESUME = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20),
    reason="the trainer's own resume on the CPU fails, or does not say what it leaves out",
)


def with_both(rank, world, place, resume, attached):
    """Trains by the trainer's own checkpoints, or by ours, without what is random by rank."""
    prepare(rank, world)
    options = {"model": language_model(7 if resume else 0, dropout=0.0), "stop": None if resume else 4, "max_steps": 8}
    trainer, watch = made(place, attached=attached, **options)
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer), watch.seen


def both(rank, world, ours, own):
    return [with_both(rank, world, place, None, place == ours) for place in (ours, own)]


def resumed_in(rank, world, ours, own):
    """The trainer's own resume from its own files, ours from ours, and an attached one from the trainer's files."""
    paths = (ours, True), (own, False), (own, True)
    return [with_both(rank, world, f"{ours}-{world}", f"{path}/checkpoint-4", is_ours) for path, is_ours in paths]


@OWN_RESUME
def test_it_goes_on_in_other_worlds_as_the_trainer_does(ranks, tmp_path):
    ours, own = f"{tmp_path}/ours", f"{tmp_path}/own"
    saved = ranks(2)(both, ours, own)
    for rank in range(2):
        assert saved[rank][0][0] == saved[rank][1][0]
        assert differences(saved[rank][0][1][4], saved[rank][1][1][4]) == []
    assert not set(os.listdir(f"{ours}/checkpoint-4")) & {"model.safetensors", "optimizer.pt", "scheduler.pt"}
    expected = saved[0][0][1][4]
    for world in (1, 4):
        for of_rank in ranks(world)(resumed_in, ours, own):
            (found, seen), (by_trainer, _), (by_both, _) = of_rank
            assert differences(seen["begin"][1], expected) == []
            assert list(found) == list(range(1, 9))
            assert found == by_trainer == by_both


class Meet(transformers.TrainerCallback):
    """Lets what was saved at step 3 become durable, and its limit choose, just before step 5, which saves, too."""

    def __init__(self, durable, chosen):
        self.durable, self.chosen = durable, chosen

    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 4:
            self.durable.set()
            assert self.chosen.wait(20)


def test_a_limit_removes_nothing_that_a_save_takes_again(tmp_path, monkeypatch, held):
    made(tmp_path, max_steps=6, save_steps=1)[0].train()
    for number in (3, 4, 5, 6):  # as kills leave them
        (directories.state_of(tmp_path / f"checkpoint-{number}") / "COMMIT").unlink()
    aged, held.waits, chosen = transformers_places._aged, threading.Event(), threading.Event()

    def slow(place):
        found = aged(place)
        chosen.set()
        time.sleep(0.3)  # the training goes on, and saves
        return found

    monkeypatch.setattr(transformers_places, "_aged", slow)
    more = {"callbacks": [watch := Watch(), Meet(held.waits, chosen)]}
    options = {"max_steps": 8, "save_steps": 1, "save_total_limit": 4, "model": language_model(3)}
    watch.trainer, _ = trainer, _ = made(tmp_path, more=more, **options)
    trainer.train(resume_from_checkpoint=True)
    assert committed(tmp_path) == [f"checkpoint-{number}" for number in (5, 6, 7, 8)]
    assert [{file.name for file in path.iterdir()} for path in tmp_path.iterdir()] == 4 * [FILES]


def test_fresh_starts_and_paths(tmp_path, caplog):
    trainer, _ = made(tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=True)  # there is none
    assert committed(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    expected = losses(trainer)
    for name in ("checkpoint-2", "checkpoint-2/", "../{}/checkpoint-2//."):
        trainer, watch = made(tmp_path, max_steps=4, model=language_model(3))
        trainer.train(resume_from_checkpoint=f"{tmp_path}/{name.format(tmp_path.name)}")
        assert (losses(trainer), watch.seen["begin"][0]) == (expected, 2)
    assert not list(tmp_path.glob(".*.replaced"))
    with pytest.raises(ValueError, match="checkpoint-9"):
        made(tmp_path)[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    for number in (6, 8):
        directories.begin(tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-10").mkdir()  # which the trainer made and wrote nothing to
    with pytest.raises(sf.NotFound, match="checkpoint-8 was not saved to its end: pass resume_from_checkpoint=True"):
        made(tmp_path)[0].train(resume_from_checkpoint=tmp_path / "checkpoint-8")
    trainer, watch = made(tmp_path, model=language_model(3))
    with caplog.at_level(logging.WARNING, "shardfast"):
        trainer.train(resume_from_checkpoint=True)
    assert watch.seen["begin"][0] == 4
    assert "checkpoint-8 was not saved to its end" in caplog.text
    for number in (2, 4, 6, 8, 10):
        (tmp_path / f"checkpoint-{number}" / "shardfast" / "COMMIT").unlink(missing_ok=True)
    trainer, watch = made(tmp_path, model=language_model(3), max_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert watch.seen["begin"][0] == 0


def test_what_is_saved_again_is_there_until_the_new_one_is_durable(tmp_path, monkeypatch):
    trainer, watch = made(tmp_path, max_steps=2)
    trainer.train()
    with monkeypatch.context() as patched:
        patched.setattr(sf, "save_async", lambda *args, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(tmp_path, max_steps=2, model=language_model(3))[0].train()
    assert (tmp_path / ".checkpoint-2.replaced").exists()
    trainer, again = made(tmp_path, max_steps=4, model=language_model(3))
    trainer.train(resume_from_checkpoint=True)
    assert differences(again.seen["begin"][1], {**watch.seen[2], "schedule": again.seen["begin"][1]["schedule"]}) == []
    assert committed(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    made(tmp_path, max_steps=4, model=language_model(3))[0].train()  # over all of them
    assert committed(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert not list(tmp_path.glob(".*"))


def test_a_trainers_state_that_a_crash_has_damaged(tmp_path, caplog):
    trainer, _ = made(tmp_path, max_steps=4)
    trainer.train()
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    expected = json.loads(file.read_text())
    for damage in (lambda: file.write_text(""), file.unlink):
        damage()
        trainer, watch = made(tmp_path)
        trainer.train(resume_from_checkpoint=str(file.parent))
        assert watch.seen["begin"][0] == 4
        assert "is damaged or missing" in caplog.text
        assert json.loads(file.read_text()) == expected


# Options


class Worst(transformers.Trainer):
    """Its evaluations are the worse the longer it trains."""

    def evaluate(self, *args, **named):
        metrics = {"eval_score": -float(self.state.global_step)}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def test_a_limit_and_the_best_model(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    more = {"eval_dataset": Texts(4)}
    trainer, _ = made(tmp_path / "a", kind=Worst, max_steps=8, save_total_limit=2)
    trainer.train()
    assert committed(tmp_path / "a") == ["checkpoint-6", "checkpoint-8"]
    for limit, left in (
        (1, ["checkpoint-2"]),
        (2, ["checkpoint-2", "checkpoint-8"]),
        (3, ["checkpoint-2", "checkpoint-6", "checkpoint-8"]),
    ):
        place = tmp_path / f"{limit}"
        watched = Watch()
        trainer, _ = made(
            place,
            kind=Worst,
            max_steps=8,
            save_total_limit=limit,
            load_best_model_at_end=True,
            more={**more, "callbacks": [watched]},
            **best,
        )
        watched.trainer = trainer
        trainer.train()
        assert committed(place) == left, limit
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
        found = {f"model/{name}": one for name, one in trainer.model.state_dict().items()}
        assert all(torch.equal(one, watched.seen[2][name]) for name, one in found.items())
        args = torch.load(place / "checkpoint-2" / "training_args.bin", weights_only=False)
        assert args.save_total_limit == limit == trainer.args.save_total_limit


def test_a_limit_removes_nothing_before_the_next_one_is_durable(tmp_path, monkeypatch, caplog):
    seen, original = [], sf.save_async

    def save_async(*args, **named):
        seen.append(committed(tmp_path))
        if named["step"] == 6:
            return Failing()
        pending = original(*args, **named)
        pending.committed()
        return pending

    monkeypatch.setattr(sf, "save_async", save_async)
    trainer, _ = made(tmp_path, save_total_limit=1)
    with pytest.raises(sf.Unavailable, match="lost"):
        trainer.train()
    assert seen == [[], ["checkpoint-2"], ["checkpoint-4"]]
    assert committed(tmp_path) == ["checkpoint-4"]
    monkeypatch.setattr(sf, "save_async", original)
    trainer, watch = made(tmp_path, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert watch.seen["begin"][0] == 4
    assert os.listdir(tmp_path) == ["checkpoint-6"]


class Failing:
    def committed(self):
        raise sf.Unavailable("lost")


def test_a_failed_save_is_raised_by_the_next_one(tmp_path, monkeypatch, caplog):
    original = sf.save_async
    monkeypatch.setattr(sf, "save_async", lambda *a, **n: Failing() if n["step"] == 2 else original(*a, **n))
    trainer, _ = made(tmp_path, max_steps=6)
    with pytest.raises(sf.Unavailable, match="lost"):
        trainer.train()
    assert "a save failed in the background: lost" in caplog.text
    assert trainer.state.global_step in (4, 6)
    assert "checkpoint-4" in committed(tmp_path) or trainer.state.global_step == 4
    monkeypatch.setattr(sf, "save_async", original)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6" in committed(tmp_path)


def names(directory):
    with sf.mapped(directory / "shardfast") as checkpoint:
        return sorted(checkpoint), checkpoint.value_names()


def test_save_only_model(tmp_path, caplog):
    trainer, watch = made(tmp_path, save_only_model=True, max_steps=4)
    trainer.train()
    leaves, values = names(tmp_path / "checkpoint-4")
    assert leaves and all(name.startswith("model/") for name in leaves)
    assert {name.partition("/")[0] for name in values} == {"trainer"}
    trainer, again = made(tmp_path, model=language_model(5))
    trainer.train(resume_from_checkpoint=True)
    step, found = again.seen["begin"]
    assert step == 4
    assert all(torch.equal(found[name], one) for name, one in watch.seen[4].items() if name.startswith("model/"))
    assert found["schedule"]["last_epoch"] == 0
    assert "checkpoint-4 has no optimizer, scheduler: these begin anew" in caplog.text
    assert "optimizer/state.lm_head.weight.exp_avg" in names(tmp_path / "checkpoint-6")[0]


def test_ignore_data_skip(tmp_path):
    for place, attached in ((tmp_path / "ours", True), (tmp_path / "own", False)):
        made(place, attached=attached, max_steps=2)[0].train()
    found = []
    for place, attached in ((tmp_path / "ours", True), (tmp_path / "own", False)):
        trainer, _ = made(place, attached=attached, ignore_data_skip=True, model=language_model(4))
        trainer.train(resume_from_checkpoint=f"{place}/checkpoint-2")
        found.append(losses(trainer))
    assert found[0] == found[1]


def test_states_of_callbacks(tmp_path):
    for restore in (False, True):
        place = tmp_path / f"{restore}"
        options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
        options |= {"greater_is_better": True, "load_best_model_at_end": True, "kind": Worst}
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=9)
        trainer, _ = made(place, more={"eval_dataset": Texts(4), "callbacks": [stopping]}, max_steps=4, **options)
        trainer.train()
        assert stopping.early_stopping_patience_counter == 1
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=5)
        more = {"eval_dataset": Texts(4), "callbacks": [stopping]}
        trainer, _ = made(place, more=more, restore_callback_states_from_checkpoint=restore, **options)
        trainer.train(resume_from_checkpoint=True)
        (found,) = [
            one for one in trainer.callback_handler.callbacks if isinstance(one, transformers.EarlyStoppingCallback)
        ]
        assert (found.early_stopping_patience, found.early_stopping_patience_counter) == ((9, 2) if restore else (5, 1))


def test_a_scaler(tmp_path):
    def scaled(**options):
        trainer, watch = made(tmp_path, **options)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        return trainer, watch

    trainer, _ = scaled(max_steps=6)
    trainer.train()
    expected, scale = losses(trainer), trainer.accelerator.scaler.get_scale()
    assert scale == 4.0 * 2**6
    trainer, _ = scaled(model=language_model(3))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert (losses(trainer), trainer.accelerator.scaler.get_scale()) == (expected, scale)


def words():
    made_of = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made_of, unk_token="?", pad_token="?")


def test_files_that_tools_look_for(tmp_path):
    trainer, _ = made(tmp_path / "ours", max_steps=2, more={"processing_class": words()})
    trainer.train()
    trainer, _ = made(tmp_path / "own", attached=False, max_steps=2, more={"processing_class": words()})
    trainer.train()
    ours, own = tmp_path / "ours" / "checkpoint-2", tmp_path / "own" / "checkpoint-2"
    weights = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {path.name for path in ours.iterdir()} == {path.name for path in own.iterdir()} - weights | {"shardfast"}
    for path in ours.glob("*.json"):
        found, expected = json.loads(path.read_text()), json.loads((own / path.name).read_text())
        assert found == expected, path
    assert len(transformers.AutoTokenizer.from_pretrained(ours)) == 3
    assert transformers.AutoConfig.from_pretrained(ours).architectures == ["LlamaForCausalLM"]
    trainer.save_model(str(tmp_path / "end"))
    assert (tmp_path / "end" / "model.safetensors").exists()


def test_a_checkpoint_just_in_time(tmp_path):
    class Soon(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **more):
            manager.is_checkpoint_requested = state.global_step == 3

    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer, watch = made(tmp_path, enable_jit_checkpoint=True, more={"callbacks": [Soon()]})
        (found,) = [one for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager")]
        manager = found.jit_manager
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainer.state.global_step == 4
    assert committed(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    trainer, watch = made(tmp_path, model=language_model(3))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert watch.seen["begin"][0] == 3


# peft


def adapted(seed=0, **options):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], **options)
    return peft.get_peft_model(language_model(seed), config)


def test_adapters(tmp_path):
    torch.manual_seed(0)
    trainer, watch = made(tmp_path / "a", model=adapted())
    trainer.train()
    expected = losses(trainer)
    leaves, _ = names(tmp_path / "a" / "checkpoint-4")
    model = [name for name in leaves if name.startswith("model/")]
    assert len(model) == 5
    assert all("lora_" in name or "modules_to_save" in name for name in model)
    assert {path.name for path in (tmp_path / "a" / "checkpoint-4").iterdir()} == {
        "adapter_config.json",
        "shardfast",
        "trainer_state.json",
        "training_args.bin",
    }
    assert peft.PeftConfig.from_pretrained(tmp_path / "a" / "checkpoint-4").r == 2
    for number in (5, 6, 7):
        torch.manual_seed(number)
        trainer, again = made(tmp_path / "a", model=adapted())
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
        assert losses(trainer) == expected
        assert differences(again.seen["begin"][1], watch.seen[4]) == []


def test_the_best_adapters(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    watch = Watch()
    more = {"eval_dataset": Texts(4), "callbacks": [watch]}
    trainer, _ = made(tmp_path, kind=Worst, model=adapted(), load_best_model_at_end=True, more=more, **options)
    watch.trainer = trainer
    trainer.train()
    found = {f"model/{name}": one for name, one in trainer.model.state_dict().items()}
    assert all(torch.equal(one, watch.seen[2][name]) for name, one in found.items())


def test_adapters_that_are_not_active_and_biases(tmp_path):
    model = adapted(bias="lora_only")
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"]))
    trainer, _ = made(tmp_path, model=model, max_steps=2)
    trainer.train()
    leaves, _ = names(tmp_path / "checkpoint-2")
    assert "model/base_model.model.model.layers.0.self_attn.v_proj.lora_A.other.weight" in leaves
    assert (tmp_path / "checkpoint-2" / "other" / "adapter_config.json").exists()
    prompts = peft.get_peft_model(
        language_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    trainer, _ = made(tmp_path / "b", model=prompts, max_steps=2)
    trainer.train()
    leaves, _ = names(tmp_path / "b" / "checkpoint-2")
    assert [name for name in leaves if name.startswith("model/")] == ["model/prompt_encoder.default.embedding.weight"]


# Refusals


def test_what_is_no_trainer_or_is_attached_or_trains(tmp_path):
    with pytest.raises(sf.Invalid, match=r"attach\(Linear\): expected a transformers.Trainer"):
        integration.attach(torch.nn.Linear(1, 1))
    trainer, _ = made(tmp_path)
    with pytest.raises(sf.Invalid, match="attached already"):
        integration.attach(trainer)

    class Late(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            integration.attach(trainer)

    trainer, _ = made(tmp_path, attached=False, more={"callbacks": [Late()]})
    with pytest.raises(sf.Invalid, match="has begun to train: attach before train"):
        trainer.train()


REFUSED = {
    "deepspeed": (lambda t: setattr(t, "is_deepspeed_enabled", True), "shardfast.integrations.deepspeed"),
    "hub": (lambda t: setattr(t.args, "push_to_hub", True), 'hub_strategy="end"'),
    "nodes": (lambda t: setattr(t.args, "save_on_each_node", True), "save_on_each_node"),
    "lomo": (lambda t: setattr(t.args, "optim", "lomo"), 'optim="lomo"'),
    "galore": (lambda t: setattr(t.args, "optim", "galore_adamw_layerwise"), "steps in backward"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_options_that_are_refused(tmp_path, change, said):
    trainer, _ = made(tmp_path, attached=False)
    change(trainer)
    with pytest.raises(sf.Unsupported, match=said):
        integration.attach(trainer)
    assert "train" not in vars(trainer)
    trainer, _ = made(tmp_path)
    change(trainer)
    with pytest.raises(sf.Unsupported, match=said):
        trainer.train()


def test_all_that_is_refused_stands_in_one_error(tmp_path):
    trainer, _ = made(tmp_path, attached=False)
    trainer.args.push_to_hub = trainer.args.save_on_each_node = True
    with pytest.raises(sf.Unsupported, match=r"(?s)push_to_hub.*save_on_each_node"):
        integration.attach(trainer)
    trainer.args.save_on_each_node, trainer.args.hub_strategy = False, "end"
    integration.attach(trainer)


def test_a_trainer_with_own_ways_to_write(tmp_path):
    class Own(transformers.Trainer):
        def _save(self, output_dir=None, state_dict=None):
            pass

    with pytest.raises(sf.Unsupported, match=r"Own has methods of its own that write or read a checkpoint, _save,"):
        made(tmp_path, kind=Own)

    class Further(transformers.Seq2SeqTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", "further").touch()

    trainer, _ = made(tmp_path, attached=False)
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), max_steps=2, save_steps=2, report_to=[], use_cpu=True)
    trainer = Further(language_model(), args, train_dataset=Texts())
    integration.attach(trainer)
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "further").exists()
    assert committed(tmp_path) == ["checkpoint-2"]


def test_another_version_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(transformers, "__version__", "6.0.0")
    made(tmp_path)
    assert "transformers 6.0.0: shardfast was tried with 5.23.0" in caplog.text
    monkeypatch.setattr(transformers, "__version__", "5.9.1")
    with pytest.raises(sf.Unsupported, match=r"transformers 5\.9\.1: 5\.10\.0 is the oldest"):
        made(tmp_path)


def test_another_checkpoint_is_no_trainers(tmp_path):
    sf.save(tmp_path / "checkpoint-2" / "shardfast", {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(sf.Invalid, match="expected a checkpoint of a Trainer"):
        made(tmp_path)[0].train(resume_from_checkpoint=True)


# Loaders with a state


class Counted(Texts):
    """Writes down which samples are read."""

    def __init__(self, size=64):
        super().__init__(size)
        self.read = []

    def __getitem__(self, number):
        self.read.append(number)
        return super().__getitem__(number)


class WithState(transformers.Trainer):
    """Its loader is torchdata's, not prepared by accelerate."""

    def get_train_dataloader(self):
        return StatefulDataLoader(self.train_dataset, batch_size=2, shuffle=True)


def prepared_with_state(trainer):
    trainer.accelerator.dataloader_config.use_stateful_dataloader = True


LOADERS = {
    "torchdata's": (WithState, lambda trainer: None),
    "accelerate's": (transformers.Trainer, prepared_with_state),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("kind", "change"), LOADERS.values(), ids=LOADERS)
def test_a_loader_with_a_state_reads_no_old_sample(tmp_path, kind, change, every):
    """Epochs have 6 batches: saves are within them and at their ends."""
    options = {"kind": kind, "max_steps": 12 // every, "save_steps": 1, "gradient_accumulation_steps": every}
    data = Counted(12)
    trainer, watch = made(tmp_path, data=data, **options)
    change(trainer)
    trainer.train()
    expected, order, epochs = losses(trainer), data.read, [entry["epoch"] for entry in trainer.state.log_history]
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    for step in range(1, 12 // every):
        data = Counted(12)
        trainer, again = made(tmp_path, data=data, model=language_model(3), **options)
        change(trainer)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert differences(again.seen["begin"][1], watch.seen[step]) == []
        assert data.read == order[2 * every * step :], step
        assert losses(trainer) == expected, step
        assert [entry["epoch"] for entry in trainer.state.log_history] == epochs


@pytest.mark.parametrize("is_new", [False, True])
def test_a_loader_with_a_state_and_a_checkpoint_without_a_position(tmp_path, is_new):
    class Plain(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2)

    class Stateful(transformers.Trainer):
        def get_train_dataloader(self):
            return StatefulDataLoader(self.train_dataset, batch_size=2)

    trainer, _ = made(tmp_path, kind=Plain, attached=is_new)
    trainer.train()
    expected = losses(trainer)
    data = Counted()
    trainer, _ = made(tmp_path, kind=Stateful, data=data, model=language_model(2))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(trainer) == expected
    trainer, _ = made(tmp_path, kind=Stateful, data=(data := Counted()), model=language_model(2))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # which has one now
    assert losses(trainer) == expected
    assert data.read == [8, 9, 10, 11]
    trainer, _ = made(tmp_path, kind=Stateful, data=(data := Counted()), ignore_data_skip=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert data.read == [0, 1, 2, 3]


class Units(torch.utils.data.IterableDataset):
    """Samples, each of which is a unit of work."""

    def __init__(self, size, rank, ranks):
        self.size, self.left, self.mine, self.read = size, None, (rank, ranks), []

    def __iter__(self):
        if self.left is None:
            self.left = list(range(self.size))[self.mine[0] :: self.mine[1]]
        while self.left:
            number = self.left.pop(0)
            self.read.append(number)
            yield Texts()[number]
        self.left = None

    def state_dict(self):
        return {"replicated": {}, "units": [] if self.left is None else list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["units"])


class OfUnits(transformers.Trainer):
    def get_train_dataloader(self):
        return StatefulDataLoader(self.train_dataset, batch_size=1)


def with_units(rank, world, place, resume, steps):
    prepare(rank, world)
    data = Units(24, rank, world)
    trainer, _ = made(place, kind=OfUnits, data=data, stop=steps, max_steps=12, per_device_train_batch_size=1)
    trainer.train(resume_from_checkpoint=resume)
    return data.read, trainer.state.global_step


def test_units_are_dealt_out_in_another_world(ranks, tmp_path):
    first = [read for read, _ in ranks(2)(with_units, f"{tmp_path}", None, 4)]
    assert [len(read) for read in first] == [4, 4]
    rest = [read for read, _ in ranks(4)(with_units, f"{tmp_path}", True, 8)]
    assert sorted(itertools.chain(*first, *rest)) == list(range(24))


def test_loaders_whose_position_is_nobodys(tmp_path):
    trainer, _ = made(tmp_path, kind=WithState, enable_jit_checkpoint=False)
    trainer.args.enable_jit_checkpoint = True
    with pytest.raises(sf.Unsupported, match="enable_jit_checkpoint with a stateful data loader"):
        trainer.train()


# Models that are sharded as they are loaded


def sharded(rank, world, place, resume, stop):
    prepare(rank, world)
    if rank == 0 and not resume:
        language_model(dropout=0.0).save_pretrained(f"{place}/init")
    dist.barrier()
    model = transformers.LlamaForCausalLM.from_pretrained(
        f"{place}/init", distributed_config=DistributedConfig(fsdp_size=world)
    )
    with pytest.raises(ValueError, match="optimizer state cannot be checkpointed"):
        made(place, model=model, attached=False)
    trainer, watch = made(place, model=model, attached=False, save_only_model=True, stop=stop)
    integration.attach(trainer, save_only_model=False)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(next(iter(trainer.model.parameters())), DTensor)
    return losses(trainer), watch.seen


@OWN_RESUME
def test_a_model_that_is_sharded_by_its_configuration(ranks, tmp_path):
    expected, seen = ranks(2)(sharded, f"{tmp_path}", None, None)[0]
    found, again = ranks(2)(sharded, f"{tmp_path}", f"{tmp_path}/checkpoint-4", None)[0]
    assert found == expected
    assert differences(seen[4], again["begin"][1]) == []
    for _, other in ranks(3)(sharded, f"{tmp_path}", f"{tmp_path}/checkpoint-4", 5):
        assert other["begin"][0] == 4
        assert differences(seen[4], other["begin"][1]) == []
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert files == FILES


# The example


def test_the_example(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "trainer.py"), str(tmp_path / "run")]

    def run(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=200)
        return [line for line in done.stdout.splitlines() if line.startswith("step ")]

    first, second = run("--steps=20"), run("--steps=30")
    assert [line.split(":")[0] for line in first + second] == [f"step {number}" for number in range(1, 31)]
    assert directories.is_committed(tmp_path / "run" / "checkpoint-30")
    assert float(second[-1].split()[-1]) < float(first[0].split()[-1])
