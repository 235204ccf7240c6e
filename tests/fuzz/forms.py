"""What random programs are made of: forms of expressions and statements, by shape.

Operations are smooth and their results of the order of 1, so that errors are roundings.
"""

SHAPES = {"s": "()", "v": "(3,)", "m": "(3, 3)"}

# (what is written, shapes of operands, shape of the result)
SAME = [
    ("torch.sin({0})", "x", "x"),
    ("torch.tanh({0} * 1.3)", "x", "x"),
    ("torch.exp(-{0}.square())", "x", "x"),
    ("torch.nn.functional.softplus({0})", "x", "x"),
    ("{0} * {1}", "xx", "x"),
    ("{0} - {1}.cos()", "xx", "x"),
    ("{0} / (2.0 + {1}.sin())", "xx", "x"),
    ("torch.where({0} > 0.1, {0}, {1} * 0.5)", "xx", "x"),
    ("torch.addcmul({0}, {1}, {0}, value=0.5)", "xx", "x"),
    ("{0}.clamp(-0.7, 0.9)", "x", "x"),
    ("torch.lerp({0}, {1}, 0.3)", "xx", "x"),
    ("torch.maximum({0}, {1} * 0.7)", "xx", "x"),
]
MIXED = [
    ("torch.tanh({0} @ {1})", "mv", "v"),
    ("torch.tanh({0} @ {1})", "mm", "m"),
    ("torch.outer({0}, {1}).sin()", "vv", "m"),
    ("{0}.sum().sin()", "v", "s"),
    ("torch.logsumexp({0}, 0)", "v", "s"),
    ("{0}.mean(0)", "m", "v"),
    ("{0}.square().mean().sqrt()", "m", "s"),
    ("torch.softmax({0}, -1)", "v", "v"),
    ("torch.softmax({0}, -1) * 2.0", "m", "m"),
    ("torch.nn.functional.layer_norm({0}, (3,)).tanh()", "m", "m"),
    ("{0}.cumsum(0) * 0.4", "v", "v"),
    ("{0} * {1}", "vs", "v"),
    ("{0} + {1}", "mv", "m"),
    ("torch.einsum('ij,j->i', {0}, {1}).sin()", "mv", "v"),
    ("torch.cat([{0}[:1], {1}[1:]])", "vv", "v"),
    ("torch.cat([{0}[:0], {0} * 0.5])", "v", "v"),
    ("torch.stack([{0}, {1}, {0} * 0.5])", "vv", "m"),
    ("{0}[torch.tensor([2, 0, 0])]", "v", "v"),
    ("{0}.sort()[0]", "v", "v"),
    ("torch.nn.functional.linear({0}, {1}, {2}).tanh()", "vmv", "v"),
    ("functx.vmap(torch.tanh)({0})", "v", "v"),
    ("torch.func.vmap(lambda t: t.exp() * 0.5, 1, 1)({0})", "m", "m"),
    ("torch.func.vmap(lambda t: t)({0}.sin())", "m", "m"),
]
VIEWS = [
    ("{0}.mT", "m", "m"),
    ("{0}[1]", "m", "v"),
    ("{0}[:, 2]", "m", "v"),
    ("{0}.diagonal()", "m", "v"),
    ("{0}.unbind(0)[1]", "m", "v"),
    ("{0}.flip(0).view(3)", "v", "v"),
    ("{0}[None].expand(3, 3)", "v", "m"),
    ("{0}.select(0, 1)", "v", "s"),
    ("{0}.unsqueeze(0).squeeze(0)", "v", "v"),
    ("{0}.reshape(-1)[3:6]", "m", "v"),
    ("{0}.expand(3)", "s", "v"),
]
# Writes to a fresh tensor {0}, of a shape, reading {1} of another.
WRITES = [
    ("{0}.mul_({1})", "x", "x"),
    ("{0} += {1}.sin()", "x", "x"),
    ("{0}.copy_({1} * 0.5)", "x", "x"),
    ("{0}.tanh_()", "x", "x"),
    ("{0}.clamp_(-0.5, 0.5)", "x", "x"),
    ("{0}.masked_fill_({0} > 0.5, 0.25)", "x", "x"),
]
# The same, to a view of it.
VIEW_WRITES = [
    ("{0}[1] = {1}", "v", "s"),
    ("{0}[1:].mul_(0.5)", "v", "v"),
    ("{0}.view(3)[:2].add_({1}[1:])", "v", "v"),
    ("{0}[0] = {1}.exp() * 0.3", "m", "v"),
    ("{0}.diagonal().mul_({1})", "m", "v"),
    ("{0}.mT[2].add_({1})", "m", "v"),
]
RANDOM = [
    "torch.nn.functional.dropout({0}, 0.4)",
    "{0} * torch.rand_like({0})",
    "{0} + torch.randn({shape}, dtype=torch.float64) * 0.3",
    "{0} * torch.bernoulli(torch.full({shape}, 0.6, dtype=torch.float64))",
    "{0} + torch.empty_like({0}).normal_() * {0}.sin()",
]
# With a generator of the program's own.
GENERATOR = [
    "{0} * torch.rand({shape}, generator=env.generator, dtype=torch.float64)",
    "{0} + torch.randn({shape}, generator=env.generator, dtype=torch.float64) * {0}.cos() * 0.3",
    "{0} + torch.empty_like({0}).uniform_(generator=env.generator)",
]
CUT = ["{0}.detach()", "({0}.detach() * {0}).tanh()"]
COMPLEX = [
    ("torch.complex({0}, {1}).exp().real * 0.5", "xx", "x"),
    ("torch.complex({0}, {1}).tanh().abs()", "xx", "x"),
    ("(torch.complex({0}, {1}) * torch.complex({1}, {0}).conj()).imag", "xx", "x"),
    ("torch.fft.fft({0}).imag * 0.5", "v", "v"),
    ("torch.view_as_real(torch.polar({0}, {1}))[:, 0]", "vv", "v"),
]
# A region from complex numbers to complex numbers.
COMPLEX_REGION = "remat(lambda z: torch.sigmoid(z.real) * z.sin())(torch.complex({0}, {1})).imag"
# In a block of autocast, in float32, on {0}; it is read once, so that no rounding of a sum of its
# gradients depends on their order.
AUTOCAST = [
    "env.single({0})",
    "torch.nn.functional.linear({0}, env.single.weight.detach())",
    "({0} @ env.single.weight).relu()",
]
POLICIES = [
    "dots_saveable",
    "nothing_saveable",
    "everything_saveable",
    "dots_with_no_batch_dims_saveable",
    "save_only_these_names('a')",
    "save_anything_except_these_names('a')",
    "save_any_names_but_these('b')",
    "save_at_least(40)",
    "save_smaller_than(40)",
    "save_in_modules('0', '2')",
    "save_costing_at_least(0.4)",
    "offload(functx.checkpoint_policies.dots_saveable)",
    "dots_saveable | functx.checkpoint_policies.save_only_these_names('a')",
    "offload(functx.checkpoint_policies.everything_saveable)",
    "everything_saveable & ~functx.checkpoint_policies.save_only_these_names('a')",
    "save_at_least(40) & ~functx.checkpoint_policies.dots_saveable",
    "everything_saveable & env.every_other",
]
