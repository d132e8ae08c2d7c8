"""The place in its job that a launcher tells a process."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .errors import Invalid

PORTS = range(20_000, 32_000)
"""Ports at which rank 0 of a step of Slurm listens: below those that Linux gives by itself."""


class Described(NamedTuple):
    """This process's place in its job.

    Attributes:
        root: Where rank 0 listens: ``host:port``.
        token: What only the ranks of this job know; ``None`` if nothing tells it.
        rank: This rank.
        world: Number of ranks.
        local_world: Most ranks on a machine.
    """

    root: str
    token: str | None
    rank: int
    world: int
    local_world: int


def number(name: str, least: int, default: int | None = None, *, beside: str) -> int:
    """The number that a variable of the environment holds.

    Raises:
        Invalid: For another text, and if it is not set and has no default.
    """
    text = os.environ.get(name, default)
    if text is None:
        raise Invalid(f"{name}: not set; this job needs it beside {beside}")
    if not re.fullmatch(r"[0-9]{1,9}", str(text)) or int(text) < least:
        raise Invalid(f"{name}={text!r}: expected a number, at least {least}")
    return int(text)


def is_in_step() -> bool:
    """Whether Slurm's ``srun`` has started this process as one of several."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return "SLURM_PROCID" in os.environ and re.fullmatch(r"[0-9]{1,9}", tasks) is not None and int(tasks) > 1


def of_slurm(token: str | None) -> Described:
    """The place of a process of a step of Slurm. Steps of one allocation, and jobs, have ports of their own.

    Raises:
        Invalid: For variables that Slurm does not set so.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    job, step, nodes = (os.environ.get(name, "") for name in names)
    if not (job and step and nodes):
        missing = [name for name in names if not os.environ.get(name)]
        raise Invalid(f"{', '.join(missing)}: not set; a step of Slurm has them beside SLURM_STEP_NUM_TASKS")
    world = number("SLURM_STEP_NUM_TASKS", 1, beside="SLURM_PROCID")
    name = f"{job}.{step}"
    port = PORTS.start + (sum(int(part) * 4099 for part in re.findall(r"[0-9]{1,9}", name)) + len(name)) % len(PORTS)
    return Described(
        root=f"{first_of(nodes)}:{port}",
        token=token or f"slurm-{name}",
        rank=number("SLURM_PROCID", 0, beside="SLURM_STEP_NUM_TASKS"),
        world=world,
        local_world=min(most_of(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")), world),
    )


def first_of(nodes: str) -> str:
    """The first host of a list such as ``node[07-12,20],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def most_of(tasks: str) -> int:
    """The largest number of a list such as ``4(x2),3``."""
    counts = [int(count) for count in re.findall(r"(?:^|,)([0-9]{1,9})", tasks)]
    return max(counts, default=1)
