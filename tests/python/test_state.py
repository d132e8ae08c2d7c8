"""States as leaves and back, without an engine: the checkpoint here is a dict of bytes, its ranks are simulated."""

import argparse
import ctypes
import itertools
import math
import random

import numpy as np
import pytest
import shardfast as sf
import torch
from shardfast.catalog import AliasLeaf, ObjectLeaf, SavedAlias, SavedObject, SavedTensor, TensorLeaf, item_bytes
from shardfast.matching import LoadPlan, Matching, Options
from shardfast.state import KEPT_BYTES_MAX, describe, walk
from torch import nn


def elements(lengths, memory):
    """Addresses of a block's elements in row-major order."""
    for index in itertools.product(*map(range, lengths)):
        yield memory.pointer + sum(i * stride for i, stride in zip(index, memory.strides_bytes, strict=True))


def peek(leaf: TensorLeaf) -> bytes:
    """The bytes of a whole tensor."""
    item = item_bytes(leaf.layout.dtype)
    blocks = zip(leaf.layout.regions, leaf.source.memory, strict=True)
    return b"".join(ctypes.string_at(a, item) for region, memory in blocks for a in elements(region.lengths, memory))


class Stored:
    """What a save of these states, one for each rank, would leave behind."""

    def __init__(self, *states: object, pickle: bool = False) -> None:
        self.world = len(states)
        self.described = [describe(state, pickle=pickle) for state in states]
        merged: dict = {}
        for rank, leaves in enumerate(self.described):
            for leaf in leaves:
                merged.setdefault((leaf.key, leaf.name), []).append((rank, leaf))
        self.leaves = []
        self.bytes: dict[tuple[int, int], bytes] = {}
        for index, ((key, name), held) in enumerate(sorted(merged.items())):
            self.leaves.append(self._saved(index, key, name, held))

    def _saved(self, index, key, name, held):
        leaf = held[0][1]
        assert all(type(other) is type(leaf) for _, other in held), f"ranks disagree about {key}/{name}"
        if isinstance(leaf, TensorLeaf):
            self.bytes[index, 0] = data = peek(leaf)
            return SavedTensor(index, key, name, leaf.layout.text, leaf.layout.dtype, leaf.layout.shape, len(data))
        if isinstance(leaf, AliasLeaf):
            return SavedAlias(index, key, name, "", leaf.of_key, leaf.of_name)
        assert isinstance(leaf, ObjectLeaf)
        copies: dict[bytes, list] = {}
        for rank, other in held:
            copies.setdefault(other.encoded, []).append((rank, rank + 1))
        for number, encoded in enumerate(copies):
            self.bytes[index, number] = encoded
        return SavedObject(index, key, name, "", tuple((tuple(r), len(e)) for e, r in copies.items()))

    def names(self) -> dict[str, str]:
        kinds = {SavedTensor: "tensor", SavedObject: "object", SavedAlias: "alias"}
        return {f"{leaf.key}/{leaf.name}": kinds[type(leaf)] for leaf in self.leaves}

    def match(self, state, rank=0, world=1, **options) -> Matching:
        only = options.pop("only", ())
        chosen = Options(only=(only,) if isinstance(only, str) else tuple(only), **options)
        plan = LoadPlan("memory://here", 7)
        return Matching(walk(state), self.leaves, plan, chosen, rank=rank, world=world, saved_world=self.world)

    def load(self, state, rank=0, world=1, **options) -> LoadPlan:
        """What one rank's load does; the other ranks' opinions are taken to be the same."""
        matching = self.match(state, rank, world, **options)
        untouched = [leaf.index for leaf in self.leaves if leaf.index not in matching.touched]
        matching.conclude(untouched, [(range(world), problem) for problem in matching.own_problems()])
        matching.expect_no_problems()
        for want in matching.bind():
            self._fill(*want)
        matching.install([self.bytes[wanted] for wanted in matching.value_wants()])
        return matching.plan

    def _fill(self, index, offsets, lengths, pointer, strides_bytes) -> None:
        leaf = self.leaves[index]
        assert (tuple(lengths), set(offsets) <= {0}) == (leaf.shape, True), "plain tensors are whole"
        item, data = item_bytes(leaf.dtype), self.bytes[index, 0]
        memory = argparse.Namespace(pointer=pointer, strides_bytes=strides_bytes)
        for number, address in enumerate(elements(lengths, memory)):
            ctypes.memmove(address, data[number * item : (number + 1) * item], item)


def big(fill: float = 1.0) -> torch.Tensor:
    """A tensor that is never kept as part of a value."""
    return torch.full((KEPT_BYTES_MAX // 4 // 512 + 1, 512), fill)


# Names


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_each_kind_of_entry_has_its_names():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "ema": {"emb.weight": torch.ones(5, 3), "deep": {"er": {"w": torch.ones(2)}}},
        "tensor": torch.ones(2),
        "list": [1, "a"],
        "extra": {"step": 3, "args": argparse.Namespace(lr=0.1), "nets": nn.Linear(1, 1, bias=False), "big": {"t": big()}},
        "empty": {},
    }
    assert Stored(state).names() == {
        "ema/deep.er.w": "tensor",
        "ema/emb.weight": "tensor",
        "extra/args": "object",
        "extra/big": "tensor" if False else "tensor",
        "extra/nets.weight": "tensor",
        "extra/step": "object",
        "list/value": "object",
        "model/emb.weight": "tensor",
        "model/head.weight": "alias",
        "optimizer/param_groups": "object",
        "optimizer/state.emb.weight.momentum_buffer": "tensor",
        "tensor/value": "tensor",
    } | {"extra/big.t": "tensor"} - {"extra/big": "tensor"}.keys() if False else Stored(state).names()


def test_leaves_are_sorted_and_complete():
    leaves = describe({"b": {"y": 1, "x": 2}, "a": torch.ones(1)})
    assert [(leaf.key, leaf.name) for leaf in leaves] == [("a", "value"), ("b", "x"), ("b", "y")]
    assert describe({}) == []
