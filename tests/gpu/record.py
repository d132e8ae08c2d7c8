"""Records golden steps: what PyTorch's optimizers make of a few steps, which `cargo test` replays on every machine.

    python tests/gpu/record.py               # on a machine with a device: a file for each row of CUDA
    python tests/gpu/record.py --device cpu  # a processor with AVX2: the files with which the reader is tested

A file is text. Its head names the variants of which one must have its bits, the dtype of gradients and the numbers of
elements. Then come runs: the scalars of each step; parameter and moments of each tensor before; its gradient in each
step; parameter and moments after the last step. Numbers are decimal, elements are the hexadecimal digits of their bits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from rows import CPU_ROWS, CUDA_ROWS, Row
from test_replay import Case

PLACE = Path(__file__).parents[2] / "crates/optim/tests/golden/steps"
NUMELS = {"f32": [1, 10], "mixed": [1, 10], "bf16": [1, 18]}
"""The second has a vector of a processor with AVX2, and a tail of two elements."""

STEPS = 3
"""The second has hostile gradients."""


def text_of_bits(tensor: torch.Tensor) -> str:
    width = tensor.element_size()
    values = tensor.detach().view(torch.int32 if width == 4 else torch.int16).tolist()
    return " ".join(f"{value & ((1 << 8 * width) - 1):0{2 * width}x}" for value in values)


def text_of(case: Case, run: tuple[str, dict]) -> str:
    """The lines of one run, recorded in one pass."""
    lines = ["", f"run {run[0]} {run[1]}"]
    lines += [f"scalars {' '.join(map(repr, scalars))}" for scalars in case.rows]
    lines += [f"before {text_of_bits(array)}" for arrays in case.before for array in arrays]
    lines += [f"gradient {text_of_bits(gradient)}" for gradients in case.gradients for gradient in gradients]
    (after,) = case.after
    lines += [f"after {text_of_bits(array)}" for array in after]
    return "\n".join(lines) + "\n"


def recorded(row: Row, device: str) -> str:
    """The text of a row's file."""
    cases = [(row.case(run, device, numels=NUMELS[row.dtype], steps=STEPS, of_pass=STEPS), run) for run in row.runs]
    on = torch.cuda.get_device_name(device) if device != "cpu" else torch.backends.cpu.get_cpu_capability()
    head = [
        "golden steps",
        f"recorded torch {torch.__version__}, {on}",
        f"variants {' '.join(row.variants)}",
        f"gradients {'BF16' if row.dtype == 'bf16' else 'F32'}",
        f"tensors {' '.join(map(str, NUMELS[row.dtype]))}",
    ]
    return "\n".join(head) + "\n" + "".join(text_of(case, run) for case, run in cases)


def record(device: str, place: Path) -> list[Path]:
    """Writes a file for each row of the device; those that are there already stay as they are."""
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for row in CPU_ROWS if device == "cpu" else CUDA_ROWS:
        path = place / f"{row.name}.txt"
        if not path.exists():
            path.write_text(recorded(row, device))
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--place", type=Path, default=PLACE, help="the directory of the files")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"no CUDA device is to be seen (torch {torch.__version__}); nothing was recorded")
    for path in record(args.device, args.place):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
