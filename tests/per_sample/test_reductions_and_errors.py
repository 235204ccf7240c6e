"""`map_reduce`, `jacobian`, `gram` and modules against loops, and what they refuse."""

import concurrent.futures
import contextlib
import threading

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same, peak
from torch import nn

import functx
from functx import per_sample

from .losses import slow_norms, slow_sum

B = 5
W, X = numbers(3, 4), numbers(B, 3, start=1.0)
CHUNKS = [None, 1, 2]


def scores(w, x):
    return torch.tanh(x @ w)


@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestMapReduce:
    @pytest.mark.parametrize("how", ["sum", "mean", "min", "max"])
    def test_a_name_says_how(self, how, chunk_size):
        pair = lambda w, x: {"score": scores(w, x), "square": [x.square().sum()]}
        f = per_sample.map_reduce(pair, how, in_dims=(None, 0), chunk_size=chunk_size)
        all_scores, squares = scores(W, X), X.square().sum(1)
        reduce = {"sum": torch.sum, "mean": torch.mean, "min": torch.amin, "max": torch.amax}[how]
        expected = {"score": reduce(all_scores, 0), "square": [reduce(squares, 0)]}
        assert_same(f(W, X), expected, eps=8)

    def test_a_function_says_how(self, chunk_size):
        f = per_sample.map_reduce(
            lambda x: x.sum(),
            lambda rows: {"largest": rows.topk(1).values},
            lambda a, b: {"largest": torch.maximum(a["largest"], b["largest"])},
            chunk_size=chunk_size,
        )
        assert_same(f(X), {"largest": X.sum(1).max()[None]}, eps=8)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(("mode", "argnum"), [("reverse", 0), ("forward", 0), ("reverse", 1)])
def test_jacobians_are_those_of_vmap(mode, argnum, chunk_size):
    options = {"mode": mode, "chunk_size": chunk_size, "in_dims": (None, 0)}
    expected = torch.func.vmap(torch.func.jacrev(scores, argnum), (None, 0))(W, X)
    assert_same(per_sample.jacobian(scores, argnum, **options)(W, X), expected, eps=8)
    with_aux = lambda w, x: (scores(w, x), x)
    found = per_sample.jacobian(with_aux, argnum, has_aux=True, **options)(W, X)
    assert_same(found, (expected, X), eps=8)


EQUATIONS = {"full": "iap,jbp->ijab", "diagonal": "iap,jap->ija", "trace": "iap,jap->ij"}
OUTPUTS = {(): torch.sum, (4,): torch.clone, (2, 2): lambda scores: scores.view(2, 2)}


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(
    ("shape", "outputs", "other"),
    [
        *(((), "full", False), ((4,), "full", False), ((2, 2), "full", False)),
        *(((4,), "full", True), ((4,), "diagonal", True), ((4,), "trace", False)),
    ],
)
def test_a_gram_matrix_is_of_jacobians(shape, outputs, other, chunk_size):
    func, x2 = lambda w, x: OUTPUTS[shape](scores(w, x)), numbers(3, 3, start=2.0)
    f = per_sample.gram(func, outputs=outputs, chunk_size=chunk_size)
    found = f(W, X, others=x2) if other else f(W, X)
    jacobians = lambda x: torch.func.vmap(torch.func.jacrev(func), (None, 0))(W, x)
    left, right = (jacobians(rows).view(len(rows), -1, 12) for rows in (X, x2 if other else X))
    expected = torch.einsum(EQUATIONS[outputs], left, right)
    count = expected.dim() - 2  # of the outputs' shape
    assert_same(found, expected.reshape(*expected.shape[:2], *shape * count), eps=64)


class TestGramInChunks:
    def test_it_takes_two_chunks_of_memory(self):
        w, x = numbers(30, 30), numbers(12, 30)
        f = per_sample.gram(lambda w, x: torch.tanh(x @ w), chunk_size=1)
        matrix, jacobian = 12 * 12 * w.nbytes, 30 * w.nbytes
        assert peak(f, w, x) < matrix + 2.7 * jacobian

    @pytest.mark.parametrize("chunk_size", CHUNKS)
    def test_padding_counts_for_nothing(self, chunk_size):
        is_padding = torch.tensor([True, False, False, True, False])
        f = per_sample.gram(scores, outputs="diagonal", chunk_size=chunk_size)
        x = X.masked_fill(is_padding[:, None], torch.nan)
        whole, left = f(W, X), (~is_padding).to(X)[:, None, None]
        found = f(W, x, is_padding_example=is_padding)
        assert_same(found, whole * left * left.transpose(0, 1), eps=64)
        assert_same(f(W, x, others=X, is_padding_example=is_padding), whole * left, eps=64)
        none = f(W, x, is_padding_example=torch.ones(B, dtype=torch.bool))
        assert_same(none, torch.zeros_like(whole))

    def test_it_takes_batches(self):
        f = per_sample.gram(scores, chunk_size=2)
        assert_same(f(W, iter([X[:3], (X[3:],)])), f(W, X))
        with pytest.raises(ValueError, match="no batch"):
            f(W, iter(()))

    def test_it_can_be_differentiated(self):
        def total(w, chunk_size):
            return per_sample.gram(scores, chunk_size=chunk_size)(w, X).sin().sum()

        assert_same(functx.grad(total)(W, 2), functx.grad(total)(W, None), eps=256)


class TestOfModules:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).to(X)

    def of_function(self, make, after, *more):
        f = lambda params, x, *more: after(functx.functional_call(self.module, params, (x,)), *more)
        params = {name: p.detach() for name, p in self.module.named_parameters()}
        return make(f)(params, X, *more)

    @pytest.mark.parametrize("make", [per_sample.jacobian, per_sample.gram])
    def test_values_are_those_of_vmap(self, make):
        expected = self.of_function(make, lambda out: out)
        assert_same(make(self.module, chunk_size=2)(X), expected, eps=64)
        expected = self.of_function(make, lambda out, y: (out[:2] * y).sum(), X[:, 0])
        pair = (self.module, lambda out, y: (out[:, :2] * y[:, None]).sum())
        assert_same(make(pair)(X, X[:, 0]), expected, eps=64)
        assert_same(make(pair, in_dims=(1, 0))(X.mT, X[:, 0]), expected, eps=64)


def total(w, *x):
    return (x[0] @ w).sum()


def grads(*args, **options):
    return lambda: per_sample.grads(total, **options)(*args)


def clipped(**options):
    return lambda: per_sample.clipped_sum(total, **options)(W, X)


def reduced(how, *args, x=X, **options):
    return lambda: per_sample.map_reduce(lambda x: x, how, *args, **options)(x)


def of_module(make, *args, **options):
    module = torch.nn.Linear(3, 4)
    return [lambda f=f: f((module, torch.sum), *args, **options) for f in make]


PADDED = {
    "grads": (total, {}),
    "norms": (total, {}),
    "jacobian": (scores, {}),
    "clipped_sum": (total, {"max_norm": 0.5}),
    "map_reduce": (scores, {"reduce": "mean", "in_dims": (None, 0)}),
}


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("make", PADDED)
def test_padding_counts_for_nothing(make, chunk_size):
    func, options = PADDED[make]
    is_padding = torch.tensor([True, False, False, True, False])
    f = getattr(per_sample, make)(func, chunk_size=chunk_size, **options)
    found = f(W, X.masked_fill(is_padding[:, None], torch.nan), is_padding_example=is_padding)
    expected = f(W, X[~is_padding])
    if make not in ("clipped_sum", "map_reduce"):  # rows of zeros
        whole = expected.new_zeros(B, *expected.shape[1:])
        expected = whole.index_copy(0, (~is_padding).nonzero().squeeze(1), expected)
    assert_same(found, expected, eps=8)


MAKES = (per_sample.jacobian, per_sample.gram, per_sample.grads)
NO_PADDING = torch.zeros(B, dtype=torch.bool)
REFUSED = {
    "entry for each of the 2 positional": [grads(W, X, in_dims=(None, 0, 0))],
    "no argument has a batch dimension": [grads(W, X, in_dims=(None, None))],
    "which it does not have": [grads(W, X, in_dims=(None, 2)), grads(W, torch.tensor(3.0))],
    "ints and None, got 'x'": [grads(W, X, in_dims=(None, "x"))],
    "in_dims of argument 1": [grads(W, X, in_dims=(None, [0]))],
    r"same number of examples, got sizes \[2, 5\]": [grads(W, X, X[:2])],
    "only tensors can be mapped": [grads(W, 3, in_dims=(None, 0))],
    "the iterator has no batch": [grads(W, iter(()))],
    r"bool tensor of shape \(5,\)": [
        lambda: per_sample.grads(total)(W, X, is_padding_example=torch.zeros(B))
    ],
    "not with an iterator": [
        lambda: per_sample.grads(total)(W, iter([X]), is_padding_example=NO_PADDING)
    ],
    "argnums must be int .* must be non-empty": [
        lambda make=make: make(total, argnums=())(W, X)
        for make in (per_sample.grads, per_sample.norms, per_sample.gram)
    ],
    "needs max_norm": [clipped()],
    "positive numbers, got -1.0": [clipped(max_norm=-1.0)],
    "pytree prefix": [clipped(max_norm={"w": 1.0})],
    "a number for each group": [clipped(max_norm={"a": 1.0}, groups="b")],
    "groups must be a pytree prefix": [clipped(max_norm=1.0, groups=["a", "b"])],
    "must be a pytree of labels, got <function": [clipped(max_norm=1.0, groups=total)],
    "must be positive numbers, got '1'": [clipped(max_norm="1")],
    "scaling must be one of": [clipped(max_norm=1.0, scaling="sharp")],
    r"a name or a function .* got 3": [clipped(max_norm=1.0, scaling=3)],
    r"factor for each norm.*\(5,\)": [clipped(max_norm=1.0, scaling=lambda n, _: n.sum())],
    "init_process_group first": [clipped(max_norm=1.0, process_group=True)],
    "gamma must be positive, got 0": [lambda: per_sample.automatic(gamma=0)],
    "'sum', 'mean', 'min', 'max' or a function": [reduced("median")],
    "combine can be used only if": [reduced("sum", torch.add)],
    r"\(1, 3\) after \(2, 3\).*pass combine": [reduced(lambda rows: rows, chunk_size=2)],
    r"different structures.*pass combine": [reduced(lambda rows: [0] * len(rows), chunk_size=3)],
    "no examples to reduce": [reduced("max", x=X[:0])],
    "'reverse' or 'forward', got 'up'": [lambda: per_sample.jacobian(scores, mode="up")],
    r"a pair \(module, criterion\), got \(int, function\)": [
        lambda: per_sample.functional(3, lambda y: y)
    ],
    "'full', 'diagonal' or 'trace'": [lambda: per_sample.gram(scores, outputs="all")],
    r"each of the 1 arguments.*got 2": [lambda: per_sample.gram(scores)(W, X, others=(X, X))],
    "returns a tensor": [lambda: per_sample.gram(lambda w, x: [w])(W, X)],
    "no example": [lambda: per_sample.gram(scores)(W, X[:0])],
    "its parameters are differentiated; leave out argnums=1": of_module(MAKES, 1),
    r"pass a pair \(module, criterion\)": [lambda: per_sample.grads(nn.Linear(2, 2))],
    "must be a tuple with an entry for each argument": of_module(MAKES, in_dims=0),
}
"""What is refused, by what the error says."""


@pytest.mark.parametrize("message", REFUSED)
def test_an_error_says_what_does_not_fit(message):
    for call in REFUSED[message]:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_loss_that_gives_no_number_is_an_error(grad_mode, chunk_size):
    for bad, match in (
        (lambda w, x: x @ w, "scalar Tensor"),
        (lambda w, x: 3.0, r"Tensor, got 3\.0"),
        (lambda w, x: ((x @ w).sum(), x), "has_aux=True"),
    ):
        f = per_sample.grads(bad, chunk_size=chunk_size)
        with torch.set_grad_enabled(grad_mode), pytest.raises(RuntimeError, match=match):
            f(W, X)
    f = per_sample.grads(lambda w, x: (total(w, x), "text"), has_aux=True, chunk_size=chunk_size)
    with pytest.raises((ValueError, RuntimeError), match="aux"):
        f(W, X)


def test_nothing_has_a_sum():
    assert_same(per_sample.map_reduce(lambda x: x)(X[:0]), torch.zeros_like(X[0]))


def looped(module, criterion, *batch):
    """The gradients of its parameters, of one example after the other."""
    found = []
    for x, *others in zip(*batch):
        module.zero_grad()
        criterion(module(x[None]), *(y[None] for y in others)).backward()
        found.append([p.grad.to_dense() for p in module.parameters()])
    return found


class TestModules:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def test_the_sum_is_that_of_a_loop_over_the_examples(self):
        model = self.model()
        x, y = numbers(B, 3), torch.tensor([0, 1, 1, 0, 1])
        total, extras = per_sample.clipped_sum(
            (model, nn.functional.cross_entropy), max_norm=0.3, return_values=True
        )(x, y)
        gradients = looped(model, nn.functional.cross_entropy, x, y)
        factors = (0.3 / slow_norms(gradients)).clamp(max=1)
        assert list(total) == [name for name, _ in model.named_parameters()]
        assert_same(list(total.values()), slow_sum(gradients, factors), eps=16)
        values = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
        assert_same(extras.values, values, eps=8)
        assert not any(t.requires_grad for t in (*total.values(), extras.values))

    def test_it_is_read_at_each_call(self):
        """What an optimizer did, and what is frozen."""
        model, x = self.model(), numbers(B, 3)
        f = per_sample.grads((model, lambda out: out.square().sum()))
        before = f(x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        changed = f(x)
        assert not torch.equal(changed["0.bias"], before["0.bias"])
        model[0].requires_grad_(False)
        assert_same(f(x), {name: changed[name] for name in ("2.weight", "2.bias")})

    @pytest.mark.parametrize("chunk_size", [None, 1])
    def test_tied_parameters_are_summed_before_the_norm(self, chunk_size):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 3, dtype=DTYPE)
                self.head = nn.Linear(3, 5, bias=False, dtype=DTYPE)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(torch.tanh(self.embed(tokens))).flatten(0, 1)

        criterion = lambda scores, tokens: nn.functional.cross_entropy(scores, tokens.flatten())
        torch.manual_seed(0)
        model, tokens = Tied(), torch.tensor([[0, 1, 2], [3, 3, 3], [4, 0, 4]])
        norms = per_sample.norms((model, criterion), chunk_size=chunk_size)(tokens, tokens)
        assert_same(norms, slow_norms(looped(model, criterion, tokens, tokens)), eps=8)

    def test_inputs_may_be_several_arguments(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(numbers(3))

            def forward(self, a, b):
                assert a.shape == (1, 3)
                return (self.w * a * b).sum(1)

        model, a, b = Two(), numbers(B, 3), numbers(B, 3, start=1.0)
        for inputs in ((a, b), {"b": b, "a": a}):
            gradients = per_sample.grads((model, torch.sum), chunk_size=2)(inputs)
            assert_same(gradients, {"w": a * b}, eps=8)

    @pytest.mark.parametrize("kind", ["training", "no statistics", "nested"])
    def test_batch_norm_is_refused(self, kind):
        norm = nn.BatchNorm1d(3, track_running_stats=kind != "no statistics")
        norm.train(kind != "no statistics")
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(norm) if kind == "nested" else norm)
        match = r"BatchNorm1d '1.*statistics of the whole batch"
        for make, options in ((per_sample.grads, {}), (per_sample.clipped_sum, {"max_norm": 1.0})):
            with pytest.raises(ValueError, match=match):
                make((model, torch.sum), **options)

    def test_batch_norm_that_begins_to_train_is_refused(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
        f = per_sample.norms((model, torch.sum))
        assert f(torch.randn(B, 3)).shape == (B,)
        model.train()
        with pytest.raises(ValueError, match="evaluation mode"):
            f(torch.randn(B, 3))


def test_threads_that_share_a_module_take_turns():
    """While one runs it, its parameters are in the place of the module's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(DTYPE)
    gradients = lambda x: per_sample.grads((model, lambda out: out.square().sum()))(x)
    batches = [numbers(3, 4), numbers(3, 4, start=5.0)]
    expected, barrier = [*map(gradients, batches)], threading.Barrier(2)

    def wait(*_):
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(1.0)

    for layer in model[1:]:  # so neither is done while the other is in between
        layer.register_forward_hook(wait)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert_same([*pool.map(gradients, batches)], expected, eps=8)


def test_what_vmap_can_not_run_needs_one_example_at_a_time():
    module, x = nn.GRU(3, 2, batch_first=True), numbers(3, 4, 3)
    pair = module.to(DTYPE), lambda out: out[0].sin().sum()
    gradients = looped(*pair, x)
    clipped = slow_sum(gradients, (1 / slow_norms(gradients)).clamp(max=1))
    found = per_sample.grads(pair, chunk_size=1)(x)
    assert_same([*found.values()], [torch.stack(leaf) for leaf in zip(*gradients)], eps=64)
    found = per_sample.clipped_sum(pair, max_norm=1.0, chunk_size=1)(x)
    assert_same([*found.values()], clipped, eps=64)
    with pytest.raises(RuntimeError) as caught:
        per_sample.clipped_sum(pair, max_norm=1.0)(x)
    assert "chunk_size=1 runs each example without vmap" in caught.value.__notes__[-1]


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:TF32 acceleration")
def test_an_lstm_in_float32_needs_one_example_at_a_time():
    module, x = nn.LSTM(3, 2, batch_first=True), torch.randn(3, 4, 3)
    pair = module, lambda out: out[0].sum()
    assert per_sample.norms(pair, chunk_size=1)(x).shape == (3,)
    for options in ({}, {"budget": 0.9}):
        with pytest.raises(RuntimeError) as caught:
            per_sample.norms(pair, **options)(x)
        assert "chunk_size=1 runs each example without vmap" in caught.value.__notes__[-1]
    # Rows of a Jacobian are pulled back under vmap, also those of one example.
    scores = module, lambda out: out[0][:, -1, :]
    for of_scores in (per_sample.gram, per_sample.jacobian):
        with pytest.raises(RuntimeError) as caught:
            of_scores(scores, chunk_size=1)(x)
        assert "mkldnn.flags(enabled=False)" in caught.value.__notes__[0]
        with torch.backends.mkldnn.flags(enabled=False):
            of_scores(scores, chunk_size=1)(x)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_sum_under_autocast_is_added_up_in_its_own_dtype(chunk_size):
    weight, x = torch.randn(40, 50), torch.randn(6, 50)
    loss = lambda w, x: (w * x).sin().square().sum()  # elementwise: bfloat16 is in no product
    clipped = per_sample.clipped_sum(loss, max_norm=1e9, chunk_size=chunk_size)
    with torch.autocast("cpu", torch.bfloat16):
        total = clipped(weight, x)
    exact = functx.vmap(functx.grad(loss), (None, 0))(weight.double(), x.double()).sum(0)
    assert total.dtype == torch.float32
    assert (total - exact).abs().max() < 1e-4
