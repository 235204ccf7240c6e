"""``functx demo``: the main job once, on real data, in both frameworks.

Trains a small vision transformer on scanned digits with per-example clipped gradients, each block a
remat region; checks one batch against JAX; measures what remat saves; writes the figures down. It
uses the public API only, so that every part can be copied:

- ``training`` data, network, per-example clipped gradients, and the loop around them;
- ``measurement`` bytes and seconds of each way to get the gradients;
- ``run`` the program, from start to end;
- ``command`` its place on the command line.
"""

from functx._cli.demo.command import add_demo as add_demo
