"""Training with dropout under every layout, real schedules of pipelines, and PyTorch's own full state dicts."""

import copy

import torch
import torch.distributed as dist
from layouts import APART, PIPELINES, batch, build, parameters_of, pipeline_mesh
from older import HIDDEN, IS_OLDER
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

MICROBATCHES = 4


def apart_of(world):
    """The layouts in which no rank has all names that a job of so many ranks can have."""
    return [name for name in APART if world == 4 or name in ("pp", "interleaved", "ep", "zero1")]


def trained_of(world):
    """Those that PyTorch trains: FSDP1 frees parameters behind one micro-batch that the next one's backward needs.

    The schedules of PyTorch 2.7 never end on gloo.
    """
    return [name for name in apart_of(world) if "fsdp1" not in name and not (IS_OLDER and name in PIPELINES)]


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Run:
    """A model that is trained with dropout.

    Attributes:
        groups: The process groups that its layout uses.
    """

    def __init__(self, layout, seed, hidden=HIDDEN):
        self.model, self.optimizer = build(layout, seed, dropout=0.3, hidden=hidden)
        self.layout, self.groups = layout, [dist.group.WORLD]
        self.schedule, self.share = None, dist.get_rank()
        if layout in PIPELINES:
            mesh = pipeline_mesh(layout == "pp")
            self.groups += mesh.get_all_groups()
            self.schedule = self._scheduled(mesh)
            self.share = mesh["inside"].get_local_rank()
        if layout.endswith(("tp", "ep", "ep_fsdp")):
            self.share = 0  # these ranks compute with the same tokens

    def _scheduled(self, mesh):
        depth, here, group = mesh.shape[0], mesh["pp"].get_local_rank(), mesh.get_group("pp")
        self.is_first, self.is_last = here == 0, here == depth - 1
        count, device = depth * len(self.model), torch.device("cpu")
        stages = [
            PipelineStage(part, here + number * depth, count, device, group=group)
            for number, part in enumerate(self.model)
        ]
        if len(stages) == 1:
            return Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
        return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)

    def losses(self, steps):
        """Those that this rank sees: of a pipeline only the last ranks see any."""
        found = []
        for step in steps:
            tokens = batch(step * 10 + self.share)
            if self.schedule is None:
                loss = loss_of(self.model(tokens), tokens)
                loss.backward()
                seen = [loss]
            else:
                seen = []
                inputs = (tokens,) if self.is_first else ()
                targets = {"target": tokens, "losses": seen} if self.is_last else {}
                self.schedule.step(*inputs, **targets)
            if self.layout == "interleaved":  # whose replicas nothing keeps the same
                for parameter in parameters_of(self.model):
                    dist.all_reduce(parameter.grad, group=self.groups[-1])
            found += [loss.item() for loss in seen]
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return found

    def optimizers(self):
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def pairs(self):
        """Each stage, or the whole model, with its optimizer."""
        return zip(self.model if isinstance(self.model, list) else [self.model], self.optimizers(), strict=True)

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}


def whole_by_torch(run):
    """The state of a run, gathered by PyTorch's own full state dicts; those of stages are put together."""
    options, whole = StateDictOptions(full_state_dict=True), {"model": {}, "state": {}}
    for part, optimizer in run.pairs():
        whole["model"] |= get_model_state_dict(part, options=options)
        found = get_optimizer_state_dict(part, optimizer, options=options)
        whole["state"] |= found["state"]
        whole["group"] = found["param_groups"][0]
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, whole)
    for kind in ("model", "state"):
        whole[kind] = {name: value for of_rank in stages for name, value in of_rank[kind].items()}
    return whole


def put_by_torch(run, whole):
    options = StateDictOptions(full_state_dict=True)
    for part, optimizer in run.pairs():
        mine = get_model_state_dict(part, options=options)
        set_model_state_dict(part, {name: whole["model"][name] for name in mine}, options=options)
        # One flat parameter has one step counter, which PyTorch would give to all its parameters to raise.
        state = {name: copy.deepcopy(parts) for name, parts in whole["state"].items() if name in mine}
        groups = [{**whole["group"], "params": list(state)}]
        set_optimizer_state_dict(part, optimizer, {"state": state, "param_groups": groups}, options=options)
