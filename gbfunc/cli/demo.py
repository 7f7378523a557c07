"""`gbfunc demo`: a genome, the same p-net trained densely, and a small dense net of the genome's size."""

from __future__ import annotations

from dataclasses import dataclass

from gbfunc.cli.options import TrainingOptions


@dataclass(frozen=True)
class Demo(TrainingOptions):
    """Train a genome on real digits, and beside it the same p-net and a small net densely; compare them."""

    def run(self) -> None:
        """Train all three, write the results, print one table."""
        from gbfunc.cli.fit import dense_trainer, fit, total_steps
        from gbfunc.cli.job import make_job, measure, results_folder
        from gbfunc.cli.output import print_comparison, write_figure, write_run
        from gbfunc.cli.train import train_genome
        from gbfunc.tasks.pnets import n_params, narrowed

        job = make_job(self)
        task, recipe = job.task, job.recipe
        small_pnet = narrowed(task.pnet, job.plan.genome_params)
        with results_folder(self.out) as folder:
            result, generated, metrics = train_genome(job, self, folder)
            dense = task.build(self.seed).to(self.device)
            small = small_pnet.build(self.seed).to(self.device)
            runs = {"genome": result.history}
            for label, net in (("dense p-net", dense), ("small dense net", small)):
                trainer = dense_trainer(net, task, recipe, total_steps(task, recipe))
                runs[label] = fit(trainer, task, recipe, label=label, seed=self.seed).history
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
            if self.out is not None:
                from gbfunc.plots import weight_images

                nets = {"generated": generated.state_dict(), "dense": dense.state_dict()}
                image = task.interface.inputs[1:] if len(task.interface.inputs) == 3 else None
                # A net of convolutions alone has no matrices to show.
                if any(w.ndim == 2 for w in nets["dense"].values()):
                    write_figure(folder / "weights.png", weight_images(nets, image))
                write_run(folder, metrics, runs, task.metric)
            print_comparison(metrics, task.metric)
