"""Exports in which nothing can be saved: one clear error each, at once."""

import re

import pytest

SECONDS_MAX = 15

EXPORTS = {
    "readonly": (
        "Invalid",
        r"mkdir /tmp/readonly/\S+: Read-only file system .*: expected one that is .* exported for writing",
    ),
    "squashed": ("Invalid", r"mkdir /tmp/squashed/\S+: Permission denied .*: expected one that .*root for nobody"),
    "full": (
        "Exhausted",
        r"/tmp/full/\S+: No space left on device .*: expected room for 84\d+ bytes, found 4\d+ bytes free",
    ),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_that_takes_no_checkpoint_is_refused(machines, alone, export):
    kind, message = EXPORTS[export]
    worker, place = alone[0], f"/tmp/{export}"
    machines.guests[0].mount(f"/{export}", place)
    for path in (f"{place}/one", f"{place}/run/step-00000001"):
        failed = worker.begin("save", path, 1, 8 << 20).outcome()
        assert failed["kind"] == kind and re.search(message, failed["message"]), failed
        assert failed["seconds"] < SECONDS_MAX
        assert not worker.call("is_there", f"{path}/COMMIT")
