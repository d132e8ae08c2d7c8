"""What is not understood of Megatron-Core, or does not fit, is refused by name, before a byte changes."""

import shardfast as sf
import torch
from jobs import Kind, Layout, begin, build, step, truth
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear


def error_of(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except sf.Error as error:
        return str(error)
    return ""


def save_overlapping(rank, world, place):
    begin(Layout())
    chunks, optimizer = build(Layout(), Kind(layers=1, overlaps=True))
    state = {"model": chunks, "optimizer": optimizer}
    refused = error_of(sf.save, f"{place}/overlapping", state)
    chunks[0].disable_forward_pre_hook(param_sync=False)
    return refused, error_of(sf.save, f"{place}/apart", state)


def test_parameters_that_the_next_forward_pass_gathers_are_refused(ranks, tmp_path):
    for refused, saved in ranks(2)(save_overlapping, str(tmp_path)):
        assert "overlap_param_gather" in refused
        assert "disable_forward_pre_hook()" in refused
        assert not saved


def save_chained(rank, world, place):
    begin(Layout(distributed=False))
    chunks, optimizer = build(Layout(distributed=False), Kind(layers=1))
    optimizer.__class__ = type("ShuffledOptimizer", (type(optimizer),), {})
    return error_of(sf.save, f"{place}/saved", {"model": chunks, "optimizer": optimizer})


def test_an_optimizer_that_chains_in_its_own_way_is_refused(ranks, tmp_path):
    for refused in ranks(2)(save_chained, str(tmp_path)):
        assert "a ShuffledOptimizer of Megatron-Core is not understood" in refused


def load_others(rank, world, place):
    url = f"{place}/saved"
    layout = Layout(tp=2)
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=2, experts=0))
    step(chunks, optimizer, 0)
    sf.save(url, {"model": chunks, "optimizer": optimizer})
    found = []
    for kind in (Kind(layers=1), Kind(layers=3), Kind(layers=2, hidden=16), Kind(layers=2, vocabulary=200)):
        begin(layout)
        chunks, optimizer = build(layout, kind, seed=5)
        before = [parameter.detach().clone() for parameter in chunks[0].parameters()]
        found.append(error_of(sf.load, url, {"model": chunks, "optimizer": optimizer}))
        assert all(map(torch.equal, before, chunks[0].parameters()))
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=2), seed=5)
    found.append(error_of(sf.load, url, {"optimizer": optimizer}))
    return found


def test_another_depth_width_or_vocabulary_is_refused(ranks, tmp_path):
    for shallower, deeper, narrower, larger, alone in ranks(2)(load_others, str(tmp_path)):
        assert "decoder.layers.1." in shallower
        assert "decoder.layers.2." in deeper
        assert (
            "model/decoder.layers.0.mlp.linear_fc1.weight is [56, 24] in the checkpoint and [56, 16] here" in narrower
        )
        assert (
            "model/embedding.word_embeddings.weight is [64, 24] in the checkpoint and [224, 24] here, of which 1 to 64 "
            "there and 193 to 224 here are no padding" in larger
        )
        assert "belongs to no model of the state" in alone


def load_apart(rank, world, place):
    url = f"{place}/saved"
    begin(Layout())
    chunks, optimizer = build(Layout(), Kind(layers=1))
    step(chunks, optimizer, 0)
    sf.save(url, {"model": chunks, "optimizer": optimizer})
    with torch.no_grad():
        next(chunks[0].parameters()).add_(1)
    return error_of(sf.load, url, {"model": chunks, "optimizer": optimizer}, only="optimizer")


def test_masters_of_another_step_than_the_model_are_refused(ranks, tmp_path):
    for refused in ranks(2)(load_apart, str(tmp_path)):
        assert ".master and the model's" in refused
        assert "are of different steps" in refused


def scaled(rank, world, place):
    url, kind = f"{place}/saved", Kind(dtype=torch.float16, layers=1)
    begin(Layout())
    chunks, optimizer = build(Layout(), kind)
    step(chunks, optimizer, 0)
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler._growth_tracker, scaler._hysteresis_tracker = 7, 1
    scaler._scale.fill_(2.0**17)
    sf.save(url, {"model": chunks, "optimizer": optimizer})
    before = truth(chunks, optimizer)
    begin(Layout(tp=2))
    chunks, optimizer = build(Layout(tp=2), kind, seed=5)
    sf.load(url, {"model": chunks, "optimizer": optimizer})
    assert all(torch.equal(tensor, before[name]) for name, tensor in truth(chunks, optimizer).items())
    scaler = optimizer.chained_optimizers[0].grad_scaler
    return scaler.scale.item(), scaler._growth_tracker, scaler._hysteresis_tracker


def test_a_loss_scaler_comes_back(ranks, tmp_path):
    assert ranks(2)(scaled, str(tmp_path)) == [(2.0**17, 7, 1)] * 2


def save_with_a_hole(rank, world, place):
    begin(Layout())
    chunks, optimizer = build(Layout(), Kind(layers=1))
    step(chunks, optimizer, 0)
    (buckets,) = optimizer.chained_optimizers[0].gbuf_ranges[0].values()
    if rank == 1:
        buckets[0]["param_map"].popitem()
    return error_of(sf.save, f"{place}/saved", {"model": chunks, "optimizer": optimizer})


def test_records_of_a_buffer_without_a_parameter_are_refused(ranks, tmp_path):
    for said in ranks(2)(save_with_a_hole, str(tmp_path)):
        assert "rank 1: optimizer: its records name no parameter of which it steps a run of shape (1536,)" in said


def load_as_another_dtype(rank, world, place):
    """What differs from the exact values after a load with `cast=True`, which alone would round or widen."""
    found, layout = [], Layout()
    for saved, loaded in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        begin(layout)
        chunks, optimizer = build(layout, Kind(layers=1, dtype=saved))
        step(chunks, optimizer, 0)
        sf.save(f"{place}/{saved}", {"model": chunks, "optimizer": optimizer})
        begin(layout)
        chunks, optimizer = build(layout, Kind(layers=1, dtype=loaded), seed=5)
        sf.load(f"{place}/{saved}", {"model": chunks, "optimizer": optimizer}, cast=True)
        sf.save(f"{place}/from {saved}", {"model": chunks, "optimizer": optimizer})
        with sf.mapped(f"{place}/{saved}") as before, sf.mapped(f"{place}/from {saved}") as after:
            names = [name.partition("/")[2] for name in before if name.startswith("model/")]
            assert len(names) > 5
            for name in names:
                model, master = f"model/{name}", f"optimizer/state.{name}.master"
                exact = before[master] if saved is torch.bfloat16 else before[model]
                if not torch.equal(after[model], exact.to(loaded)):
                    found.append(model)
                if loaded is torch.bfloat16 and not torch.equal(after[master], exact):
                    found.append(master)
    return found


def test_exact_copies_are_not_left_behind(ranks, tmp_path):
    assert ranks(2)(load_as_another_dtype, str(tmp_path)) == [[], []]


def save_without_groups_or_around(rank, world, place):
    begin(Layout())
    chunks, _ = build(Layout(), Kind(layers=1))
    around = error_of(sf.save, f"{place}/around", {"model": torch.nn.Sequential(*chunks)})
    parallel_state.destroy_model_parallel()
    return around, error_of(sf.save, f"{place}/gone", {"model": chunks})


def test_a_model_that_does_not_tell_where_it_lies_is_refused(ranks, tmp_path):
    for around, gone in ranks(2)(save_without_groups_or_around, str(tmp_path)):
        assert "model: a Sequential around modules of Megatron-Core" in around
        assert "model: a model of Megatron-Core, whose process groups are not there" in gone


def save_with_extra_state(rank, world, place):
    """Layers say more than their tensors: nothing, as TransformerEngine's do without fp8, then three bytes."""
    said = torch.empty(0, dtype=torch.uint8)
    RowParallelLinear.get_extra_state = lambda layer: said
    begin(Layout())
    chunks, _ = build(Layout(), Kind(layers=1))
    before = {name: one.detach().clone() for name, one in chunks[0].named_parameters()}
    sf.save(f"{place}/empty", {"model": chunks})
    chunks, _ = build(Layout(), Kind(layers=1), seed=5)
    sf.load(f"{place}/empty", {"model": chunks})
    assert all(torch.equal(one, before[name]) for name, one in chunks[0].named_parameters())
    said = torch.zeros(3, dtype=torch.uint8)
    return error_of(sf.save, f"{place}/filled", {"model": chunks})


def test_extra_state_with_content_is_refused(ranks, tmp_path):
    (refused,) = ranks(1)(save_with_extra_state, str(tmp_path))
    assert "_extra_state" in refused
    assert "is a Tensor, which is not understood" in refused


def save_a_split_parameter(rank, world, place):
    """Says of one parameter that it is two tensors, as TransformerEngine's grouped experts with a single weight do."""
    begin(Layout())
    chunks, _ = build(Layout(), Kind(layers=1))
    said = GPTModel.sharded_state_dict

    def split(model, *arguments, **named):
        entries = said(model, *arguments, **named)
        entry = entries["decoder.layers.0.self_attention.linear_proj.weight"]
        entry.data = entry.data[:12]
        return entries

    GPTModel.sharded_state_dict = split
    return error_of(sf.save, f"{place}/split", {"model": chunks})


def test_parameters_that_a_model_splits_are_refused(ranks, tmp_path):
    (refused,) = ranks(1)(save_a_split_parameter, str(tmp_path))
    assert "'decoder.layers.0.self_attention.linear_proj.weight', which is none of its parameters or buffers" in refused
