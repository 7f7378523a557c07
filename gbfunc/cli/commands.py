"""The commands and their options. Options are parsed before torch is imported, so this module must not import torch.

A command `name` is a dataclass `Name` in `COMMANDS`, and a function `run_name(command)` in another module.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args

from tyro.conf import FlagCreatePairsOff, Positional, arg

from gbfunc.cli import options
from gbfunc.cli.options import COUNT, POSITIVE, SEED, ScheduleName, shows

FormatName = Literal["onnx", "pt2", "aoti", "iree", "safetensors"]
WeightsName = Literal["genome", "dense"]
Flag = FlagCreatePairsOff[bool]
Threads = Annotated[int | None, shows("INT", "torch's"), COUNT]

SIZES = (600, 1_300, 2_000, 6_000, 20_000)
"""Default budgets of `gbfunc compare`: the file sizes of periodic genomes with these numbers of parameters."""

_FILES = {"demo": "train", "train": "train", "federated": "federated", "plan": "job", "bench": "lab", "compare": "lab"}
"""{command: module in `gbfunc.cli` with its function}. Other commands are in the module `genomes`."""


class Command:
    """Base class of all commands. The fields of a subclass are the options of the command."""

    def load(self) -> Callable[[Any], None]:
        """Check that task and data exist. Then import torch, and return the command's function.

        Before the import, set OpenMP's policy for idle threads to passive. On a busy machine, active threads would
        make the steps of a small p-net five to ten times slower.
        """
        values = options.values_of(self)
        task, data_dir = values.get("task", ""), values.get("data_dir")
        # Check before importing torch, which takes seconds. A user's task may create `data_dir`: do not check it.
        if task not in ("", *options.TASKS) and ":" not in task:
            raise ValueError(f"no task {task!r}: choose one of {', '.join(options.TASKS)}, or package.module:function")
        if data_dir is not None and ":" not in task and not data_dir.exists():
            raise FileNotFoundError(f"--data-dir: no such file or folder: {data_dir}")
        chosen = os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
        if "torch" not in sys.modules and not chosen and not isinstance(self, Bench):
            os.environ["OMP_WAIT_POLICY"] = "passive"
        name = type(self).__name__.lower()
        return getattr(importlib.import_module(f"gbfunc.cli.{_FILES.get(name, 'genomes')}"), f"run_{name}")

    def run(self) -> None:
        self.load()(self)


@dataclass(frozen=True, kw_only=True)
class GenomeCommand(Command, options.ConfigOption, options.DataOptions):
    """Base class of commands that read a genome. By default, the genome's file names the task and the p-net."""

    # Task: digits, mnist, fashion-mnist, cifar10, images, text, chat, trec, texts, control, or your module:function.
    task: Annotated[str, shows("NAME", "the task of the genome")] = ""
    # Genome file of gbfunc train, or a web page or QR code of gbfunc export.
    genome: Annotated[Path, arg(metavar="FILE")]

    def run(self) -> None:
        if self.genome.suffix.lower() not in (".html", ".png", ".jpg", ".jpeg", ".webp", ".svg"):
            return super().run()
        from gbfunc.exporting.qr import shipped_genome

        with TemporaryDirectory(prefix="gbfunc-") as folder:
            path = Path(folder, f"{self.genome.stem}.safetensors")
            path.write_bytes(shipped_genome(self.genome))
            return Command.run(replace(self, genome=path))


@dataclass(frozen=True, kw_only=True)
class Train(Command, options.RunOptions):
    """Train a genome on a task, and measure the generated network."""

    # Train the p-net's weights instead of a genome: the dense baseline.
    dense: bool = False

    output: options.CheckpointOptions = options.CheckpointOptions()
    teacher: options.TeacherOptions = options.TeacherOptions()
    execution: options.ExecutionOptions = options.ExecutionOptions()


@dataclass(frozen=True, kw_only=True)
class Demo(Command, options.RunOptions):
    """Compare a genome with two dense networks on images of digits."""


@dataclass(frozen=True, kw_only=True)
class Eval(GenomeCommand):
    """Show the contents of a genome file, and measure the network that the genome generates."""


@dataclass(frozen=True, kw_only=True)
class Predict(GenomeCommand):
    """Classify pictures, arrays (.npy, .npz) or texts (.txt, one per line)."""

    # Files to classify. Pictures have pixels from 0 to 255; transparent pixels count as white. Numbers in
    # arrays have the range of the task's data (for digits from 0 to 16).
    inputs: Positional[tuple[Path, ...]]
    # Number of classes to print for each input, the likeliest first.
    top: Annotated[int, arg(metavar="INT"), COUNT] = 1


@dataclass(frozen=True, kw_only=True)
class Sample(GenomeCommand):
    """Write text with the language or chat model of a genome file."""

    # Text that the model continues or answers.
    prompt: Annotated[str, shows("TEXT", "a new line")] = "\n"
    # Number of tokens to write. A token is a character, or a piece of a word in the task's vocabulary.
    tokens: int = 300
    # Temperature of sampling. Below 1, likely tokens become likelier; 0 always takes the likeliest token.
    temperature: float = 0.8
    # Seed of sampling.
    seed: Annotated[int, SEED] = 0


@dataclass(frozen=True, kw_only=True)
class Export(GenomeCommand):
    """Export a network for other programs, as a web page, or as a QR code."""

    # File to write or replace. A web page (.html) of a text task needs --data-dir, to read the characters.
    out: Annotated[Path, arg(metavar="FILE")]
    # Write a QR code, which opens the exported page at the address PAGE with a genome of at most about 2,200 bytes.
    qr: Annotated[str | None, shows("PAGE")] = None
    # Format: ONNX, torch.export, AOTInductor, IREE or dense weights.
    to: Annotated[FormatName | None, shows(FormatName, "by the suffix: .onnx, .pt2, .vmfb, .safetensors")] = None
    # genome: the exported program generates the weights when it runs. dense: the file contains the weights.
    weights: Annotated[WeightsName | None, shows(WeightsName, "genome; dense for safetensors, and adapters")] = None


@dataclass(frozen=True, kw_only=True)
class Plan(Command, options.ConfigOption):
    """Show the size of a genome, and the tensors that the genome generates."""

    data: options.PNetOptions = options.PNetOptions()
    genome: options.GenomeOptions = options.GenomeOptions()
    output: options.StoredOptions = options.StoredOptions()

    # Estimate memory, bytes sent and seconds per step for every mesh of this number of ranks (processes).
    ranks: Annotated[int | None, shows("INT"), COUNT] = None
    # Memory of a rank, such as 16GB or 80GiB. Needs --ranks.
    memory: Annotated[str | None, shows("SIZE", "the memory in --device")] = None
    # Bandwidth between ranks, such as 100Gbit or 12.5GB. Needs --ranks.
    link: Annotated[str | None, shows("RATE", "the bandwidth in --device")] = None
    # File with the speed of a rank: the JSON that gbfunc bench --calibrate prints. Needs --ranks.
    device: Annotated[Path | None, shows("FILE", "50 Gflop/s, 10 GB/s, 10Gbit, 16GB")] = None
    # Number of examples per step, summed over all ranks. Needs --ranks.
    batch_size: Annotated[int | None, shows("INT", recipe="batch_size"), COUNT] = None
    # Number of microbatches per step. Needs --ranks.
    microbatches: Annotated[int | None, shows("INT", "the fastest"), COUNT] = None
    # Function that splits layers of the p-net over the axis tensor of a mesh, as for gbfunc train. Needs --ranks.
    parallel: Annotated[str | None, shows("MODULE:FUNCTION", "the p-net's styles")] = None


@dataclass(frozen=True)
class Compare(Command, options.DataOptions):
    """Compare genomes with other small networks whose files have as many bytes."""

    # Numbers of parameters of periodic genomes. The bytes of each genome's file are a budget for all methods.
    sizes: Annotated[tuple[int, ...] | None, shows("INT ...", " ".join(map(str, SIZES)))] = None
    # Budgets in bytes, instead of --sizes. For a pretrained p-net, the default is 1500 to 186000.
    bytes: Annotated[tuple[int, ...] | None, shows("INT ...")] = None
    # Methods: periodic, periodic_int7, periodic_auto, smaller_dense, gnet, stochastic, low_rank_genome, xox.
    # With --pretrained: genome, genome_int7, genome_auto, linear_probe, bitfit, lora, vera, ia3, full_fine_tuning.
    methods: Annotated[tuple[str, ...] | None, shows("NAME ...", "all")] = None
    # Number of seeds (0, 1, ...) per method and budget.
    seeds: Annotated[int, COUNT] = 3
    # Number of passes over the training examples, for every method. Settings are first compared after fewer passes.
    epochs: Annotated[int | None, shows("INT", recipe="epochs"), COUNT] = None
    # dtype of the numbers in files, except for methods that set another dtype (such as periodic_int7).
    dtype: Literal["float32", "float16"] = "float32"
    # Train every network under autocast to this dtype.
    amp: Annotated[Literal["bfloat16"] | None, shows("bfloat16")] = None
    # Test only that everything runs: one epoch, one seed, and two settings per method to choose from.
    quick: Flag = False
    # Number of CPU threads.
    threads: Threads = None
    # Folder for compare.json, the figure and the networks. Trainings with results in compare.json do not run again.
    out: Path = Path("compare")


@dataclass(frozen=True)
class Bench(Command):
    """Measure time and memory of training steps, with genomes and with dense p-nets."""

    # Run fewer and smaller cases, which take less than a minute.
    quick: Flag = False
    # Cases: demo, small_mlp, mlp_2048, mlp_4096, generation, gpt, resnet18, remat.
    cases: Annotated[tuple[str, ...] | None, shows("NAME ...", "all")] = None
    # Number of runs per case. The table shows medians over runs, and the range of times relative to the dense p-net.
    repeat: Annotated[int, arg(metavar="N"), COUNT] = 1
    # Device: cpu, or cuda, which also measures steps as CUDA graphs.
    device: str = "cpu"
    # Number of CPU threads.
    threads: Threads = None
    # Folder for bench.json, which is replaced.
    out: Path = Path("bench")
    # Measure the speed of a matrix product, a copy and an all-reduce, and print JSON for gbfunc plan --device FILE.
    calibrate: Flag = False


@dataclass(frozen=True, kw_only=True)
class Federated(Command, options.ConfigOption):
    """Simulate federated learning of a genome with Flower."""

    data: options.PNetOptions = options.PNetOptions()
    genome: options.GenomeOptions = options.GenomeOptions()

    # Number of clients.
    clients: Annotated[int, COUNT] = 100
    # Number of clients that train in a round, drawn at random.
    sample: Annotated[int, COUNT] = 10
    # Dirichlet concentration of the clients' fractions of each class. 0.1: few classes per client; inf: equal shares.
    alpha: float = float("inf")
    # Total number of rounds.
    rounds: Annotated[int, COUNT] = 200
    # Number of training steps of a client in a round.
    local_steps: Annotated[int, COUNT] = 20
    # Number of examples per training step of a client.
    batch_size: Annotated[int, COUNT] = 32
    # Peak learning rate of the clients.
    lr: Annotated[float | None, shows("FLOAT", "0.02; with convolutions 0.01; with --dense 0.1"), POSITIVE] = None
    # Schedule of the learning rate over the rounds.
    schedule: Annotated[ScheduleName, arg(metavar="|".join(get_args(ScheduleName)))] = "cosine"
    # Optimizer of the clients, a class of torch.optim. Its state is reset in each round.
    optimizer: Annotated[str | None, shows("NAME", "Adam; with --dense SGD")] = None
    # Class of flwr.serverapp.strategy, by which the server combines updates: FedAvg, FedAvgM, FedAdam, FedProx, ... If
    # clients may be hostile, choose FedMedian, FedTrimmedAvg, Krum, MultiKrum or Bulyan.
    strategy: Annotated[str | None, shows("NAME", "FedAvgM of momentum 0.5; with --dense FedAvg")] = None
    # Options of the strategy, such as '{"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99}' for FedAdam.
    strategy_config: Annotated[str, shows("JSON")] = "{}"
    # dtype of clients' updates; topK: the K largest numbers. The rounding error is added to the client's next update.
    up: Annotated[str, arg(metavar="float32|float16|int8|...|int2|topK")] = "int4"
    # dtype of the genome that the server sends.
    down: Annotated[str, arg(metavar="float32|float16|int8|...|int2")] = "int8"
    # Train the p-net's weights instead of a genome: the dense baseline.
    dense: Flag = False
    # Rounds between two validations.
    measure_every: Annotated[int, arg(metavar="ROUNDS"), COUNT] = 10
    # Folder for metrics.json, history.csv, genome.safetensors, and server.safetensors (the server's state).
    out: Annotated[Path | None, shows("DIR", "no files")] = None
    # Continue from OUT/server.safetensors. The results equal those of a simulation without interruption.
    resume: Flag = False


_ALL = (Demo, Plan, Train, Eval, Predict, Sample, Export, Compare, Bench, Federated)
COMMANDS: dict[str, Any] = {command.__name__.lower(): command for command in _ALL}
