"""The commands that come with this package: `rankscope reproduce`, `rankscope study`, `rankscope remedies`."""
