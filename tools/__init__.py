"""Long searches for mistakes: random programs, operators, models. `make sweep` runs them."""
