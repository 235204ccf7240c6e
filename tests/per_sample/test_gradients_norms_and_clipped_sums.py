"""Per-example gradients, norms and clipped sums are those of a loop over the examples."""

import pytest
import torch
from cases import DTYPE, numbers
from references import assert_same

from functx import per_sample

from .losses import slow, slow_norms, slow_sum

B = 5
CHUNKS = [None, 1, 2, 9]


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


product = lambda w, x: (w * x).sum()


def flat(tree):
    return torch.utils._pytree.tree_leaves(tree)


SIZES = [(), (0, 3), (1,), (3,), (2, 0), (40, 40), (30, 60, 1)]


def of_any_size(params, x):
    """Numbers, empty ones, ones that are not read, small and large ones together."""
    return sum((p * (i + 1)).sin().sum() * x.sum() for i, p in enumerate(params) if i != 3)


PROBLEMS = {
    "network": (loss, *problem()),
    "any size": (of_any_size, [numbers(*size, start=1.0) for size in SIZES], problem()[1]),
}


# One example alone takes another way where nothing could differentiate the result.
@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestValues:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_they_are_those_of_a_loop(self, name, chunk_size, grad_mode):
        loss, params, *batch = PROBLEMS[name]
        gradients = slow(loss, params, *batch)
        norms = slow_norms(gradients)
        limit = norms.mean().item()
        options = {"chunk_size": chunk_size, "return_norms": True}
        with torch.set_grad_enabled(grad_mode):
            each, extras = per_sample.grads(loss, return_values=True, **options)(params, *batch)
            alone = per_sample.norms(loss, chunk_size=chunk_size)(params, *batch)
            total, of_sum = per_sample.clipped_sum(loss, max_norm=limit, **options)(params, *batch)
        assert_same(flat(each), [torch.stack(leaf) for leaf in zip(*gradients)], eps=64)
        assert_same((extras.norms, alone, of_sum.norms), (norms,) * 3, eps=64)
        assert norms.min() < limit < norms.max()
        assert_same(flat(total), slow_sum(gradients, (limit / norms).clamp(max=1)), eps=64)
        assert_same(extras.values, torch.stack([loss(params, *one) for one in zip(*batch)]), eps=8)
        assert (extras.aux, of_sum.values) == (None, None)

    def test_aux_is_handed_out(self, chunk_size, grad_mode):
        with_aux = lambda w, x: ((w * x).sum(), {"scaled": w * x, "twice": [2 * x]})
        w, x = numbers(3), numbers(B, 3, start=1.0)
        for make, more in (("grads", {}), ("norms", {}), ("clipped_sum", {"max_norm": 1})):
            f = getattr(per_sample, make)(with_aux, has_aux=True, chunk_size=chunk_size, **more)
            with torch.set_grad_enabled(grad_mode):
                assert_same(f(w, x)[1], {"scaled": w * x, "twice": [2 * x]})


LABELS = {"first": "z", "rest": ["a", "z"]}


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    ("options", "parts", "limits"),
    [
        ({"max_norm": {"first": 0.5, "rest": [0.25, 2.0]}}, [(0, 1), (2,), (3,)], [0.5, 0.25, 2.0]),
        ({"groups": LABELS, "max_norm": {"z": 0.5, "a": 0.25}}, [(0, 1, 3), (2,)], [0.5, 0.25]),
        ({"groups": LABELS, "max_norm": 0.5}, [(0, 1, 3), (2,)], [0.5, 0.5]),
    ],
)
def test_parts_of_the_parameters_are_clipped_together(options, parts, limits, chunk_size):
    params, x, y = problem()
    gradients = slow(loss, params, x, y)  # b and w of first, then rest
    norms = [slow_norms([[one[i] for i in part] for one in gradients]) for part in parts]
    factors = [(limit / norm).clamp(max=1) for limit, norm in zip(limits, norms)]
    of_leaf = {i: factor for part, factor in zip(parts, factors) for i in part}
    expected = [sum(f * one[i] for f, one in zip(of_leaf[i], gradients)) for i in range(4)]
    f = per_sample.clipped_sum(loss, return_norms=True, chunk_size=chunk_size, **options)
    total, extras = f(params, x, y)
    assert_same(flat(total), expected, eps=16)
    if groups := options.get("groups"):
        assert_same(extras.norms, dict(zip("za", norms)), eps=8)
        assert_same(per_sample.norms(loss, groups=groups)(params, x, y), extras.norms, eps=8)
    else:
        assert_same(extras.norms, {"first": norms[0], "rest": norms[1:]}, eps=8)


def test_each_argument_may_have_a_threshold():
    of_two = lambda w, x, v: (w * x * v).sum()
    w, x, v = numbers(3), numbers(B, 3, start=1.0), numbers(3, start=2.0)
    total = per_sample.clipped_sum(of_two, (0, -1), max_norm=(0.5, 0.25))(w, x, v)
    for found, limit, other in ((total[0], 0.5, v), (total[1], 0.25, w)):
        gradients = x * other
        assert_same(found, (limit / gradients.norm(dim=1)).clamp(max=1) @ gradients, eps=8)


@pytest.mark.parametrize(
    ("scaling", "max_norm", "expected"),
    [
        ("automatic", None, [3 / 5.01, 4 / 5.01 + 0.5 / 0.51]),  # by norm and gamma
        (per_sample.automatic(gamma=1.0), 2.0, [1.0, 8 / 6 + 1 / 1.5]),
        ("normalize", None, [0.6, 1.8]),
        (lambda norm, limit: (norm < limit).to(norm.dtype), 1.0, [0.0, 0.5]),
        ("clip", 1.0, [0.6, 1.3]),
    ],
)
def test_a_scaling_gives_the_factor_and_zero_stays_zero(scaling, max_norm, expected):
    w, x = numbers(2), torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.5]], dtype=DTYPE)
    f = per_sample.clipped_sum(product, scaling=scaling, max_norm=max_norm)
    assert_same(f(w, x), torch.tensor(expected, dtype=DTYPE), eps=8)


class TestArguments:
    def test_in_dims_are_those_of_vmap(self):
        params, x, y = problem()
        expected = per_sample.grads(loss)(params, x, y)
        for dims, args in (
            ((None, 1, 0), (params, x.T, y)),
            ((None, -1, -1), (params, x.T, y)),
            (({"first": None, "rest": [None, None]}, 0, 0), (params, x, y)),
        ):
            assert_same(per_sample.grads(loss, in_dims=dims, chunk_size=2)(*args), expected, eps=8)

    def test_each_example_may_have_its_parameter(self):
        w, x = numbers(B, 3), numbers(B, 3, start=1.0)
        f = per_sample.grads(lambda w, x: (w * x).sin().sum(), in_dims=0, chunk_size=2)
        assert_same(f(w, x), (w * x).cos() * x, eps=8)
        f = per_sample.clipped_sum(product, in_dims=0, max_norm=100.0, chunk_size=2)
        assert_same(f(w, x), x.sum(0), eps=8)

    @pytest.mark.parametrize("batch", ["empty", "all padding"])
    def test_of_no_example_sums_are_zero(self, batch):
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
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
        clipped = per_sample.clipped_sum(loss, max_norm=0.5)
        for f, batches in (
            (clipped, pairs),
            (per_sample.norms(loss), loader),
            (per_sample.grads(loss), iter(loader)),
        ):
            assert_same(f(params, batches), f(params, x, y), eps=8)

    def test_sums_are_accumulated_in_float32(self):
        x = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
        w = torch.ones(1, dtype=torch.bfloat16)
        for chunk_size in (1, 100):
            f = per_sample.clipped_sum(product, max_norm=1.0, chunk_size=chunk_size)
            assert f(w, x).item() == 300  # 256 + 1 is 256 in bfloat16
            assert f(w, x).dtype == torch.bfloat16
        f = per_sample.clipped_sum(product, max_norm=1.0, accumulation_dtype=torch.float64)
        assert f(w, x[:3]).dtype == torch.float64
        huge = torch.full((1, 1), 300.0, dtype=torch.float16)  # its square is no float16
        norm = per_sample.norms(product)(torch.ones(1).half(), huge)
        assert (norm.item(), norm.dtype) == (300, torch.float32)
