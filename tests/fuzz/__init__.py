"""Random programs, with remat and without: see `test_fuzz`."""
