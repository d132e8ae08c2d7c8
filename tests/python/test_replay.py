"""Replays of optimizers' steps against the steps of PyTorch on this processor, bit for bit: no bit may differ."""

import itertools
import math
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from older import IS_OLDER

pytestmark = pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels")

ROOT = Path(__file__).resolve().parents[2]
STEPS = int(os.environ.get("SHARDFAST_REPLAY_STEPS", "30"))
"""Steps of a usual run; a campaign sets more."""

NUMELS = [*range(1, 34), 200, 1013]

Row = list[float]
Tensors = list[torch.Tensor]


@pytest.fixture(scope="session")
def replay() -> Callable:
    return replayer()


def replayer() -> Callable:
    """``replay(variant, rows, tensors, gradients, ...)``: arrays of each tensor after each pass."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "shardfast-optim"]
    subprocess.run([*command, "--example", "replay"], cwd=ROOT, check=True)

    def call(variant: str, rows: list[Row], arrays: list[Tensors], gradients: list[Tensors], *, of_pass: int,
             block: int = 1 << 40, factor: float | None = None) -> list[Tensors]:  # fmt: skip
        numels = [tensors[0].numel() for tensors in arrays]
        dtype = "BF16" if gradients[0][0].dtype == torch.bfloat16 else "F32"
        arguments = [variant, dtype, "-" if factor is None else repr(factor), str(of_pass), str(block)]
        parts = [struct.pack("<Q", len(rows)), *(struct.pack(f"<{len(row)}d", *row) for row in rows)]
        parts += [raw(tensor) for tensors in arrays for tensor in tensors]
        parts += [raw(tensor) for tensors in gradients for tensor in tensors]
        program = [target / "release" / "examples" / "replay", *arguments, ",".join(map(str, numels))]
        done = subprocess.run(program, input=b"".join(parts), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return list(unpacked(done.stdout, arrays, math.ceil(len(rows) / of_pass)))

    return call


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def unpacked(data: bytes, arrays: list[Tensors], passes: int) -> Iterator[Tensors]:
    """The arrays of all tensors after each pass, one after the other."""
    place = 0
    for _ in range(passes):
        after = []
        for tensor in itertools.chain.from_iterable(arrays):
            size = tensor.numel() * tensor.element_size()
            after.append(torch.frombuffer(bytearray(data[place : place + size]), dtype=tensor.dtype))
            place += size
        yield after
    assert place == len(data)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits; all that is not a number is one, since processors differ in its payload."""
    same = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=tensor.dtype), tensor)
    return same.detach().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def hostile(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of every size: denormals, zeros of both signs, numbers whose squares overflow."""
    values = torch.randn(numel, generator=generator)
    scales = torch.tensor([1.0, 1.0, 1.0, 1e-3, 1e-20, 1e-38, 1e-42, 1e25, 0.0, -0.0])
    return (values * scales[torch.randint(len(scales), (numel,), generator=generator)]).to(dtype)


def gradient(step: int, numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random and hostile values; late in a run some are infinite or not a number."""
    values = hostile(numel, dtype, generator) if step % 3 == 2 else torch.randn(numel, generator=generator).to(dtype)
    if step > STEPS * 0.8 and step % 10 == 0:
        values[torch.rand(numel, generator=generator) < 0.02] = float("inf")
        values[torch.rand(numel, generator=generator) < 0.02] = float("nan")
    return values


def learning_rate(step: int) -> float:
    return 3e-3 * (0.55 + 0.45 * math.cos(step / 100))


class Case:
    """A run of an optimizer of PyTorch, recorded: scalars and gradients of each step, arrays after each pass.

    The optimizer steps on ``device``; what is recorded lies on the host. With ``narrow``, moments are of that dtype.
    """

    def __init__(self, make: Callable, row: Callable, moments: tuple[str, ...], dtype: torch.dtype = torch.float32, *,
                 numels: list[int] = NUMELS, steps: int = STEPS, of_pass: int = 7, device: str = "cpu",
                 narrow: torch.dtype | None = None) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(17)
        parameters = [torch.nn.Parameter(hostile(numel, dtype, generator).to(device)) for numel in numels]
        optimizer = make(parameters)
        for parameter in parameters if narrow else ():
            optimizer.state[parameter] = {name: torch.zeros_like(parameter, dtype=narrow) for name in moments}
            optimizer.state[parameter]["step"] = torch.zeros((), device=device)
        (group,) = optimizer.param_groups
        self.of_pass = of_pass
        self.rows: list[Row] = []
        self.gradients: list[Tensors] = []
        self.after: list[Tensors] = []
        first = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        zeros = [[torch.zeros_like(parameter, dtype=narrow or dtype) for _ in moments] for parameter in first]
        self.before = [[parameter, *of_it] for parameter, of_it in zip(first, zeros, strict=True)]
        for step in range(1, steps + 1):
            group["lr"] = learning_rate(step)
            self.gradients.append([gradient(step, numel, dtype, generator) for numel in numels])
            for parameter, one in zip(parameters, self.gradients[-1], strict=True):
                parameter.grad = one.to(device, copy=True)
            optimizer.step()
            self.rows.append([float(value) for value in row(group, step)])
            if step % of_pass == 0 or step == steps:
                states = [optimizer.state[parameter] for parameter in parameters]
                self.after.append([
                    tensor.detach().to("cpu", copy=True)
                    for parameter, state in zip(parameters, states, strict=True)
                    for tensor in (parameter, *(state[name] for name in moments))
                ])  # fmt: skip

    def differing(self, replay: Callable, variant: str, *, block: int = 1 << 40) -> list[int]:
        """How many elements differ after each pass."""
        found = replay(variant, self.rows, self.before, self.gradients, of_pass=self.of_pass, block=block)
        return [
            sum(int((bits(ours) != bits(theirs)).sum()) for ours, theirs in zip(one, other, strict=True))
            for one, other in zip(found, self.after, strict=True)
        ]


def adam_row(group: dict, step: int) -> Row:
    beta1, beta2 = group["betas"]
    corrections = [1 - beta1**step, math.sqrt(1 - beta2**step), False]
    flags = [group["decoupled_weight_decay"], group["maximize"], group["amsgrad"]]
    return [group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *flags, *corrections]


def adam_row_of_device(device: str) -> Callable:
    """The rows of kernels that compute Adam's bias corrections on the device, in fp32."""

    def row(group: dict, step: int) -> Row:
        count = torch.tensor(step, dtype=torch.float32, device=device)
        betas = [torch.tensor(beta, dtype=torch.float32, device=device) for beta in group["betas"]]
        power1, power2 = (torch.pow(beta, count) for beta in betas)
        return [*adam_row(group, step)[:-3], (1 - power1).item(), (1 - power2).sqrt().item(), True]

    return row


def sgd_row(group: dict, step: int) -> Row:
    flags = [group["nesterov"], group["maximize"], step == 1]
    return [group["lr"], group["momentum"], group["dampening"], group["weight_decay"], *flags]


def adagrad_row(group: dict, step: int) -> Row:
    corrected = group["lr"] / (1.0 + (step - 1.0) * group["lr_decay"])
    return [corrected, group["eps"], group["weight_decay"], group["maximize"]]


def lion_row(group: dict, step: int) -> Row:
    return [group["lr"], *group["betas"], group["weight_decay"]]


class Lion(torch.optim.Optimizer):
    """PyTorch has no Lion. Both published references, as its elementwise operations do them."""

    def __init__(self, parameters: Tensors, added: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})
        self.added = added

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for parameter in group["params"]:
            moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.mul_(1 - lr * group["weight_decay"])
            if self.added:
                update = moment.clone().mul_(beta1).add(parameter.grad, alpha=1 - beta1)
            else:
                update = moment * beta1 + parameter.grad * (1 - beta1)
            parameter.add_(update.sign_(), alpha=-lr)
            moment.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def case_of(kind: str, dtype: str, flags: dict, *, device: str = "cpu", **options: int) -> Case:
    """A run of the optimizer called ``kind``, the fused one unless flags say otherwise."""
    narrow = torch.bfloat16 if dtype == "mixed" else None
    options = {"device": device, "narrow": narrow, **options}
    if kind == "Lion":
        return Case(lambda parameters: Lion(parameters, **flags), lion_row, ("exp_avg",), DTYPES[dtype], **options)
    make = getattr(torch.optim, kind)
    flags = {"fused": True, "lr": 1e-3, **flags}
    is_of_device = device != "cpu" and (flags["fused"] or flags.get("capturable"))
    row, moments = {
        "Adam": (
            adam_row_of_device(device) if is_of_device else adam_row,
            ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if flags.get("amsgrad") else [])],
        ),
        "SGD": (sgd_row, ["momentum_buffer"] if flags.get("momentum") else []),
        "Adagrad": (adagrad_row, ["sum"]),
    }[kind.removesuffix("W")]
    return Case(lambda parameters: make(parameters, **flags), row, tuple(moments), DTYPES[dtype], **options)


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float32}
"""Of parameters; of mixed ones the moments are of bfloat16, which only fused kernels of a device take."""
ADAM_FLAGS = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.3, 0.6), "eps": 1e-6, "weight_decay": 0.3},
    {"betas": (0.0, 0.9), "weight_decay": 0.0},
]
FUSED = [
    *(("AdamW", flags) for flags in ADAM_FLAGS),
    *(("Adam", flags) for flags in ADAM_FLAGS[1:]),
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1, "maximize": True}),
]


def variant_of(kind: str, capability: str, dtype: str) -> str:
    return f"{kind.lower().removesuffix('w')}.fused.{capability}.{dtype}"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("kind", "flags"), FUSED, ids=str)
def test_fused_steps(replay, kind, flags, dtype):
    case = case_of(kind, dtype, flags)
    assert not any(case.differing(replay, variant_of(kind, "cpu", dtype)))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("flags", [flags for kind, flags in FUSED if kind == "SGD"], ids=str)
def test_sgd_by_operations(replay, flags, foreach):
    case = case_of("SGD", "f32", {**flags, "fused": False, "foreach": foreach})
    assert not any(case.differing(replay, "sgd.for-loop.cpu.f32"))


@pytest.mark.parametrize("added", [True, False])
def test_lion(replay, added):
    case = Case(lambda parameters: Lion(parameters, added), lion_row, ("exp_avg",))
    assert not any(case.differing(replay, f"lion.{'added' if added else 'multiplied'}.cpu.f32"))


CHILD = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
import torch, test_replay
torch.set_num_threads(1)
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
cases = []
for kind, flags in test_replay.FUSED:
    for dtype in ("f32", "bf16"):
        cases.append((kind, dtype, test_replay.case_of(kind, dtype, flags, numels=[1, 7, 17, 200])))
sys.stdout.buffer.write(pickle.dumps(cases))
"""


def test_fused_steps_without_fma(replay):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent)]
    cases = pickle.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)
    for kind, dtype, case in cases:
        assert not any(case.differing(replay, variant_of(kind, "cpu-default", dtype))), (kind, dtype)
    assert any(cases[0][2].differing(replay, variant_of("AdamW", "cpu", "f32")))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_of_the_training(replay, threads):
    """Where its threads meet has no tail of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = case_of("AdamW", "f32", {"weight_decay": 0.1}, numels=[100_003, 70_000, 65], steps=9)
    finally:
        torch.set_num_threads(before)
    assert not any(case.differing(replay, "adam.fused.cpu.f32"))


@pytest.mark.parametrize("block", [1, 13, 64, 65])
def test_blocks_are_cut_anywhere(replay, block):
    case = case_of("AdamW", "f32", {"weight_decay": 0.1}, steps=30)
    assert not any(case.differing(replay, "adam.fused.cpu.f32", block=block))
