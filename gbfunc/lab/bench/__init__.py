"""Measurements of generated against dense p-nets, side by side: what `gbfunc bench` runs."""
