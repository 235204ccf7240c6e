"""The rules of the repository itself, its pages and its programs."""
