"""All that an optimizer says of itself comes back, or a save refuses it by name: wrappers, hooks, own methods, odd keys
and shapes of state, parameters of two optimizers, and numbers that begin equal on all ranks."""

import pytest
import shardfast as sf
import torch
from older import AVERAGED
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(8, 4)


def step(model, optimizer, count=3):
    for number in range(count):
        torch.manual_seed(number)
        model(torch.randn(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def momentum(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def held(optimizer):
    return {"optimizer": optimizer}


class Around(Optimizer):
    """Counts its steps, and says so beside the state of what is inside."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

    def step(self, closure=None):
        self.count += 1
        self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"inside": self.optimizer.state_dict(), "own": {"count": self.count, "pair": (self.count, [None, "a"])}}

    def load_state_dict(self, said):
        self.optimizer.load_state_dict(said["inside"])
        self.count = said["own"]["count"]
        assert said["own"]["pair"] == (self.count, [None, "a"])
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class Further(Around):
    pass


class Third(Around):
    def state_dict(self):
        return {**self.optimizer.state_dict(), "count": self.count, "name": "third"}

    def load_state_dict(self, said):
        self.count = said.pop("count")
        self.optimizer.load_state_dict(said)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def wrapped(model, depth):
    optimizer = momentum(model)
    for kind in (Around, Further, Third)[:depth]:
        optimizer = kind(optimizer)
    return optimizer


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plain_values_of_wrappers_come_back_through_their_own_load(tmp_path, depth):
    model = net()
    optimizer = wrapped(model, depth)
    for number in range(2):  # the second save finds the state described
        step(model, optimizer)
        sf.save(tmp_path / f"{number}", {"model": model, **held(optimizer)})
    into = net(1)
    other = wrapped(into, depth)
    if depth == 2:
        step(into, other, 1)
    sf.load(tmp_path / "1", {"model": into, **held(other)})
    one, two = optimizer, other
    for _ in range(depth):
        assert one.count == two.count == 6
        one, two = one.optimizer, two.optimizer
    step(model, optimizer)
    step(into, other)
    assert torch.equal(model.weight, into.weight)
    with pytest.raises(sf.Invalid, match=r"missing|unexpected"):
        sf.load(tmp_path / "1", {"model": into, **held(momentum(into))})


class Forgetful(Around):
    def load_state_dict(self, said):
        self.optimizer.load_state_dict(said["inside"])


def test_a_value_that_is_not_taken_back_is_an_error_of_the_load(tmp_path):
    model = net()
    optimizer = Forgetful(momentum(model))
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    into = net(1)
    with pytest.raises(sf.Invalid, match=r"load_state_dict\(\) of a \S+Forgetful does not take own\.count: it is 0"):
        sf.load(tmp_path / "one", {"model": into, **held(Forgetful(momentum(into)))})


class Alike(SGD):
    """Says a number of its own, which the state may have, too."""

    def __init__(self, parameters, count, place):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.place = count, place

    def state_dict(self):
        said = super().state_dict()
        (said if self.place == "top" else said["state"])["count"] = self.count
        return said

    def load_state_dict(self, said):
        if self.place == "top":
            self.count = said["count"]
        super().load_state_dict({"state": said["state"], "param_groups": said["param_groups"]})


def test_a_number_that_the_state_has_too_is_not_taken_for_it(tmp_path):
    model = net()
    optimizer = Alike(model.parameters(), 1, "top")
    step(model, optimizer)
    optimizer.state["steps"] = 1
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    other = Alike(model.parameters(), 0, "top")
    sf.load(tmp_path / "one", {"model": model, **held(other)})
    assert other.count == 1 and other.state["steps"] == 1


@pytest.mark.parametrize(("saved", "here"), [(1, 0), (0.0, -0.0), (1, True), (1, 1.0), (float("nan"), 0.0)])
def test_a_number_that_hides_one_of_the_state_is_refused_if_it_is_another_after_the_load(tmp_path, saved, here):
    model = net()
    optimizer = Alike(model.parameters(), saved, "state")
    step(model, optimizer)
    optimizer.state["count"] = saved
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    other = Alike(model.parameters(), here, "state")
    other.state["count"] = here
    with pytest.raises(sf.Invalid, match=r"optimizer: a \S+Alike says .* beside its state after the load, and {} in"):
        sf.load(tmp_path / "one", {"model": model, **held(other)})
    other.count = saved
    sf.load(tmp_path / "one", {"model": model, **held(other)})


class Copying(SGD):
    """Says a tensor among its state, which loads as if it were state."""

    count = torch.zeros(())

    def state_dict(self):
        said = super().state_dict()
        return {**said, "state": {**said["state"], "count": self.count}}


def test_what_is_said_among_the_state_does_not_become_state_by_a_load(tmp_path):
    model = net()
    inside, other = (Copying(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    step(model, inside)
    inside.count = torch.tensor(3.0)
    inside.state["steps"] = torch.tensor(3.0)
    other.state["steps"] = torch.tensor(0.0)
    sf.save(tmp_path / "one", {"model": model, **held(Forwarding(inside))})
    with pytest.raises(sf.Invalid, match=r"has a tensor of shape \(\) under state\.count"):
        sf.load(tmp_path / "one", {"model": model, **held(Forwarding(other))})


class Forwarding(Around):
    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, said):
        self.optimizer.load_state_dict(said)


class Hiding(SGD):
    """Says its own number in the place of one of its group."""

    weight = 0.0

    def state_dict(self):
        said = super().state_dict()
        return {**said, "param_groups": [{**group, "weight": self.weight} for group in said["param_groups"]]}


def test_a_number_that_hides_one_of_the_group_is_told_apart_by_its_sign(tmp_path):
    model = net()
    optimizer, other = Hiding(model.parameters(), lr=0.1), Hiding(model.parameters(), lr=0.1)
    optimizer.weight = optimizer.param_groups[0]["weight"] = -0.0
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    other.param_groups[0]["weight"] = 0.0
    with pytest.raises(sf.Invalid, match=r"Hiding has a parameter group that is not one of its param_groups"):
        sf.load(tmp_path / "one", {"model": model, **held(other)})


@pytest.mark.parametrize("count", [float("nan"), -0.0, 2**70, (1, [None, float("inf")])])
def test_any_number_of_a_wrapper_comes_back(tmp_path, count):
    model = net()
    optimizer = Alike(model.parameters(), count, "top")
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    other = Alike(model.parameters(), 0, "top")
    sf.load(tmp_path / "one", {"model": model, **held(other)})
    assert repr(other.count) == repr(count)


class Sums(Around):
    """Says tensors that are in no state."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.sums = [torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self):
        return {**self.optimizer.state_dict(), "sums": self.sums}


class Box:
    def __init__(self, optimizer):
        self.optimizer = optimizer


class Boxed(Around):
    """Holds the optimizer inside in an object."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.box, self.state = Box(self.optimizer), {}
        del self.optimizer

    def step(self, closure=None):
        self.box.optimizer.step()

    def zero_grad(self, set_to_none=True):
        self.box.optimizer.zero_grad()

    def state_dict(self):
        return {"state": {}, "param_groups": []}


class BoxedAround(Boxed):
    """Holds in an object an optimizer that has no state of its own, around one that has."""

    def __init__(self, optimizer):
        super().__init__(Boxed(Around(optimizer)))


class Empty(Around):
    """Says a tensor without elements that is in no state."""

    def state_dict(self):
        return {**self.optimizer.state_dict(), "none": torch.zeros(0, dtype=torch.float64)}


class Hooked(SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.register_state_dict_post_hook(lambda optimizer, said: {**said, "more": 3})


class Inside(SGD):
    def state_dict(self):
        said = super().state_dict()
        said["state"]["more"] = 3
        return said


class Group(SGD):
    def state_dict(self):
        said = super().state_dict()
        return {**said, "param_groups": [{**group, "more": 3} for group in said["param_groups"]]}


class Average:
    def __init__(self):
        self.sum = torch.ones(3)

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, said):
        self.sum = said["sum"]


class Averaging(Around):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.average = Average()


REFUSED = [
    (lambda model: Sums(momentum(model)), r"Sums has a tensor of shape \(4, 8\) under sums\.0, and it is not in the"),
    (lambda model: Boxed(momentum(model)), r"Boxed holds a \S+SGD that steps the same parameters in .* its \.box"),
    (
        lambda model: BoxedAround(momentum(model)),
        r"BoxedAround holds a \S+Boxed that steps the same parameters in .* its \.box",
    ),
    (lambda model: Empty(momentum(model)), r"Empty has a tensor of shape \(0,\) under none, and it is not in the"),
    (lambda model: Hooked(model.parameters()), r"Hooked has 3, which its load_state_dict\(\) ignores under more,"),
    (lambda model: Inside(model.parameters(), lr=0.1, momentum=0.9), r"Inside has 3, which .* under state\.more,"),
    (lambda model: Group(model.parameters(), lr=0.1), r"Group has a parameter group that is not one of its param"),
    (
        lambda model: Averaging(momentum(model)),
        r"Averaging holds a \S+Average as \.average, whose state its state_dict",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_save_would_leave_out_is_refused(tmp_path, number):
    make, said = REFUSED[number]
    model = net()
    optimizer = make(model)
    step(model, optimizer)
    for given in (optimizer, [optimizer], Around(optimizer)):
        with pytest.raises(sf.Invalid, match=rf"optimizer: .*{said}"):
            sf.save(tmp_path / "one", {"model": model, **held(given)})
    assert not (tmp_path / "one" / "COMMIT").exists()


def test_an_object_that_stands_in_the_state_too_is_saved_there(tmp_path):
    model = net()
    optimizer = Averaging(momentum(model))
    step(model, optimizer)
    optimizer.average.sum *= 5
    sf.save(tmp_path / "one", {"model": model, **held(optimizer), "average": optimizer.average})
    other = Averaging(momentum(model))
    sf.load(tmp_path / "one", {"model": model, **held(other), "average": other.average})
    assert torch.equal(other.average.sum, torch.full((3,), 5.0)) and other.count == 3


def test_a_hook_that_is_added_between_two_saves_is_noticed(tmp_path):
    model = net()
    optimizer = momentum(model)
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    optimizer.register_state_dict_post_hook(lambda optimizer, said: {**said, "more": 3})
    with pytest.raises(sf.Invalid, match=r"SGD has 3, which its load_state_dict\(\) ignores under more"):
        sf.save(tmp_path / "two", {"model": model, **held(optimizer)})


# Own methods


class Cached(SGD):
    """Steps with what it computes from its state when that is loaded."""

    cache = None

    def refresh(self):
        self.cache = {p: float(of["momentum_buffer"].norm()) for p, of in self.state.items()}

    def load_state_dict(self, said):
        super().load_state_dict(said)
        self.refresh()

    def step(self, closure=None):
        super().step(closure)
        self.refresh()


class Restoring(Cached):
    load_state_dict = Optimizer.load_state_dict

    def __setstate__(self, state):
        super().__setstate__(state)
        self.refresh()


@pytest.mark.parametrize("kind", [Cached, Restoring])
def test_an_optimizers_own_load_runs(tmp_path, kind):
    model, into = net(), net(1)
    optimizer, other = (kind(one.parameters(), lr=0.1, momentum=0.9) for one in (model, into))
    step(model, optimizer)
    hooked = []
    other.register_load_state_dict_post_hook(hooked.append)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    sf.load(tmp_path / "one", {"model": into, **held(other)})
    assert sorted(other.cache.values()) == sorted(optimizer.cache.values())
    assert hooked == [other], "once"


class Packed(SGD):
    """Packs the tensors of each parameter in what it says, in the order in which its state was made."""

    def step(self, closure=None):
        super().step(closure)
        for entries in self.state.values():
            entries["count"] = entries.get("count", 0) + 1

    def state_dict(self):
        said = super().state_dict()
        tensors = {
            number: {name: one for name, one in entries.items() if name != "count"}
            for number, entries in said["state"].items()
        }
        return {**said, "state": {n: {"of": tensors[n], "count": one["count"]} for n, one in said["state"].items()}}

    def load_state_dict(self, said):
        state = {number: {**entries["of"], "count": entries["count"]} for number, entries in said["state"].items()}
        super().load_state_dict({**said, "state": state})


def test_the_order_in_which_state_was_made_is_no_part_of_what_is_said(tmp_path):
    model, into = net(), net(1)
    optimizer, other = (Packed(one.parameters(), lr=0.1, momentum=0.9) for one in (model, into))
    step(model, optimizer)
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    sf.load(tmp_path / "one", {"model": into, **held(other)})
    assert next(iter(optimizer.state)) is model.weight and next(iter(other.state)) is into.bias
    assert all(entries["count"] == 3 for entries in other.state.values())
    assert torch.equal(other.state[into.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


class Precise(Optimizer):
    """Has moments of a higher precision than its parameters, which PyTorch's own load does not keep."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.loads = 0

    def load_state_dict(self, said):
        super().load_state_dict(said)
        self.loads += 1

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros(parameter.shape))
            moment.mul_(0.9).add_(parameter.grad)
            parameter.add_(moment, alpha=-0.1)


def test_state_is_what_was_loaded_whatever_an_own_load_casts(tmp_path):
    model, into = net().bfloat16(), net(1).bfloat16()
    optimizer, other = Precise(model.parameters()), Precise(into.parameters())
    for _ in range(3):
        model(torch.randn(2, 8).bfloat16()).square().sum().backward()
        optimizer.step()
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    sf.load(tmp_path / "one", {"model": into, **held(other)})
    moment = other.state[into.weight]["moment"]
    assert other.loads == 1 and moment.dtype is torch.float32
    assert torch.equal(moment, optimizer.state[model.weight]["moment"])
    # Also if a cast changes no value.
    for parameter in model.parameters():
        optimizer.state[parameter]["moment"] = torch.ones_like(parameter, dtype=torch.float32)
    sf.save(tmp_path / "ones", {"model": model, **held(optimizer)})
    sf.load(tmp_path / "ones", {"model": into, **held(other)})
    assert other.state[into.weight]["moment"].dtype is torch.float32


# Who owns a parameter


class Switch(Optimizer):
    """Hands over from one optimizer to another one."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.adam, self.sgd = AdamW(parameters, lr=0.1), SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(parameters, {})

    def step(self, closure=None):
        self.adam.step()
        self.sgd.step()


def test_two_optimizers_of_one_parameter_are_refused_under_one_key(tmp_path):
    model = net()
    adam, sgd = AdamW(model.parameters()), momentum(model)
    step(model, adam)
    step(model, sgd)
    both = Switch(model.parameters())
    step(model, both)
    said = r"optimizer: 'weight' belongs to two of its optimizers, a \S+AdamW and a \S+SGD, .*under a key of its own"
    for given in ([adam, sgd], both):
        with pytest.raises(sf.Invalid, match=said):
            sf.save(tmp_path / "one", {"model": model, "optimizer": given})
    sf.save(tmp_path / "one", {"model": model, "adam": adam, "sgd": sgd})
    into = net(1)
    first, second = AdamW(into.parameters()), momentum(into)
    sf.load(tmp_path / "one", {"model": into, "adam": first, "sgd": second})
    assert torch.equal(first.state[into.weight]["exp_avg"], adam.state[model.weight]["exp_avg"])
    assert torch.equal(second.state[into.weight]["momentum_buffer"], sgd.state[model.weight]["momentum_buffer"])


# Keys and shapes of state


class Under(Optimizer):
    """Keeps its moments under a key that is given to it."""

    def __init__(self, parameters, key, make=torch.zeros_like):
        super().__init__(parameters, {"lr": 0.01})
        self.key, self.make = key, make

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state[self.key] = state.get(self.key, torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(state[self.key], alpha=0.01)


@pytest.mark.parametrize("key", [0, ("m", 1), None, b"m"])
def test_state_under_what_is_no_text_is_refused(tmp_path, key):
    model = net()
    optimizer = Under(model.parameters(), key)
    step(model, optimizer)
    with pytest.raises(sf.Invalid, match=r"optimizer: a \S+Under has state under .*, which is no text"):
        sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    optimizer = momentum(model)
    optimizer.state[key] = 3
    with pytest.raises(sf.Invalid, match=r"optimizer: a \S+SGD has state under .*, which is no text"):
        sf.save(tmp_path / "one", {"model": model, **held(optimizer)})


@pytest.mark.parametrize("key", ["a.b", "a%2Eb", "%", "a.", ".a", "weight.m"])
def test_a_dot_in_a_states_name_is_part_of_the_name(tmp_path, key):
    model = net()
    optimizer = Under(model.parameters(), key)
    step(model, optimizer)
    optimizer.state.update({"": None, "a": 1, key: torch.ones(3), "..": torch.ones(())})
    sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    into = net(1)
    other = Under(into.parameters(), key)
    for _ in range(2):  # into an optimizer without state, and into one that has some
        sf.load(tmp_path / "one", {"model": into, **held(other)})
        assert list(other.state[into.weight]) == [key]
        assert torch.equal(other.state[into.weight][key], optimizer.state[model.weight][key])
        assert (other.state[""], other.state["a"], float(other.state[".."])) == (None, 1, 1.0)
        assert torch.equal(other.state[key], torch.ones(3))
        step(into, other)
    stale = Under(into.parameters(), "other.name")
    step(into, stale)
    sf.load(tmp_path / "one", {"model": into, **held(stale)})
    assert list(stale.state[into.weight]) == [key]


def test_state_of_another_tensor_or_in_no_dict_is_refused(tmp_path):
    model = net()
    optimizer = momentum(model)
    assert not optimizer.state[torch.zeros(7)], "to ask for it makes an entry"
    sf.save(tmp_path / "none", {"model": model, **held(optimizer)})
    optimizer.state[torch.zeros(7)] = {"m": torch.zeros(7)}
    with pytest.raises(sf.Invalid, match=r"SGD has state of a tensor of shape \(7,\) that is in none of its groups"):
        sf.save(tmp_path / "one", {"model": model, **held(optimizer)})
    optimizer = momentum(model)
    optimizer.state[model.weight] = [torch.zeros(4, 8)]
    with pytest.raises(sf.Invalid, match=r"SGD has a list as the state of a parameter of shape \(4, 8\): expected a"):
        sf.save(tmp_path / "one", {"model": model, **held(optimizer)})


class History(Optimizer):
    """Keeps its last gradients in a list, zeros at first, and a norm of what this rank holds."""

    def __init__(self, parameters, is_list):
        super().__init__(parameters, {"lr": 0.01})
        self.is_list = is_list

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            state = self.state[parameter]
            if self.is_list:
                last = state.get("last", [torch.zeros_like(gradient)] * 2)
                state["last"] = [last[1], gradient.clone() if state else last[1].clone()]
            else:
                state["scale"] = gradient.norm() if state else torch.ones(())


def wide(kind):
    torch.manual_seed(0)
    model = nn.Linear(520, 520, bias=False)
    if kind == "fsdp2":
        return fully_shard(model, **AVERAGED)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return FSDP(model, use_orig_params=kind == "fsdp1 orig", device_id=torch.device("cpu"))


def train(rank, model, optimizer, number):
    torch.manual_seed(number * 2 + rank)
    model(torch.randn(4, 520)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_lists(rank, world, url):
    for kind in ("fsdp2", "fsdp1 orig", "fsdp1 flat"):
        model = wide(kind)
        optimizer = History(model.parameters(), is_list=True)
        train(rank, model, optimizer, 0)
        with pytest.raises(sf.Invalid, match=r"\.last is a list that holds tensors, and its parameter is sharded"):
            sf.save(f"{url}/{kind}", {"model": model, **held(optimizer)})
    model = wide("ddp")
    optimizer = History(model.parameters(), is_list=True)
    for number in range(3):
        train(rank, model, optimizer, number)
        sf.save(f"{url}/ddp{number}", {"model": model, **held(optimizer)})
    into = wide("ddp")
    other = History(into.parameters(), is_list=True)
    sf.load(f"{url}/ddp2", {"model": into, **held(other)})
    one, two = (of.state[next(iter(of.state))]["last"] for of in (optimizer, other))
    assert len(one) == len(two) == 2 and all(map(torch.equal, one, two))
    optimizer.state[next(iter(optimizer.state))]["last"][1].add_(rank)
    with pytest.raises(sf.Invalid, match=r"last\.1.* differ, by their CRC-64"):
        sf.save(f"{url}/ddp3", {"model": model, **held(optimizer)})


def test_tensors_in_lists_are_refused_where_shards_would_mix(ranks, tmp_path):
    ranks(2)(check_lists, f"{tmp_path}")


def check_numbers(rank, world, url):
    for kind in ("fsdp2", "fsdp1 orig", "fsdp1 flat"):
        model = wide(kind)
        optimizer = History(model.parameters(), is_list=False)
        train(rank, model, optimizer, 0)
        sf.save(f"{url}/{kind}/0", {"model": model, **held(optimizer)})
        train(rank, model, optimizer, 1)
        with pytest.raises(sf.Invalid, match=r"scale.* differ, by their CRC-64"):
            sf.save(f"{url}/{kind}/1", {"model": model, **held(optimizer)})


def test_numbers_of_shards_that_begin_equal_are_compared_at_every_save(ranks, tmp_path):
    ranks(2)(check_numbers, f"{tmp_path}")


class Tracker:
    def __init__(self, count):
        self.sum = torch.zeros(count)

    def state_dict(self):
        return {"sum": self.sum, "count": 1}

    def load_state_dict(self, said):
        self.sum = said["sum"]


def check_tracker(rank, world, url):
    for count in (10, 300_000):
        tracker = Tracker(count)
        sf.save(f"{url}/{count}/0", {"tracker": tracker})
        tracker.sum = torch.full((count,), rank + 1.0)
        with pytest.raises(sf.Invalid, match=r"tracker/value\.sum.* differ, by their CRC-64"):
            sf.save(f"{url}/{count}/1", {"tracker": tracker})
        tracker.sum = torch.full((count,), 7.0)
        sf.save(f"{url}/{count}/2", {"tracker": tracker})


def test_an_objects_tensor_that_begins_equal_is_compared_at_every_save(ranks, tmp_path):
    ranks(2)(check_tracker, f"{tmp_path}")


def check_local_steps(rank, world, url):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def made():
        model = net()
        return model, PostLocalSGDOptimizer(momentum(model), PeriodicModelAverager(period=2, warmup_steps=1))

    model, optimizer = made()
    step(model, optimizer)
    sf.save(url, {"model": model, **held(optimizer)})
    into, other = made()
    sf.load(url, {"model": into, **held(other)})
    assert other.averager.step == optimizer.averager.step == 3


def test_the_step_of_an_averager_comes_back(ranks, tmp_path):
    ranks(2)(check_local_steps, f"{tmp_path}/one")
