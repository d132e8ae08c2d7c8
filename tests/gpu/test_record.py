"""What ``record.py`` writes: with AVX2 the very files that the reader in ``crates/optim`` is tested with."""

import re

import pytest
import record
import torch
from test_replay import IS_OLDER

pytestmark = [
    pytest.mark.skipif(IS_OLDER, reason="variants are those of the newest PyTorch's kernels"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX2",
        reason="PyTorch's vectors have another length here; with ATEN_CPU_CAPABILITY=avx2 they have this one",
    ),
]


def without_origin(text: str) -> str:
    return re.sub(r"(?m)^recorded .*\n", "", text)


def test_a_cpu_records_what_is_committed(tmp_path):
    written = record.record("cpu", tmp_path)
    assert len(written) == len(record.CPU_ROWS)
    for path in written:
        assert without_origin(path.read_text()) == without_origin((record.PLACE / path.name).read_text()), path.name


def test_what_is_there_stays(tmp_path):
    for path in record.record("cpu", tmp_path):
        path.write_text("older")
    assert record.record("cpu", tmp_path) == []
    assert {path.read_text() for path in tmp_path.iterdir()} == {"older"}


def test_a_device_records_every_row(tmp_path, device):
    written = record.record(str(device), tmp_path)
    assert len(written) == len(record.CUDA_ROWS)
    for path in (path for path in written if (record.PLACE / path.name).exists()):
        assert without_origin(path.read_text()) == without_origin((record.PLACE / path.name).read_text()), path.name
