"""Per-example gradients, norms and clipped sums are those of a loop over the examples."""

import math

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same
from torch import nn

import functx
from functx import per_sample

B = 5
CHUNKS = [None, 1, 2, 5, 9]


def loss(params, x, y):
    hidden = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
    for w in params["rest"]:
        hidden = torch.tanh(hidden @ w)
    return (hidden.sum() - y).square()


def problem():
    params = {
        "first": {"w": numbers(3, 4), "b": numbers(4, start=1.0)},
        "rest": [numbers(4, 4, start=2.0), numbers(4, 2, start=3.0)],
    }
    return params, numbers(B, 3, start=4.0), numbers(B, start=5.0)


def slow(loss, params, *batch):
    """One gradient after the other, in plain autograd: a list of flat lists of tensors."""
    found = []
    for one in zip(*batch):
        leaves, spec = torch.utils._pytree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(torch.utils._pytree.tree_unflatten(leaves, spec), *one)
        found.append(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))
    return found


def slow_norms(gradients):
    return torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])


def slow_sum(gradients, factors):
    return [sum(f * g for f, g in zip(factors, leaf)) for leaf in zip(*gradients)]


def flat(tree):
    return torch.utils._pytree.tree_leaves(tree)


@pytest.fixture(params=[True, False], ids=["grad mode on", "off"])
def grad_mode(request):
    """One example alone takes another way where nothing could differentiate the result."""
    with torch.set_grad_enabled(request.param):
        yield


@pytest.mark.usefixtures("grad_mode")
@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestValues:
    def test_grads(self, chunk_size):
        params, x, y = problem()
        with torch.enable_grad():
            expected = slow(loss, params, x, y)
        gradients, extras = per_sample.grads(
            loss, chunk_size=chunk_size, return_values=True, return_norms=True
        )(params, x, y)
        assert_same(flat(gradients), [torch.stack(leaf) for leaf in zip(*expected)], eps=8)
        assert_same(extras.norms, slow_norms(expected), eps=8)
        values = torch.stack([loss(params, *one) for one in zip(x, y)])
        assert_same(extras.values, values, eps=8)
        assert extras.aux is None

    def test_norms(self, chunk_size):
        params, x, y = problem()
        with torch.enable_grad():
            expected = slow_norms(slow(loss, params, x, y))
        assert_same(per_sample.norms(loss, chunk_size=chunk_size)(params, x, y), expected, eps=8)

    @pytest.mark.parametrize("passes", [None, 1, 2])
    def test_clipped_sum(self, chunk_size, passes):
        params, x, y = problem()
        with torch.enable_grad():
            gradients = slow(loss, params, x, y)
        norms = slow_norms(gradients)
        limit = norms.median().item()
        expected = slow_sum(gradients, (limit / norms).clamp(max=1))
        total, extras = per_sample.clipped_sum(
            loss, max_norm=limit, chunk_size=chunk_size, passes=passes, return_norms=True
        )(params, x, y)
        assert (norms > limit).any()
        assert (norms < limit).any()
        assert_same(flat(total), expected, eps=16)
        assert_same(extras.norms, norms, eps=8)

    def test_aux(self, chunk_size):
        def with_aux(w, x):
            return (w * x).sum(), {"scaled": w * x, "twice": [2 * x]}

        w, x = numbers(3), numbers(B, 3, start=1.0)
        for function in (
            per_sample.grads(with_aux, has_aux=True, chunk_size=chunk_size),
            per_sample.norms(with_aux, has_aux=True, chunk_size=chunk_size),
            per_sample.clipped_sum(with_aux, max_norm=1, has_aux=True, chunk_size=chunk_size),
        ):
            _, aux = function(w, x)
            assert_same(aux, {"scaled": w * x, "twice": [2 * x]})


class TestGroups:
    def expected(self, parts, limits):
        params, x, y = problem()
        gradients = slow(loss, params, x, y)  # b and w of first, then rest
        factors = {}
        for part, limit in zip(parts, limits):
            norms = slow_norms([[one[i] for i in part] for one in gradients])
            factors |= dict.fromkeys(part, (limit / norms).clamp(max=1))
        names = [i for i in range(4) if i in factors]
        return [sum(f * one[i] for f, one in zip(factors[i], gradients)) for i in names]

    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("chunk_size", [None, 2])
    def test_prefix(self, chunk_size, passes):
        params, x, y = problem()
        limits = {"first": 0.5, "rest": [0.25, 2.0]}
        total, extras = per_sample.clipped_sum(
            loss, max_norm=limits, return_norms=True, passes=passes, chunk_size=chunk_size
        )(params, x, y)
        assert_same(flat(total), self.expected([(0, 1), (2,), (3,)], [0.5, 0.25, 2.0]), eps=16)
        assert set(extras.norms) == {"first", "rest"}
        assert [norm.shape for norm in extras.norms["rest"]] == [(B,), (B,)]

    def test_labels(self):
        params, x, y = problem()
        labels = {"first": "z", "rest": ["a", "z"]}
        options = {"groups": labels, "return_norms": True}
        total, extras = per_sample.clipped_sum(loss, max_norm={"z": 0.5, "a": 0.25}, **options)(
            params, x, y
        )
        assert_same(flat(total), self.expected([(0, 1, 3), (2,)], [0.5, 0.25]), eps=16)
        assert set(extras.norms) == {"z", "a"}
        same, _ = per_sample.clipped_sum(loss, max_norm=0.5, **options)(params, x, y)
        assert_same(flat(same), self.expected([(0, 1, 3), (2,)], [0.5, 0.5]), eps=16)

    def test_norms_by_group(self):
        params, x, y = problem()
        gradients = slow(loss, params, x, y)
        norms = per_sample.norms(loss, groups={"first": 1, "rest": 2})(params, x, y)
        assert_same(norms[1], slow_norms([one[:2] for one in gradients]), eps=8)
        assert_same(norms[2], slow_norms([one[2:] for one in gradients]), eps=8)

    def test_argnums(self):
        def of_two(w, x, v):
            return (w * x * v).sum()

        w, x, v = numbers(3), numbers(B, 3, start=1.0), numbers(3, start=2.0)
        total = per_sample.clipped_sum(of_two, (0, -1), max_norm=(0.5, 0.25))(w, x, v)
        for position, limit, other in ((0, 0.5, v), (1, 0.25, w)):
            gradients = x * other
            factors = (limit / gradients.norm(dim=1)).clamp(max=1)
            assert_same(total[position], factors @ gradients, eps=8)


class TestScalings:
    def total(self, scaling, **options):
        x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.5]], dtype=DTYPE)
        return per_sample.clipped_sum(lambda w, x: (w * x).sum(), scaling=scaling, **options)(
            torch.ones(2, dtype=DTYPE), x
        )

    def test_automatic(self):
        expected = [3 / 5.01, 4 / 5.01 + 0.5 / 0.51]
        assert_same(self.total("automatic"), torch.tensor(expected, dtype=DTYPE), eps=8)
        custom = self.total(per_sample.automatic(gamma=1.0), max_norm=2.0)
        assert_same(custom, torch.tensor([1.0, 8 / 6 + 1 / 1.5], dtype=DTYPE), eps=8)

    def test_normalize(self):
        assert_same(self.total("normalize"), torch.tensor([0.6, 1.8], dtype=DTYPE), eps=8)

    def test_of_the_user(self):
        total = self.total(lambda norm, limit: (norm < limit).to(norm.dtype), max_norm=1.0)
        assert_same(total, torch.tensor([0.0, 0.5], dtype=DTYPE))

    def test_a_gradient_of_zero_is_clipped_to_zero(self):
        assert_same(self.total("clip", max_norm=1.0), torch.tensor([0.6, 1.3], dtype=DTYPE), eps=8)

    def test_wrong_factors(self):
        with pytest.raises(ValueError, match=r"factor for each norm.*\(3,\)"):
            self.total(lambda norm, limit: norm.sum())


class TestArguments:
    def test_in_dims(self):
        params, x, y = problem()
        expected = per_sample.grads(loss)(params, x, y)
        for dims, args in (
            ((None, 1, 0), (params, x.T, y)),
            ((None, -1, -1), (params, x.T, y)),
            (({"first": None, "rest": [None, None]}, 0, 0), (params, x, y)),
        ):
            assert_same(per_sample.grads(loss, in_dims=dims, chunk_size=2)(*args), expected, eps=8)

    def test_a_parameter_for_each_example(self):
        w, x = numbers(B, 3), numbers(B, 3, start=1.0)
        f = per_sample.grads(lambda w, x: (w * x).sin().sum(), in_dims=0, chunk_size=2)
        assert_same(f(w, x), (w * x).cos() * x, eps=8)
        total = per_sample.clipped_sum(
            lambda w, x: (w * x).sum(), in_dims=0, max_norm=100.0, chunk_size=2
        )(w, x)
        assert_same(total, x.sum(0), eps=8)

    def test_keywords_and_non_tensors_are_shared(self):
        def scaled(w, x, power, *, scale):
            return (w * x**power * scale).sum()

        w, x, scale = numbers(3), numbers(B, 3), numbers(3, start=2.0)
        assert_same(per_sample.grads(scaled)(w, x, 2, scale=scale), x**2 * scale, eps=8)

    @pytest.mark.parametrize("chunk_size", [None, 1, 2])
    def test_padding_counts_for_nothing(self, chunk_size):
        params, x, y = problem()
        is_padding = torch.tensor([False, True, False, False, True])
        bad = torch.where(is_padding[:, None], math.nan, x)
        real = (params, x[~is_padding], y[~is_padding])
        options = {"max_norm": 0.5, "chunk_size": chunk_size, "return_norms": True}
        expected, few = per_sample.clipped_sum(loss, **options)(*real)
        total, extras = per_sample.clipped_sum(loss, **options)(
            params, bad, y, is_padding_example=is_padding
        )
        assert_same(total, expected, eps=8)
        assert_same(extras.norms[~is_padding], few.norms, eps=8)
        assert (extras.norms[is_padding] == 0).all()
        gradients = per_sample.grads(loss, chunk_size=chunk_size)(
            params, bad, y, is_padding_example=is_padding
        )
        assert all((leaf[is_padding] == 0).all() for leaf in flat(gradients))
        assert_same(flat(gradients)[0][~is_padding], flat(per_sample.grads(loss)(*real))[0], eps=8)

    @pytest.mark.parametrize("batch", ["empty", "all padding"])
    def test_no_example(self, batch):
        params, x, y = problem()
        size, options = 0, {}
        if batch == "empty":
            x, y = x[:0], y[:0]
        else:
            size, options = B, {"is_padding_example": torch.ones(B, dtype=torch.bool)}
        total, extras = per_sample.clipped_sum(
            loss, max_norm=1.0, return_values=True, return_norms=True
        )(params, x, y, **options)
        assert_same(flat(total), [torch.zeros_like(leaf) for leaf in flat(params)])
        assert_same((extras.values, extras.norms), (torch.zeros(size, dtype=DTYPE),) * 2)
        gradients = per_sample.grads(loss)(params, x, y, **options)
        assert flat(gradients)[0].shape == (size, *flat(params)[0].shape)

    def test_an_iterator_is_the_batch_it_makes(self):
        params, x, y = problem()
        pairs = ((x[i : i + 2], y[i : i + 2]) for i in range(0, B, 2))
        total, extras = per_sample.clipped_sum(loss, max_norm=0.5, return_norms=True)(params, pairs)
        expected, same = per_sample.clipped_sum(loss, max_norm=0.5, return_norms=True)(params, x, y)
        assert_same((total, extras.norms), (expected, same.norms), eps=8)
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        assert_same(per_sample.norms(loss)(params, loader), extras.norms, eps=8)
        gradients = per_sample.grads(loss)(params, iter(loader))
        assert_same(gradients, per_sample.grads(loss)(params, x, y), eps=8)

    def test_accumulation_dtype(self):
        x = torch.full((2048, 1), 1.0, dtype=torch.bfloat16)
        w = torch.ones(1, dtype=torch.bfloat16)
        for chunk_size in (1, 100):
            f = per_sample.clipped_sum(
                lambda w, x: (w * x).sum(), max_norm=1.0, chunk_size=chunk_size
            )
            assert f(w, x).item() == 2048  # 256 + 1 is 256 in bfloat16
            assert f(w, x).dtype == torch.bfloat16
        f = per_sample.clipped_sum(
            lambda w, x: (w * x).sum(), max_norm=1.0, accumulation_dtype=torch.float64
        )
        assert f(w, x[:3]).dtype == torch.float64
        huge = torch.full((1, 1), 300.0, dtype=torch.float16)  # its square is no float16
        norm = per_sample.norms(lambda w, x: (w * x).sum())(torch.ones(1).half(), huge)
        assert (norm.item(), norm.dtype) == (300, torch.float32)

    def test_complex_parameters(self):
        w, x = torch.view_as_complex(numbers(3, 2)), numbers(B, 3)
        f = lambda w, x: (w * x).abs().square().sum()  # noqa: E731
        expected = torch.func.vmap(torch.func.grad(f), (None, 0))(w, x)
        norms = expected.abs().square().sum(1).sqrt()
        assert_same(per_sample.norms(f)(w, x), norms, eps=8)
        total = per_sample.clipped_sum(f, max_norm=0.5)(w, x)
        factors = (0.5 / norms).clamp(max=1).to(expected.dtype)
        assert_same(total, factors @ expected, eps=8)


class TestModules:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def test_pair(self):
        model = self.model()
        x, y = numbers(B, 3), torch.tensor([0, 1, 1, 0, 1])
        total, extras = per_sample.clipped_sum(
            (model, nn.functional.cross_entropy), max_norm=0.3, return_values=True
        )(x, y)
        factors, gradients = [], []
        for one in range(B):
            model.zero_grad()
            nn.functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1]).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            factors.append(min(1.0, 0.3 / slow_norms(gradients[-1:]).item()))
        assert list(total) == [name for name, _ in model.named_parameters()]
        assert_same(list(total.values()), slow_sum(gradients, factors), eps=16)
        values = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
        assert_same(extras.values, values, eps=8)
        assert not any(t.requires_grad for t in (*total.values(), extras.values))

    def test_sees_what_an_optimizer_did(self):
        model, x = self.model(), numbers(B, 3)
        f = per_sample.norms((model, torch.sum))
        before = f(x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        assert not torch.equal(f(x), before)

    def test_frozen_parameters(self):
        model, x = self.model(), numbers(B, 3)
        everything = per_sample.grads((model, torch.sum))(x)
        model[0].requires_grad_(False)
        some = per_sample.grads((model, torch.sum))(x)
        assert list(some) == ["2.weight", "2.bias"]
        assert_same(some, {name: everything[name] for name in some})

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

        def criterion(scores, tokens):
            return nn.functional.cross_entropy(scores, tokens.flatten())

        torch.manual_seed(0)
        model, tokens = Tied(), torch.tensor([[0, 1, 2], [3, 3, 3], [4, 0, 4]])
        norms = per_sample.norms((model, criterion), chunk_size=chunk_size)(tokens, tokens)
        expected = []
        for one in tokens:
            model.zero_grad()
            criterion(model(one[None]), one[None]).backward()
            expected.append(model.embed.weight.grad.norm())
        assert_same(norms, torch.stack(expected), eps=8)

    def test_inputs_of_several_arguments(self):
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
        for make in (per_sample.grads, per_sample.norms):
            with pytest.raises(ValueError, match="statistics of the batch, which mix its examples"):
                make((model, torch.sum))
        with pytest.raises(ValueError, match="BatchNorm1d '1"):
            per_sample.clipped_sum((model, torch.sum), max_norm=1.0)

    def test_batch_norm_that_begins_to_train_is_refused(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
        f = per_sample.norms((model, torch.sum))
        assert f(torch.randn(B, 3)).shape == (B,)
        model.train()
        with pytest.raises(ValueError, match="evaluation mode"):
            f(torch.randn(B, 3))

    def test_nothing_to_differentiate(self):
        with pytest.raises(ValueError, match="no parameter of Linear requires grad"):
            per_sample.grads((nn.Linear(2, 2).requires_grad_(False), torch.sum))

    def test_a_module_alone(self):
        with pytest.raises(TypeError, match=r"pass a pair \(module, criterion\)"):
            per_sample.grads(nn.Linear(2, 2))


def test_functx_has_it():
    assert functx.per_sample is per_sample
