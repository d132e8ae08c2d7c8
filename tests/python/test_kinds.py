"""Tensors of every kind, in every place and under every mode, through every verb: never the end of the process.

Each runs in a child, so that one that ends by a signal is a failure with its name.
"""

import contextlib
import importlib
import os
import warnings

import numpy as np
import pytest
import shardfast as sf
import torch
import torch.masked
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# What is imported when first used: once for all children, which are forked behind the import of this module.
for module in ("torch._dynamo", "shardfast.verbs", "shardfast.inspection", "shardfast.adapters.torch"):
    importlib.import_module(module)

SHAPE = (3, 4)


def plain():
    return torch.arange(12.0).reshape(SHAPE)


# Kinds


class Labelled(torch.Tensor):
    """A subclass that is its memory, as those of data sets are."""


class Silent(torch.Tensor):
    """A subclass that lets nothing be done with it."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        raise RuntimeError("Silent tensors say nothing")


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return NotImplemented


def resized(size):
    tensor = plain()
    tensor.untyped_storage().resize_(size)
    return tensor


def mapped(mode):
    path = f"/dev/shm/shardfast-kinds-{os.getpid()}.npy"
    np.save(path, plain().numpy())
    array = np.load(path, mmap_mode=mode)
    os.remove(path)
    return array


def read_only(array):
    array.flags.writeable = False
    return array


EXPECTED = plain().tolist()


def made_in(context, make=plain):
    with context:
        return make()


def module_of(tensor):
    module = nn.Module()
    module.register_buffer("t", tensor)
    return module


def scripted():
    return next(torch.jit.script(nn.Linear(4, 3, bias=False)).parameters())


# What makes it, and what is said when it is saved and when it is loaded into: nothing where that works.
KINDS = {
    "ordinary": (plain, "", ""),
    "parameter": (lambda: nn.Parameter(plain()), "", ""),
    "buffer": (lambda: nn.Buffer(plain()), "", ""),
    "of a scripted module": (scripted, "", ""),
    "shared memory": (lambda: plain().share_memory_(), "", ""),
    "inference": (lambda: made_in(torch.inference_mode()), "", ""),
    "transposed": (lambda: torch.arange(12.0).reshape(4, 3).t(), "", ""),
    "negated view": (lambda: torch.complex(torch.zeros(SHAPE), -plain()).conj().imag, "", ""),
    "a part of another": (lambda: torch.zeros(9, 9)[2:5, 1:5], "", ""),
    "meta": (lambda: torch.empty(SHAPE, device="meta"), "meta device", "meta device"),
    "fake": (lambda: FakeTensorMode().from_tensor(plain()), "FakeTensor", "FakeTensor"),
    "masked": (lambda: torch.masked.masked_tensor(plain(), plain() > 3), "MaskedTensor", "MaskedTensor"),
    "nested": (lambda: torch.nested.nested_tensor([plain(), plain()]), "nested tensor", "nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([plain(), plain()], layout=torch.jagged),
        "nested tensor|NestedTensor",
        "nested tensor|NestedTensor",
    ),
    "sparse": (lambda: plain().to_sparse(), "sparse_coo", "sparse_coo"),
    "compressed": (lambda: plain().to_sparse_csr(), "sparse_csr", "sparse_csr"),
    "mkldnn": (lambda: plain().to_mkldnn(), "_mkldnn", "_mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8),
        "quantized tensor|qint8",
        "quantized tensor|qint8",
    ),
    "freed": (lambda: resized(0), "has 0 bytes and needs 48", "has 0 bytes and needs 48"),
    "shrunk": (lambda: resized(40), "has 40 bytes and needs 48", "has 40 bytes and needs 48"),
    "expanded": (lambda: torch.zeros(1, 4).expand(SHAPE), "", "share memory"),
    "overlapping": (lambda: torch.zeros(6).as_strided(SHAPE, (1, 1)), "", "share memory"),
    "mapped to be read": (lambda: torch.from_numpy(mapped("r")), "", "read-only memory"),
    "mapped to be written": (lambda: torch.from_numpy(mapped("r+")), "", ""),
    "mapped privately": (lambda: torch.from_numpy(mapped("c")), "", ""),
    "lazy": (nn.parameter.UninitializedParameter, "no shape yet", "no shape yet"),
    "subclass": (lambda: plain().as_subclass(Labelled), "", ""),
    "raising": (lambda: plain().as_subclass(Silent), "Silent", "Silent"),
    "dispatching": (
        lambda: torch.Tensor._make_subclass(Dispatching, plain()),
        "__torch_dispatch__",
        "__torch_dispatch__",
    ),
    "wrapping": (
        lambda: torch.Tensor._make_wrapper_subclass(Dispatching, SHAPE, dtype=torch.float32),
        "__torch_dispatch__",
        "__torch_dispatch__",
    ),
    "of no elements": (lambda: torch.empty(0, 4), "", "shape|where the state has"),
    "array": (lambda: plain().numpy().copy(), "", ""),
    "array over a tensor": (lambda: plain().numpy(), "", ""),
    "array that is read-only": (lambda: read_only(plain().numpy().copy()), "", "read-only"),
    "array mapped to be read": (lambda: mapped("r"), "", "read-only"),
    "array over what is mapped to be read": (lambda: torch.from_numpy(mapped("r")).numpy(), "", "read-only"),
    "array mapped privately": (lambda: mapped("c"), "", ""),
    "array that overlaps": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), SHAPE, (4, 4)),
        "",
        "share memory",
    ),
    "array backwards": (lambda: np.zeros(SHAPE, np.float32)[::-1, ::-1], "", ""),
    "array of the other byte order": (lambda: np.zeros(SHAPE, ">f4"), "", ""),
    "array unaligned": (lambda: np.frombuffer(bytearray(49), np.float32, offset=1).reshape(SHAPE), "", ""),
}

# The same, of what exists inside a transform only: each calls ``use`` there.
INSIDE = {
    "vmap": lambda use: torch.vmap(lambda x: (use(x), x)[1])(torch.ones(2, *SHAPE)),
    "grad": lambda use: torch.func.grad(lambda x: (use(x), x.sum())[1])(plain()),
    "jvp": lambda use: torch.func.jvp(lambda x: (use(x), x)[1], (plain(),), (plain(),)),
    "functionalize": lambda use: torch.func.functionalize(lambda x: (use(x), x + 1)[1])(plain()),
}


# A place in a state for a tensor, and what is called so there.
PLACES = {
    "entry": (lambda tensor: {"w": {"t": tensor}}, "w.t|w/t"),
    "beside values": (lambda tensor: {"w": {"t": tensor, "n": 1}}, "w.t|w/t"),
    "tree": (lambda tensor: {"w": {"a": {"t": tensor}}}, "w.a.t|w/a.t"),
    "list": (lambda tensor: {"w": {"t": [tensor, 1]}}, "w.t|w/t"),
    "per rank": (lambda tensor: {"w": {"t": sf.PerRank({"a": tensor})}}, "w.t|w/t"),
    "module": (lambda tensor: {"w": module_of(tensor)}, "w.t|w/t"),
}


REPLACED = ("list", "per rank")
"""Places inside of values, where a load puts new tensors in place of what cannot be filled."""


def outcome(call):
    """Nothing, or the kind of error and its text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def through_verbs(tensor, place):
    """What each verb says of a tensor in a place; it is loaded from where an ordinary one was saved."""
    make, _ = PLACES[place]
    state = make(tensor)
    like = f"memory://kinds/{place}/{'array' if isinstance(tensor, np.ndarray) else 'tensor'}"
    said = {
        "save": outcome(lambda: sf.save(f"memory://kinds/{place}/save", state)),
        "save_async": outcome(lambda: sf.save_async(f"memory://kinds/{place}/async", state).committed()),
        "plan_load": outcome(lambda: sf.plan_load(like, state)),
        "load": outcome(lambda: sf.load(like, state)),
        "cast": "",
    }
    is_filled = not said["load"] and place not in REPLACED
    said["values"] = "" if not is_filled or tensor.tolist() == EXPECTED else str(tensor)
    if place in ("entry", "tree", "module"):
        said["cast"] = outcome(lambda: sf.load(f"{like}/double", make(tensor), cast=True))
    return said


def used_in_child(kind):
    warnings.simplefilter("ignore")
    for place, (make, _) in PLACES.items():
        for name, like in {"tensor": plain(), "array": plain().numpy().copy()}.items():
            if place != "module" or name == "tensor":
                sf.save(f"memory://kinds/{place}/{name}", make(like))
                double = like.double() if name == "tensor" else like.astype(np.float64)
                sf.save(f"memory://kinds/{place}/{name}/double", make(double))
    found = {}
    for place in PLACES:
        if kind in INSIDE:
            INSIDE[kind](lambda x, place=place: found.update({place: through_verbs(x, place)}))
            continue
        tensor = KINDS[kind][0]()
        if place != "module" or isinstance(tensor, torch.Tensor):
            found[place] = through_verbs(tensor, place)
    return found


def check(said, expected, names, why):
    if not expected:
        assert said == "", why
        return
    kind, _, text = said.partition(": ")
    assert kind in ("Invalid", "Unsupported"), f"{why}: {said}"
    assert any(name in text for name in expected.split("|")), f"{why}: {said}"
    assert any(name in text for name in names.split("|")), f"{why}: the leaf is not named: {said}"


@pytest.mark.parametrize("kind", [*KINDS, *INSIDE])
def test_a_tensor_of_any_kind_is_stored_or_refused_by_name(alone, kind):
    saves, loads = KINDS[kind][1:] if kind in KINDS else ("transform", "transform")
    for place, said in alone(used_in_child, kind).items():
        names = PLACES[place][1]
        is_less = kind == "subclass" and place in REPLACED
        for verb in ("save", "save_async"):
            expected = "come back as a plain tensor" if is_less else saves
            check(said[verb], expected, names, f"{verb}, {place}: {said[verb]}")
        check(said["plan_load"], "", names, f"plan_load, {place}: {said['plan_load']}")
        is_replaced = place in REPLACED and (kind in KINDS or not said["load"])  # inside of some by wrapped ones, too
        check(said["load"], "" if is_replaced else loads, names, f"load, {place}: {said['load']}")
        check(said["values"], "", names, f"{place}: {said['values']}")
        if place in ("entry", "tree", "module"):
            check(said["cast"], loads, names, f"cast, {place}: {said['cast']}")


# Modes


class Function(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def default(set_to, get, value):
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


MODES = {
    "default device meta": lambda: default(torch.set_default_device, torch.get_default_device, "meta"),
    "device meta": lambda: torch.device("meta"),
    "default dtype": lambda: default(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "function mode": Function,
    "dispatch mode": Dispatch,
    "fake tensors": FakeTensorMode,
    "deterministic": lambda: default(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "anomaly detection": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu"),
}


def built(seed=0, capturable_rate=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    rate = torch.tensor(0.5 + seed) if capturable_rate else 0.5 + seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    return model, optimizer


def trained(model, optimizer):
    model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    optimizer.step()


def flat(model, optimizer, extra):
    found = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value.tolist() for name, value in entries.items()}
    found |= {name: value.tolist() for name, value in extra.items()}
    return {**found, "lr": float(optimizer.param_groups[0]["lr"])}


def loaded(url, state):
    return outcome(lambda: sf.plan_load(url, state)) or outcome(lambda: sf.load(url, state))


def under_mode(mode, directory):
    """Saves and loads under a mode, and outside of it what is not done under it; what was lost on the way."""
    warnings.simplefilter("ignore")
    model, optimizer = built(0, True)
    trained(model, optimizer)
    extra = {"t": torch.arange(3.0), "big": torch.arange(400_000.0), "count": torch.tensor(7)}
    state = {"model": model, "optimizer": optimizer, "extra": {**extra, "text": "a"}}
    wanted, said = flat(model, optimizer, extra), {}
    sf.save(f"{directory}/outside", state)
    with MODES[mode]():
        said["save"] = outcome(lambda: sf.save(f"{directory}/save", state))
        said["save_async"] = outcome(lambda: sf.save_async(f"{directory}/async", state).committed())
    wrong = []
    for name in [name for name in ("outside", "save", "async") if os.path.exists(f"{directory}/{name}/COMMIT")]:
        for inside in (True, False):
            other, others = built(1, True)
            empty = {"t": None, "big": torch.zeros(400_000), "count": torch.tensor(0), "text": None}
            with MODES[mode]() if inside else contextlib.nullcontext():
                failed = loaded(f"{directory}/{name}", {"model": other, "optimizer": others, "extra": empty})
            said[f"load {name} {inside}"] = failed
            if not failed:
                empty.pop("text")
                if flat(other, others, empty) != wanted:
                    wrong.append(f"{name} {inside}: {flat(other, others, empty)}")
                trained(other, others)  # what was made can be trained with, outside of the mode

    def look():
        with sf.mapped(f"{directory}/outside") as found:
            return found["extra/big"].sum().item(), found["model/0.weight"].tolist(), found.value("extra/count")

    with MODES[mode]():
        said["mapped"] = outcome(look)
    return said, wrong


@pytest.mark.parametrize("mode", MODES)
def test_saves_and_loads_do_not_depend_on_modes(alone, tmp_path, mode):
    """But where a mode gives no memory to anything: there a load that needs some is refused."""
    said, wrong = alone(under_mode, mode, str(tmp_path))
    assert wrong == []
    for what, text in said.items():
        if text:
            assert mode == "fake tensors", f"{what}: {text}"
            assert "FakeTensor" in text, f"{what}: {text}"
