"""A state in terms of no framework: leaves, regions, memory, and the interface of an adapter.

A *leaf* is one tensor or one value with a name below a key of the state. A tensor leaf names the *regions* of the
global shape that this rank holds and the *memory* in which they lie. Nothing here knows files or other ranks, and only
:func:`is_writable` touches a tensor's bytes: it writes one over itself.
"""

import ctypes
import functools
import os
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ..capture.stepping import Steps

Ints = tuple[int, ...]

VALUE_BYTES_MAX = 1 << 30
"""Largest encoding of one value, as in the format."""


class Refused(Exception):
    """Something cannot be stored or loaded into. The text says what it is, why, and what to do instead.

    Raised by adapters, which do not know the thing's place in the state; their caller adds it.
    """


class Region(NamedTuple):
    """An n-d box in a tensor's global shape, in elements. Never empty."""

    offsets: Ints
    lengths: Ints


class Flat(NamedTuple):
    """The run ``[start, stop)`` of the row-major flattened global tensor, or of a box in it. Never empty."""

    start: int
    stop: int
    box: Region | None = None
    """Where the run lies in a box, that box: ``start`` and ``stop`` count its elements in row-major order."""


class Memory(NamedTuple):
    """Memory of a region's elements in this process.

    Attributes:
        pointer: Address of the first element.
        strides_bytes: Distance between neighbours per dimension of a :class:`Region`; empty for a :class:`Flat`, whose
            elements follow each other.
        device: Number of the CUDA device whose memory it is; ``None`` for the host's.
    """

    pointer: int
    strides_bytes: Ints = ()
    device: int | None = None

    @property
    def where(self) -> tuple[int, ...]:
        """The device as the end of a tuple: nothing for the host."""
        return () if self.device is None else (self.device,)


class Layout(NamedTuple):
    """Which parts of a tensor this rank holds.

    Attributes:
        dtype: safetensors name of the element type, such as ``"BF16"``.
        shape: Global shape, in elements.
        regions: The parts: disjoint, in bounds, none for an empty shard.
        text: The tensor's layout in the job, for people; empty for a whole tensor in ordinary memory.
        holders: All ranks of the job that hold exactly these regions, ascending, this one among them; ``None`` where
            that is not known. It must be all of them: ranks that know it for every tensor plan a save alone.
    """

    dtype: str
    shape: Ints
    regions: tuple[Region | Flat, ...]
    text: str = ""
    holders: Ints | None = None


@functools.cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element of a safetensors type (of a pair, for ``"F4"``)."""
    bits = re.search(r"[0-9]+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one address; never if each dimension steps over all inner ones."""
    inside = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True)):
        if size > 1 and stride <= inside:
            return True
        inside += max(size - 1, 0) * stride
    return False


def is_writable(address: int) -> bool:
    """Whether the kernel permits writing the byte at an address, which keeps its value.

    A write to memory that was mapped read-only ends the process, and no framework shows which memory is.
    """
    byte = (ctypes.c_char * 1).from_address(address)
    reading, writing = os.pipe()
    try:
        os.write(writing, byte)
        return os.readv(reading, [byte]) == 1
    except OSError:
        return False
    finally:
        os.close(reading)
        os.close(writing)


class Source(NamedTuple):
    """Memory to save from, for each region of the layout, and the object that keeps it allocated.

    Attributes:
        owner: A tensor that is all of the memory, with no sharding.
        is_copy: Whether the memory is a copy and not the tensor's own.
    """

    memory: tuple[Memory, ...]
    owner: object
    is_copy: bool = False

    @property
    def is_on_device(self) -> bool:
        """Whether some of the memory is a CUDA device's."""
        return any(memory.device is not None for memory in self.memory)


class Origin(NamedTuple):
    """A tensor that is to be saved.

    Attributes:
        layout: As :meth:`Adapter.layout` returns it.
        identity: As :meth:`Adapter.identity` returns it.
        source: As :meth:`Adapter.source` returns it, if that is the tensor's own memory and cheap to find.
    """

    layout: Layout
    identity: Hashable
    source: Source | None


class Box(NamedTuple):
    """Elements in memory: a box of them, no two at one address.

    Attributes:
        space: Equal for the same memory, such as that of one device.
        pointer: Address of the first element.
        lengths: The number of elements per dimension.
        strides: The distance of neighbours per dimension, in bytes.
        item: Size of an element, in bytes.
        is_lazy: Whether the tensor is a view that reads other values than the bytes there, such as their conjugates.
    """

    space: Hashable
    pointer: int
    lengths: Ints
    strides: Ints
    item: int
    is_lazy: bool = False


class Target(NamedTuple):
    """Memory to load into, for each region of the layout.

    Attributes:
        memory: Writable, no two elements at one address. owner: Keeps the memory allocated. finish: Called once the
        bytes are there, if a copy to a device or into another dtype remains.
    """

    memory: tuple[Memory, ...]
    owner: object
    finish: Callable[[], None] | None = None


class Destination(NamedTuple):
    """A tensor that is to be loaded into.

    Attributes:
        layout: As :meth:`Adapter.layout` returns it.
        identity: As :meth:`Adapter.identity` returns it.
        target: As :meth:`Adapter.target` returns it, if that is the tensor's own memory and cheap to find.
    """

    layout: Layout
    identity: Hashable
    target: Target | None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """This rank's part of a tensor, given as a plain tensor and its place.

    A framework that is built on another one has tensors that lie in plain tensors of that one, such as parameters in a
    flat buffer. Its bundles give parts. Names and places are theirs; the adapter of the plain tensors says the rest.

    Attributes:
        tensor: Its elements in row-major order are those of the regions, one region behind the other. Contiguous,
            except that one box of its own shape may have any strides.
        shape: The global shape, in elements.
        regions: As in :class:`Layout`.
        text, holders: See there.
        sharers: All ranks of the job that hold any of the tensor's elements, where that is known.
        within: The object that the framework changes: ``tensor`` is a view of it, shares its memory and its count of
            writes. What optimizers step and bundles announce is this object.
        start: Where ``within`` is a buffer of several parts, the number of its elements before this one.
        length: Likewise the number of all its elements; 0 where ``within`` is the part alone.
        several: One list for all leaves read from the same memory that are not tied, such as the step counter of a flat
            buffer. A load fills it if the saved ones are equal, else refuses; it notes here which it was given.
        name: The leaf's, where there are several.
        refusal: Why a load cannot write to it now; empty if it can.
        others: This rank's other parts of the leaf, which lie in other memory.
        elsewhere: Whether other ranks save these elements, as a copy that is cut otherwise: this one is only loaded.
    """

    tensor: Any
    shape: Ints
    regions: tuple[Region | Flat, ...]
    text: str = ""
    holders: Ints | None = None
    sharers: Ints | None = None
    within: Any = None
    start: int = 0
    length: int = 0
    several: list[str] | None = None
    name: str = ""
    refusal: str = ""
    others: "Sequence[Part]" = ()
    elsewhere: bool = False


NamedPart = tuple[str, Part | None]
"""The name of a parameter, and what of the elements of an optimizer's tensor it is; ``None`` if it is that tensor."""


Capture = Literal["inline", "eager", "lazy", "owned"]
"""How a save captures a tensor, which is when it copies it: ``inline`` in the call itself; ``eager`` in the background,
while the call waits; ``lazy`` while the program goes on, until the tensor is about to change, which is announced;
``owned`` at any time, since the save has a copy of its own already."""


Owner = Literal["job", "rank"] | tuple[int, int]
"""Whose a value is: the job's, this rank's alone, or that of one of several pieces, ``(index, count)``."""

Compared = Literal["first save", "on request", "every save", "never"]
"""Which saves compare the copies of a tensor: the first one of each layout; those with ``prove=True``; each one, since
that copies were equal once tells nothing of later; or none, as the user says."""


class TensorLeaf(NamedTuple):
    """A tensor as this rank gives it to a save."""

    key: str
    name: str
    layout: Layout
    source: Source
    capture: Capture
    compared: Compared = "first save"


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """A Python value as this rank gives it to a save.

    Attributes:
        value: The value as it was then, which ``encoded()`` encodes.
        owner: Whose it is.
    """

    key: str
    name: str
    value: Any
    owner: Owner


@dataclass(frozen=True, slots=True)
class AliasLeaf:
    """Another name of a tensor leaf (tied weights): stored once, restored as tied."""

    key: str
    name: str
    of_key: str
    of_name: str


Leaf = TensorLeaf | ObjectLeaf | AliasLeaf


@dataclass(slots=True)
class SavedTensor:
    """A tensor of a checkpoint; ``index`` is its place in the manifest."""

    index: int
    key: str
    name: str
    layout: str
    dtype: str
    shape: Ints
    bytes: int


@dataclass(slots=True)
class SavedObject:
    """A Python value of a checkpoint.

    Attributes:
        copies: Its distinct values: the ranks that held each, as half-open ranges, and its encoded size in bytes.
    """

    index: int
    key: str
    name: str
    layout: str
    copies: tuple[tuple[tuple[tuple[int, int], ...], int], ...]


@dataclass(slots=True)
class SavedAlias:
    """A second name of a tensor of a checkpoint."""

    index: int
    key: str
    name: str
    layout: str
    of_key: str
    of_name: str


SavedLeaf = SavedTensor | SavedObject | SavedAlias


@dataclass(frozen=True, slots=True)
class Hold:
    """How a framework keeps the memory of tensors allocated, and how it shows writes and moves.

    Attributes:
        memory: For each tensor what keeps its memory allocated, and keeps nothing else alive. Can be referred to
            weakly, and is one object for as long as the tensor lies in that memory.
        address: Tells where one of these lies now. Memory that is resized is elsewhere before the old is given back.
        version: The name of the tensor attribute that counts writes.
        retain: Is called with each of these after it was reached through a weak reference, so that the new reference
            keeps the memory allocated; ``None`` where every reference does.
    """

    memory: Sequence[Any]
    address: Callable[[Any], int]
    version: str
    retain: Callable[[Any], object] | None = None


Kind = Literal["names", "objects", "object", "entries", "groups", "members", "listed", "state"]
"""What stands in an attribute: a dict or a set of which the names count; a dict of objects of the bundle or ``None``;
one such object; a dict of entries by name; a list of dicts, each with a list of *members* under the name that
:attr:`Outline.members` gives; likewise, each member an entry, too; a list of such members; or a dict by member of dicts
of entries, and by name of an entry. Names are texts or whole numbers."""


class Inside(NamedTuple):
    """Way from a tensor that wraps others to a leaf's memory, for as long as the types on it stay the same.

    Attributes:
        path: Names of attributes: the tensor's, that of what stands there, and so on to the memory.
        layout: Name of the tensor's attribute that says how it is sharded, which is replaced, never changed; or empty.
    """

    path: tuple[str, ...]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Outline:
    """Places of a bundle's leaves in its objects. While they are unchanged, the bundle need not be described again.

    Attributes:
        objects: All objects that count, with those of their attributes that do. What is met in these, in this order,
            numbers the entries.
        tensors: For each of :meth:`Bundle.tensors`, in order, the number of its entry.
        parameters: The numbers of a module's parameters; an optimizer's are all members.
        others: Numbers of the entries that ``values`` needs.
        inside: For tensors inside of their entries, by number among the tensors, where they are there.
        values: What :meth:`Bundle.values` would give now, from these entries. Keeps nothing of the bundle alive.
        members: The name under which a group lists its members, where an attribute lists such.
        place: Returns a tensor's device, address, element type, shape and strides, and what else says how its memory
            is read. Is called for tensors whose class has no exchange table of DLPack, which is faster.
    """

    objects: Sequence[tuple[Any, Sequence[tuple[str, Kind]]]]
    tensors: Sequence[int]
    parameters: Sequence[int]
    others: Sequence[int]
    inside: Mapping[int, Inside]
    values: Callable[[Sequence[Any]], Mapping[str, object]]
    members: str = ""
    place: Callable[[Any], Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """A bundle's answer to loaded values.

    Attributes:
        install: The call that installs it.
        missing: Leaves of the bundle that stay as they were, because the checkpoint does not have them.
        unexpected: Loaded leaves for which there is no place after all.
    """

    install: Callable[[], None]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


class Bundle(Protocol):
    """A framework's object (a module, an optimizer) as named tensors and values.

    Names are unique within the bundle and the same on every rank that holds the thing named, whatever the layout.
    """

    parameters: dict[str, Any]
    """By FQN the parameters that a module holds, as tensors or parts, or the tensors that an optimizer steps."""

    def announce(self, notice: Callable[[str], None]) -> Sequence[Any]:
        """Calls ``notice`` before the framework changes the bundle's tensors, for as long as the bundle lives.

        Its argument names what changes them; it is empty for a step of an optimizer.

        Calling it again changes nothing, and copies and pickles of the framework's objects know nothing of it.

        Returns:
            Those tensors, of this bundle or another one, that change in no other way: a program that writes them other
            than by the framework's steps and loads must call ``staged()`` first.
        """

    def steps(self) -> Steps | None:
        """How its optimizers step now; ``None`` for what has none."""

    def holders(self, of: Mapping[int, Ints]) -> Mapping[str, Ints]:
        """The :attr:`Layout.holders` of tensors whose own layout does not have them, by leaf name, as far as known.

        Args:
            of: Those of parameters of the state's modules, by ``id``.
        """

    def compared(self) -> Mapping[str, Compared]:
        """When the ranks' copies of its tensors are compared, by leaf name, if not at the first save."""

    def makers(self) -> Sequence[tuple[str, str, str, list[str], list[str]]]:
        """Classes that make its tensors: a value's leaf name, the class, its kind, for what it made some, or will.

        Classes of one kind take each other's tensors.
        """

    def outline(self) -> Outline | None:
        """Returns what shows later, without a new description, that the bundle is the same; ``None`` if nothing can."""

    def masters(self) -> Mapping[str, Any]:
        """Parameters of which a rank of the job keeps a more exact copy, ``state.<FQN>.master``.

        It names all of the parameters that this rank has, whichever rank has the copy, and may say what an optimizer
        steps on other ranks alone.
        """

    def tensors(self) -> Mapping[str, Any]:
        """The tensors there are now, by leaf name, or this rank's parts of them."""

    def values(self) -> Mapping[str, object]:
        """The other leaves, by leaf name. A value may hold tensors of its own."""

    def accepts(self, name: str, *, is_master: bool = False) -> bool:
        """Whether there is a place for a saved leaf of that name though nothing is there yet (state made lazily).

        ``is_master`` tells that it is the more exact copy of a 16-bit parameter.
        """

    def create(self, name: str, dtype: str, shape: Ints, *, layout: str = "", beside: str = "", dry: bool) -> Any:
        """A tensor, or a part, for the saved tensor ``name``, not yet installed; with ``dry`` without memory, to plan.

        Args:
            name: Of the leaf.
            dtype: Its element type.
            shape: Its global shape.
            layout: The :attr:`Layout.text` with which it was saved.
            beside: That of the parameter to which it belongs.
            dry: See above.
        """

    def drops(self, name: str) -> bool:
        """Whether a load removes a leaf that is here if the checkpoint holds the bundle without it."""

    def merges(self, name: str) -> bool:
        """Whether a load needs every rank's copy of the value ``name`` instead of one."""

    def descriptions(self) -> Mapping[str, str]:
        """The values that describe other leaves, such as their version: by leaf name the beginning of their names.

        A load reads one with any of those leaves, whatever the user selects. It may be absent here or in a checkpoint.
        """

    def describes(self, name: str) -> bool:
        """Whether a saved value of that name is such a description, also of what is not here or has none here."""

    def renamed(self, name: str, parameter: Callable[[str], str]) -> str:
        """The name of a saved leaf when parameters were renamed as ``parameter`` says (from FQN to FQN)."""

    def restore(
        self,
        created: Mapping[str, Any],
        values: Mapping[str, object],
        parameter: Callable[[str], str],
        *,
        strict: bool,
        absent: Sequence[str] = (),
        decisive: Mapping[str, int] = {},
        filled: Collection[str] = (),
    ) -> Restored:
        """Checks what was loaded and returns the call that installs it.

        Args:
            created: Tensors from :meth:`create`, filled.
            values: The loaded values by name; for those that merge, the list of all copies.
            parameter: As in :meth:`renamed`, for the names of parameters inside values.
            strict: Whether values must cover all that is here.
            absent: Leaves that are here and not in the checkpoint, of those that :meth:`drops` names.
            decisive: For a value that merges, how many of the copies decide: the first ones, each over those behind it.
            filled: Leaves that are here and were loaded, of a bundle with descriptions.

        Raises:
            Refused: If the values do not fit; nothing has changed then.
        """


@dataclass(frozen=True, slots=True)
class Module:
    """A bundle with parameters, which optimizers refer to by name."""

    bundle: Bundle
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Objects(Protocol):
    """One framework's modules and optimizers. Of a framework that is built on another one it is all there is to say."""

    def module(self, value: object) -> Module | None:
        """``value`` as a bundle, if it is a module or a list of modules (pipeline stages) of this framework."""
        ...

    def optimizer(
        self, value: object, names: Mapping[int, Sequence[NamedPart]], beside: Collection[int] = ()
    ) -> Bundle | None:
        """``value`` as a bundle, if it is an optimizer or a list of them.

        Args:
            value: See above.
            names: What the parameters of the state's modules are called, by ``id`` of what an optimizer steps.
            beside: ``id`` of the objects that the state has under keys of their own.

        Raises:
            Refused: If it holds a parameter without a name, or state that a save would leave out.
        """
        ...

    def coordinates(self, things: Sequence[object]) -> Mapping[str, int]:
        """Returns this rank's coordinates in the job's meshes that these show, by the name of the dimension.

        Dimensions of one rank are left out. Must not communicate, and is called when a state is described.

        Args:
            things: A state's bundles, and its tensors outside of them.
        """
        ...


class Adapter(Objects, Protocol):
    """One framework's tensors as regions. ``shardfast.testing`` has checks of the contract.

    An adapter knows its framework and this module, and nothing of files, ranks' agreement or other adapters.
    """

    refers: bool
    """Whether tensors inside other values are leaves of their own (else they are always part of the value)."""

    def is_tensor(self, value: object) -> bool:
        """Whether ``value`` is a tensor of this framework."""

    def layout(self, tensor: Any) -> Layout:
        """Which parts of the global tensor this rank holds. Reads no data and allocates none; no communication.

        Raises:
            Refused: If the tensor is of a kind that cannot be stored.
        """
        ...

    def source(self, tensor: Any) -> Source:
        """Memory to save from: the tensor's own on the host or a CUDA device, a copy elsewhere."""
        ...

    def origin(self, tensor: Any) -> Origin:
        """Returns what a save needs of ``tensor`` first, in one call, since a state has many tensors.

        Raises:
            Refused: As :meth:`layout`.
        """
        ...

    def follow(self, before: Callable[[object], None], after: Callable[[object], None]) -> None:
        """Calls ``before`` and ``after`` each step of any optimizer of this process, behind all other hooks.

        Calling it again changes nothing.
        """
        ...

    def stream(self, device: int) -> int | None:
        """The handle of the stream that the program now uses on that CUDA device, if it is this framework's."""

    def hold(self, tensors: Sequence[Any]) -> Hold:
        """Holds tensors with announced changes: owners of sources that are no copies.

        Raises:
            Refused: If the framework cannot show afterwards whether a tensor was written.
        """
        ...

    def target(self, tensor: Any, dtype: str) -> Target:
        """Memory that takes elements of type ``dtype`` on their way into ``tensor``."""
        ...

    def wrote(self, owners: Sequence[Any]) -> None:
        """Tells the framework that these were written: owners of targets, which a load has filled."""

    def destination(self, tensor: Any, dtype: str) -> Destination:
        """Returns what a load of elements of type ``dtype`` into ``tensor`` needs first, in one call.

        Raises:
            Refused: As :meth:`layout`.
        """
        ...

    def written(self, tensor: Any) -> Box | None:
        """The memory that a load into ``tensor`` changes; ``None`` if it has none."""

    def allocate(self, dtype: str, shape: Ints) -> Any:
        """A new whole tensor in host memory, contents undefined."""
        ...

    def view(self, dtype: str, shape: Ints, buffer: Any) -> Any:
        """A whole tensor over the memory of ``buffer``, a writable one of its elements, row-major; keeps the buffer.

        Raises:
            Refused: If the framework has no such type.
        """
        ...

    def fill(self, tensor: Any, value: object, cast: bool = False) -> None:
        """Copies a loaded whole value into ``tensor``, each rank its part; with ``cast`` it converts the elements.

        Raises:
            Refused: If the value is no tensor of the same shape and dtype.
        """
        ...

    def clear(self, tensor: Any, start: int, stop: int) -> None:
        """Sets a run of a plain tensor's elements to 0, counted in row-major order."""

    def identity(self, tensor: Any) -> Hashable:
        """Equal for two tensors exactly if they are the same elements in the same memory."""
        ...

    def expect_remade(self, tensor: Any) -> None:
        """Refuses a tensor inside a value if a load, which makes a new one there, would lose a part of it.

        Raises:
            Refused: If its class holds more than the elements.
        """
        ...

    def lower_value(self, value: object) -> tuple[str, object] | None:
        """A framework's value as a tag and plain data, ``None`` if ``value`` is not the framework's.

        Raises:
            Refused: If the value is the framework's and cannot be stored.
        """
        ...

    def raise_value(self, tag: str, payload: Any) -> Any:
        """The value of a tag and its data; ``NotImplemented`` when they are not of this framework.

        Raises:
            Refused: If they are and no value can be made of them.
        """
        ...
