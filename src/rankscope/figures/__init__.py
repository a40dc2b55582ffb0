"""Figures: one description of each, drawn with matplotlib or on a page.

Nothing here imports matplotlib but `rankscope.figures.matplotlib`.
"""
