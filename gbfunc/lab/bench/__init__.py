"""Measurements of generated and dense p-nets, which `gbfunc bench` runs."""
