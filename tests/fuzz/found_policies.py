"""What random programs with policies found, shrunk: kept for ever."""

from .program import Program

WITH_POLICIES = {
    "what a policy may keep is reshaped in place in a nested region": Program(
        """
def build(remat, env):
    policy = functx.checkpoint_policies.dots_saveable
    def f(x):
        def region1():
            v2 = remat(env.mlp)(x)
            return torch.sigmoid(x)
        v4 = remat(region1, policy=policy)()
        v8 = remat(lambda: torch.sigmoid(torch.sin(v4)), policy=policy)()
        return v8 * 0.5 + v8.sin()
    return f
""",
        set(),
        ("jvp",),
    ),
    "policies around a transform of a region with a policy": Program(
        """
def build(remat, env):
    cp = functx.checkpoint_policies
    def f(x):
        v1 = torch.sin(x)
        def region2(p3):
            def region4():
                v5 = p3 * p3
                return torch.sigmoid(v1)
            inner = remat(lambda t: region4() * t.sin(), policy=cp.dots_saveable)
            v8 = functx.grad(lambda t: inner(t).sum())(v1)
            return torch.sigmoid(torch.sin(torch.sin(v8)))
        v12 = remat(region2, policy=cp.everything_saveable)(torch.outer(v1, v1))
        return v12 * 0.5 + v12.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "nested policies, four times differentiated": Program(
        """
def build(remat, env):
    cp = functx.checkpoint_policies
    def f(x):
        v1 = torch.sin(x)
        def region2():
            def region3(p4):
                v5 = torch.sin(torch.outer(p4, p4))
                return torch.sigmoid(torch.tanh(x.sin() * 1.4))
            return torch.sigmoid(remat(region3, policy=cp.save_smaller_than(40))(v1))
        v10 = remat(region2, policy=cp.dots_saveable)()
        return v10 * 0.5 + v10.sin()
    return f
""",
        set(),
        ("grad", "grad", "grad"),
    ),
    "a replay departs at a copy to host memory, of a region inside": Program(
        """
def build(remat, env):
    cp = functx.checkpoint_policies
    leaf = env.leaf(())
    def f(x):
        def region1(p):
            def region2():
                unread = torch.sin(leaf), torch.outer(p, p).mT
                return torch.sigmoid(x)
            v = remat(region2, policy=cp.offload(cp.everything_saveable))()
            return torch.sigmoid(v * 0.9 + 0.05)
        v = remat(region1, policy=cp.dots_saveable)(x)
        return v * 0.5 + v.sin()
    return f
""",
        set(),
        ("vmap", "vjp"),
        (2,),
    ),
    "what regions inside leave out of a gradient, of which a policy keeps a part": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        def region1(p2):
            return torch.nn.functional.dropout(p2, 0.4)
        def region3(p4):
            return remat(region1)(p4) * 0.5
        def region5(p6):
            return torch.sigmoid(functx.grad(lambda t: remat(region3)(t).sum())(p6) * leaf0)
        return remat(region5, policy=functx.checkpoint_policies.everything_saveable)(x)
    return f
""",
        set(),
    ),
    "a norm is dropped that advances statistics which the region has made": Program(
        """
def build(remat, env):
    policy = functx.checkpoint_policies.everything_saveable
    def f(x):
        def region():
            mean = x.detach() * 0.5
            var = mean.square() + 1.0
            given = torch.outer(mean, mean)
            buffers = {"running_mean": mean, "running_var": var}
            torch.func.functional_call(remat(env.norm), buffers, (given,))
            return torch.sigmoid(var) * x.sin()
        return remat(region, policy=policy)()
    return f
""",
        set(),
    ),
    "a constant that a region inside is given, and only hands back": Program(
        """
def build(remat, env):
    def f(x):
        made = remat(lambda: torch.sin(x.detach()))()
        def region():
            out, back = remat(lambda p: (torch.sigmoid(x), p))(made)
            return out * 0.5
        return remat(region)()
    return f
""",
        set(),
    ),
    "a policy keeps what was written to, not what that was computed from": Program(
        """
def build(remat, env):
    policy = functx.checkpoint_policies.everything_saveable
    def f(x):
        def region(p):
            v = torch.addmv(p, torch.outer(p, p), p)
            v += p.sin()
            return torch.sigmoid(v * v.cos())
        return remat(region, policy=policy)(x.sin().sin())
    return f
""",
        set(),
    ),
    "a policy keeps all of what was written to in part": Program(
        """
def build(remat, env):
    policy = functx.checkpoint_policies.everything_saveable
    def f(x):
        def region():
            v = x * 0.7 + x.sum() * 0.1
            v.view(3)[:2].add_(x[1:])
            return torch.sigmoid(v)
        return remat(region, policy=policy)() * 0.5
    return f
""",
        set(),
        ("jacfwd",),
    ),
    "what a policy keeps is written to when the region has run": Program(
        """
def build(remat, env):
    policy = functx.checkpoint_policies.save_at_least(20)
    def f(x):
        def region():
            v = x * 2.0
            return torch.sigmoid(v.sum() * 0.1).expand(3) * 0.5, v
        out, v = remat(region, policy=policy)()
        v.mul_(x)
        return out + v.sin()
    return f
""",
        set(),
    ),
}
