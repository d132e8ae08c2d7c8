"""Exports in which nothing can be saved: one clear error each, at once."""

import pytest

EXPORTS = {
    "readonly": "Invalid",
    "squashed": "Invalid",
    "full": "Exhausted",
}


@pytest.mark.parametrize(("export", "kind"), EXPORTS.items())
def test_an_export_that_takes_no_checkpoint_is_refused(machines, alone, export, kind):
    worker, place = alone[0], f"/tmp/{export}"
    machines.guests[0].mount(f"/{export}", place)
    for path in (f"{place}/one", f"{place}/run/step-00000001"):
        failed = worker.begin("save", path, 1, 8 << 20).outcome()
        print(path, failed)
        assert failed.get("kind") == kind, failed
