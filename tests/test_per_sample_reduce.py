"""`map_reduce`, `jacobian` and `gram` against loops over the examples, and what they refuse."""

import pytest
import torch
from cases import numbers
from references import assert_same, peak

import functx
from functx import per_sample

B = 5
W, X = numbers(3, 4), numbers(B, 3, start=1.0)
CHUNKS = [None, 1, 2, 5]


def scores(w, x):
    return torch.tanh(x @ w)


@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestMapReduce:
    @pytest.mark.parametrize("how", ["sum", "mean", "min", "max"])
    def test_by_name(self, how, chunk_size):
        def pair(w, x):
            return {"score": scores(w, x), "square": [x.square().sum()]}

        f = per_sample.map_reduce(pair, how, in_dims=(None, 0), chunk_size=chunk_size)
        all_scores, squares = scores(W, X), X.square().sum(1)
        reduce = {"sum": torch.sum, "mean": torch.mean, "min": torch.amin, "max": torch.amax}[how]
        expected = {"score": reduce(all_scores, 0), "square": [reduce(squares, 0)]}
        assert_same(f(W, X), expected, eps=8)

    def test_by_function(self, chunk_size):
        f = per_sample.map_reduce(
            lambda x: x.sum(),
            lambda rows: {"largest": rows.topk(1).values},
            lambda a, b: {"largest": torch.maximum(a["largest"], b["largest"])},
            chunk_size=chunk_size,
        )
        assert_same(f(X), {"largest": X.sum(1).max()[None]}, eps=8)

    def test_second_moment_of_gradients(self, chunk_size):
        gradient = functx.grad(lambda w, x: scores(w, x).sum())
        f = per_sample.map_reduce(
            lambda w, x: gradient(w, x).square(), in_dims=(None, 0), chunk_size=chunk_size
        )
        each = torch.func.vmap(torch.func.grad(lambda w, x: scores(w, x).sum()), (None, 0))
        assert_same(f(W, X), each(W, X).square().sum(0), eps=8)

    def test_padding(self, chunk_size):
        is_padding = torch.tensor([True, False, False, True, False])
        f = per_sample.map_reduce(lambda x: x, "mean", chunk_size=chunk_size)
        found = f(X.masked_fill(is_padding[:, None], torch.nan), is_padding_example=is_padding)
        assert_same(found, X[~is_padding].mean(0), eps=8)


class TestMapReduceRefuses:
    def test_reduce(self):
        with pytest.raises(ValueError, match="'sum', 'mean', 'min', 'max' or a function"):
            per_sample.map_reduce(scores, "median")
        with pytest.raises(ValueError, match="combine goes with a function"):
            per_sample.map_reduce(scores, "sum", torch.add)

    def test_parts_that_do_not_add(self):
        f = per_sample.map_reduce(lambda x: x, lambda rows: rows, chunk_size=2)
        with pytest.raises(ValueError, match=r"shape \(1, 3\) after \(2, 3\).*give combine"):
            f(X)
        f = per_sample.map_reduce(lambda x: x, lambda rows: [0] * len(rows), chunk_size=3)
        with pytest.raises(ValueError, match=r"another structure.*give combine"):
            f(X)

    def test_nothing(self):
        assert_same(per_sample.map_reduce(lambda x: x)(X[:0]), torch.zeros_like(X[0]))
        with pytest.raises(ValueError, match="no example to reduce"):
            per_sample.map_reduce(lambda x: x, "max")(X[:0])


@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestJacobian:
    @pytest.mark.parametrize("mode", ["reverse", "forward"])
    def test_values(self, mode, chunk_size):
        f = per_sample.jacobian(scores, mode=mode, chunk_size=chunk_size)
        expected = torch.func.vmap(torch.func.jacrev(scores), (None, 0))(W, X)
        assert_same(f(W, X), expected, eps=8)

    def test_of_inputs_with_aux(self, chunk_size):
        f = per_sample.jacobian(
            lambda w, x: (scores(w, x), x),
            1,
            has_aux=True,
            chunk_size=chunk_size,
            in_dims=(None, 0),
        )
        jacobian, aux = f(W, X)
        expected = torch.func.vmap(torch.func.jacrev(scores, 1), (None, 0))(W, X)
        assert_same((jacobian, aux), (expected, X), eps=8)


@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestGram:
    def jacobian(self, x):
        found = torch.func.vmap(torch.func.jacrev(scores), (None, 0))(W, x)
        return found.flatten(2)  # (B, 4, 12)

    def test_of_a_loss(self, chunk_size):
        f = per_sample.gram(lambda w, x: scores(w, x).sum(), chunk_size=chunk_size)
        gradients = self.jacobian(X).sum(1)
        assert_same(f(W, X), gradients @ gradients.mT, eps=32)

    @pytest.mark.parametrize("outputs", ["full", "diagonal", "trace"])
    @pytest.mark.parametrize("other", [False, True])
    def test_of_scores(self, other, outputs, chunk_size):
        x2 = numbers(3, 3, start=2.0)
        f = per_sample.gram(scores, outputs=outputs, chunk_size=chunk_size)
        found = f(W, X, others=x2) if other else f(W, X)
        left, right = self.jacobian(X), self.jacobian(x2 if other else X)
        equation = {"full": "iap,jbp->ijab", "diagonal": "iap,jap->ija", "trace": "iap,jap->ij"}
        assert_same(found, torch.einsum(equation[outputs], left, right), eps=64)

    def test_of_a_matrix_of_outputs(self, chunk_size):
        f = per_sample.gram(lambda w, x: scores(w, x).view(2, 2), chunk_size=chunk_size)
        left = self.jacobian(X).view(B, 2, 2, -1)
        assert_same(f(W, X), torch.einsum("iabp,jcdp->ijabcd", left, left), eps=64)


class TestGramRefuses:
    def test_arguments(self):
        with pytest.raises(ValueError, match="'full', 'diagonal' or 'trace'"):
            per_sample.gram(scores, outputs="all")
        with pytest.raises(ValueError, match=r"each of the 1 arguments.*got 2"):
            per_sample.gram(scores)(W, X, others=(X, X))
        with pytest.raises(TypeError, match="returns a tensor"):
            per_sample.gram(lambda w, x: [w])(W, X)
        with pytest.raises(ValueError, match="no example"):
            per_sample.gram(scores)(W, X[:0])


class TestGramInChunks:
    def test_takes_two_chunks_of_memory(self):
        w, x = numbers(30, 30), numbers(12, 30)
        f = per_sample.gram(lambda w, x: torch.tanh(x @ w), chunk_size=1)
        matrix, jacobian = 12 * 12 * w.nbytes, 30 * w.nbytes
        assert peak(f, w, x) < matrix + 2.7 * jacobian

    @pytest.mark.parametrize("other", [False, True])
    def test_under_a_budget(self, other):
        w, x = numbers(30, 30), numbers(12, 30)
        more = {"others": numbers(7, 30, start=3.0)} if other else {}
        whole, least = (peak(per_sample.gram(scores, chunk_size=c), w, x, **more) for c in (12, 1))
        for budget in (whole, (whole + least) // 2, whole // 4 + 3 * least // 4):
            f = per_sample.gram(scores, memory_budget=budget)
            f(w, x, **more)  # measures
            assert peak(f, w, x, **more) <= budget
            assert_same(f(w, x, **more), per_sample.gram(scores)(w, x, **more), eps=64)

    @pytest.mark.parametrize("other", [False, True])
    @pytest.mark.parametrize("chunk_size", [None, 4])
    def test_memory_runs_out(self, other, chunk_size):
        more = {"others": numbers(3, 3, start=2.0)} if other else {}
        calls = []

        def fails(w, x):
            calls.append(1)
            if len(calls) in (1, 3):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return scores(w, x)

        with pytest.warns(RuntimeWarning, match="out of memory with"):
            found = per_sample.gram(fails, chunk_size=chunk_size)(W, X, **more)
        assert_same(found, per_sample.gram(scores)(W, X, **more), eps=64)

    @pytest.mark.parametrize("chunk_size", CHUNKS)
    def test_padding(self, chunk_size):
        is_padding = torch.tensor([True, False, False, True, False])
        f = per_sample.gram(scores, outputs="diagonal", chunk_size=chunk_size)
        x = X.masked_fill(is_padding[:, None], torch.nan)
        whole, left = f(W, X), (~is_padding).to(X)[:, None, None]
        found = f(W, x, is_padding_example=is_padding)
        assert_same(found, whole * left * left.transpose(0, 1), eps=64)
        assert_same(f(W, x, others=X, is_padding_example=is_padding), whole * left, eps=64)
        none = f(W, x, is_padding_example=torch.ones(B, dtype=torch.bool))
        assert_same(none, torch.zeros_like(whole))

    def test_of_batches(self):
        f = per_sample.gram(scores, chunk_size=2)
        assert_same(f(W, iter([X[:3], (X[3:],)])), f(W, X))
        with pytest.raises(ValueError, match="no batch"):
            f(W, iter(()))

    def test_differentiable(self):
        def total(w, chunk_size):
            return per_sample.gram(scores, chunk_size=chunk_size)(w, X).sin().sum()

        assert_same(functx.grad(total)(W, 2), functx.grad(total)(W, None), eps=256)


class TestOfModules:
    """A module, or a pair of that and a criterion, in the place of a function."""

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).to(X)

    def of_function(self, make, after, *more):
        def f(params, x, *more):
            return after(functx.functional_call(self.module, params, (x,)), *more)

        params = {name: p.detach() for name, p in self.module.named_parameters()}
        return make(f)(params, X, *more)

    @pytest.mark.parametrize("make", [per_sample.jacobian, per_sample.gram])
    def test_values(self, make):
        expected = self.of_function(make, lambda out: out)
        assert_same(make(self.module, chunk_size=2)(X), expected, eps=64)
        expected = self.of_function(make, lambda out, y: (out[:2] * y).sum(), X[:, 0])
        pair = (self.module, lambda out, y: (out[:, :2] * y[:, None]).sum())
        assert_same(make(pair)(X, X[:, 0]), expected, eps=64)
        assert_same(make(pair, in_dims=(1, 0))(X.mT, X[:, 0]), expected, eps=64)

    def test_others(self):
        f = per_sample.gram(self.module)
        assert_same(f(X, others=X[:2]), f(X)[:, :2], eps=64)

    @pytest.mark.parametrize("make", [per_sample.jacobian, per_sample.gram, per_sample.grads])
    def test_refused(self, make):
        pair = (self.module, lambda out: out.sum())
        with pytest.raises(ValueError, match="the parameters are differentiated, argnums=1"):
            make(pair, 1)
        with pytest.raises(ValueError, match="must be a tuple, an entry for each argument"):
            make(pair, in_dims=0)


class TestRefuses:
    @pytest.mark.parametrize(
        ("args", "options", "match"),
        [
            ((W, X), {"in_dims": (None, 0, 0)}, "entry for each of the 2 positional"),
            ((W, X), {"in_dims": (None, None)}, "no argument has a batch dimension"),
            ((W, X), {"in_dims": (None, 2)}, "which it does not have"),
            ((W, X), {"in_dims": (None, "x")}, "ints and None, got 'x'"),
            ((W, X), {"in_dims": (None, [0])}, "in_dims of argument 1"),
            ((W, X, X[:2]), {}, r"same number of examples, got sizes \[2, 5\]"),
            ((W, 3), {"in_dims": (None, 0)}, "only tensors hold examples"),
            ((W, torch.tensor(3.0)), {}, "which it does not have"),
            ((W, iter(())), {}, "the iterator has no batch"),
        ],
    )
    def test_arguments(self, args, options, match):
        f = per_sample.grads(lambda w, *x: (x[0] @ w).sum(), **options)
        with pytest.raises(ValueError, match=match):
            f(*args)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({}, "needs max_norm"),
            ({"max_norm": -1.0}, "positive, got -1.0"),
            ({"max_norm": {"w": 1.0}}, "pytree prefix"),
            ({"max_norm": {"a": 1.0}, "groups": "b"}, "one for each group"),
            ({"max_norm": 1.0, "groups": ["a", "b"]}, "groups must be a pytree prefix"),
            ({"max_norm": "1"}, "must be numbers, got '1'"),
            ({"max_norm": 1.0, "scaling": "sharp"}, "scaling must be one of"),
            ({"max_norm": 1.0, "passes": 3}, "passes must be 1 or 2"),
        ],
    )
    def test_clipping(self, options, match):
        with pytest.raises(ValueError, match=match):
            per_sample.clipped_sum(lambda w, x: (x @ w).sum(), **options)(W, X)

    def test_what_scales(self):
        with pytest.raises(ValueError, match="gamma must be positive, got 0"):
            per_sample.automatic(gamma=0)
        with pytest.raises(TypeError, match=r"a name or a function .* got 3"):
            per_sample.clipped_sum(lambda w, x: (x @ w).sum(), max_norm=1.0, scaling=3)

    def test_options_of_jacobians_and_of_modules(self):
        with pytest.raises(ValueError, match="'reverse' or 'forward', got 'up'"):
            per_sample.jacobian(lambda w, x: x @ w, mode="up")
        with pytest.raises(TypeError, match=r"a pair \(module, criterion\), got \(int, function\)"):
            per_sample.functional(3, lambda y: y)

    @pytest.mark.parametrize("chunk_size", [None, 1])
    def test_aux(self, chunk_size):
        f = per_sample.grads(
            lambda w, x: ((x @ w).sum(), "text"), has_aux=True, chunk_size=chunk_size
        )
        with pytest.raises((ValueError, RuntimeError), match="aux"):
            f(W, X)

    @pytest.mark.parametrize("chunk_size", [None, 1])
    @pytest.mark.parametrize("grad_mode", [True, False])
    def test_losses(self, grad_mode, chunk_size):
        for bad, match in (
            (lambda w, x: x @ w, "scalar Tensor"),
            (lambda w, x: 3.0, "return a Tensor"),
            (lambda w, x: ((x @ w).sum(), x), "has_aux=True"),
        ):
            f = per_sample.grads(bad, chunk_size=chunk_size)
            with torch.set_grad_enabled(grad_mode), pytest.raises(RuntimeError, match=match):
                f(W, X)

    def test_padding(self):
        f = per_sample.grads(lambda w, x: (x @ w).sum())
        with pytest.raises(ValueError, match=r"bool tensor of shape \(5,\)"):
            f(W, X, is_padding_example=torch.zeros(B))
        with pytest.raises(ValueError, match="not with an iterator"):
            f(W, iter([X]), is_padding_example=torch.zeros(B, dtype=torch.bool))

    def test_process_group_without_one(self):
        f = per_sample.clipped_sum(lambda w, x: (x @ w).sum(), max_norm=1.0, process_group=True)
        with pytest.raises(RuntimeError, match="init_process_group first"):
            f(W, X)
