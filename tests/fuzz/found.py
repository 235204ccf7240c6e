"""What random programs found, shrunk: kept for ever."""

from .program import Program

FOUND = {
    "two regions in a region, twice differentiated": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        def region1():
            return torch.sigmoid(torch.sin(x))
        v2 = remat(region1)()
        def region3(p4, p5):
            return torch.sigmoid(torch.sin(p4))
        v6 = remat(region3)(v2, leaf0)
        return v6 * 0.5 + v6.sin()
    return f
""",
        set(),
        ("grad",),
        (0,),
    ),
    "an unused result and a capture, twice differentiated": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3, 3))
    def f(x):
        v1 = torch.nn.functional.linear(x, leaf0, x).tanh()
        def region2():
            v3 = torch.tanh(v1 * 1.3)
            v4 = torch.sigmoid(x)
            return v4, v4
        v5, v6 = remat(region2)()
        return v6 * 0.5 + v6.sin()
    return f
""",
        set(),
        ("grad", "grad"),
    ),
    "a capture that a nested region hands back": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.sin(torch.sin(x))
        def region2():
            def region3():
                return torch.sigmoid(torch.sin(v1)), v1
            v4, v5 = remat(region3)()
            return torch.sigmoid(v5) * v4
        v6 = remat(region2)()
        return v6 * 0.5 + v6.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "a capture that is handed back by a region two levels down": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.sin(torch.outer(x, x))
        def region2():
            def region3():
                def region4():
                    return torch.sigmoid(x.cumsum(0) * 0.4)
                v5 = remat(region4)()
                return torch.sigmoid(v5), v1
            v6, v7 = remat(region3)()
            return torch.sigmoid(v6)
        v8 = remat(region2)()
        return v8 * 0.5 + v8.sin()
    return f
""",
        set(),
    ),
    "a hook on a capture that no gradient reaches": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.sin(x)
        env.hook(v1)
        def region2():
            v3 = torch.sin(v1)
            return torch.sigmoid(x)
        v4 = remat(region2)()
        return v4 * 0.5 + v4.sin()
    return f
""",
        set(),
    ),
    "a leaf that is returned from a vmapped region": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3, 3))
    def f(x):
        v1 = torch.sin(x)
        def region2(p3):
            v4 = leaf0.mT
            def region5(p6):
                return torch.sigmoid(torch.sin(p6))
            return torch.sigmoid(remat(region5)(torch.sin(p3)))
        v7 = remat(region2)(v1)
        return v1 * 0.5 + v7.sin(), leaf0
    return f
""",
        set(),
        ("vmap",),
        (0, 1),
    ),
    "a module below three transforms": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v1 = x[torch.tensor([2, 0, 0])]
        def region2():
            v3 = torch.outer(v1, v1).sin()
            v4 = remat(env.linear)(leaf0)
            v5 = torch.sigmoid(v4)
            return v5, v5
        v6, v7 = remat(region2)()
        return v7 * 0.5 + v7.sin()
    return f
""",
        set(),
        ("jacrev", "jacfwd", "grad"),
        (1,),
    ),
    "without gradient, and returned from the next region": Program(
        """
def build(remat, env):
    def f(x):
        v1 = env.mlp(x)
        def region2(p3):
            def region4(p5):
                v6 = torch.sigmoid(env.mlp(p5))
                return v6, v6
            v7, v8 = remat(region4)(p3)
            return torch.sigmoid(v8)
        v9 = remat(region2)(v1)
        with torch.no_grad():
            v10 = torch.outer(v9, v1)
        def region11():
            return torch.sigmoid(torch.sin(v9)), v10
        v12, v13 = remat(region11)()
        return v12 * 0.5 + v12.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "a capture that is met first without gradient": Program(
        """
def build(remat, env):
    def f(x):
        v1 = x.sin()
        def region2():
            with torch.no_grad():
                v3 = v1.tanh()
            return torch.sigmoid(torch.tanh(v1.sin())), v3.sin()
        def region4():
            return remat(region2)()[0]
        return torch.sigmoid(remat(region4)())
    return f
""",
        set(),
        ("grad", "jvp", "grad"),
    ),
    "a view of a leaf that two regions hand back": Program(
        """
def build(remat, env):
    leaf1 = env.leaf((3, 3))
    def f(x):
        def region2():
            v3 = leaf1[:, 2]
            return torch.sigmoid(torch.sin(v3)), v3
        v6, v7 = remat(remat(region2))()
        return v7 * 0.5 + v7.sin() * x
    return f
""",
        set(),
        ("grad", "grad", "grad"),
    ),
    "an input that is not read, of a level that has ended": Program(
        """
def build(remat, env):
    def f(x):
        def region1():
            v2 = torch.outer(x, x).square().mean().sqrt()
            return torch.sigmoid(x)
        v5 = functx.grad(lambda t: remat(lambda t4: region1() * t4.sin())(t).sum())(x)
        def region6(p7, p8):
            v9 = torch.outer(p8, p8).mT
            return torch.sigmoid(x)
        v13 = remat(region6)(v5, v5)
        return v13 * 0.5 + v13.sin()
    return f
""",
        set(),
        ("grad", "grad", "grad"),
        (0,),
    ),
    "a leaf among the outputs of a pullback": Program(
        """
def build(remat, env):
    leaf1 = env.leaf((3, 3))
    def f(x):
        v1 = torch.sigmoid(torch.sin(x))
        return v1 * 0.5, leaf1
    return f
""",
        set(),
        ("vjp", "grad"),
        (0, 1),
    ),
    "only a leaf among the outputs of a pullback": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        return leaf0
    return f
""",
        set(),
        ("vjp", "vmap", "jacrev"),
        (0, 2),
        library="torch.func",
    ),
    "forward mode's zeros": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.sin(x)
        def region2():
            v3 = remat(env.linear)(v1)
            return torch.sigmoid(v3)
        v5 = remat(region2)()
        return v5 * 0.5 + v5.sin()
    return f
""",
        set(),
        ("jacfwd", "grad"),
    ),
    "a write below a level that takes no tape in the replay": Program(
        """
def build(remat, env):
    leaf1 = env.leaf(())
    def f(x):
        def region1():
            def region2():
                v3 = x * 0.7 + x.sum() * 0.1
                v3.mul_(x)
                return torch.sigmoid(torch.sin(x))
            v8 = functx.grad(lambda t: remat(lambda t7: region2() * t7.sin())(t).sum())(x)
            return torch.sigmoid(v8)
        v10 = remat(region1)()
        def region11():
            return torch.sigmoid(v10)
        v14 = remat(region11)()
        return v14 * 0.5 + v14.sin()
    return f
""",
        set(),
        ("grad", "grad"),
    ),
    "what a region hands back is known to the next by identity": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.outer(x, x) * torch.outer(x, x)
        v2 = torch.sin(x)
        def region3():
            def region4():
                def region5(p6):
                    return torch.sigmoid(torch.sin(torch.sin(p6))), v1
                v10, v11 = remat(region5)(v2)
                v12 = torch.sin(v11)
                return torch.sigmoid(v10)
            return torch.sigmoid(remat(region4)())
        v16 = remat(region3)()
        return v16 * 0.5 + v16.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "a detached tensor that a nested region passes on": Program(
        """
def build(remat, env):
    def f(x):
        v1 = torch.outer(x, x).detach()
        v2 = torch.sin(x)
        def region3():
            v5 = v2 * 0.7
            def region6():
                return torch.sigmoid(torch.sin(v5)), v1
            v11, v12 = remat(region6)()
            return torch.sigmoid(v11)
        v14 = remat(region3)()
        return v14 * 0.5 + v14.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "a leaf that a custom Function saves under two regions": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        def region1():
            return torch.sigmoid(env.function(leaf0, x))
        return remat(region1)()
    return f
""",
        set(),
        ("grad",),
        (0,),
    ),
    "a leaf that a custom Function saves, inside and around torch.func.grad": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        return torch.sigmoid(env.function(x, leaf0))
    return f
""",
        set(),
        ("grad",),
        (0, 1),
        library="torch.func",
    ),
    "one copy more for the tape of a level that lives on": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        def region1(p2):
            return torch.sigmoid(torch.softmax(x, -1))
        return remat(region1)(leaf0)
    return f
""",
        set(),
        ("jvp", "grad"),
        library="torch.func",
    ),
    "a cotangent that forward mode copies inside a region": Program(
        """
def build(remat, env):
    def f(x):
        def region1(p2):
            def region3(t4):
                return x * t4
            return torch.sigmoid(functx.vmap(remat(region3))(torch.outer(p2, p2)).sum(0))
        return remat(region1)(x.cos() * x)
    return f
""",
        set(),
        ("grad", "jacfwd"),
        (1,),
    ),
    "a copy more where only some of the copies before it are read": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v1 = x * 0.7 + x.sum() * 0.1
        def region3():
            v1.mul_(x.sin())
            return torch.sigmoid(v1)
        v4 = remat(region3)()
        def region5(p6, p7, n=1, flag=False):
            def region8(n=1, flag=False):
                v9 = torch.sin(p6)
                v10 = torch.sin(v9)
                v11 = torch.sigmoid(v10)
                return v11
            v12 = remat(region8)(n=1, flag=True)
            v13 = torch.sin(v12)
            v14 = torch.sin(leaf0)
            v15 = torch.sigmoid(v12)
            return v15
        v16 = remat(region5)(v4, torch.outer(x, x), n=3, flag=True)
        return v16 * 0.5 + v16.sin()
    return f
""",
        set(),
        ("grad",),
        (0,),
        library="torch.func",
    ),
}
