"""Forward passes of a GPT with an adapter for each row, beside its base's: `python notebooks/results/serving.py`."""

import json

import torch

import gbfunc as gb
from gbfunc.lab.bench.cases import adapter_case
from gbfunc.lab.bench.report import time_together
from gbfunc.lab.bench.variants import first_net, plan_of

ROWS, LENGTH = 100, 16


def genome(seed: int) -> gb.Genome:
    """A genome whose deltas are not zero, as they are at first."""
    drawn, generator = gb.init_genome(plan, net, seed), torch.Generator().manual_seed(seed)
    gnets = {
        e: {k: x + 0.1 * torch.randn(x.shape, generator=generator) for k, x in leaves.items()}
        for e, leaves in drawn.gnets.items()
    }
    return drawn._replace(gnets=gnets)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    case = adapter_case(6, 384, ROWS, LENGTH)
    net, (x, _) = first_net(case).eval(), case.batch()
    plan = plan_of(net, case.adapter)
    many, index = gb.materialize_many(plan, [genome(i) for i in range(ROWS)], net), torch.arange(ROWS)
    # Modules in turn, whose weights are all in memory: more would not fit.
    alone = [gb.materialize(plan, genome(i), net, factored=True).eval() for i in range(10)]
    calls = {
        "base, all rows": lambda: net(x),
        "a genome per row, together": lambda: many(index, x),
        "a genome per row, one by one": lambda: [alone[i % 10](x[i : i + 1]) for i in range(ROWS)],
        "one genome merged, one row": lambda: gb.materialize(plan, genome(0), net).eval()(x[:1]),
    }
    torch.testing.assert_close(many(index, x)[3:4], alone[3](x[3:4]), rtol=1e-4, atol=1e-5)
    for name, timing in time_together(calls, torch.device("cpu"), rounds=7).items():
        print(json.dumps({"variant": name, "ms": round(1e3 * timing.seconds, 2)}), flush=True)
