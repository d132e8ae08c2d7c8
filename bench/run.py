"""Durable save and cold load of a sharded state on several processes: ours, rivals, and the machine's own rates.

Everything is measured in one run, system by system within each round, so that a noisy neighbour hits all of them.
Reported are medians over the rounds, their spread, and ratios to the ceiling and to the fastest rival: rates by
themselves say little on a shared machine.

    .venv/bin/python bench/run.py                      # 2 GB on 2 processes, 5 rounds
    .venv/bin/python bench/run.py --gigabytes 0.5 --rounds 3 --where /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import ceiling
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from systems import state_of, systems

Seconds = dict[str, list[float]]


def timed(action: Callable[[], None]) -> float:
    """Seconds from the moment that all ranks are ready until the last one is done."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def on_rank_0(action: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def machine(where: Path, share: int, save: Seconds, load: Seconds) -> None:
    mine = where / f"ceiling-{dist.get_rank()}"
    for name, write in ceiling.WRITES.items():
        save[name].append(timed(lambda write=write: write(mine, share)))
        mine.unlink()
    ceiling.write(mine, share, direct=True, threads=4)
    for name, read in ceiling.READS.items():
        on_rank_0(lambda: ceiling.drop_page_cache([where / f"ceiling-{r}" for r in range(dist.get_world_size())]))
        load[name].append(timed(lambda read=read: read(mine)))
    mine.unlink()


def worker(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(args.processes), "LOCAL_WORLD_SIZE": str(args.processes)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    dist.init_process_group("gloo")
    total = int(args.gigabytes * 1e9)
    state, other = state_of(total, seed=1), state_of(total, seed=1000)
    saved_bytes = sum(t.numel() * t.element_size() for t in state.values())
    expected = {name: tensor.to_local().clone() for name, tensor in list(state.items())[:3]}
    where: Path = args.where / "shardfast-bench"
    on_rank_0(lambda: where.mkdir(parents=True, exist_ok=True))

    save: Seconds = defaultdict(list)
    load: Seconds = defaultdict(list)
    warm: Seconds = defaultdict(list)
    copy: list[float] = []
    source = torch.empty(saved_bytes // args.processes // 4).uniform_()
    target = torch.empty_like(source)
    for round_ in range(args.rounds + 1):  # the first one only warms up
        if round_ == 1:
            for times in (save, load, warm):
                times.clear()
            copy.clear()
        target.copy_(source)  # a system may have taken back pages that were not touched for a while
        copy.append(timed(lambda: target.copy_(source)))
        machine(where, saved_bytes // args.processes, save, load)
        order = systems()
        for system in order[round_ % len(order) :] + order[: round_ % len(order)]:
            path = where / f"{system.name.replace(' ', '-').replace(',', '')}-{round_}"
            save[system.name].append(timed(lambda system=system, path=path: system.save(path, state)))
            on_rank_0(lambda path=path: ceiling.drop_page_cache([p for p in path.rglob("*") if p.is_file()]))
            for tensor in other.values():
                tensor.to_local().zero_()
            load[system.name].append(timed(lambda system=system, path=path: system.load(path, other)))
            for name, values in expected.items():
                assert torch.equal(other[name].to_local(), values), f"{system.name} loaded other bytes than it saved"
            warm[system.name].append(timed(lambda system=system, path=path: system.load(path, other)))
            on_rank_0(lambda path=path: shutil.rmtree(path))
        if rank == 0:
            print(f"round {round_} of {args.rounds}{' (warm-up)' if round_ == 0 else ''} done", flush=True)
    on_rank_0(lambda: shutil.rmtree(where))
    if rank == 0:
        report(args, saved_bytes, save, load, warm, copy)
    dist.destroy_process_group()


def report(args: argparse.Namespace, size: int, save: Seconds, load: Seconds, warm: Seconds, copy: list[float]) -> None:
    ours, *rivals = [system.name for system in systems()]
    results: dict[str, object] = {
        "bytes": size,
        "processes": args.processes,
        "rounds": args.rounds,
        "where": str(args.where),
    }
    setting = f"{args.processes} processes, {args.rounds} rounds, {os.cpu_count()} cores, {args.where}"
    print(f"\n{size / 1e9:.2f} GB on {setting}")
    memory = size / statistics.median(copy) / 1e9
    results["memory_copy_gb_s"] = memory
    print(f"memory copy: {memory:.2f} GB/s")
    for title, seconds, methods in (
        ("durable save", save, list(ceiling.WRITES)),
        ("cold load", load, list(ceiling.READS)),
        ("warm load", warm, []),
    ):
        rate = {name: size / statistics.median(times) / 1e9 for name, times in seconds.items()}
        top = max((rate[name] for name in methods), default=memory)
        fastest = max(rivals, key=lambda name: rate[name])
        print(f"\n{title:<34} {'GB/s':>6} {'(min .. max)':>16} {'of ceiling':>11} {'of best rival':>14}")
        for name in [*methods, ours, *rivals]:
            low, high = size / max(seconds[name]) / 1e9, size / min(seconds[name]) / 1e9
            row = f"{name:<34} {rate[name]:>6.2f} {f'({low:.2f} .. {high:.2f})':>16} {rate[name] / top:>11.2f}"
            print(row + (f" {rate[name] / rate[fastest]:>14.2f}" if name not in methods else ""))
        results[title] = {
            "rates_gb_s": rate,
            "of_ceiling": rate[ours] / top,
            "of_best_rival": rate[ours] / rate[fastest],
        }
    print()
    for system in systems():
        print(f"{system.name}: {system.note}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", type=Path, default=Path("bench-out"), help="a directory on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(worker, (args, port), nprocs=args.processes, start_method="spawn")


if __name__ == "__main__":
    main()
