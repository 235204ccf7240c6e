"""Programs that need Python on the tape to be known of, shrunk: kept for ever."""

from .program import Program

WITH_PYTHON_ON_THE_TAPE = {
    "an old-style Function keeps an input as an attribute of its context": Program(
        """
def build(remat, env):
    def f(x):
        def region1():
            v2 = env.old_style(x, 1.0)
            return torch.sigmoid(v2)
        v4 = remat(region1)()
        v8 = remat(lambda: torch.sigmoid(torch.sin(v4)))()
        return v8 * 0.5 + v8.sin()
    return f
""",
        set(),
    ),
}
