"""A package with one of each mistake."""
