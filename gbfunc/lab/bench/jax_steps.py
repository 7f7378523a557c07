r"""The training step of an MLP in JAX, as users would write it, under one `jax.jit`: dense, or by thin products.

With codes $X_r, X_c$ of a layer's units, $A = X_r W_r + \phi$ and $B = X_c W_c$, the weight of a periodic g-net is
$L R^T$ with $L = [v \sin A, v \cos A]$ and $R = [\cos B, \sin B]$: a layer gives $(x R) L^T + b$. XLA's sines are
faster where the units come last in memory: `transposed` makes $L^T$ and $R^T$ instead of $L$ and $R$.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gbfunc.genome import codes_of, init_genome


def jax_step(setup: Any, *, thin: bool, transposed: bool = False) -> Callable[[], Any]:
    """Make a step of AdamW on the CPU, all of it in one compiled function whose state is donated.

    The `Setup` is of an MLP and a plan of whole matrices. The step trains its genome by thin products, or else the
    p-net's own weights.
    """
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    plan, cpu = setup.plan, jax.devices("cpu")[0]

    def array(x: torch.Tensor) -> Any:
        return jax.device_put(x.detach().cpu().numpy().copy(), cpu)

    params: dict[str, Any] = {name: array(p) for name, p in setup.pnet.named_parameters()}
    codes: dict[str, Any] = {}
    genome = init_genome(plan, setup.pnet, 0)
    for ensemble in plan.ensembles if thin else ():
        tables = [array(x) for x in codes_of(ensemble, plan.dtype, torch.device("cpu"))]
        for number, _, first, slot in ensemble.spans:
            name = plan.tensors[number].name
            params[name] = {k: array(x[first]) for k, x in genome.gnets[ensemble.name].items()}
            codes[name] = [x[first % len(x)] for x in tables], slot.scale
    inputs, classes = (array(x) for x in setup.batch)
    layers = [name.removesuffix(".weight") for name in params if name.endswith(".weight")]
    features = 0 if transposed else 1

    def side(codes: Any, weight: Any) -> Any:
        return weight.T @ codes.T if transposed else codes @ weight

    def column(v: Any) -> Any:
        return v[:, None] if transposed else v

    def product(x: Any, weight: Any, name: str) -> Any:
        if name not in codes:
            return x @ weight.T
        (rows, cols), scale = codes[name]
        a, b = side(rows, weight["row_weight"]) + column(weight["phase"]), side(cols, weight["col_weight"])
        v = column(scale * weight["amplitude"])
        left = jnp.concatenate([v * jnp.sin(a), v * jnp.cos(a)], features)
        right = jnp.concatenate([jnp.cos(b), jnp.sin(b)], features)
        return (x @ right.T) @ left if transposed else (x @ right) @ left.T

    def loss_of(params: Any, x: Any, classes: Any) -> Any:
        for i, layer in enumerate(layers):
            x = jax.nn.relu(x) if i else x
            x = product(x, params[f"{layer}.weight"], f"{layer}.weight") + params[f"{layer}.bias"]
        return optax.softmax_cross_entropy_with_integer_labels(x, classes).mean()

    # As torch's AdamW.
    optimizer = optax.adamw(setup.setting.lr, weight_decay=1e-2)

    def update(params: Any, moments: Any, x: Any, classes: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, classes)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    jitted = jax.jit(update, donate_argnums=(0, 1))
    with jax.default_device(cpu):
        moments = optimizer.init(params)

    def step() -> Any:
        nonlocal params, moments
        params, moments, loss = jitted(params, moments, inputs, classes)
        # Calls return before their work is done.
        return jax.block_until_ready((loss, params, moments))[0]

    return step
