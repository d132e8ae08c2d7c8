"""Models of Megatron-FSDP: saved without a message, and loaded into and from what Megatron's DDP has."""

import dataclasses
import re

import pytest
import shardfast as sf
import torch
import torch.distributed as dist
from jobs import LENGTH, Kind, Layout, begin, build, difference, end_gathering, step, truth
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata
from test_layouts import no_collectives

SHARDED = "optim_grads_params"


def whole(tensor):
    """All of a DTensor, from the pieces that Megatron says the ranks have of it."""
    update_uneven_dtensor_chunk_metadata(tensor)
    local = tensor._local_tensor
    mine = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local.__create_chunk_list__()] if len(local) else []
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, (mine, local.clone()))
    found = torch.full(tensor.shape, float("nan"))
    for chunks, of in pieces:
        for offsets, sizes in chunks:
            found[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = of.reshape(sizes)
    return found


NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What Megatron calls norms in checkpoints, as TransformerEngine does."""


def differing(optimizer, expected):
    """What an optimizer has in another way than a job without tensor parallelism said, and of how many names."""
    found, names = [], 0
    for group in optimizer.optimizer.param_groups:
        for stepped in group["params"]:
            buffers = stepped._megatron_fsdp_model.param_and_grad_buffer
            name = buffers.param_to_name[stepped.orig_param].removeprefix("module.")
            key, number = re.sub(r"(layers)\.\d+", r"\1", name), re.search(r"layers\.(\d+)", name)
            for of, saved in NORMS.items():
                key = key.replace(of, saved)
            entries = optimizer.optimizer.state[stepped]
            # A rank without elements of it has no state.
            for what, tensor in (("param", stepped), ("exp_avg", entries.get("exp_avg", torch.zeros_like(stepped)))):
                one = expected[f"optimizer.state.{what}.{key}"]
                names += 1
                if not torch.equal(whole(tensor.detach()), one[int(number[1])] if number else one):
                    found.append(f"{name}.{what}")
    return found, names


def there_and_back(rank, world, place, ordinary, strategy, experts):
    """What a state lost once it is back in Megatron's DDP, and one step later; what Megatron-FSDP says it was there."""
    kind, sharded = Kind(layers=2, experts=experts), dataclasses.replace(ordinary, fsdp=strategy)
    begin(ordinary)
    chunks, optimizer = build(ordinary, kind)
    for number in range(2):
        step(chunks, optimizer, number)
    sf.save(f"{place}/first", {"model": chunks, "optimizer": optimizer})
    before = truth(chunks, optimizer)
    step(chunks, optimizer, 2)
    later = truth(chunks, optimizer)
    begin(sharded)
    chunks, optimizer = build(sharded, kind, seed=5)
    sf.load(f"{place}/first", {"model": chunks, "optimizer": optimizer})
    is_simple = ordinary == Layout() and strategy == SHARDED and not experts
    gathered = differing(optimizer, before) if is_simple else ([], 2 * 20)
    with no_collectives():
        sf.save(f"{place}/second", {"model": chunks, "optimizer": optimizer})
    step(chunks, optimizer, 2)
    sf.save(f"{place}/third", {"model": chunks, "optimizer": optimizer})
    found = []
    for name, expected in (("second", before), ("third", later)):
        begin(ordinary)
        chunks, optimizer = build(ordinary, kind, seed=6)
        sf.load(f"{place}/{name}", {"model": chunks, "optimizer": optimizer})
        found.append(difference(expected, truth(chunks, optimizer)))
    return found, gathered


@pytest.mark.parametrize(
    ("layout", "strategy", "experts"),
    [
        (Layout(), SHARDED, 0),
        pytest.param(Layout(tp=2), SHARDED, 0, marks=pytest.mark.campaign),
        pytest.param(Layout(), "optim", 0, marks=pytest.mark.campaign),
        pytest.param(Layout(tp=2), "optim_grads", 0, marks=pytest.mark.campaign),
        pytest.param(Layout(), "no_shard", 0, marks=pytest.mark.campaign),
        pytest.param(Layout(ep=2), SHARDED, 4, marks=pytest.mark.campaign),
        (Layout(), SHARDED, 4),
    ],
    ids=str,
)
def test_a_state_goes_to_megatron_fsdp_and_back(ranks, tmp_path, layout, strategy, experts):
    for found, (gathered, names) in ranks(4)(there_and_back, str(tmp_path), layout, strategy, experts):
        assert found == [[], []], found
        assert not gathered
        assert names == 2 * 20


def forward(chunk):
    tokens = torch.arange(LENGTH)[None].repeat(2, 1)
    with torch.no_grad():
        return chunk(tokens, torch.arange(LENGTH)[None], None, labels=tokens).clone()


def load_what_was_gathered(rank, world, place, gathers):
    """Losses: when it was saved, a step later, after the load of all, and of the model alone; and a step after that."""
    layout, kind = Layout(fsdp=SHARDED), Kind(layers=2, overlaps=gathers)
    begin(layout)
    chunks, optimizer = build(layout, kind)
    step(chunks, optimizer, 0)
    losses = [forward(chunks[0])]
    state = {"model": chunks, "optimizer": optimizer}
    sf.save(f"{place}/saved", state)
    for chosen in ({}, {"only": "model"}):
        step(chunks, optimizer, 1)
        later = forward(chunks[0])
        sf.load(f"{place}/saved", state, **chosen)
        losses += [later, forward(chunks[0])]
    # Each step begins with the copies in fp32.
    chunks[0].param_and_grad_buffer.copy_main_weights_to_model_weights()
    end_gathering(chunks[0])
    return [*losses, forward(chunks[0])]


@pytest.mark.parametrize("gathers", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_what_was_gathered_before_a_load_is_not_used_after_it(ranks, tmp_path, gathers):
    for saved, later, loaded, again, alone, kept in ranks(2)(load_what_was_gathered, str(tmp_path), gathers):
        assert not torch.equal(saved, later)
        assert torch.equal(saved, loaded)
        assert not torch.equal(saved, again)
        assert torch.equal(saved, alone)
        assert torch.equal(saved, kept)
