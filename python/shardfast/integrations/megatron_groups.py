"""Values that the schedule of a job asks of its optimizer's groups, beside what a checkpoint says of them.

Each group has its own ends of the learning rate and of the weight decay, which Megatron's scheduler prefers to those of
the whole job: a load would bring back the old ones whatever the job asks for.
"""

from __future__ import annotations

from typing import Any

import shardfast as sf

_OF_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult")


class Asked:
    """The ends that the job's arguments give to groups, before a load.

    Args:
        args: Megatron's arguments.
        optimizer: The job's, if it is loaded.
    """

    def __init__(self, args: Any, optimizer: Any) -> None:
        self._overrides = bool(getattr(args, "override_opt_param_scheduler", False))
        self._keeps = bool(getattr(args, "use_checkpoint_opt_param_scheduler", False))
        self._groups = () if optimizer is None else optimizer.param_groups
        self._were = [{name: group[name] for name in _OF_SCHEDULE if name in group} for group in self._groups]

    def settle(self, url: str) -> None:
        """Decides after the load as Megatron's arguments say.

        Raises:
            Invalid: They differ, and the arguments do not say which count.
        """
        differ: dict[str, str] = {}
        for group, were in zip(self._groups, self._were, strict=True):
            changed = {name: was for name, was in were.items() if group.get(name) != was}
            if self._overrides:
                group.update(changed)
            elif not self._keeps:
                differ |= {name: f"{name} is {group[name]} there and {was} here" for name, was in changed.items()}
        if differ:
            raise sf.Invalid(
                f"{url}: the schedule of its parameter groups is another one: {', '.join(differ.values())}: pass "
                "--override-opt-param-scheduler to train with what this job asks for, or "
                "--use-checkpoint-opt-param-scheduler to go on with the checkpoint's"
            )
