"""Cost of a save for the training on a device: a transformer of a billion parameters, bf16 compute, fp32 AdamW.

Everything is measured in one run, rounds interleaved, beside what the machine itself can do: copies between the device
and page-locked memory, durable writes to the disk. Read the ratios; rates by themselves say little.

    bench/gpu/run.sh                                   # 1.1 billion parameters, 5 rounds
    bench/gpu/run.sh --layers 40 --where /mnt/nvme --json figures.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import shardfast as sf
import torch
from torch import nn
from torch.nn import functional

GIB = 1 << 30
COPY_BYTES = GIB
WRITE_BYTES = 4 * GIB
READ_BYTES = 4 * GIB
REQUEST_BYTES = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model in training; each step tells how long the host stood in ``optimizer.step``."""

    def __init__(self, args: argparse.Namespace, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = Transformer(args.vocabulary, args.width, args.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, args.vocabulary, (args.batch, args.length + 1), device=device)
        self.device = device

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        moments = [t for entries in self.optimizer.state.values() for t in entries.values() if torch.is_tensor(t)]
        return [*self.model.state_dict().values(), *moments]

    def step(self) -> float:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        began = time.perf_counter()
        self.optimizer.step()
        waited = time.perf_counter() - began
        self.optimizer.zero_grad()
        return waited


@dataclass
class Figures:
    """Values by name, one a round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def show(self, name: str, text: str, scale: float = 1.0, unit: str = "") -> None:
        values = [value * scale for value in self.values[name]]
        low, high = min(values), max(values)
        print(f"  {text:<58} {statistics.median(values):>9.2f} {unit:<5} ({low:.2f} .. {high:.2f})")


def seconds(action: Callable[[], object]) -> float:
    """Until the device has done it too."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copy_ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes per second from the device to page-locked memory and back."""
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def rate(to: torch.Tensor, of: torch.Tensor) -> float:
        return max(COPY_BYTES / seconds(lambda: to.copy_(of, non_blocking=True)) for _ in range(4))

    return rate(on_host, on_device), rate(on_device, on_host)


def write_ceiling(where: Path) -> float:
    """Bytes per second of the better of direct and buffered durable writes, eight requests in flight."""
    buffer = mmap.mmap(-1, 8 * REQUEST_BYTES)
    buffer.write(os.urandom(len(buffer)))

    def write(direct: bool) -> float:
        path = where / "ceiling"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(path, flags)
        except OSError:  # a file system without direct writes
            return 0.0
        try:
            os.posix_fallocate(fd, 0, WRITE_BYTES)
            began = time.perf_counter()
            with ThreadPoolExecutor(8) as pool:

                def request(at: int) -> int:
                    start = at % len(buffer)
                    return os.pwrite(fd, memoryview(buffer)[start : start + REQUEST_BYTES], at)

                list(pool.map(request, range(0, WRITE_BYTES, REQUEST_BYTES)))
            os.fsync(fd)
            return WRITE_BYTES / (time.perf_counter() - began)
        finally:
            os.close(fd)
            path.unlink()

    return max(write(direct=True), write(direct=False))


def drop_page_cache(place: Path) -> None:
    """Makes the next read a cold one: of everything where that is permitted, of these files elsewhere."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in (path for path in place.rglob("*") if path.is_file()):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_rate(place: Path, *, direct: bool, most: int) -> float:
    """Bytes per second of reads of the files at ``place``, ``most`` bytes or all, eight requests in flight. Reads that
    are not direct leave them in the page cache."""
    sizes = [(path, path.stat().st_size) for path in sorted(place.rglob("*")) if path.is_file()]
    requests = [(path, at) for path, size in sizes for at in range(0, size, REQUEST_BYTES)][: most // REQUEST_BYTES]

    def request(path: Path, at: int) -> int:
        with mmap.mmap(-1, REQUEST_BYTES) as buffer:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            try:
                return os.preadv(fd, [buffer], at)
            finally:
                os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        try:
            done = sum(pool.map(lambda one: request(*one), requests))
        except OSError:  # a file system without direct reads
            return 0.0
    return done / (time.perf_counter() - began)


def measure_save(training: Training, place: Path, steps: int, size: int, figures: Figures) -> None:
    """Steps alone, steps beside a save, the capture alone."""
    alone = [0.0] * steps
    began = time.perf_counter()
    for number in range(steps):
        alone[number] = training.step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / steps

    called = time.perf_counter()
    pending = sf.save_async(place / "beside", training.state)
    stall_s = time.perf_counter() - called
    waits, done = [], 0
    while done < steps or not pending.done():
        waits.append(training.step())
        done += 1
    torch.cuda.synchronize()
    beside_s = (time.perf_counter() - called) / done
    pending.committed()
    phases = pending.report["phases_ms"]
    figures.add(stall_s=stall_s, step_s=step_s, slowdown=beside_s / step_s)
    figures.add(wait_s=max(0.0, max(waits) - statistics.median(alone)))
    figures.add(durable_beside_b_s=size / (phases["committed"] / 1e3))
    shutil.rmtree(place / "beside")

    os.sync()
    time.sleep(1.0)  # what a deleted file leaves the disk to do
    torch.cuda.synchronize()
    pending = sf.save_async(place / "alone", training.state)
    pending.committed()
    phases = pending.report["phases_ms"]
    figures.add(capture_b_s=size / (phases["staged"] / 1e3), durable_b_s=size / (phases["committed"] / 1e3))


def measure_first(training: Training, place: Path, prepared_steps: int) -> dict[str, float]:
    """The first save of a run, so many steps after the call of ``Checkpointer.step`` that looks at the state: how long
    both calls take, and the longest wait before an optimizer step after each, in seconds."""
    found = {"look_s": 0.0, "look_wait_s": 0.0, "first_s": 0.0, "first_wait_s": 0.0}
    with sf.Checkpointer(place / "run", every=sf.steps(2)) as ckpt:
        ckpt.restore(training.state)
        for number, name in ((1, "look"), (2, "first")):
            alone = [training.step() for _ in range(4)]
            torch.cuda.synchronize()
            began = time.perf_counter()
            ckpt.step(number, training.state)
            found[f"{name}_s"] = time.perf_counter() - began
            waits = [training.step() for _ in range(prepared_steps)]
            found[f"{name}_wait_s"] = max(0.0, max(waits) - statistics.median(alone))
    shutil.rmtree(place / "run")
    return found


def measure_load(training: Training, other: Training, place: Path, size: int, figures: Figures) -> None:
    """Loads what was saved alone into another training's tensors, cold, then out of the page cache, and compares."""
    drop_page_cache(place)
    cold_s = seconds(lambda: sf.load(place / "alone", other.state))
    drop_page_cache(place)
    direct = read_rate(place / "alone", direct=True, most=READ_BYTES)
    buffered = read_rate(place / "alone", direct=False, most=2 * size)  # all of it is in the page cache now
    figures.add(read_b_s=max(direct, buffered))
    warm_s = seconds(lambda: sf.load(place / "alone", other.state))
    figures.add(cold_b_s=size / cold_s, warm_b_s=size / warm_s)
    for found, expected in zip(other.tensors(), training.tensors(), strict=True):
        assert torch.equal(found, expected), "the load gave other bytes than were saved"
    shutil.rmtree(place / "alone")


def report(args: argparse.Namespace, training: Training, size: int, first: dict[str, float], figures: Figures) -> None:
    ceilings = {"capture_b_s": "to_host_b_s", "durable_b_s": "write_b_s"}
    ceilings |= {"cold_b_s": "read_b_s", "warm_b_s": "to_device_b_s"}
    for name, of in ceilings.items():
        pairs = zip(figures.values[name], figures.values[of], strict=True)
        figures.values[f"{name} of {of}"] = [value / ceiling for value, ceiling in pairs]
    parameters = sum(p.numel() for p in training.model.parameters())
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.release()}")
    print(f"{parameters / 1e9:.2f} billion parameters, {len(training.tensors())} tensors, {size / 1e9:.2f} GB of state")
    print(f"{args.rounds} rounds; medians (least .. most)\n")
    figures.show("stall_s", "save_async returns after", 1e3, "ms")
    figures.show("wait_s", "longest wait before an optimizer step", 1e3, "ms")
    figures.show("step_s", "a step alone", 1e3, "ms")
    figures.show("slowdown", "a step beside a save / alone")
    figures.show("capture_b_s", "device to staging", 1e-9, "GB/s")
    figures.show("to_host_b_s", "  ceiling: one copy to page-locked memory", 1e-9, "GB/s")
    figures.show("capture_b_s of to_host_b_s", "  ratio")
    figures.show("durable_b_s", "durable save, training paused", 1e-9, "GB/s")
    figures.show("write_b_s", "  ceiling: durable writes to that disk", 1e-9, "GB/s")
    figures.show("durable_b_s of write_b_s", "  ratio")
    figures.show("durable_beside_b_s", "durable save beside the training", 1e-9, "GB/s")
    figures.show("cold_b_s", "cold load to the device", 1e-9, "GB/s")
    figures.show("read_b_s", "  ceiling: reads from that disk", 1e-9, "GB/s")
    figures.show("cold_b_s of read_b_s", "  ratio")
    figures.show("warm_b_s", "load to the device out of the page cache", 1e-9, "GB/s")
    figures.show("to_device_b_s", "  ceiling: one copy from page-locked memory", 1e-9, "GB/s")
    figures.show("warm_b_s of to_device_b_s", "  ratio")
    texts = {
        "look_s": "once a run: Checkpointer.step looks at the state for",
        "look_wait_s": "  longest wait before an optimizer step, then",
        "first_s": "first save of a run: Checkpointer.step returns after",
        "first_wait_s": "  longest wait before an optimizer step, then",
    }
    for name, text in texts.items():
        print(f"  {text:<58} {first[name] * 1e3:>9.2f} ms")
    if args.json:
        facts = {
            "parameters": parameters,
            "bytes": size,
            **first,
            "device": torch.cuda.get_device_name(),
        }
        args.json.write_text(json.dumps({**facts, "rounds": figures.values}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", type=Path, default=Path("bench-out"), help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    place: Path = args.where / "shardfast-gpu"
    place.mkdir(parents=True)
    try:
        training, other = Training(args, device, seed=1), Training(args, device, seed=2)
        for trained in (training, other):
            for _ in range(3):
                trained.step()
        size = sum(tensor.nbytes for tensor in training.tensors())
        first = measure_first(training, place, prepared_steps=5 * args.steps)
        figures = Figures()
        for round_ in range(args.rounds):
            to_host, to_device = copy_ceilings(device)
            figures.add(to_host_b_s=to_host, to_device_b_s=to_device, write_b_s=write_ceiling(place))
            measure_save(training, place, args.steps, size, figures)
            measure_load(training, other, place, size, figures)
            print(f"round {round_ + 1} of {args.rounds} done", flush=True)
        report(args, training, size, first, figures)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
