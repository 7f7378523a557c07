"""`gbfunc demo`: a genome, the p-net trained densely, and a small dense net, side by side."""

from __future__ import annotations

from gbfunc.cli.commands import Demo
from gbfunc.cli.job import make_job
from gbfunc.cli.networks import measure
from gbfunc.cli.output import print_comparison, write_figure, write_run
from gbfunc.cli.train import results_folder, run_fit, train_genome
from gbfunc.tasks.pnets import n_params, narrowed
from gbfunc.tasks.training import dense_trainer


def run(options: Demo) -> None:
    """Train all three, write the results, print one table."""
    job = make_job(options.data, options.genome, options.training, stored=options.output.dtype)
    seed, device, out = options.data.seed, options.training.device, options.output.out
    task, recipe = job.task, job.recipe
    small_pnet = narrowed(task.pnet, job.plan.genome_params)
    with results_folder(out) as folder:
        result, generated, metrics = train_genome(job, options, folder)
        dense = task.build(seed).to(device)
        small = small_pnet.build(seed).to(device)
        runs = {"genome": result.history}
        for label, net in (("dense p-net", dense), ("small dense net", small)):
            trainer = dense_trainer(net, task, recipe)
            runs[label] = run_fit(trainer, job, seed, label).history
            net.eval()
        metrics |= {
            **measure(task, dense, "dense_"),
            **measure(task, small, "small_dense_"),
            "small_dense_params": n_params(small),
            "small_dense_bytes": sum(p.nbytes for p in small.parameters()),
            "small_dense_config": dict(small_pnet.config),
            "pnet_label": task.pnet.label,
            "small_dense_label": small_pnet.label,
        }
        if out is not None:
            from gbfunc.plots import weight_images

            nets = {"generated": generated.state_dict(), "dense": dense.state_dict()}
            image = task.interface.inputs[1:] if len(task.interface.inputs) == 3 else None
            if any(w.ndim in (2, 4) for w in nets["dense"].values()):
                write_figure(folder / "weights.png", weight_images(nets, image))
            write_run(folder, metrics, runs, task)
        print_comparison(metrics, task.metric)
