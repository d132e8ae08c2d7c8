"""An outline is that of its objects while they hold what they held, and a hold tells what was done to its memory."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import shardfast as sf
import torch
from older import TABLE
from shardfast.adapters.torch.hooks import hold_of, place
from shardfast.state.catalog import Hold, Inside, Outline
from shardfast.state.description import held, outlined


class Box:
    def __init__(self, **slots):
        vars(self).update(slots)


class Wrapping(torch.Tensor):
    """Wraps its memory, as a sharded tensor does."""


def wrapping(inner, layout):
    tensor = torch.ones(2).as_subclass(Wrapping)
    tensor.inner_memory, tensor.sharded_as = inner, layout  # `layout` is an attribute of all tensors
    return tensor


LAYOUT = object()


def made():
    """A state of boxes, and its outline."""
    inner, below = Box(), Box(entries={"w": torch.ones(3)})
    first, second, third = (torch.ones(n) for n in (4, 5, 6))
    box = Box(
        names={"one": 1, 7: 2},
        set={"x"},
        children={"below": below, "none": None},
        other=inner,
        entries={"w": first, "again": first, "text": "a text", "sharded": wrapping(torch.ones(2), LAYOUT)},
        groups=[{"listed": [first, second]}, {"listed": [third], "lr": 0.1}],
        state={first: {"step": 1, "mean": torch.ones(4)}, third: {}, "total": 3},
    )
    attributes = [("names", "names"), ("set", "names"), ("children", "objects"), ("other", "object"),
                  ("entries", "entries"), ("groups", "groups"), ("state", "state")]  # fmt: skip
    objects = [(box, attributes), (inner, []), (below, [("entries", "entries")])]
    # w again text sharded | step mean | total | w
    tensors, parameters, others = [0, 1, 3, 5, 7], [0, 1], [4, 6]
    inside = {2: Inside(("inner_memory",), "sharded_as")}
    further = {"members": "listed", "place": place}
    return box, Outline(objects, tensors, parameters, others, inside, lambda entries: {}, **further)


def test_what_is_the_same_is_told_with_what_it_holds_now(table):
    box, outline = made()
    native = outlined([outline])
    tensors, entries, others = native.again()
    assert [id(one) for one in tensors] == [
        *map(id, [box.entries["w"], box.entries["w"], box.entries["sharded"].inner_memory]),
        *map(id, [box.state[box.entries["w"]]["mean"], box.children["below"].entries["w"]]),
    ]
    assert [number for number in range(5) if entries[number] is not tensors[number]] == [2]
    assert entries[2] is box.entries["sharded"]
    assert others == [[1, 3]]
    box.state[box.entries["w"]]["step"] = 2
    box.state["total"] = 5
    box.groups[1]["lr"] = "other"
    box.names["one"] = object()
    box.entries = dict(box.entries)
    box.entries["w"] += 1
    assert native.again()[2] == [[2, 5]]


def test_members_that_are_entries_are_told_and_watched():
    first, second = torch.ones(4), torch.ones(5)
    box = Box(groups=[{"listed": [first]}, {"listed": [second]}], state={second: {"mean": torch.ones(5)}})
    attributes = [("groups", "members"), ("state", "state")]
    native = outlined(
        [Outline([(box, attributes)], [2, 1], [], [], {}, lambda entries: {}, members="listed", place=place)]
    )
    tensors, _, _ = native.again()
    assert [id(one) for one in tensors] == [id(box.state[second]["mean"]), id(second)]
    second.data = torch.ones(5)
    assert native.again() is None


def a_key_by_an_equal_one(box):
    """A text of its own that is the same is the same name."""
    box.entries = {"".join(["te", "xt"]) if name == "text" else name: one for name, one in box.entries.items()}


def test_equal_names_are_the_same():
    box, outline = made()
    native = outlined([outline])
    a_key_by_an_equal_one(box)
    assert native.again() is not None


CHANGES = {
    "another name": lambda box: box.names.update(two=2),
    "no name": lambda box: box.names.pop(7),
    "names in another order": lambda box: box.names.update(one=box.names.pop("one")),
    "another number for a name": lambda box: box.names.update({8: box.names.pop(7)}),
    "a name of another type": lambda box: box.names.update({"7": box.names.pop(7)}),
    "a name in a set": lambda box: box.set.add("y"),
    "another name in a set": lambda box: (box.set.clear(), box.set.add("y")),
    "a slot of another kind": lambda box: vars(box).update(entries=list(box.entries.values())),
    "no slot": lambda box: vars(box).pop("names"),
    "another child": lambda box: box.children.update(below=Box(**vars(box.children["below"]))),
    "a child in place of none": lambda box: box.children.update(none=box.children["below"]),
    "no child": lambda box: box.children.update(below=None),
    "another object": lambda box: vars(box).update(other=Box()),
    "the wrong object": lambda box: vars(box).update(other=box),
    "a tensor of other memory": lambda box: box.entries.update(w=torch.ones(4)),
    "a tensor of another shape": lambda box: box.entries["w"].resize_(2, 2),
    "a tensor of another type": lambda box: vars(box)["entries"].update(w=box.entries["w"].view(torch.int32)),
    "a tensor of another class": lambda box: box.entries.update(again=torch.nn.Parameter(box.entries["w"])),
    "no tensor": lambda box: box.entries.update(w=None),
    "a value of another type": lambda box: box.entries.update(text=b"bytes"),
    "a tensor in place of a value": lambda box: box.entries.update(text=torch.ones(1)),
    "the same memory as another tensor": lambda box: box.entries.update(again=box.entries["w"].detach()),
    "another layout": lambda box: setattr(box.entries["sharded"], "sharded_as", object()),
    "no layout": lambda box: delattr(box.entries["sharded"], "sharded_as"),
    "other memory inside": lambda box: setattr(box.entries["sharded"], "inner_memory", torch.ones(2)),
    "another class inside": lambda box: setattr(box.entries["sharded"], "inner_memory", box.entries["sharded"]),
    "nothing inside": lambda box: delattr(box.entries["sharded"], "inner_memory"),
    "another group": lambda box: box.groups.append({"listed": []}),
    "groups cut otherwise": lambda box: box.groups[1]["listed"].insert(0, box.groups[0]["listed"].pop()),
    "no members": lambda box: box.groups[1].pop("listed"),
    "another member": lambda box: box.groups[0]["listed"].__setitem__(0, torch.ones(1)),
    "members in another order": lambda box: box.groups[0]["listed"].reverse(),
    "a member twice": lambda box: box.groups[0]["listed"].__setitem__(1, box.groups[0]["listed"][0]),
    "state of another member": lambda box: box.state.update({box.groups[0]["listed"][1]: {}}),
    "state of none any more": lambda box: box.state.clear(),
    "state that is no dict": lambda box: box.state.update({box.groups[1]["listed"][0]: []}),
    "state under another name": lambda box: box.state.update(sum=box.state.pop("total")),
    "another entry of state": lambda box: box.state[box.groups[1]["listed"][0]].update(step=1),
    "state of another type": lambda box: box.state.update(total="3"),
    "a class in the slots": lambda box: vars(box.children["below"]).pop("entries"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(table, name):
    box, outline = made()
    native = outlined([outline])
    assert native.again() is not None
    CHANGES[name](box)
    assert native.again() is None


PLACES = {
    "other memory": lambda tensor: tensor.set_(torch.ones(4, 6)),
    "a later element of the same memory": lambda tensor: tensor.set_(tensor.untyped_storage(), 1, (4, 5), (5, 1)),
    "another shape": lambda tensor: tensor.resize_(6, 4),
    "other strides": lambda tensor: tensor.t_(),
    "another element type": lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
    "another class": lambda tensor: setattr(tensor, "__class__", Wrapping),
}


@pytest.mark.parametrize("name", PLACES)
def test_every_change_of_a_place_is_noticed(table, name):
    """The object stays, and is another tensor."""
    tensor = torch.ones(4, 6)
    box = Box(entries={"w": tensor})
    native = outlined([Outline([(box, [("entries", "entries")])], [0], [], [], {}, dict, place=place)])
    assert native.again() is not None
    PLACES[name](tensor)
    assert native.again() is None


def test_classes_without_a_table_are_asked(table):
    """What tells the place of each tensor is called where there is no table, and only there."""
    asked = []

    def told(tensor):
        asked.append(tensor)
        return place(tensor)

    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    box = Box(entries=dict(enumerate(tensors)))
    outline = Outline([(box, [("entries", "entries")])], [0, 1], [], [], {}, dict, place=told)
    native = outlined([outline])
    assert native.again() is not None
    expected = tensors * 2 if table == "without the table" else []
    assert list(map(id, asked)) == list(map(id, expected))
    outline = Outline([(box, [("entries", "entries")])], [0, 1], [], [], {}, dict)
    assert (outlined([outline]) is None) == (table == "without the table"), "nothing else tells it"


def test_a_place_that_cannot_be_told_is_no_place(monkeypatch):
    """An error of what tells it is one of the outline, which then serves no further save."""

    def told(tensor):
        if failing:
            raise RuntimeError("no memory")
        return place(tensor)

    monkeypatch.delattr(torch.Tensor, TABLE, raising=False)
    failing = []
    box = Box(entries={"w": torch.ones(1)})
    native = outlined([Outline([(box, [("entries", "entries")])], [0], [], [], {}, dict, place=told)])
    assert native.again() is not None
    failing.append(True)
    with pytest.raises(RuntimeError, match="no memory"):
        native.again()


def test_tensors_deep_inside_of_an_entry_are_followed(table):
    """Several leaves of one entry, as of a sharded and quantised tensor."""
    codes, scale = torch.ones(4), torch.ones(1)
    entry = wrapping(wrapping(codes, LAYOUT), LAYOUT)
    entry.inner_memory.further = scale
    box = Box(entries={"w": entry})
    deep = Inside(("inner_memory", "inner_memory"), "sharded_as"), Inside(("inner_memory", "further"))

    def made():
        return outlined(
            [Outline([(box, [("entries", "entries")])], [0, 0], [], [0], dict(enumerate(deep)), dict, place=place)]
        )

    native = made()
    tensors, entries, others = native.again()
    assert tensors[0] is codes and tensors[1] is scale and others == [[entry]]
    assert entries[0] is entry and entries[1] is entry
    scale += 1
    assert native.again() is not None
    changes = {
        "another class of the entry": lambda: setattr(entry, "__class__", torch.nn.Parameter),
        "another class on the way": lambda: setattr(entry.inner_memory, "__class__", torch.nn.Parameter),
        "another class inside": lambda: setattr(entry.inner_memory, "inner_memory", wrapping(codes, LAYOUT)),
        "nothing inside": lambda: delattr(entry.inner_memory, "further"),
        "another layout": lambda: setattr(entry, "sharded_as", object()),
        "other memory": lambda: setattr(entry.inner_memory, "further", torch.ones(1)),
    }
    for change in changes.values():
        entry = box.entries["w"] = wrapping(wrapping(codes, LAYOUT), LAYOUT)
        entry.inner_memory.further = scale
        native = made()
        assert native.again() is not None
        change()
        assert native.again() is None, change
    with pytest.raises(sf.Invalid, match="expected numbers of 1 tensors"):
        outlined([Outline([(box, [("entries", "entries")])], [0], [], [], {1: deep[0]}, dict, place=place)])


def test_two_parameters_that_were_one_are_noticed_between_bundles():
    shared = torch.ones(3)
    boxes = [Box(entries={"w": shared}) for _ in range(2)]
    outlines = [Outline([(box, [("entries", "entries")])], [0], [0], [], {}, dict, place=place) for box in boxes]
    native = outlined(outlines)
    assert native.again() is not None
    boxes[1].entries["w"] = shared.detach()  # where it was
    assert native.again() is None
    other = outlined(outlines)
    assert other.again() is not None
    boxes[1].entries["w"] = shared
    assert other.again() is None
    boxes[0].entries["w"] = boxes[1].entries["w"] = shared.detach()
    assert native.again() is not None, "which one it is does not count"


def test_it_counts_which_parameters_are_the_same():
    one = torch.ones(3)
    other = one.detach()  # where it is
    boxes = [Box(entries={"w": of}) for of in (one, one, other)]
    native = outlined(
        [Outline([(box, [("entries", "entries")])], [0], [0], [], {}, dict, place=place) for box in boxes]
    )
    assert native.again() is not None
    boxes[1].entries["w"] = other
    assert native.again() is None
    boxes[0].entries["w"] = other
    boxes[2].entries["w"] = one
    assert native.again() is not None


class Odd(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda box: box.names.update({(1, 2): 3}),
        lambda box: box.entries.update({Odd("name"): 1}),
        lambda box: box.children.update(stranger=Box()),
        lambda box: box.state.update({torch.ones(1): {}}),
        lambda box: box.entries.update(w="no tensor"),
        lambda box: vars(box).pop("groups"),
    ],
)
def test_what_cannot_be_looked_at_again_has_no_outline(spoil):
    box, outline = made()
    spoil(box)
    assert outlined([outline]) is None


def test_an_outline_keeps_nothing_alive():
    box, outline = made()
    native = outlined([outline])
    seen = [sum(one is box for one in gc.get_objects())]
    del box, outline
    gc.collect()
    assert seen == [1] and native.again() is None
    assert not any(type(one) is Box for one in gc.get_objects())


def test_numbers_that_are_none_are_errors():
    box = Box(entries={})
    with pytest.raises(Exception, match="numbers of 0 entries"):
        outlined([Outline([(box, [("entries", "entries")])], [0], [], [], {}, dict, place=place)])


def test_a_hold_tells_what_was_done():
    tensors = [torch.ones(4) for _ in range(4)]
    hold = held(hold_of(tensors))
    stamp = hold.stamp(tensors)
    assert hold.changes(tensors, stamp) == []
    tensors[1] += 1
    tensors[2].untyped_storage().resize_(1 << 20)
    tensors[3].data = torch.zeros(4)
    assert hold.changes(tensors, stamp) == [(1, "written"), (2, "resized or moved")]
    assert hold.stamp(tensors) is None
    with pytest.raises(AttributeError):
        hold.changes([object()] * 4, stamp)
    with pytest.raises(TypeError):
        held(Hold([1], lambda memory: "here", "_version"))


def test_a_hold_counts_writes_of_what_wraps_its_tensors():
    tensors, outer = [torch.ones(4) for _ in range(3)], [torch.ones(1), torch.ones(1)]
    hold = held(hold_of(tensors), [2, 1])
    stamp = hold.stamp(tensors + outer)
    outer[0] += 1
    assert hold.changes(tensors + outer, stamp) == [(2, "written")]
    tensors[1] += 1
    assert hold.changes(tensors + outer, stamp) == [(1, "written"), (2, "written")]
    with pytest.raises(sf.Invalid, match="expected 5 tensors, found 3"):
        hold.stamp(tensors)
    with pytest.raises(sf.Invalid, match="expected numbers of 3 tensors, found 3"):
        held(hold_of(tensors), [3])


def test_a_stamp_keeps_memory_that_its_tensor_lets_go_of():
    """What reads it would read freed memory otherwise, or end the process."""
    tensors = [torch.arange(1000.0) for _ in range(3)]
    numbers = np.ctypeslib.as_array((ctypes.c_float * 1000).from_address(tensors[0].data_ptr()))
    alive = weakref.ref(tensors[0].untyped_storage())
    hold = held(hold_of(tensors))
    stamp = hold.stamp(tensors)
    tensors[0].data = torch.zeros(2)
    gc.collect()
    others = [torch.full((1000,), -1.0) for _ in range(50)]  # they take memory that was freed
    assert numbers.tolist() == list(range(1000))
    assert hold.changes(tensors, stamp) == []
    del stamp, others
    assert alive() is None
    assert hold.stamp(tensors) is None
