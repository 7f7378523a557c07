"""Many genomes at once: the gradient of one, under `vmap`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from gbfunc.genome import Noise
from gbfunc.plan import Plan
from gbfunc.train.gradients.loss import GenomeLoss, Given, noise_of, seeded
from gbfunc.trees import tree_leaves, tree_map
from gbfunc.types import Params

_NUMBERS = (Tensor, bool, int, float, complex)


class Batched:
    """Losses and gradients of n genomes, stacked as their leaves are.

    All have the `same` batch, or each its part of the first dimension.
    """

    def __init__(self, plan: Plan, loss: GenomeLoss, scale: float, same: bool) -> None:
        self._plan, self._loss, self._scale, self._same = plan, loss, scale, same

    def __call__(
        self, frozen: Params, trained: Params, buffers: Params, batch: Any, seeds: list[int]
    ) -> tuple[Tensor, Any, Params, Params]:
        """Losses [n], aux, gradients by name and buffers; `frozen` are the leaves that are not trained."""
        like = next(iter(trained.values()))
        drawn = [noise_of(self._plan, seed, like) for seed in seeds]
        noise = None if drawn[0] is None else tree_map(lambda *tensors: torch.stack(tensors), *drawn)
        generator = self._loss.generator
        generator.prepare(frozen | trained)

        # Beside tensors an aux may have None and texts, which torch.func does not return.
        structure: list[Any] = []

        def one(frozen: Params, trained: Params, noise: Noise | None, buffers: Params, small: Any) -> Any:
            def loss_of(trained: Params, buffers: Params) -> Any:
                weights = generator(frozen | trained, noise)
                loss, aux = self._loss.on(weights, buffers, batch if self._same else small)
                structure.append(aux)
                numbers = [torch.as_tensor(x) for _, x in tree_leaves(aux) if isinstance(x, _NUMBERS)]
                return loss * self._scale, (loss, numbers, buffers)

            return grad(loss_of, has_aux=True)(trained, buffers)

        rows = None if self._same else tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        dims = (0, 0, None if noise is None else 0, 0, rows)
        with seeded(seeds[0], like.device), torch.enable_grad():
            # Not a gradient around vmap: inside of it no tensor would be seen to require one.
            many = vmap(one, dims, randomness="different")
            gradients, (loss_n, aux, buffers) = many(frozen, trained, noise, buffers, None if self._same else batch)
            if loss_n.requires_grad:
                self._loss.gradients(loss_n.sum(), [])
        numbers = iter(aux)
        aux = tree_map(lambda x: next(numbers) if isinstance(x, _NUMBERS) else x, structure[-1])
        aux = Given(frozen | trained, None, buffers, None, 1, True).detached(aux)
        found = loss_n, {k: g / self._scale for k, g in gradients.items()}, buffers
        # The graph of what the loss reads of other modules.
        loss_n, gradients, buffers = tree_map(torch.detach, found)
        return loss_n, aux, gradients, buffers
