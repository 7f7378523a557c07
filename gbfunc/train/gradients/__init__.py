"""Algorithms for a genome's gradient. `loss` has base classes; `proof` checks gradients of p-nets split over ranks."""
