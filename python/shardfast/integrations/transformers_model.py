"""The model of a Trainer: what is saved of one with adapters, and its configuration files."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import custom_object_save


def is_peft(trainer: Any) -> bool:
    """Whether checkpoints of a trainer's model are those of its adapters."""
    model = plain(trainer)
    return bool(getattr(model, "peft_config", None)) and (
        getattr(model, "_hf_peft_config_loaded", False) or not isinstance(model, transformers.PreTrainedModel)
    )


def plain(trainer: Any) -> Any:
    """The user's model, without what compilation and data parallelism put around it."""
    known = _unwrapped.get(trainer.model)
    model = None if known is None else known()
    if model is None:  # accelerate parses the descriptions of installed packages for it, for milliseconds
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        _unwrapped[trainer.model] = weakref.ref(model)
    return model


_unwrapped: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()


def _named(all_of: Any) -> dict[str, torch.Tensor]:
    return dict(all_of(remove_duplicate=False))


def adapter_names(model: Any) -> list[str]:
    """The tensors that are trained, those that adapters have, and those that peft saves beside them."""
    from peft import get_peft_model_state_dict

    tensors = model.state_dict(keep_vars=True)
    saved = {id(one) for name in model.peft_config for one in get_peft_model_state_dict(model, tensors, name).values()}
    adapters = set(model.peft_config)
    known = {**_named(model.named_parameters), **_named(model.named_buffers)}
    return [
        name
        for name, one in known.items()
        if one.requires_grad or (name in tensors and (id(one) in saved or adapters & set(name.split("."))))
    ]


def adapter_of(model: Any, names: list[str]) -> torch.nn.Module:
    """A module that has these tensors of a model and no others, by the same names."""
    tensors = {**_named(model.named_parameters), **_named(model.named_buffers)}
    root = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        node = root
        for part in path:
            if part not in dict(node.named_children()):
                node.add_module(part, torch.nn.Module())
            node = node.get_submodule(part)
        parameter = tensors[name]
        if isinstance(parameter, torch.nn.Parameter):
            node.register_parameter(last, parameter)
        else:
            node.register_buffer(last, tensors[name])
    return root


def write_configurations(model: Any, directory: str, *, is_adapter: bool) -> None:
    """The files ``config.json`` and so on that ``save_pretrained()`` writes beside the weights of a model."""
    for name, config in model.peft_config.items() if is_adapter else ():
        place = Path(directory) if name == "default" else Path(directory) / name
        config = copy.copy(config)
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
        mapping = None
        if config.task_type is None and hasattr(model, "get_base_model"):
            kind = type(model.get_base_model())
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(str(place), auto_mapping_dict=mapping)
    if is_adapter or not isinstance(model, transformers.PreTrainedModel):
        return
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    if model.is_remote_code():
        custom_object_save(model, directory, config=model.config)
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
