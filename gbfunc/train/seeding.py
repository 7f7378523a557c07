"""Torch's default generators for the time of a step: dropout draws from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DEFAULT_GENERATORS = threading.RLock()
"""Held while a step seeds torch's default generators, which all threads share."""


RANK_MIX = 0xBF58476D1CE4E5B9
"""An odd constant of splitmix64 (Steele et al., 2014): spreads ranks over seeds."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators (dropout draws from them), and put them back after; threads take turns."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with _DEFAULT_GENERATORS:
        states = [g.get_state() for g in generators]
        try:
            for g in generators:
                g.manual_seed(seed)
            yield
        finally:
            for g, s in zip(generators, states, strict=True):
                g.set_state(s)
