"""A small network, and the ways in which programs change the weights and the layers of a module that they hold.

Each way is done alike to an optimized module and to the module in eager PyTorch that it must equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

Way = Callable[[Any], object]


class Net(nn.Module):
    """Two convolutions, a norm, a residual, three linear layers, a parameter and a buffer of its own: [N, 3, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.again = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.drop, self.fc = nn.Dropout(), nn.Linear(8, 5)
        self.gate = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(8))
        self.factor = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        y = F.relu(self.again(y) + y)
        z = self.body(y.mean((2, 3))) * self.gate + self.offset * self.factor
        result: Tensor = self.fc(self.drop(z))
        return result


class Double(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def halve(module: Any, args: Any, result: Tensor) -> Tensor:
    """A hook."""
    return result / 2


def negate(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before forward."""
    return (-args[0],)


def _step(m: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    parameters = [p for p in m.parameters() if p.is_leaf]
    for p in parameters:
        p.requires_grad_()
        p.grad = torch.randn_like(p)
    make(parameters).step()
    for p in parameters:
        p.grad = None


def sgd(m: Any) -> None:
    _step(m, lambda p: torch.optim.SGD(p, lr=0.01))


def sgd_momentum(m: Any) -> None:
    _step(m, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False))


def adam(m: Any) -> None:
    _step(m, lambda p: torch.optim.Adam(p, lr=0.01))


def adam_fused(m: Any) -> None:
    _step(m, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@torch.no_grad()
def copied(m: Any) -> None:
    m.fc.weight.copy_(torch.randn(m.fc.weight.shape))


@torch.no_grad()
def added(m: Any) -> None:
    m.conv.weight.add_(0.1)


@torch.no_grad()
def foreach(m: Any) -> None:
    torch._foreach_mul_([p for p in m.parameters() if p.is_leaf], 1.05)


@torch.no_grad()
def one_row(m: Any) -> None:
    m.fc.weight[1:3] = torch.randn(m.fc.weight[1:3].shape)


@torch.no_grad()
def through_a_view(m: Any) -> None:
    m.again.weight.view(-1)[::2].mul_(-1)


def detached(m: Any) -> None:
    m.body[0].weight.detach().mul_(1.5)


def in_inference_mode(m: Any) -> None:
    with torch.inference_mode():
        m.fc.bias.add_(1)


def normal(m: Any) -> None:
    nn.init.normal_(m.body[2].weight)


def kaiming(m: Any) -> None:
    nn.init.kaiming_uniform_(m.conv.weight)


def zeros(m: Any) -> None:
    nn.init.zeros_(m.conv.bias)


def reset(m: Any) -> None:
    m.fc.reset_parameters()


@torch.no_grad()
def running_statistics(m: Any) -> None:
    m.norm.running_mean.normal_()
    m.norm.running_var.uniform_(0.5, 2)


@torch.no_grad()
def own_buffer(m: Any) -> None:
    m.offset.normal_()


@torch.no_grad()
def own_parameter(m: Any) -> None:
    m.gate.fill_(1.5)


@torch.no_grad()
def own_attribute(m: Any) -> None:
    m.factor.add_(0.5)


def exchanged_memory(m: Any) -> None:
    m.fc.weight.data = torch.randn(m.fc.weight.shape)


def transposed_memory(m: Any) -> None:
    m.body[0].weight.data = m.body[0].weight.data.t()


def fewer_rows(m: Any) -> None:
    m.fc.weight.data, m.fc.bias.data = m.fc.weight.data[:3], m.fc.bias.data[:3]


def negated_memory(m: Any) -> None:
    m.body[2].weight.data = torch._neg_view(m.body[2].weight.data)


@torch.no_grad()
def set_memory(m: Any) -> None:
    m.fc.weight.set_(torch.randn(m.fc.weight.shape))


def vector(m: Any) -> None:
    size = sum(p.numel() for p in m.parameters())
    nn.utils.vector_to_parameters(torch.randn(size) / 3, m.parameters())


def swapped(m: Any) -> None:
    torch.utils.swap_tensors(m.fc.weight, nn.Parameter(torch.randn(m.fc.weight.shape)))


IN_PLACE: tuple[Way, ...] = (
    sgd, sgd_momentum, adam, adam_fused, copied, added, foreach, one_row, through_a_view, detached, in_inference_mode,
    normal, kaiming, zeros, reset, running_statistics, own_buffer, own_parameter, own_attribute,
)  # fmt: skip


def new_parameter(m: Any) -> None:
    m.body[0].weight = nn.Parameter(torch.randn(8, 8))


def new_parameter_of_its_own(m: Any) -> None:
    m.gate = nn.Parameter(torch.full((1,), 0.5))


def transposed(m: Any) -> None:
    m.body[2].weight = nn.Parameter(m.body[2].weight.detach().t())


def strided(m: Any) -> None:
    m.body[0].weight = nn.Parameter(torch.randn(16, 16)[::2, 1::2])


def expanded(m: Any) -> None:
    m.norm.weight = nn.Parameter(torch.full((1,), 1.5).expand(8))


def new_attribute(m: Any) -> None:
    m.factor = torch.randn(8)


def new_buffer(m: Any) -> None:
    m.offset = torch.randn(8)


def registered_buffer(m: Any) -> None:
    m.norm.register_buffer("running_mean", torch.randn(8))


def no_bias(m: Any) -> None:
    m.fc.bias = None


def no_bias_of_a_convolution(m: Any) -> None:
    m.conv.bias = None


def a_bias(m: Any) -> None:
    m.fc.bias = nn.Parameter(torch.randn(m.fc.weight.shape[0]))


def unaffine(m: Any) -> None:
    m.norm.weight = m.norm.bias = None


def new_layer(m: Any) -> None:
    m.fc = nn.Linear(8, 5)


def another_layer(m: Any) -> None:
    m.fc = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


def new_inner_layer(m: Any) -> None:
    m.body[0] = nn.Linear(8, 8, bias=False)


def new_activation(m: Any) -> None:
    m.body[1] = nn.Tanh()


def appended(m: Any) -> None:
    m.body.append(nn.Linear(8, 8))


def removed(m: Any) -> None:
    del m.body[len(m.body) - 1]


def identity(m: Any) -> None:
    m.again = nn.Identity()


def hook(m: Any) -> None:
    m.body[0].register_forward_hook(halve)


def hook_before(m: Any) -> None:
    m.fc.register_forward_pre_hook(negate)


def hook_on_the_root(m: Any) -> None:
    m.register_forward_hook(halve)


def hook_for_a_while(m: Any) -> None:
    m.again.register_forward_hook(halve).remove()


def no_hooks(m: Any) -> None:
    for module in m.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    m.register_forward_hook(halve).remove()


def pruned(m: Any) -> None:
    prune.l1_unstructured(m.body[0], "weight", amount=0.3)


def pruned_structure(m: Any) -> None:
    prune.ln_structured(m.conv, "weight", amount=0.5, n=2, dim=0)


def prune_made_permanent(m: Any) -> None:
    for module in m.modules():
        if prune.is_pruned(module) and hasattr(module, "weight_orig"):
            prune.remove(module, "weight")


def parametrized(m: Any) -> None:
    parametrize.register_parametrization(m.fc, "weight", Double())


def unparametrized(m: Any) -> None:
    for module in m.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


def spectral_norm(m: Any) -> None:
    parametrizations.spectral_norm(m.body[0]).eval()


def weight_norm(m: Any) -> None:
    parametrizations.weight_norm(m.conv)


def tied(m: Any) -> None:
    m.body[2].weight = m.body[0].weight


def untied(m: Any) -> None:
    m.body[2].weight = nn.Parameter(m.body[2].weight.detach().clone() + 0.1)


def frozen(m: Any) -> None:
    m.requires_grad_(False)


def thawed(m: Any) -> None:
    m.requires_grad_(True)


def channels_last(m: Any) -> None:
    m.to(memory_format=torch.channels_last)


def by_float64(m: Any) -> None:
    m.double().float()


def by_bfloat16(m: Any) -> None:
    m.to(torch.bfloat16).to(torch.float32)


def overwritten_by_conversion(m: Any) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        m.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def loaded(m: Any) -> None:
    m.load_state_dict({k: torch.randn_like(v) / 2 if v.ndim > 1 else v.clone() for k, v in m.state_dict().items()})


def loaded_by_assignment(m: Any) -> None:
    m.load_state_dict({k: v.clone() * 1.1 if v.is_floating_point() else v for k, v in m.state_dict().items()},
                      assign=True)  # fmt: skip


def one_layer_loaded(m: Any) -> None:
    m.body[0].load_state_dict({k: torch.randn_like(v) for k, v in m.body[0].state_dict().items()})


def batch_statistics(m: Any) -> None:
    m.norm.train()


def running_statistics_again(m: Any) -> None:
    m.norm.eval()


def another_epsilon(m: Any) -> None:
    m.norm.eps = 0.5
    told(m)


def uncounted(m: Any) -> None:
    m.fc.weight.data.add_(0.5)
    told(m)


def in_the_dictionary(m: Any) -> None:
    m.body[2]._parameters["weight"] = nn.Parameter(torch.randn(8, 8))


def in_the_dictionary_of_buffers(m: Any) -> None:
    m.norm._buffers["running_mean"] = torch.randn(8)


def in_the_dictionary_of_layers(m: Any) -> None:
    m.body._modules["0"] = nn.Linear(8, 8)


def another_order(m: Any) -> None:
    layer = m.body._modules.pop("1")
    m.body._modules["1"] = layer


def another_dictionary(m: Any) -> None:
    m.body[2]._parameters = {"weight": nn.Parameter(torch.randn(8, 8)), "bias": None}


def another_dictionary_of_buffers(m: Any) -> None:
    m.norm._buffers = dict(m.norm._buffers, running_var=torch.rand(8) + 0.5)


def another_dictionary_of_layers(m: Any) -> None:
    m.body._modules = {"0": nn.Linear(8, 8)}


def own_dictionary(m: Any) -> None:
    m._parameters = dict(m._parameters, gate=nn.Parameter(torch.full((1,), 0.25)))


def own_dictionary_of_buffers(m: Any) -> None:
    m._buffers = dict(m._buffers, offset=torch.randn(8))


def own_dictionary_of_layers(m: Any) -> None:
    m._modules = {name: layer for name, layer in m._modules.items() if name != "fc"} | {"fc": nn.Linear(8, 5)}


def hidden_parameter(m: Any) -> None:
    m.fc.__dict__["weight"] = torch.randn(5, 8)


def no_buffer_any_longer(m: Any) -> None:
    del m.offset
    m.offset = torch.randn(8)


def no_attribute_any_longer(m: Any) -> None:
    del m.factor
    m.factor = nn.Parameter(torch.randn(8))


def another_forward(m: Any) -> None:
    m.body[0].forward = _doubled


def its_own_forward_again(m: Any) -> None:
    for module in m.modules():
        if module.__dict__.get("forward") is _doubled:
            del module.forward


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


def by_numpy(m: Any) -> None:
    m.fc.weight.detach().numpy()[0] = 3
    told(m)


def told(m: Any) -> None:
    """What programs do after a change that PyTorch does not count."""
    if hasattr(m, "invalidate"):
        m.invalidate()


OTHERS: tuple[Way, ...] = (
    exchanged_memory, transposed_memory, fewer_rows, negated_memory, set_memory, vector, swapped,
    new_parameter, new_parameter_of_its_own, transposed, strided, expanded, new_attribute, new_buffer,
    registered_buffer, no_bias, no_bias_of_a_convolution, a_bias, unaffine, new_layer, another_layer, new_inner_layer,
    new_activation, appended, removed, identity, hook, hook_before, hook_on_the_root, hook_for_a_while, no_hooks,
    pruned, pruned_structure, prune_made_permanent, parametrized, unparametrized, spectral_norm, weight_norm, tied,
    untied, frozen, thawed, channels_last, by_float64, by_bfloat16, overwritten_by_conversion, loaded,
    loaded_by_assignment, one_layer_loaded, batch_statistics, running_statistics_again, another_epsilon, uncounted,
    by_numpy, told, in_the_dictionary, in_the_dictionary_of_buffers, in_the_dictionary_of_layers, another_order,
    another_dictionary, another_dictionary_of_buffers, another_dictionary_of_layers, own_dictionary,
    own_dictionary_of_buffers, own_dictionary_of_layers, hidden_parameter, no_buffer_any_longer,
    no_attribute_any_longer, another_forward, its_own_forward_again,
)  # fmt: skip
WAYS = IN_PLACE + OTHERS


def net(seed: int = 0) -> Net:
    """The network in evaluation mode, with random statistics."""
    torch.manual_seed(seed)
    model = Net().eval()
    running_statistics(model)
    return model


def both(way: Way, seed: int, *modules: Any) -> None:
    """Change modules alike. Where one refuses (there is nothing to remove, it is pruned already), all must."""
    outcomes = []
    for module in modules:
        torch.manual_seed(seed)
        try:
            way(module)
            outcomes.append(None)
        except Exception as error:  # whatever PyTorch raises for a change that does not fit
            outcomes.append(type(error))
    assert len(set(outcomes)) == 1, outcomes


def twin(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of the module tree on the same storage, as an optimized module is one, in eager PyTorch."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        alias = tensor.detach()
        memo[id(tensor)] = nn.Parameter(alias, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else alias
    for inner in module.modules():
        memo |= {id(v): v.detach() for v in inner.__dict__.values() if isinstance(v, Tensor)}
    return copy.deepcopy(module, memo)
