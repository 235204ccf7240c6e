"""Lines of random programs: one table, a group a feature.

Each is ``kind: text``. Kinds are ``m`` (3 x 3), ``v`` (3), ``s`` (no dimensions), all of
float64, and ``i`` (three indices). Operands are ``{m}``, ``{m2}``, ``{v}``, ``{s}``, ``{i}``; the
function itself was given or made ``{om}`` and ``{ov}``. ``{k}`` is a number, and ``{out}`` the
result: a text without it is an expression. ``self`` is the module of `world`.
"""

import re

GROUPS = {
    "pointwise": """
        m: torch.sin({m}) * {m2} | m: torch.tanh({m} + {v}) | m: {m} * {m2} - {k} * {m}
        m: torch.sigmoid({m}) / (1 + {m2} ** 2) | m: torch.exp(-({m} * {m2}).abs())
        m: torch.addcmul({m}, {m2}, torch.cos({m}), value={k}) | m: F.gelu({m}) + F.softplus({m2})
        v: {v} * torch.cos({v2}) * {s} | v: torch.atan2({v}, 2 + {v2} ** 2)
        s: torch.sin({s} * {s2}) + {k} | s: (1 + {s} ** 2).sqrt() * {s2}""",
    "matmul": """
        m: {m} @ {m2} / 3 | m: torch.tanh(torch.addmm({m}, {m2}, self.constant))
        m: torch.einsum("ij,kj->ik", {m}, {m2}) * {k}
        m: torch.bmm(torch.stack([{m}, {m2}]), torch.stack([{m2}, {m}])).sum(0) / 4
        m: torch.outer({v}, {v2}) | v: {m} @ {v} / 2 | v: {v} @ torch.tanh({m}) | s: {v} @ {v2}""",
    "layers": """
        m: F.linear({m}, {m2}, {v}) / 2 | m: F.linear(torch.tanh({m}), {m2}) / 3
        m: F.conv1d({m}[None], {m2}[:, :, None], {v})[0] / 2
        m: F.conv1d({m}[None], self.conv.weight, padding=1)[0]
        m: F.normalize({m}, dim=1, eps=1.0) | m: F.embedding({i}, {m})
        v: F.embedding({i}, {m}).sum(1) | s: F.cross_entropy({m}, {i})
        s: F.mse_loss({m}, {m2})""",
    "reductions": """
        v: {m}.sum(0) | v: torch.logsumexp({m}, 1) | v: {m}.amax(1) + {m}.mean(0)
        v: {m}.cumsum(0).prod(1).tanh() | v: torch.linalg.vector_norm({m} + 2, dim=1)
        s: ({m} * {m2}).mean() | s: {v}.var() | s: {m}.diagonal().sum()
        m: torch.softmax({m}, -1) | m: torch.log_softmax({m} * {k}, 0)
        m: torch.softmax({m} @ {m2}, 0) @ {m} | v: torch.softmax({v}, 0) * {v2}""",
    "views": """
        m: {m}.t() | m: {m}.reshape(9).view(3, 3) | m: {v}.expand(3, 3)
        m: {m}.unsqueeze(1).transpose(0, 2).squeeze(1) | m: {m}.flatten().unflatten(0, (3, 3)).mT
        v: {m}[1] | v: {m}.diagonal() | v: {m}.unbind(1)[2] | v: {m}.view(-1)[::4] | s: {v}[0]
        s: {m}[1, 2]""",
    "indexing": """
        m: {m}[{i}] | m: {m}[:, torch.tensor([2, 0, 1])] * {m2}
        m: torch.where({m} > 0, {m2}, {k} * {m}) | m: {m}.index_select(1, {i})
        m: {m}.gather(1, {i}.expand(3, 3)) | m: {m}.masked_fill({m2} > 0, {k})
        m: {m}.index_add(0, {i}, {m2}) | m: {m}.sort(0)[0] | v: {v}[{i}] * {v2}
        v: {m}[torch.arange(3), {i}] | v: {m}.topk(1, 1)[0][:, 0] | i: {m}.argsort(1)[0]
        i: {v}.argsort()""",
    "cat and split": """
        m: torch.cat([{m}[:1], {m2}[1:]]) | m: torch.stack([{v}, {v2}, {v} * {k}], 1)
        m: sum({m}.split([1, 2])[1].chunk(2)) * {m2} | m: torch.stack({m}.unbind(1)) + {m2}
        m: torch.roll({m}, 1, 0) - {m2}.flip(1) | m: torch.tril({m}) + torch.triu({m2}, 1)
        v: torch.cat([{v}[1:], {v2}[:1]])""",
    "in place": """
        m: {out} = {m}.clone(); {out}.mul_({v}) | m: {out} = {m} * {k}; {out}.add_({m2}).tanh_()
        m: {out} = torch.zeros_like({m}); {out}.copy_({m2}); {out}.sub_({m})
        m: {out} = {m} + 1; {out}[0] += {v} | m: {out} = {m}.clone(); {out}[1].mul_({k})
        m: {out} = {m}.clone(); {out}.t().add_({m2})
        m: {out} = {m}.clone(); {out}[{m2} > 0] = {k} | m: {out} = {m} @ {m2}; F.relu_({out})
        m: {out} = {m}.clone(); {out}.diagonal().add_({v})
        v: {out} = {v} + {v2}; {out}.clamp_(-2, 2) | v: {out} = {v}.clone(); {out}[1:].neg_()""",
    "default generator": """
        m: torch.rand_like({m}) * {m2} | m: F.dropout({m}, 0.4)
        m: torch.bernoulli(torch.full_like({m}, 0.5)) * {m2} | m: {m} + torch.randn(3, 3)
        m: torch.empty_like({m}).uniform_() * {m} | m: self.dropout({m})
        m: {m}[torch.randperm(3)] | v: F.dropout({v}, 0.5) + torch.rand(3)
        s: {s} * torch.normal(0.0, 1.0, (3,)).sum()""",
    "torch.Generator": """
        m: torch.rand(3, 3, generator=generator) * {m}
        m: {m} * torch.bernoulli(torch.full((3, 3), 0.5), generator=generator)
        m: {m} + torch.empty(3, 3).normal_(generator=generator) * {m2}
        v: {v} * torch.randn(3, generator=generator)""",
    "module": """
        m: self.linear({m}) | m: torch.tanh(self.linear({m})) * self.scale | m: self({m})
        m: {m} @ self.linear.weight.t() | v: {v} * self.linear.bias + self.scale""",
    "remat in a module": "m: self.inside({m}) | m: self.of_self({m}) | v: self.inside({m})[0]",
    "batch norm": "m: self.bn({m}) * {m2}",
    "own norm": "m: self.norm({m})",
    "counter": "m: self.counted({m}) | m: self.counted({m}) * {m2} | m: self.counted({m}) + {v}",
    "functional_call": """
        m: fx.functional_call(self, {"linear.weight": {m}, "linear.bias": {v}}, ({m2},))
        m: fx.functional_call(self, {"linear.weight": {m}}, ({m2},))
        m: fx.functional_call(self, {"linear.weight": {m}.t(), "scale": {v}}, ({m2}, "inside"))
        m: fx.functional_call(self, {"linear.bias": {v}}, ({m}, "inside"))""",
    "functional_call of buffers": """
        m: b = {"running": {v} + 0}; {out} = fx.functional_call(self, b, ({m}, "norm"))
        v: {out} = {v} + 0; fx.functional_call(self, {"running": {out}}, ({m}, "norm"))""",
    "attribute": "m: box.t * {m} | m: torch.sin(box.t + {m}) | v: box.t[0] * {v} * box.number",
    "branch": """
        m: {m} if {m}.shape[0] > 2 else {m2}
        m: torch.sin({m}) if {v}.ndim == 1 and {m}.dtype == torch.float64 else torch.cos({m})
        v: {m} @ {v} if {m}.dim() == 2 else {v}""",
    "number read": """
        m: {m} * {m2}.mean().item()
        m: torch.sin({m}) if bool({m2}.sum() > 0) else torch.cos({m}) * {k}
        v: {v} * float({m}.detach()[0, 0]) | v: {m}[int({i}[0])]
        s: {s} * len([t for t in {v}.tolist() if t > 0])""",
    "detach": """
        m: {m}.detach() * {m2} | m: {m} + ({m2}.round() - {m2}).detach()
        v: {v} - {v}.detach() * {k} | s: {s}.detach() + {v}.sum()""",
    "custom Function": """
        m: Cube.apply({om}, {k}) | m: Cube.apply({om}, 1) * {m}
        m: Cube.apply(Cube.apply({om}, 2), {k}) | v: Cube.apply({ov}, {k})""",
    "custom Function of the old style": """
        m: Product.apply({om}, self.linear.weight) | m: Product.apply({om}, {om2}) / 2""",
    "checkpoint_name": """
        m: fx.checkpoint_name(torch.sin({m}), "a") * {m2}
        m: torch.cos(fx.checkpoint_name({m} @ {m2}, "b")) | m: fx.checkpoint_name({m}, "b")
        v: fx.checkpoint_name({v} * {v2}, "a").sin()""",
    "foreign data": """
        m: {m} * torch.tensor([[1.0], [2.0], [0.5]]) | m: {m} + torch.eye(3) * {k}
        m: {m} * self.constant + self.constant.t() | v: {v} + torch.arange(3.0)
        v: {v} * torch.as_tensor([{k}, 1.0, 2.0])""",
    "half under autocast": """
        m: torch.mm({m}.float(), {m2}.float()).double()
        m: F.linear({m}.float(), self.linear.weight.float(), {v}.float()).double()
        m: torch.tanh(F.conv1d({m}.float()[None], self.conv.weight.float(), padding=1)[0].double())
        m: torch.einsum("ij,jk->ik", {m}.float(), {m2}.float()).double()""",
    "linear only": "m: {k} * {m} | m: {m} + {m2} | m: {m}.t() - {m2} | v: {m}.sum(1) | v: -{v}",
    "identity": """
        m: {m} | m: {m}.view(3, 3) | m: {m}.contiguous() | m: F.dropout({m}, 0.5, training=False)
        v: {v}.to(torch.float64)""",
    "hook": "m: hooked({om}) | v: hooked({ov})",
    "other calls in another run": """
        m: torch.sin({m}) if now.first else torch.cos({m}) | v: {v} * {v2} if now.first else {v}
        m: [torch.sin({m}) * k for k in range(1, now.times)][-1]
        m: (torch.no_grad()(torch.sin) if now.first else torch.sin)({m}) + {m2}
        m: self.inside({m}) if now.first else {m} * {m2}
        m: Cube.apply({om}, 1) if now.first else {om} ** 3 | s: {s} if now.first else {s2} * {s}
        m: ({m} + {m2} if now.first else {m} * torch.tensor([[2.0], [1.0], [{k}]])) * {m}""",
    "other numbers in another run": """
        m: {m} * now.number | m: torch.tanh({m} + now.number * {m2}) | v: {v}.mul(now.number)
        m: torch.roll({m}, now.times, 0) * {m2} | m: torch.softmax({m}, now.dim)
        m: torch.addcmul({m}, {m2}, {m}, value=now.number)
        m: {m}.masked_fill({m2} > 0, now.number)
        m: {out} = {m}.clone(); {out}.mul_(now.number) | v: {m}.select(now.dim, 1)""",
    "other shapes in another run": """
        m: {m}[: now.times].sum(0) + {m2} | v: torch.arange(3, dtype=now.dtype) * {v}
        m: torch.cat({m}.split(now.sizes)[::-1]) * {m2} | v: {m}.view(now.view).flatten()[:3] * {v}
        v: sum({m}.unbind(0)[: now.times]) | m: {v}[:, None].expand(now.expand) * {m}""",
    "other tensors in another run": """
        m: {m} * now.tensor | m: torch.sin(now.tensor + {m}) @ {m2} | v: {v} * now.tensor[1]
        v: now.vector * {v} + {v2} | v: now.vector + {m}[0]
        m: ({m} if now.first else {m2}) * {m2}""",
    "other draws in another run": """
        m: F.dropout({m}, 0.4, training=now.first) | m: F.dropout({m}, now.rate) * {m2}
        m: self.dropout({m}) + {m2} | v: {v} * torch.rand(3) if now.first else {v}
        m: {m} if now.first else {m} * torch.rand_like({m})""",
    "another torch.Generator in another run": """
        m: torch.rand(3, 3, generator=now.generator) * {m}
        v: {v} * torch.randn(3, generator=now.generator)
        m: {m} * torch.rand(3, 3, generator=generator) if now.first else {m}""",
    "linalg": """
        m: torch.linalg.inv({m} @ {m}.t() + 2 * torch.eye(3))
        m: F.scaled_dot_product_attention({m}[None], {m2}[None], {m}[None])[0]
        v: torch.linalg.solve({m} @ {m}.t() + 3 * torch.eye(3), {v})
        s: torch.trace(torch.linalg.inv({m} @ {m}.t() + 3 * torch.eye(3)))""",
}

# Results that have no memory of their own, which could be written to.
ALIASES = {"views", "identity", "branch", "module", "checkpoint_name", "cat and split", "attribute"}
TABLE = {
    name: [tuple(text.strip().split(": ", 1)) for text in re.split(r" \| |\n", rows.strip())]
    for name, rows in GROUPS.items()
}

# Where torch refuses a group, or where it would be outside of the contract: see `writer.Scope`.
NEVER = {
    "torch.Generator": {"vmap"},
    "batch norm": {"levels", "second order"},
    "own norm": {"levels"},
    "counter": {"levels", "second order"},
    "number read": {"vmap"},
    "default generator": {"no draws"},
    "functional_call of buffers": {"jvp"},
    "custom Function of the old style": {"levels"},
    "hook": {"jvp"},
    "other draws in another run": {"no draws"},
    "another torch.Generator in another run": {"no draws", "vmap"},
    "half under autocast": {"third order"},
}
