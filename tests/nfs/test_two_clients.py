"""Two machines that mount one directory over NFS, with default options, save and load as machines of one disk do."""

import pytest


def both(workers, name, *arguments):
    """Calls a function on both guests at the same time; what each returned."""
    asked = [worker.begin(name, *arguments) for worker in workers]
    return [one.value() for one in asked]


@pytest.mark.smoke
def test_two_ranks_save_and_load(ranks, place):
    both(ranks, "save", f"{place.name}/one", 7)
    assert both(ranks, "load", f"{place.name}/one", 7) == [True, True]
    assert (place.here / "one/COMMIT").exists()


@pytest.mark.smoke
def test_a_name_that_a_client_remembers_as_absent_is_found(alone, place):
    one, other = alone
    run = f"{place.name}/run"
    commit = f"{run}/step-00000001/COMMIT"
    other.call("save", f"{run}/step-00000002.old", 1)  # the run is there, and is listed
    assert one.call("restore", run) == 0
    for path in (commit, f"{run}/step-00000001", f"{place.name}/named"):
        assert not one.call("is_there", path)
    other.call("save", f"{run}/step-00000001", 1)
    other.call("save", f"{place.name}/named", 2)
    remembered = one.call("is_there", commit), one.call("is_there", f"{place.name}/named")
    assert one.call("restore", run) == 1
    assert one.call("load", f"{place.name}/named", 2)
    assert remembered == (False, False), "this client forgets at once: nothing was shown"
