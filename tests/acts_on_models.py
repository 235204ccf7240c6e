"""What a function may do to a model while it is traced, and what the model holds, to compare.

The kind: a trace computes with tensors that have no values, and none of them may stay in a model of
the user's, nor may a parameter become one. Each act ends in an error, or does what it does in eager
(``FINE``); in both cases each place in the model holds the object that it held before, of its type,
with its memory.
"""

import torch
from cases import DTYPE, numbers
from torch import nn


class Acted(nn.Module):
    """A model with all kinds of places for tensors, which does something to itself when called."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.layer = nn.Linear(3, 3, dtype=DTYPE)
        with torch.no_grad():
            self.layer.weight.copy_(numbers(3, 3))
            self.layer.bias.copy_(numbers(3))
        self.register_buffer("scale", torch.ones(3, dtype=DTYPE))
        self.plain = torch.ones(3, dtype=DTYPE)
        self.table, self.listed, self.cache = {}, [], None

    def forward(self, x):
        self.act(self)
        return self.layer(x) * self.scale


def places(model):
    """Each place of a model: the object in it, its type, and what a tensor is."""
    found = {}
    for name, part in model.named_modules():
        for store in (part._parameters, part._buffers, part._modules, vars(part)):
            for key, value in store.items():
                found[name, id(store), key] = seen(value)
    found["table"], found["listed"] = [*map(seen, model.table)], [*map(seen, model.listed)]
    return found


def seen(value):
    if not isinstance(value, torch.Tensor):
        return id(value), type(value)
    what = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return id(value), type(value), value.data_ptr(), what, value.grad


def sets_data(m):
    m.layer.weight.data = m.layer.weight.data * 0.9


def sets_a_parameter(m):
    m.layer.weight = nn.Parameter(m.layer.weight * 0.9)


def sets_an_entry(m):
    m.layer._parameters["weight"] = m.layer.weight * 0.9


def sets_a_buffer(m):
    m.scale = m.scale * 0.9


def sets_an_attribute(m):
    vars(m)["plain"] = m.plain * 0.9


def fills_a_cache(m):
    m.cache = m.scale * 0.9


def fills_a_dict(m):
    m.table["scale"] = m.scale * 0.9


def fills_a_list(m):
    m.listed.append(m.scale * 0.9)


def sets_a_gradient(m):
    m.layer.weight.grad = m.layer.weight * 0.9


def swaps(m):
    torch.utils.swap_tensors(m.layer.weight, nn.Parameter(m.layer.weight * 0.9))


def swaps_what_nobody_has_read(m):
    torch.utils.swap_tensors(m.layer.weight, nn.Parameter(torch.zeros(3, 3, dtype=DTYPE)))


def sets_memory(m):
    with torch.no_grad():
        m.layer.weight.set_(m.layer.weight * 0.9)


def sets_all_data(m):
    flat = nn.utils.parameters_to_vector(m.layer.parameters())
    nn.utils.vector_to_parameters(flat * 0.9, m.layer.parameters())


def loads_by_assignment(m):
    m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items()}, assign=True)


def adds_a_module(m):
    m.layer = nn.Linear(3, 3, dtype=DTYPE)


def fails_after_it(m):
    m.layer.weight = nn.Parameter(m.layer.weight * 0.9)
    m.table["scale"] = m.scale * 0.9
    raise ZeroDivisionError


def is_interrupted_after_it(m):
    m.layer.weight = nn.Parameter(m.layer.weight * 0.9)
    raise KeyboardInterrupt


# Each with words of the error of `functx.jit`.
ERRORS = {
    sets_data: r"acts_on_models\.py:\d+ .*sets \.data",
    sets_a_parameter: "is kept by Linear",
    sets_an_entry: "is kept by Linear",
    sets_a_buffer: "is kept by Acted",
    sets_an_attribute: "is kept by Acted",
    fills_a_cache: "is kept by Acted",
    fills_a_dict: "is kept by Acted",
    fills_a_list: "is kept by Acted",
    sets_a_gradient: r"sets \.grad",
    swaps: "swaps tensors",
    swaps_what_nobody_has_read: "swaps tensors",
    sets_memory: r"set_\(\) or the like",
    sets_all_data: r"sets \.data",
    loads_by_assignment: "is kept by|traced once more",
    adds_a_module: "is kept by",
    lambda m: m.half(): "converts the parameters of a module",
    lambda m: m.to(torch.float32): "converts the parameters of a module",
    lambda m: m.to("meta"): "converts the parameters of a module",
    lambda m: m.layer.half().double(): "converts the parameters of a module",
    lambda m: m.register_buffer("new", m.scale * 0.9): "is kept by Acted",
    lambda m: m.register_parameter("new", nn.Parameter(m.scale * 0.9)): "is kept by Acted",
}
FAILURES = {fails_after_it: ZeroDivisionError, is_interrupted_after_it: KeyboardInterrupt}
FINE = {
    "nothing": lambda m: None,
    "to the same": lambda m: m.to(torch.float64),
    "no gradients": lambda m: m.zero_grad(),
    "the same data": lambda m: setattr(m.layer.weight, "data", m.layer.weight),
}
NAMES = [f.__name__ if f.__name__ != "<lambda>" else f"act {i}" for i, f in enumerate(ERRORS)]
