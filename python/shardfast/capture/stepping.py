"""Steps of optimizers in terms of no framework: a capture ahead of a save applies them to its copies."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Stepped(NamedTuple):
    """A parameter with its moments, as an optimizer steps them here element by element.

    Attributes:
        kind: ``"adam"`` (AdamW, too), ``"sgd"``, ``"adagrad"`` or ``"lion"``.
        dtype: Of the parameter: ``"F32"`` or ``"BF16"``.
        moments: The dtype of all moments.
        device: ``"cpu"`` or ``"cuda"``.
        is_fused: Whether one kernel makes the whole step; ``None`` if that is not known.
        arithmetic: What decides how the optimizer rounds: its class and flags. Equal for parameters stepped alike.
        numel: Elements of the tensor that the optimizer steps.
        addresses: Of the parameter and of its moments, each contiguous, in the order in which the step reads them.
    """

    kind: str
    dtype: str
    moments: str
    device: str
    is_fused: bool | None
    arithmetic: Hashable
    numel: int
    addresses: tuple[int, ...]


class Taken(NamedTuple):
    """Gradients and scalars that a step of an optimizer used.

    Attributes:
        applied: For each parameter that took part its number in the window, its gradient as a plain tensor, and the
            number of its scalars.
        scalars: The kind of the optimizer, and the numbers that its kind takes, as the step used them. On a device
            Adam's bias corrections stand behind them once more, as the device computes them. Last what the gradients
            were multiplied by, in fp32, before the optimizer saw them; ``None`` if they were not.
    """

    applied: Sequence[tuple[int, object, int]]
    scalars: Sequence[tuple[str, Sequence[float], float | None]]


class Steps(Protocol):
    """How optimizers step, for captures ahead of a save: what they used is applied to copies, bit for bit."""

    units: Sequence[Stepped]
    """What can be replayed, if an implementation with these bits is known."""

    reason: str
    """Why something of the optimizers' cannot be replayed, the first reason; empty if all can."""

    def is_current(self) -> bool:
        """Whether the optimizers still step by the same arithmetic as when this was made."""
        ...

    def streams(self) -> Mapping[int, int]:
        """The stream on which each device of the optimizers works now, by the device's number; none for a host."""
        ...

    def begin(self, steps: int, numbers: Sequence[int]) -> None:
        """Notes how often each parameter was stepped so far; later steps are counted, about so many.

        ``numbers`` has the number of each unit in the window; -1 for one that is captured otherwise.
        """
        ...

    def stepping(self, optimizer: object) -> None:
        """``optimizer`` is about to step: notes its gradients, which hooks behind the step may drop."""
        ...

    def taken(self, optimizer: object) -> Taken:
        """Returns what ``optimizer`` used, which has just stepped; nothing if it is none of these."""
        ...

    def place(self, gradient: object) -> tuple[int, int, str, int | None]:
        """The address of a gradient, its elements, its dtype, and the number of its device; ``None`` for the host.

        It is asked where DLPack's exchange table does not describe the gradient.

        Raises:
            Refused: If its elements do not lie in one run, or are neither fp32 nor bf16.
        """
        ...
