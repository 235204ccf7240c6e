"""Random programs with `remat` regions, compared with the same programs without: see `judge`."""
