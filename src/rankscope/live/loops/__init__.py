"""The monitor in loops of others: `transformers` and `lightning`, each imported by those who use it."""
