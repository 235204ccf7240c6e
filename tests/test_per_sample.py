"""Per-example gradients, norms and clipped sums are those of a loop over the examples."""

import math

import pytest
import torch
from cases import DTYPE, numbers
from per_sample_loops import slow, slow_norms, slow_sum
from references import assert_same

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

    @pytest.mark.parametrize("chunk_size", [None, 1, 2])
    def test_parameters_of_any_size(self, chunk_size):
        """Numbers, empty ones, ones that the loss does not read, small and large ones together."""
        sizes = [(), (0, 3), (1,), (3,), (2, 0), (40, 40), (30, 60, 1)]
        params = [numbers(*size, start=float(len(size))) for size in sizes]

        def of_all(params, x):
            return sum((p * (i + 1)).sin().sum() * x.sum() for i, p in enumerate(params) if i != 3)

        x = numbers(B, 3, start=2.0)
        gradients = slow(of_all, params, x)
        norms = slow_norms(gradients)
        expected = slow_sum(gradients, (2.0 / norms).clamp(max=1))
        for passes in (1, 2):
            f = per_sample.clipped_sum(of_all, max_norm=2.0, passes=passes, chunk_size=chunk_size)
            assert_same(f(params, x), expected, eps=64)
        assert_same(per_sample.norms(of_all, chunk_size=chunk_size)(params, x), norms, eps=64)
        each = per_sample.grads(of_all, chunk_size=chunk_size)(params, x)
        assert_same(each, [torch.stack(leaf) for leaf in zip(*gradients)], eps=64)

    def test_complex_parameters(self):
        w, x = torch.view_as_complex(numbers(3, 2)), numbers(B, 3)
        f = lambda w, x: (w * x).abs().square().sum()  # noqa: E731
        expected = torch.func.vmap(torch.func.grad(f), (None, 0))(w, x)
        norms = expected.abs().square().sum(1).sqrt()
        assert_same(per_sample.norms(f)(w, x), norms, eps=8)
        total = per_sample.clipped_sum(f, max_norm=0.5)(w, x)
        factors = (0.5 / norms).clamp(max=1).to(expected.dtype)
        assert_same(total, factors @ expected, eps=8)


def test_functx_has_it():
    assert functx.per_sample is per_sample


def test_penalties_on_norms():
    """Torch's rule for layer_norm's backward forgets that the statistics depend on the input."""
    scale, x = numbers(4), numbers(3, 2, 4)

    def loss(w, x):
        return torch.layer_norm(x, (4,), w).pow(3).sum()

    def expected(x):
        asked = scale.clone().requires_grad_()
        values = torch.stack([loss(asked, row) for row in x])
        rows = [torch.autograd.grad(v, asked, create_graph=True)[0].norm() for v in values]
        return torch.stack(rows).sum()

    asked = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(expected(asked), asked)
    (found,) = torch.autograd.grad(per_sample.norms(loss)(scale, asked).sum(), asked)
    assert_same(found, wanted, eps=64)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_tangents_of_plain_forward_mode(chunk_size):
    """In a dual level of torch's, without functorch and in whatever grad mode."""
    w, tangent, x = numbers(4), numbers(4, start=2.0), numbers(3, 4)

    def gradients(w):
        return per_sample.grads(lambda w, x: (w * x).sin().sum(), chunk_size=chunk_size)(w, x)

    expected = -torch.sin(w * x) * x.square() * tangent
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, tangent)
            found = torch.autograd.forward_ad.unpack_dual(gradients(dual)).tangent
            assert_same(found, expected, eps=16)
