"""What random programs found whose replays run other ATen operations than their forward."""

from .program import Program

DEPARTING = {
    "sizes that a tape compares, and copies it takes, at other levels": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    leaf1 = env.leaf((3,))
    def f(x):
        v1 = torch.sin(x)
        def region2(p3):
            v4 = p3.sum() * 0.7 + leaf0.sum() * 0.1
            v4 += leaf0.sum().sin()
            return torch.sigmoid(torch.sin(p3))
        v7 = remat(region2)(leaf1)
        v8 = torch.outer(v7, v7).mT
        v9 = v7 * 0.7 + v1.sum() * 0.1
        v9.mul_(v1)
        return v1 * 0.5 + v7.sin()
    return f
""",
        set(),
        ("grad", "jvp", "grad"),
        (0,),
        library="torch.func",
    ),
    "the result of a nested region, around which a level has ended, under forward mode": Program(
        """
def build(remat, env):
    constant = env.constant
    dots = functx.checkpoint_policies.offload(functx.checkpoint_policies.dots_saveable)
    def f(x):
        given = x.detach()
        v1 = torch.outer(constant, constant) + given
        v2 = given.sort()[0]
        def region3(p4):
            v5 = torch.cat([x[:0], x * 0.5])
            def region6(p7, p8):
                def region9(n=1, flag=False):
                    v10 = remat(env.noisy)(v2)
                    return torch.sigmoid(v5), v1
                r12, r13 = remat(env.holder(region9, n=1, flag=True), policy=dots)()
                return torch.sigmoid(r12)
            v17 = remat(lambda *a: region6(*a))(v1, v2)
            return torch.sigmoid(v17) * 0.5, p4
        r19, r20 = remat(lambda *a: region3(*a))(v2)
        return torch.sin(r19) * 0.5 + r19.sin()
    return f
""",
        set(),
        ("vmap", "jvp"),
        (),
        randomness="different",
    ),
    "memory on the host for what a policy keeps in a nested region": Program(
        """
def build(remat, env):
    dots = functx.checkpoint_policies.dots_saveable
    def f(x):
        def region1(p2, p3):
            v7 = remat(lambda: torch.sigmoid(torch.sin(p3)), policy=dots)()
            return torch.sigmoid(v7)
        v9 = remat(region1, policy=dots)(x, x)
        v10 = torch.sin(v9)
        def region11(p12, p13):
            v14 = torch.sin(v9)
            v16 = torch.func.functional_call(env.inner, {'weight': p13}, (torch.sin(p12),))
            v17 = torch.tanh(v9.cos() * 1.4)
            return torch.sigmoid(v16)
        offload = functx.checkpoint_policies.offload(dots)
        v19 = remat(region11, policy=offload)(v10, torch.outer(v10, v10))
        return v19 * 0.5 + v19.sin()
    return f
""",
        set(),
        ("grad",),
    ),
    "a region that writes to what a tape knows, three times differentiated": Program(
        """
def build(remat, env):
    dots = functx.checkpoint_policies.dots_saveable
    leaf0 = env.leaf((3,))
    def f(x):
        def region1(p2):
            v4 = x * 0.7 + x.sum() * 0.1
            def region6(t5):
                t5.mul_(x.sin())
                return torch.sigmoid(t5)
            return torch.sigmoid(remat(region6)(v4))
        v9 = remat(region1, policy=dots)(leaf0)
        v14 = remat(lambda: torch.sigmoid(torch.sin(v9)), policy=dots)()
        return v14 * 0.5 + v14.sin()
    return f
""",
        set(),
        ("grad", "grad", "grad"),
        randomness="same",
        library="torch.func",
    ),
    "transforms inside of nested regions with policies": Program(
        """
def build(remat, env):
    dots = functx.checkpoint_policies.dots_saveable
    def f(x):
        v1 = torch.outer(x, x).mT
        def region2():
            v3 = remat(lambda z: torch.sigmoid(z.real) * z.sin())(torch.complex(x, x)).imag
            return torch.sigmoid(v3)
        v6 = functx.grad(lambda t: remat(lambda t5: region2() * t5.sin(), policy=dots)(t).sum())(x)
        def region7(p8, p9):
            return torch.sigmoid(torch.sin(torch.sin(torch.sin(p9))))
        v14 = remat(region7)(x, v6)
        def region15(p16, p17):
            def region18():
                v21 = remat(env.linear)(v14.sum().expand(3)).cos()
                return torch.sigmoid(torch.tanh(v21 * 1.4))
            inner = remat(lambda t24: region18() * t24.sin(), policy=dots)
            v25 = functx.grad(lambda t: inner(t).sum())(v14)
            return torch.sigmoid(torch.sin(p17.unbind(0)[1]))
        v29 = remat(region15, policy=dots)(v1, v1)
        return v29 * 0.5 + v29.sin()
    return f
""",
        set(),
        ("vjp",),
    ),
    "an argument written to in a transform inside a region with a policy": Program(
        """
def build(remat, env):
    dots = functx.checkpoint_policies.dots_saveable
    leaf1 = env.leaf((3, 3))
    def f(x):
        v1 = x * 0.7 + x.sum() * 0.1
        v1[1:].mul_(0.5)
        def region2():
            v7 = remat(lambda p4: torch.sigmoid(torch.sin(v1)), policy=dots)(leaf1)
            v8 = torch.sin(v7)
            v9 = v8 * 0.7 + v8.sum() * 0.1
            def region11(t10):
                t10.mul_(v8.sin())
                return torch.sigmoid(t10)
            return torch.sigmoid(remat(region11)(v9))
        inner = remat(lambda t14: region2() * t14.sin(), policy=dots)
        v15 = functx.grad(lambda t: inner(t).sum())(v1)
        v19 = remat(lambda: torch.sigmoid(torch.sin(v15)), policy=dots)()
        return v19 * 0.5 + v19.sin()
    return f
""",
        set(),
        ("grad",),
        randomness="same",
        library="torch.func",
    ),
    "a constant that a region in a region is given, and closes over": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v1 = torch.outer(leaf0, leaf0).detach()
        def region2(p3):
            v4 = v1.clamp(-0.7, 0.9)
            return torch.sigmoid(x + leaf0.sum())
        v7 = remat(remat(region2))(v1)
        return v7 * 0.5 + v7.sin()
    return f
""",
        set(),
    ),
    "a constant that a region in a region is given twice, and whose values nobody reads": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v1 = env.constant.sin()
        def region2(p3):
            def region4(p5, p6):
                return torch.sigmoid(x), p5.sin() * p6.cos()
            v7, v8 = remat(region4)(p3, v1)
            return torch.sigmoid(v7)
        return remat(region2)(v1)
    return f
""",
        set(),
    ),
    "a constant that is handed back, whose level has ended when its region runs again": Program(
        """
def build(remat, env):
    def f(x):
        given = x.detach()
        def region1(p2):
            return torch.sigmoid(p2), given
        v3, v4 = remat(region1)(x)
        return v3.sin()
    return f
""",
        set(),
        ("jacfwd", "vmap", "grad"),
        library="torch.func",
    ),
    "a constant with a tangent that is handed back first": Program(
        """
def build(remat, env):
    def f(x):
        given = x.detach()
        def g(y):
            v2, v3 = remat(lambda: (y, torch.sigmoid(x)))()
            return v2 * v3
        return functx.jvp(g, (given,), (given.cos(),))[1]
    return f
""",
        set(),
        ("grad",),
    ),
    "an expanded capture, which forward mode copies when it is met": Program(
        """
def build(remat, env):
    def f(x):
        v1 = x.sum().expand(3)
        v6 = remat(lambda: torch.sigmoid(v1))()
        return v6 * 0.5 + v6.sin()
    return f
""",
        set(),
        ("vjp", "jvp"),
    ),
    "a view of an expanded capture, of two regions": Program(
        """
def build(remat, env):
    def f(x):
        v1 = x[None].expand(3, 3)
        v2 = torch.sin(x)
        def region3():
            v7 = remat(lambda: torch.sigmoid(torch.sin(v2)))()
            return torch.sigmoid(v1[1])
        v10 = remat(region3)()
        return v10 * 0.5 + v10.sin()
    return f
""",
        set(),
        ("jvp", "grad"),
    ),
    "a copy of a batch where the forward copied one example": Program(
        """
def build(remat, env):
    def f(x):
        v1 = x.sum() * 0.7
        v1.clamp_(-0.5, 0.5)
        v2 = remat(lambda: torch.sigmoid(x))()
        return v2 * 0.5 + v2.sin()
    return f
""",
        set(),
        ("grad", "vmap"),
        (0,),
        library="torch.func",
    ),
    "a constant that a region is given, and one inside closes over by both names": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v1 = torch.sin(env.constant)
        def region2(p3):
            def region4():
                return torch.sigmoid(v1) * p3.cos()
            v5 = remat(region4)()
            return torch.sigmoid(leaf0 * v5)
        v6 = remat(region2)(v1)
        return v6 * 0.5 + v6.sin()
    return f
""",
        set(),
    ),
    "a constant that a region in two others is given by two names, and nothing reads": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    def f(x):
        v2 = env.constant.sin()
        def region3(p5):
            def region4(p6, p7):
                return torch.sigmoid(leaf0), p6.sin() * p7
            r9, r8 = remat(region4)(p5, v2)
            return torch.sigmoid(leaf0 * r9)
        v10 = remat(remat(region3))(v2)
        return v2 * 0.5 + v10.sin(), torch.outer(x, x)
    return f
""",
        set(),
    ),
    "a transform in a nested region wraps a constant that nothing reads": Program(
        """
def build(remat, env):
    leaf0 = env.leaf((3,))
    constant = env.constant
    def f(x):
        def region2(p3):
            def region9(p10):
                v11 = functx.vmap(torch.tanh)(constant)
                v12 = torch.cat([p3[:0], p3 * 0.5])
                return torch.sigmoid(v12)
            v15 = remat(region9)(p3)
            return torch.sigmoid(v15.sin())
        v18 = remat(region2)(x)
        return v18 * 0.5 + v18.sin()
    return f
""",
        set(),
        ("jvp", "vmap"),
    ),
    "a region inside hands back what was computed without a gradient": Program(
        """
def build(remat, env):
    def f(x):
        with torch.no_grad():
            v = x.tanh()
        def region():
            out, back = remat(lambda: (torch.sigmoid(x), v))()
            return torch.sigmoid(x)
        return remat(region)()
    return f
""",
        set(),
        ("jvp",),
    ),
}
