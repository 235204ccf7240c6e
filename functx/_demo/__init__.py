"""``functx demo``: the main job once, on real data, in both frameworks.

Trains a small vision transformer on scanned digits with per-example clipped gradients, each block a
remat region; checks one batch against JAX; measures what remat saves; writes the figures down.

- ``data`` the digits, split; ``model`` the network, for one example;
- ``training`` per-example clipped gradients and the loop around them;
- ``measure`` bytes and seconds of each way to get the gradients;
- ``report`` tables, picture and JSON; ``run`` the program, from start to end.
"""
