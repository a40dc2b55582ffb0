"""Folders `MODEL/checkpoint-N` for `rankscope.shipped`: snapshots along the training of models that rankscope ships."""
