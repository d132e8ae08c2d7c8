"""Planning and committing at scale, on one core and without a cluster: jobs of up to 100,000 ranks are generated."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from figures import Figures
from ranks import Settings

REPOSITORY = Path(__file__).parent.parent


def measure(settings: Settings) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "scale.json"
        command = ["cargo", "run", "--quiet", "--release", "--locked", "--package", "shardfast-scale", "--"]
        quick = ["--quick"] if settings.quick else []
        subprocess.run([*command, *quick, "--json", str(results)], cwd=REPOSITORY, check=True)
        figures: dict[str, Any] = json.loads(results.read_text())
        return figures
