"""``functx demo``: the main use of functx, on real data, in both frameworks.

It trains a small vision transformer on scanned digits with per-example clipped gradients, where
each block is a remat region. It checks one batch against JAX, measures how much memory remat saves,
and writes the figures to files. It uses only the public API, so that every part can be copied:

- ``training``: data, network, per-example clipped gradients, and the training loop;
- ``measurement``: bytes and seconds of each way to compute the gradients;
- ``run``: the program from start to end;
- ``command``: its command-line options.
"""

from functx._cli.demo.command import add_demo as add_demo
