"""A layout of Megatron-Core is described once: later saves ask the model for nothing, and notice what has changed."""

import pytest
import shardfast as sf
import torch
from jobs import Kind, Layout, begin, build, difference, step, truth
from megatron.core.models.gpt import GPTModel
from shardfast.state.catalog import TensorLeaf
from shardfast.state.description import describe


def save_again(rank, world, place, kind, layout, target):
    """How often the model was asked where its tensors lie, by save; what the last one lost of the state."""
    asked, own = [], GPTModel.sharded_state_dict

    def counted(self, *arguments, **named):
        asked[-1] += 1
        return own(self, *arguments, **named)

    begin(layout)
    chunks, optimizer = build(layout, kind)
    state = {"model": chunks, "optimizer": optimizer}
    with sf.Checkpointer(place) as ckpt, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModel, "sharded_state_dict", counted)
        for number in range(5):
            step(chunks, optimizer, number)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number)
            if number == 3:  # in other memory
                inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
                entries = next(iter(inner.state.values()))
                entries["exp_avg"] = entries["exp_avg"].clone()
            asked.append(0)
            ckpt.save(number, state)
    leaves = describe(state, notice=lambda by: None)
    captures = {leaf.capture for leaf in leaves if isinstance(leaf, TensorLeaf)}
    assert captures <= {"lazy", "inline"}, "the call copies what no step announces"
    before, groups = truth(chunks, optimizer), [group["lr"] for group in optimizer.param_groups]
    begin(target)
    chunks, optimizer = build(target, kind, seed=5)
    sf.load(f"{place}/step-00000004", {"model": chunks, "optimizer": optimizer})
    assert {group["lr"] for group in optimizer.param_groups} == set(groups)
    return asked, difference(before, truth(chunks, optimizer))


@pytest.mark.parametrize(
    ("kind", "layout", "target"),
    [
        (Kind(), Layout(tp=2, pp=2), Layout()),
        pytest.param(Kind(experts=4), Layout(ep=2), Layout(ep=4), marks=pytest.mark.campaign),
        pytest.param(Kind(dtype=torch.float16), Layout(pp=2, vpp=2), Layout(tp=2), marks=pytest.mark.campaign),
        pytest.param(Kind(tied=True), Layout(tp=2, distributed=False), Layout(pp=2), marks=pytest.mark.campaign),
    ],
    ids=["dense", "experts", "scaled", "plain"],
)
def test_a_model_is_asked_once_until_something_changes(ranks, tmp_path, kind, layout, target):
    for asked, lost in ranks(4)(save_again, str(tmp_path), kind, layout, target):
        assert asked[0]
        assert not asked[1], asked
        assert not asked[2], asked
        assert asked[3], asked
        assert not asked[4], asked
        assert not lost


def goes_on(rank, world, place, layout, target):
    """A save while the training goes on at once; what it lost of what was there at its call."""
    kind = Kind(hidden=384, ffn=768, layers=6)
    begin(layout)
    chunks, optimizer = build(layout, kind)
    step(chunks, optimizer, 0)
    before = truth(chunks, optimizer)
    pending = sf.save_async(place, {"model": chunks, "optimizer": optimizer})
    for _ in range(3):
        assert optimizer.step()[0]  # with the gradients that are there
    pending.committed()
    begin(target)
    chunks, optimizer = build(target, kind, seed=5)
    sf.load(place, {"model": chunks, "optimizer": optimizer})
    return difference(before, truth(chunks, optimizer))


@pytest.mark.parametrize(
    ("layout", "target"),
    [(Layout(), Layout(tp=2)), pytest.param(Layout(instances=2), Layout(), marks=pytest.mark.campaign)],
    ids=str,
)
def test_a_save_is_of_its_call(ranks, tmp_path, layout, target, monkeypatch):
    """Also of parameters that other ranks step, which a step gathers."""
    monkeypatch.setenv("SHARDFAST_STAGING_BYTES", str(8 << 20))  # of 25 MB: copied in the background
    assert not any(ranks(4)(goes_on, str(tmp_path / "a"), layout, target))


def overlap_later(rank, world, place):
    layout = Layout()
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=1, overlaps=True))
    chunks[0].disable_forward_pre_hook(param_sync=False)
    with sf.Checkpointer(place) as ckpt:
        for number in range(2):
            ckpt.save(number, {"model": chunks, "optimizer": optimizer})
        chunks[0].enable_forward_pre_hook()
        try:
            ckpt.save(2, {"model": chunks, "optimizer": optimizer})
        except sf.Error as error:
            return str(error)
    return ""


def test_a_forward_pass_that_begins_to_gather_is_noticed(ranks, tmp_path):
    for refused in ranks(2)(overlap_later, str(tmp_path)):
        assert "overlap_param_gather" in refused


def load_into_one_counter(rank, world, place):
    """What a load of Megatron's own leaves without TransformerEngine: one step counter for all parameters."""
    layout = Layout(tp=2)
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=1))
    step(chunks, optimizer, 0)
    sf.save(f"{place}/many", {"model": chunks, "optimizer": optimizer})
    inner = optimizer.optimizer
    counter = next(iter(inner.state.values()))["step"]
    for entries in inner.state.values():
        entries["step"] = counter
    counter.fill_(7)
    sf.load(f"{place}/many", {"model": chunks, "optimizer": optimizer})
    sf.save(f"{place}/one", {"model": chunks, "optimizer": optimizer})
    loaded = [float(counter), len({id(entries["step"]) for entries in inner.state.values()})]
    chunks, optimizer = build(layout, Kind(layers=1), seed=5)
    sf.load(f"{place}/one", {"model": chunks, "optimizer": optimizer})
    return [*loaded, {float(entries["step"]) for entries in optimizer.optimizer.state.values()}]


def test_one_step_counter_of_all_parameters_is_saved_and_filled(ranks, tmp_path):
    for told in ranks(2)(load_into_one_counter, str(tmp_path)):
        assert told == [1.0, 1, {1.0}]


def load_parts(rank, world, place):
    """A load of the model alone beside its optimizer, and of all with a weight that is no number."""
    layout = Layout(tp=2)
    begin(layout)
    chunks, optimizer = build(layout, Kind(layers=1))
    step(chunks, optimizer, 0)
    with torch.no_grad():
        weight = chunks[0].module.module.decoder.final_layernorm.weight
        weight[0] = float("nan")
    optimizer.reload_model_params()
    sf.save(f"{place}/saved", {"model": chunks, "optimizer": optimizer})
    before = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    other = build(layout, Kind(layers=1), seed=5)
    state = {"model": other[0], "optimizer": other[1]}
    sf.load(f"{place}/saved", state, only="model")
    pairs = zip(before, other[0][0].parameters(), strict=True)
    alone = [torch.equal(one.view(torch.int16), now.detach().view(torch.int16)) for one, now in pairs]
    sf.load(f"{place}/saved", state)
    return all(alone), difference(*(nans_are_ones(truth(*one)) for one in ((chunks, optimizer), other)))


def nans_are_ones(tensors):
    return {name: tensor.nan_to_num(nan=1e30) for name, tensor in tensors.items()}


def test_the_model_alone_and_a_weight_that_is_no_number_are_loaded(ranks, tmp_path):
    for alone, lost in ranks(2)(load_parts, str(tmp_path)):
        assert alone
        assert not lost
