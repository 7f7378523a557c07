"""Generates text for a batch in which each row has its own genome, with `generate` of transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Draws:
    """A logits processor that draws one token per row, with the row's seed, and sets all other tokens to -inf."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds, self.generators = seeds, list[torch.Generator]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.generators = self.generators or [torch.Generator(scores.device).manual_seed(s) for s in self.seeds]
        rows = zip(scores.softmax(-1), self.generators, strict=True)
        drawn = torch.stack([torch.multinomial(p[None], 1, generator=g)[0] for p, g in rows])
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


def generate_rows(
    seeds: Sequence[int] | None, options: dict[str, Any], net: Any, rows: Sequence[int], *args: Any, **kwargs: Any
) -> Tensor:
    """Return the tokens that `net` generates for the rows with the numbers `rows`; `seeds` has one seed per row."""
    del kwargs["use_cache"]
    if seeds is None:
        return net.generate(*args, **kwargs, **options)
    own, draws = net._get_logits_processor, _Draws([seeds[b] for b in rows])
    # Draw after temperature, top_k and so on. Processors that `generate` takes as an option would run before these.
    vars(net)["_get_logits_processor"] = lambda *args, **kwargs: type(found := own(*args, **kwargs))([*found, draws])
    try:
        return net.generate(*args, **kwargs, **options)
    finally:
        del vars(net)["_get_logits_processor"]
