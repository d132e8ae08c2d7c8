"""Lets Megatron's training loop run on the CPU over gloo, for tests.

Beside the stand-ins of `megatron_on_cpu`: those for what the loop asks of a device, small data sets without their
compiled functions, loaders without pinned memory.
"""

import collections
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import megatron_on_cpu

megatron_on_cpu.install()

import torch
import torch.accelerator


class _Properties:
    total_memory, major, minor, multi_processor_count, name = 1 << 34, 8, 0, 1, "cpu"


class _Generators(list):
    def __getitem__(self, index):
        return torch.default_generator


class _Event:
    def __init__(self, *arguments, **named):
        pass

    def record(self, *arguments, **named):
        pass

    synchronize = wait = record

    def elapsed_time(self, other):
        return 1.0

    def query(self):
        return True


def _zero(*arguments, **named):
    return 0


def install() -> None:
    """Before `megatron.training` is imported."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_name = lambda *arguments, **named: "cpu"
    cuda.get_device_properties = lambda *arguments, **named: _Properties()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = cuda.max_memory_reserved = _zero
    cuda.memory_stats = lambda *arguments, **named: collections.defaultdict(int)
    cuda.mem_get_info = lambda *arguments, **named: (1 << 34, 1 << 34)
    cuda.set_rng_state = lambda state, *arguments, **named: torch.set_rng_state(state)
    cuda._lazy_call = lambda call, **named: call()
    cuda.default_generators = _Generators([None])
    cuda.Event = _Event
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.memory_stats = cuda.memory_stats
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    torch.optim.Optimizer._cuda_graph_capture_health_check = lambda self: None
    for name in ("IntTensor", "LongTensor", "FloatTensor", "BFloat16Tensor", "HalfTensor", "ByteTensor"):
        setattr(cuda, name, getattr(torch, name))
    loader = torch.utils.data.DataLoader
    make = loader.__init__

    def unpinned(self, *arguments, **named):
        # A loader draws its seed when it begins: here from another generator than that of dropout, as on a device.
        make(self, *arguments, **{**named, "pin_memory": False, "generator": torch.Generator()})

    loader.__init__ = unpinned


def repair() -> None:
    """After `megatron.training` is imported. Its own load of an optimizer needs two repairs without Apex.

    `sharded_state_dict()` asserts a step counter that a fresh optimizer does not have, and a load leaves PyTorch's
    counters as they are.
    """
    import megatron.core.datasets.utils as datasets
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    megatron_on_cpu.repair()
    MockGPTLowLevelDataset.size = 1000  # of 100,000, whose indices take a second
    datasets.compile_helpers = lambda: None
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    make, load = DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict

    def with_state(self, model_sharded_state_dict, is_loading=False, **named):
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return make(self, model_sharded_state_dict, is_loading, **named)

    def with_step(self, state_dict):
        steps = {group["step"] for group in state_dict["optimizer"]["param_groups"] if "step" in group}
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if steps:
                state["step"] = torch.tensor(float(max(steps)))

    def with_counter(self, model_param, tensors):
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return set_states(self, model_param, tensors)

    DistributedOptimizer.sharded_state_dict = with_state
    DistributedOptimizer.load_state_dict = with_step
    DistributedOptimizer._set_main_param_and_optimizer_states = with_counter
