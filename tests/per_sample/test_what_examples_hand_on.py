"""What one example hands on to the next: in a weight, in a buffer, in a tensor kept elsewhere.

The kinds are two. An embedding that writes to its weight (or has sparse gradients) has the
gradients of the weight that the user has, in chunks of any size, and the weight stays as it is, bit
by bit. A module or function that writes an example's values where the next example reads them is
refused, since the gradient of one example is not defined; whatever it does without these values
(counters, power iterations), or never reads again, is free.
"""

import contextlib
import itertools
import warnings

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx
from functx import per_sample

I = torch.tensor([[0, 3, 3], [3, 5, 1], [8, 1, 0]])  # noqa: E741
X = numbers(3, 4)
CHUNKS = [None, 1, 2]

EMBEDDINGS = {
    "a largest norm": lambda: nn.Embedding(9, 4, max_norm=0.5),
    "a largest norm of another kind": lambda: nn.Embedding(9, 4, max_norm=0.5, norm_type=1.0),
    "a largest norm, padded": lambda: nn.Embedding(9, 4, padding_idx=3, max_norm=0.5),
    "sparse": lambda: nn.Embedding(9, 4, sparse=True),
    "sparse with a largest norm": lambda: nn.Embedding(9, 4, sparse=True, max_norm=0.5),
    "a bag": lambda: nn.EmbeddingBag(9, 4, max_norm=0.5, mode="sum"),
    "a sparse bag": lambda: nn.EmbeddingBag(9, 4, sparse=True),
}
SLOW = "ignore:There is a performance drop"  # what torch says of embedding_bag under vmap


def network(kind):
    torch.manual_seed(0)
    return nn.Sequential(EMBEDDINGS[kind](), nn.Flatten(1), nn.LazyLinear(2)).to(DTYPE)


def built(kind):
    net = network(kind)
    renormalised = network(kind)
    net(I)  # which makes the linear layer, and here renormalises all rows
    fresh = network(kind)[0].weight.detach()
    with torch.no_grad():
        renormalised.load_state_dict(net.state_dict())
        net[0].weight.copy_(fresh)
    renormalised[0].sparse = False
    return net, renormalised


score = lambda out: out.sin().sum()


def looped(net, x):
    """The gradients of each example by leaf, stacked, from plain autograd."""
    params = [*net.parameters()]
    rows = [torch.autograd.grad(score(net(one[None])), params) for one in x]
    return [torch.stack(leaf) for leaf in zip(*rows)]


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_gradients_are_those_at_the_renormalised_rows_and_the_weight_stays(kind, chunk_size):
    net, renormalised = built(kind)
    expected = looped(renormalised, I)
    params = {name: p.detach() for name, p in net.named_parameters()}
    before = {name: (p, p.clone()) for name, p in net.named_parameters()}
    of_one = lambda p, i: score(functx.functional_call(net, p, (i[None],)))
    for f, args in (((net, score), (I,)), (of_one, (params, I))):
        found = per_sample.grads(f, chunk_size=chunk_size)(*args)
        assert_same([*found.values()], expected, eps=64)
        assert all(t.layout is torch.strided for t in found.values())
        flat = torch.cat([t.flatten(1) for t in expected], 1)
        norms = per_sample.norms(f, chunk_size=chunk_size)(*args)
        assert_same(norms, flat.norm(dim=1), eps=64)
        total = per_sample.clipped_sum(f, max_norm=1e9, chunk_size=chunk_size)(*args)
        assert_same([*total.values()], [t.sum(0) for t in expected], eps=64)
        kernel = per_sample.gram(f, chunk_size=chunk_size)(*args)
        assert_same(kernel, flat @ flat.T, eps=256)
        jacobian = per_sample.jacobian(f, chunk_size=chunk_size)(*args)
        assert_same([*jacobian.values()], expected, eps=64)
    for name, p in net.named_parameters():
        assert p is before[name][0]
        assert type(p) is nn.Parameter
        assert p.equal(before[name][1])
        assert p._version == before[name][0]._version


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_regions_renormalise_likewise(chunk_size):
    net, renormalised = built("a largest norm")
    expected = looped(renormalised, I)
    found = per_sample.grads((functx.apply_remat(net, ["0"]), score), chunk_size=chunk_size)(I)
    assert_same([*found.values()], expected, eps=64)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_function_that_had_to_run_again_draws_the_same_random_numbers(chunk_size):
    weight = numbers(9, 4)
    draw = lambda: torch.rand((), dtype=DTYPE)
    plain = lambda w, i: draw() * F.embedding(i, w).sum()
    sparse = lambda w, i: draw() * F.embedding(i, w, sparse=True).sum()
    draws_first = lambda w, i: draw() * F.embedding(i, w, max_norm=9.0).sum()
    found = []
    for loss in (plain, sparse, draws_first):
        torch.manual_seed(0)
        f = per_sample.norms(loss, chunk_size=chunk_size, randomness="different")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            found.append(f(weight, I))
    assert_same(found[1:], found[:1] * 2, eps=64)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("kind", ["a largest norm", "sparse"])
def test_vmap_of_grad_names_what_can(kind):
    net, _ = built(kind)
    params = {name: p.detach() for name, p in net.named_parameters()}
    of_one = lambda p, i: score(functx.functional_call(net, p, (i[None],)))
    with pytest.raises(RuntimeError) as caught:
        functx.vmap(functx.grad(of_one), (None, 0))(params, I)
    assert "functx.per_sample" in caught.value.__notes__[-1]


class Stateful(nn.Module):
    """A layer that writes to its buffer, in one of these ways, and may read it."""

    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(4, 2).to(DTYPE)
        self.way = way
        self.register_buffer("state", torch.zeros(4, dtype=DTYPE))
        self.register_buffer("count", torch.zeros((), dtype=DTYPE))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.kept = torch.zeros(4, dtype=DTYPE)
        self.past = [torch.zeros(4, dtype=DTYPE)]

    def forward(self, x):
        self.read = self.state
        with torch.no_grad():
            self.write(x, x.mean(0))
        return self.linear(x - self.read)

    def write(self, x, mean):
        if self.way == "in place":
            self.state.mul_(0.9).add_(mean, alpha=0.1)
        if self.way == "by copy_":
            self.state.copy_(self.state * 0.9 + mean * 0.1)
        if self.way == "by assignment":
            self.state = self.read = self.state * 0.9 + mean * 0.1
        if self.way == "by data":
            self.state.data = self.state * 0.9 + mean * 0.1
        if self.way == "by out":
            torch.add(self.state, mean, out=self.state)
        if self.way == "of a tensor that is no buffer":
            self.read = self.kept.lerp_(mean, 0.1)
        if self.way == "of the example itself":
            self.read, self.kept = self.kept, x
        if self.way == "in a list":
            self.read = sum(self.past)
            self.past.append(mean)
        if self.way == "after it is read":
            self.read = self.state.clone()
            self.state.add_(mean)
        if self.way == "of counts":
            self.number.add_((mean > 0).sum())
            self.read = self.number
        if self.way == "counters":
            self.count.add_(1.0)
            self.number += 1
            self.read = self.count - self.number
        if self.way == "counters by assignment":
            self.number = self.number + 1
        if self.way == "never read":
            self.kept.mul_(0.9).add_(mean)
        if self.way == "overwritten first":
            self.read = self.kept.copy_(mean)
        if self.way == "of shapes":
            self.read, self.kept = self.kept, torch.ones_like(mean)
        if self.way == "the last output, never read":
            self.past = [x]


REFUSED = [
    *("in place", "by copy_", "by assignment", "by data", "by out"),
    *("of a tensor that is no buffer", "of the example itself", "in a list", "after it is read"),
    "of counts",
]
# Under transforms torch refuses to write in place to what a function captures, and its process ends
# where one assigns to ``data``. So `jacobian` and `gram` allow assignments only.
OF_LEVELS = [
    *("by assignment", "of the example itself", "in a list", "counters by assignment"),
    *("of shapes", "the last output, never read"),
]
of_levels = lambda name, way: name not in ("jacobian", "gram") or way in OF_LEVELS
FREE = [
    *("counters", "never read", "overwritten first", "of shapes"),
    *("the last output, never read", "counters by assignment"),
]
OPTIONS = {
    "grads": {},
    "norms": {"randomness": "different"},
    "clipped_sum": {"max_norm": 1.0},
    "jacobian": {},
    "gram": {},
}


@pytest.mark.parametrize(
    ("way", "name"),
    [pair for pair in itertools.product(REFUSED, OPTIONS) if of_levels(*pair[::-1])],
)
def test_an_example_that_reads_what_another_one_wrote_is_refused(way, name):
    f = getattr(per_sample, name)
    net = Stateful(way)
    with pytest.raises(ValueError, match="the gradient of one example is not defined") as caught:
        f((net, score), chunk_size=1, **OPTIONS[name])(X)
    assert str(caught.value).startswith(f"per_sample.{name}: ")
    if way in ("in place", "by copy_", "by assignment", "by out", "after it is read"):
        assert "buffer 'state'" in str(caught.value)
    assert f((Stateful(way), score), chunk_size=1, **OPTIONS[name])(X[:1]) is not None
    batches = iter([(X[:1],), (X[1:2],)])
    with pytest.raises(ValueError, match="the gradient of one example is not defined"):
        f((Stateful(way), score), chunk_size=1, **OPTIONS[name])(batches)


def joined_by(name, rows):
    """Results of several calls, as the one of all examples."""
    return sum(rows) if name == "clipped_sum" else torch.cat(rows)


@pytest.mark.parametrize(
    ("way", "name"), [pair for pair in itertools.product(FREE, OPTIONS) if of_levels(*pair[::-1])]
)
def test_what_is_written_without_the_examples_values_or_never_read_is_free(way, name):
    net = Stateful(way)
    plain = Stateful("overwritten first" if way == "overwritten first" else "nothing")
    plain.load_state_dict(net.state_dict())
    f = getattr(per_sample, name)
    if way == "of shapes":
        net.kept = plain.state = torch.ones(4, dtype=DTYPE)
    expected = [f((plain, score), chunk_size=1, **OPTIONS[name])(x[None]) for x in X]
    found = f((net, score), chunk_size=1, **OPTIONS[name])(X)
    if name == "gram":
        found, expected = found.diagonal(), [row[0] for row in expected]
    assert_same(found, pytree.tree_map(lambda *rows: joined_by(name, rows), *expected), eps=64)


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_spectral_normalisation_works(chunk_size):
    for normed in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        torch.manual_seed(0)
        net = nn.Sequential(normed(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE)
        assert per_sample.norms((net, score), chunk_size=chunk_size)(X).shape == (3,)
        for _ in range(300):
            net(X)  # converged: a further iteration changes nothing
        found = per_sample.norms((net, score), chunk_size=chunk_size)(X)
        expected = torch.cat([g.flatten(1) for g in looped(net, X)], 1).norm(dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_functions_that_keep_a_tensor_are_refused_as_modules_are():
    kept = torch.zeros(4, dtype=DTYPE)

    def loss(w, x):
        kept.mul_(0.5).add_(x)
        return (w * (x - kept)).square().sum()

    with torch.no_grad(), pytest.raises(ValueError, match="a stored tensor"):
        per_sample.grads(loss, chunk_size=1)(X[0], X)
    with pytest.raises(RuntimeError) as caught:
        per_sample.grads(loss)(X[0], X)
    assert "is refused then too" in caught.value.__notes__[-1]


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_under_vmap_no_wrapper_is_left_in_a_buffer(chunk_size):
    net = Stateful("by assignment")
    before = net.state
    with contextlib.suppress(RuntimeError), pytest.raises(ValueError, match="buffer 'state'"):
        per_sample.norms((net, score), chunk_size=chunk_size)(X)
    assert net.state is before
    assert type(net.state) is torch.Tensor
    net = Stateful("counters by assignment")
    per_sample.norms((net, score), chunk_size=chunk_size)(X)
    assert net.number.item() == (1 if chunk_size is None else 2)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(net.number)
