"""Fuzzes stored values from their bytes to the value in Python, as ``tests/python/test_values_hostile.py`` does.

Where the package is installed, with torch, NumPy and pytest::

    python fuzz/values.py --seconds 600 --start 1000000

Values that libFuzzer found for the target ``object`` (``fuzz/corpus/object``) are seeds, too, where there are any.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "python"))


def main() -> None:
    """Attacks until the time is over, or something else than an error of ours comes out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()

    from test_values_hostile import attack, honest_seeds

    found = [path.read_bytes() for path in sorted((HERE / "corpus" / "object").glob("*"))]
    seeds, outcomes = [*honest_seeds(), *found], collections.Counter[str]()
    seed, end = args.start, time.monotonic() + args.seconds
    while time.monotonic() < end:
        try:
            outcomes[attack(seed, seeds)] += 1
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        seed += 1
    print(f"{seed - args.start} values from seed {args.start} on: {dict(outcomes)}")


if __name__ == "__main__":
    main()
