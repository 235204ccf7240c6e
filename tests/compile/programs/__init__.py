"""Small programs, run in eager and under `functx.jit`: both must give the same."""
