"""Measures whose ranks run in another environment: a script that takes the settings, and writes down what it found."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks import Settings

ROOT = Path(__file__).parents[1]


def measured_by(ranks: Path, package: str, title: str, environment: str, settings: Settings) -> dict[str, Any] | None:
    """Runs a script of ranks with an interpreter that has a package: this one, or that of ``target/ENVIRONMENT``.

    Args:
        ranks: The script. It calls :func:`asked` and :func:`answer`.
        package: A name that only the right interpreter can import.
        title: The package's name, for people.
        environment: ``scripts/ENVIRONMENT.sh`` installs it into ``target/ENVIRONMENT``.
        settings: For the script.

    Returns:
        The script's answer; ``None``, with a line for the reader, if no interpreter has the package.
    """
    is_here = importlib.util.find_spec(package) is not None
    python = Path(sys.executable) if is_here else ROOT / "target" / environment / "bin" / "python"
    if not python.exists():
        print(f"  not measured: {missing(title, environment)}")
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer"
        told = json.dumps(vars(settings) | {"where": str(settings.where)})
        subprocess.run([python, ranks, told, file], check=True)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def missing(title: str, environment: str) -> str:
    """Why a measure cannot run."""
    return f"{title} is not here: scripts/{environment}.sh installs it into target/{environment}"


def asked() -> Settings:
    """The settings that the script of ranks was started with."""
    told = json.loads(sys.argv[1])
    return Settings(**told | {"where": Path(told["where"])})


def answer(found: dict[str, Any]) -> None:
    """Writes down what the ranks measured."""
    Path(sys.argv[2]).write_text(json.dumps(found))
