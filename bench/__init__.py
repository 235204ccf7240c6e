"""Benchmarks: one claim a file, each a table on the screen and a JSON file in ``results/``.

``python -m bench`` runs them all and writes their tables into the pages;
``python -m bench.overhead`` runs one. Bytes are exact and repeat; times are medians of one run, to
be read as ratios in it.
"""
