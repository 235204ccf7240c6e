"""What `make gpu` measures: each variant in a process of its own, under a limit of time.

``python -m bench --device cuda`` runs them all, ``python -m bench --device cuda gpt`` one; each
writes ``bench/results/cuda/<name>.json`` after every variant. With ``--toy`` they run small, on any
device, and write nothing: that is how the tests keep them running.
"""
