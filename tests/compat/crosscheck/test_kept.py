"""Bytes kept at region boundaries are equal, exactly, in torch and in JAX; a moved cut is seen."""

import itertools

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functx
from functx import checkpoint_policies as cp
from functx.compat import crosscheck
from functx.compat._case import case_of
from functx.compat._crosscheck import _kept
from functx.compat._derivatives import libraries
from functx.compat._dlpack import array_from_torch
from functx.compat._to_jax import to_jax

from .test_agrees import BATCH, LAYERS, WIDTH, chain, weights

ACTIVATION = WIDTH * BATCH * 4


@pytest.mark.parametrize("segment", [1, 4, 8])
def test_kept_bytes_are_equal_and_as_expected(segment):
    """Each region keeps its input; that of the first is an argument."""
    net = chain(range(0, LAYERS, segment))
    report = crosscheck(net, *weights(), transforms="grad", peak=False)
    report.assert_agrees()
    assert report.kept_torch == report.kept_jax
    assert report.kept_torch.regions == LAYERS // segment
    assert report.kept_torch.activations == (LAYERS // segment - 1) * ACTIVATION
    assert report.kept_torch.arguments == ACTIVATION + LAYERS * WIDTH * WIDTH * 4
    activations = [r.activations for r in report.kept_torch.by_region]
    assert activations == [0] + [ACTIVATION] * (LAYERS // segment - 1)
    assert {r.name for r in report.kept_jax.by_region} == {"chain.<locals>.run"}


def kept(in_torch, in_jax, *args):
    """What torch keeps of one function and JAX of another."""
    sides = []
    for n, f in enumerate((in_torch, in_jax)):
        with jax.enable_x64(True):
            case = case_of(f, args, {}, 0, None, None)
            lowered = to_jax(case.function)
            arrays = tuple([array_from_torch(x) for x in xs] for xs in (case.primals, case.rest))
            sides.append(_kept(*libraries(case, lowered), lowered, arrays)[n])
    return sides


def test_a_moved_cut_fails_the_assertion_and_names_the_region():
    def net(widths):
        """Layers of different widths, so that where a cut is shows in bytes."""
        sizes = [2, 3, 4, 5, 6]

        def run(x, *ws):
            for w in ws:
                x = torch.tanh(x @ w)
            return x

        def f(ws, x):
            for a, b in zip([0, *widths], [*widths, len(sizes) - 1]):
                x = functx.remat(run)(x, *ws[a:b])
            return x.sum()

        return f, [torch.randn(a, b) for a, b in itertools.pairwise(sizes)], torch.randn(7, 2)

    report = crosscheck(*net([1, 3]), transforms="grad", peak=False)
    report.assert_agrees()
    f, ws, x = net([1, 3])
    moved = kept(f, net([2, 3])[0], ws, x)[1]
    assert moved.activations != report.kept_jax.activations
    object.__setattr__(report, "kept_jax", moved)
    assert not report.kept_equal
    message = r"first at region 2, \S*run: 84 and 112\); the cuts are not at the same places"
    with pytest.raises(AssertionError, match=message):
        report.assert_agrees()
    assert "DIFFERENT" in str(report)


def test_what_several_regions_take_counts_for_the_first():
    def f(x):
        y = x.exp()
        first, second = functx.remat(torch.sin), functx.remat(torch.cos)
        return first(y).sum() + second(y).sum()

    report = crosscheck(f, torch.randn(5), peak=False)
    assert [r.activations for r in report.kept_torch.by_region] == [20, 0]
    assert report.kept_torch.by_region == report.kept_jax.by_region

    def hands_on(x):
        skip, x = x.exp(), x.sin()
        skip, x = functx.remat(lambda skip, x: (skip, x.cos()))(skip, x)
        return functx.remat(lambda skip, x: (skip * x).sum())(skip, x)

    report = crosscheck(hands_on, torch.randn(5), peak=False)
    report.assert_agrees()
    assert report.kept_torch.activations == report.kept_jax.activations == 60


OPERATIONS = {
    "product": lambda x, w: torch.tanh(x @ w),
    "scale": lambda x, w: x * w.sum(),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "gelu": lambda x, w: torch.nn.functional.gelu(x + w[0]),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "sin": lambda x, w: x.sin(),
    "wide": lambda x, w: torch.cat([x, x @ w], -1)[..., 1 : 1 + x.shape[-1]],
}


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_kept_bytes_agree_for_any_segmentation(data):
    """Random layers, cut anywhere, some regions nested, per example or not."""
    names = data.draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=6))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1), max_size=3)))
    spans = list(zip([0, *cuts], [*cuts, len(names)]))
    regions = [data.draw(st.sampled_from(["none", "region", "nested"])) for _ in spans]
    batched = data.draw(st.booleans())

    def layers(x, names, *ws):
        for name, w in zip(names, ws):
            x = OPERATIONS[name](x, w)
        return x

    def nested(x, names, *ws):
        x = functx.remat(layers)(x, names[:1], *ws[:1])
        return layers(x, names[1:], *ws[1:])

    kinds = {"none": layers, "region": functx.remat(layers), "nested": functx.remat(nested)}

    def f(ws, x):
        x = x @ ws[0]  # so that every region is differentiated
        for (a, b), kind in zip(spans, regions):
            x = kinds[kind](x, names[a:b], *ws[a:b])
        return x.sin().sum()  # the squares of what is normalized add up to the same, whatever it is

    ws = [torch.randn(4, 4, dtype=torch.float64) / 2 for _ in names]
    how = {"in_dims": (None, 0), "transforms": "vmap(grad)"} if batched else {"transforms": "grad"}
    report = crosscheck(f, ws, torch.randn(3, 4, dtype=torch.float64), peak=False, **how)
    report.assert_agrees(rtol=1e-4)
    assert report.kept_equal
    assert report.kept_torch.regions == sum(kind != "none" for (a, b), kind in zip(spans, regions))


@pytest.mark.parametrize(
    ("policy", "in_dims"), [(None, (None, 0)), (cp.dots_saveable, None)], ids=repr
)
def test_a_derivative_inside_the_function_keeps_the_same(policy, in_dims):
    """Its pullbacks are regions too; levels that ended inside the function keep nothing."""

    def gradient(ws, x):
        def loss(x):
            for w in ws:
                x = functx.remat(lambda x, w: torch.tanh(x @ w), policy=policy)(x, w)
            return (x * x).sum()

        return functx.grad(loss)(x)

    ws = [torch.randn(4, 4) / 2 for _ in range(3)]
    report = crosscheck(
        gradient, ws, torch.randn(5, 4), in_dims=in_dims, transforms=["grad"], peak=False
    )
    report.assert_agrees()
    assert report.kept_torch.regions == 6
    assert report.kept_torch.activations > 0


PARTS = {
    "slices of one": (lambda f, x: sum(f(one).sum() for one in x), [(48, 0)] * 5),
    "a slice": (lambda f, x: f(x[1:]).sum(), [(192, 0)]),
    "the same, reshaped": (lambda f, x: f(x.reshape(-1)).sum(), [(0, 240)]),
    "transposed": (lambda f, x: f(x).sum() + f(x.mT).sum(), [(0, 240), (240, 0)]),
    "expanded": (lambda f, x: f(x[:1].expand(5, 3, 4)).sum(), [(240, 0)]),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_argument_is_an_activation(part):
    """In JAX it is an array of its own; in torch it takes no memory, which `storages` tells."""
    f, expected = PARTS[part]
    report = crosscheck(lambda x: f(functx.remat(torch.sin), x), torch.randn(5, 3, 4), peak=False)
    report.assert_agrees()
    by_region = [(r.activations, r.arguments) for r in report.kept_torch.by_region]
    assert by_region == expected
    assert report.kept_torch.storages == 0
