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

ROOT = Path(__file__).resolve().parents[2]
STEPS = 1000
NUMELS = [*range(1, 34), 200, 1013]

Row = list[float]
Tensors = list[torch.Tensor]


@pytest.fixture(scope="session")
def replay() -> Callable:
    """``replay(variant, rows, tensors, gradients, ...)``: arrays of each tensor after each pass."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--package", "shardfast-optim", "--example", "replay"]
    subprocess.run(command, cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))

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
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


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
    if step > 900 and step % 10 == 0:
        values[torch.rand(numel, generator=generator) < 0.02] = float("inf")
        values[torch.rand(numel, generator=generator) < 0.02] = float("nan")
    return values


def learning_rate(step: int) -> float:
    return 3e-3 * (0.55 + 0.45 * math.cos(step / 100))


class Case:
    """A run of an optimizer of PyTorch, recorded: scalars and gradients of each step, arrays after each pass."""

    def __init__(self, make: Callable, row: Callable, moments: tuple[str, ...], dtype: torch.dtype = torch.float32, *,
                 numels: list[int] = NUMELS, steps: int = STEPS, of_pass: int = 7) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(17)
        parameters = [torch.nn.Parameter(hostile(numel, dtype, generator)) for numel in numels]
        optimizer = make(parameters)
        (group,) = optimizer.param_groups
        self.of_pass = of_pass
        self.rows: list[Row] = []
        self.gradients: list[Tensors] = []
        self.after: list[Tensors] = []
        first = [parameter.detach().clone() for parameter in parameters]
        self.before = [[parameter, *(torch.zeros_like(parameter) for _ in moments)] for parameter in first]
        for step in range(1, steps + 1):
            group["lr"] = learning_rate(step)
            for parameter in parameters:
                parameter.grad = gradient(step, parameter.numel(), dtype, generator)
            self.gradients.append([parameter.grad.clone() for parameter in parameters])
            optimizer.step()
            self.rows.append([float(value) for value in row(group, step)])
            if step % of_pass == 0 or step == steps:
                states = [optimizer.state[parameter] for parameter in parameters]
                self.after.append([
                    tensor.detach().clone()
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


def adam_case(kind: type, dtype: torch.dtype = torch.float32, **flags: object) -> Case:
    moments = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if flags.get("amsgrad") else []))
    return Case(lambda parameters: kind(parameters, fused=True, **flags), adam_row, moments, dtype)


ADAM_FLAGS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.0, "amsgrad": True, "maximize": True},
    {"betas": (0.3, 0.6)},
    {"betas": (0.95, 0.98), "eps": 1e-6, "weight_decay": 0.3},
]


@pytest.mark.parametrize("flags", ADAM_FLAGS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_fused_adam(replay, kind, flags):
    case = adam_case(kind, **flags)
    assert not any(case.differing(replay, "adam.fused.cpu.avx2"))


CHILD = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
import torch, test_replay
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
sys.stdout.buffer.write(pickle.dumps(test_replay.adam_case(torch.optim.AdamW, weight_decay=0.1)))
"""


def test_fused_adam_without_fma(replay):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent)]
    case = pickle.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)
    assert not any(case.differing(replay, "adam.fused.cpu.default"))
    assert any(case.differing(replay, "adam.fused.cpu.avx2"))


@pytest.mark.parametrize("block", [1, 13, 64, 65])
def test_blocks_are_cut_anywhere(replay, block):
    case = Case(lambda parameters: torch.optim.AdamW(parameters, fused=True), adam_row, ("exp_avg", "exp_avg_sq"),
                steps=30)  # fmt: skip
    assert not any(case.differing(replay, "adam.fused.cpu.avx2", block=block))
