"""Programs in which a hook was handed ``None``, where it is not called without `remat`."""

from .program import Program

_TWO_RESULTS = """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v = x.sin()
        h = v * 0.9
        env.hook(h)
        def region(p, q):
            return torch.sigmoid(q), p.tanh() * p
        a, b = remat(region)(h, v)
        return a.sin()
    return f
"""
_IN_A_REGION = """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v = x.sin()
        h = v * 0.9
        env.hook(h)
        def region(p, q):
            return torch.sigmoid(q), p.tanh() * p
        def outer(p, q):
            a, b = remat(region)(p, q)
            return a.sin(), b
        a, b = remat(outer)(h, v)
        return a.sin()
    return f
"""
_CAPTURED = """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        h = x * 0.9
        env.hook(h)
        def region():
            return torch.sigmoid(leaf0), h.tanh()
        a, b = remat(remat(region))()
        return a.sin()
    return f
"""

WITH_HOOKS = {
    "a hook before a result that is not pulled back, under forward mode": Program(
        _TWO_RESULTS, {"hook"}, ("grad", "jvp")
    ),
    "the same of jacrev under jvp, as a region": Program(
        _TWO_RESULTS, {"hook"}, ("jacrev", "jvp"), (0,)
    ),
    "a hook outside of a region that holds the region with several results": Program(
        _IN_A_REGION, {"hook"}
    ),
    "the same under forward over reverse": Program(_IN_A_REGION, {"hook"}, ("grad", "jacfwd")),
    "a hook on what a region in a region closes over": Program(_CAPTURED, {"hook"}),
}
