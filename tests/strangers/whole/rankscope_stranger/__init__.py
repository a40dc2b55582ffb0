"""A package of somebody else, which adds to rankscope."""
