"""Measure training steps of MLPs in gbfunc and in JAX: `taskset -c 1 python notebooks/results/jax_step.py`.

Steps of gbfunc and of JAX alternate. The script prints a row per network and step: the time of a step after warm-up,
the time of the first step, and the ratio to the step of the dense p-net in torch. `taskset` restricts the process to
one core, because JAX uses all cores that the process may use.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.genome import codes_of
from gbfunc.lab.bench.cases import Setting, Setup, Step, build, mlp_case
from gbfunc.lab.bench.report import time_together

NETWORKS = {(784, 256, 256, 64, 10): 16, (2048, 2048, 2048, 10): 32, (4096, 4096, 4096, 10): 32}
"""Features of the periodic g-nets, by the sizes of an MLP."""


def jax_step(setup: Setup, *, thin: bool, transposed: bool = False) -> Step:
    r"""Build the training step of an MLP in JAX, as one function under `jax.jit`.

    Without `thin`, the step trains the dense MLP. With `thin`, the step trains a genome. With codes $X_r, X_c$ of a
    layer's units, $A = X_r W_r + \phi$ and $B = X_c W_c$, the weight of a periodic g-net is $L R^T$ with $L = [v \sin
    A, v \cos A]$ and $R = [\cos B, \sin B]$. A layer computes $(x R) L^T + b$. With `transposed`, the step computes
    $L^T$ and $R^T$ instead of $L$ and $R$, because XLA's sines are faster if units are the last dimension.
    """
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    import optax  # pyright: ignore[reportMissingImports]

    plan, cpu = setup.plan, jax.devices("cpu")[0]

    def array(x: Tensor) -> Any:
        return jax.device_put(x.detach().cpu().numpy().copy(), cpu)

    params: dict[str, Any] = {name: array(p) for name, p in setup.pnet.named_parameters()}
    codes: dict[str, Any] = {}
    genome = gb.init_genome(plan, setup.pnet, 0)
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

    # optax.adamw with this weight decay makes the update of torch's AdamW.
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
        # Wait for the result, because JAX's calls return before the computation ends.
        return jax.block_until_ready((loss, params, moments))[0]

    return step


def main() -> None:
    torch.set_num_threads(1)
    setting, ours = Setting(torch.device("cpu"), 1), ("dense", "periodic auto", "periodic compiled step")
    forms = {"jax dense": {"thin": False}, "jax thin": {"thin": True}}
    forms["jax thin transposed"] = {"thin": True, "transposed": True}
    for sizes, features in NETWORKS.items():
        case = mlp_case(sizes, 256, (), h=features)
        steps = {name: build(case, name, setting)[0] for name in ours}
        for name, form in forms.items():
            pnet = case.pnet()
            setup = Setup(case, gb.make_plan(pnet, **case.periodic or {}), pnet, case.batch(), setting)
            steps[name] = jax_step(setup, **form)
        times = time_together(steps, setting.device, rounds=7)
        losses = {name: float(step()) for name, step in steps.items()}
        for one, other in (("dense", "jax dense"), ("periodic auto", "jax thin"), ("jax thin", "jax thin transposed")):
            if not math.isclose(losses[one], losses[other], rel_tol=1e-4):
                raise ValueError(f"expected equal losses of {one} and {other}, got {losses[one]} and {losses[other]}")
        for name, timing in times.items():
            row = {"network": case.name, "step": name, "ms": 1e3 * timing.seconds, "first_ms": 1e3 * timing.first}
            print(json.dumps(row | {"ratio_to_dense": timing.seconds / times["dense"].seconds}), flush=True)


if __name__ == "__main__":
    main()
