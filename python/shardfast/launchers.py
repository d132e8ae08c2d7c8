"""The place in its job that a launcher tells a process."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from .errors import Invalid

PORTS = range(20_000, 32_000)
"""Ports at which rank 0 of a step of Slurm listens: below those that Linux gives by itself."""

APART = 109
"""Jobs whose numbers differ by less have different ports, whatever steps of theirs run, if none has that many."""

SPREAD = 4099
"""Difference of the ports of one job and the next: jobs of other services are often neighbours, too."""


MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
"""Variables in which the ``mpirun`` of Open MPI, and that of MPICH and Intel MPI, tell a process its place.

They are the rank, the world, the ranks of the machine and the rank there. None tells where rank 0 is.
"""


class Described(NamedTuple):
    """This process's place in its job.

    Attributes:
        root: Where rank 0 listens: ``host:port``.
        token: What only the ranks of this job know; ``None`` if nothing tells it.
        rank: This rank.
        world: Number of ranks.
        local_world: Most ranks on a machine.
        local_rank: This rank's number on its machine; ``None`` if nothing tells it.
    """

    root: str
    token: str | None
    rank: int
    world: int
    local_world: int
    local_rank: int | None = None


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
    """Whether Slurm's ``srun`` has started this process as one of several.

    What Open MPI's ``mpirun`` has started in an allocation has the variables of its daemon, which ``srun`` has started.

    Raises:
        Invalid: For a number of tasks that is none: the process may be one of several, and must not save alone.
    """
    if MPI[0][0] in os.environ:
        return False
    return "SLURM_PROCID" in os.environ and number("SLURM_STEP_NUM_TASKS", 1, 1, beside="SLURM_PROCID") > 1


def tasks_without_step() -> int:
    """How many tasks Slurm has for the job whose batch script has started this process without ``srun``; else 1."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    is_of_script = "SLURM_PROCID" in os.environ and "SLURM_STEP_ID" not in os.environ
    return int(tasks) if is_of_script and re.fullmatch(r"[0-9]{1,9}", tasks) else 1


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
    lives = number("SLURM_RESTART_COUNT", 0, 0, beside="SLURM_JOB_ID")
    is_placed = "SLURM_LOCALID" in os.environ
    return Described(
        root=f"{first_of(nodes)}:{port_of(number(names[0], 0, beside=names[1]), number(names[1], 0, beside=names[0]))}",
        token=token or f"slurm-{job}.{step}.{lives}",
        rank=number("SLURM_PROCID", 0, beside="SLURM_STEP_NUM_TASKS"),
        world=world,
        local_world=min(most_of(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")), world),
        local_rank=number("SLURM_LOCALID", 0, beside="SLURM_PROCID") if is_placed else None,
    )


def of_mpi(root: str, token: str | None) -> Described | None:
    """The place of a process that ``mpirun`` has started, with rank 0 at ``root``; ``None`` of another one.

    Raises:
        Invalid: For variables that ``mpirun`` does not set so.
    """
    for rank, world, local_world, local_rank in MPI:
        if rank in os.environ and world in os.environ:
            return Described(
                root,
                token,
                number(rank, 0, beside=world),
                number(world, 1, beside=rank),
                number(local_world, 1, 1, beside=rank),
                number(local_rank, 0, beside=rank) if local_rank in os.environ else None,
            )
    return None


def port_of(job: int, step: int) -> int:
    """The port at which rank 0 of a step of Slurm listens.

    Two steps have one port only if their jobs' numbers, each with 109 times its step's number, differ by a multiple of
    12,000. So jobs with neighbouring numbers may have any steps on one host.
    """
    return PORTS.start + (job + APART * step) * SPREAD % len(PORTS)


def first_of(nodes: str) -> str:
    """The first host of a list such as ``node[07-12,20],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def most_of(tasks: str) -> int:
    """The largest number of a list such as ``4(x2),3``."""
    counts = [int(count) for count in re.findall(r"(?:^|,)([0-9]{1,9})", tasks)]
    return max(counts, default=1)
