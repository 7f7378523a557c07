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
        from gbfunc.cli.job import make_job, results_folder
        from gbfunc.cli.output import print_comparison, write_figure, write_run
        from gbfunc.cli.train import train_genome
        from gbfunc.tasks import accuracy, mlp

        job = make_job(self)
        task, recipe = job.task, job.recipe
        with results_folder(self.out) as folder:
            result, generated, metrics = train_genome(job, self, folder)
            dense = task.build(self.seed).to(task.train.x.device)
            small_sizes = (task.sizes[0], small_width(job.plan.genome_params, task.sizes), task.sizes[-1])
            small = mlp(small_sizes, self.seed).to(task.train.x.device)
            runs = {"genome": result.history}
            for label, net in (("dense p-net", dense), ("small dense net", small)):
                trainer = dense_trainer(net, recipe, total_steps(task, recipe))
                runs[label] = fit(trainer, task, recipe, label=label, seed=self.seed).history
            metrics |= {
                "dense_test_accuracy": accuracy(dense, task.test),
                "small_dense_test_accuracy": accuracy(small, task.test),
                "small_dense_params": sum(p.numel() for p in small.parameters()),
                "small_dense_bytes": sum(p.nbytes for p in small.parameters()),
                "small_dense_sizes": list(small_sizes),
            }
            if self.out is not None:
                from gbfunc.plots import weight_images

                nets = {"generated": generated.state_dict(), "dense": dense.state_dict()}
                write_figure(folder / "weights.png", weight_images(nets, task.image_shape))
                write_run(folder, metrics, runs)
            print_comparison(metrics)


def small_width(genome_params: int, sizes: tuple[int, ...]) -> int:
    """Hidden units of the smallest one-layer net with at least as many parameters as the genome."""
    n_in, n_out = sizes[0], sizes[-1]
    return max(1, -(-(genome_params - n_out) // (n_in + n_out + 1)))
