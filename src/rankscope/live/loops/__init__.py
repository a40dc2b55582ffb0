"""The monitor in loops that others have written: `transformers` and `lightning`, each imported by its users."""
