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
    ("torch.stack([{0}, {1}, {0} * 0.5])", "vv", "m"),
    ("{0}[torch.tensor([2, 0, 0])]", "v", "v"),
    ("{0}.sort()[0]", "v", "v"),
    ("torch.nn.functional.linear({0}, {1}, {2}).tanh()", "vmv", "v"),
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
    ("{0}[1] = {1}", "v", "s"),
    ("{0}[1:].mul_(0.5)", "v", "v"),
    ("{0}.view(3)[:2].add_({1}[1:])", "v", "v"),
    ("{0}[0] = {1}.exp() * 0.3", "m", "v"),
    ("{0}.diagonal().mul_({1})", "m", "v"),
    ("{0}.mT[2].add_({1})", "m", "v"),
    ("{0}.masked_fill_({0} > 0.5, 0.25)", "x", "x"),
]
RANDOM = [
    "torch.nn.functional.dropout({0}, 0.4)",
    "{0} * torch.rand_like({0})",
    "{0} + torch.randn({shape}, dtype=torch.float64) * 0.3",
    "{0} * torch.bernoulli(torch.full({shape}, 0.6, dtype=torch.float64))",
    "{0} + torch.empty({shape}, dtype=torch.float64).normal_() * {0}.sin()",
]
CUT = ["{0}.detach()", "({0}.detach() * {0}).tanh()"]
