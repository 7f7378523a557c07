"""The commands and their options. They are parsed before torch is imported: no module here may import it.

A command `name` is a dataclass `Name` here, in `COMMANDS`, and a function `run_name` of a module, which takes it.
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

from gbfunc.cli.options import (
    COUNT,
    POSITIVE,
    SEED,
    BirthOptions,
    CheckpointOptions,
    ConfigOption,
    DataOptions,
    ExecutionOptions,
    GenomeOptions,
    MaybeCount,
    PNetOptions,
    RecipeCount,
    RunOptions,
    ScheduleName,
    StoredOptions,
    TeacherOptions,
    shows,
)

FormatName = Literal["onnx", "pt2", "aoti", "iree", "safetensors"]
Flag = FlagCreatePairsOff[bool]
Threads = Annotated[int | None, shows("INT", "torch's"), COUNT]

SIZES = (600, 1_300, 2_000, 6_000, 20_000)
"""Budgets of `gbfunc compare`, in parameters of a periodic genome."""

_MODULES = {"demo": "train", "plan": "job", "eval": "genomes", "sample": "genomes", "export": "genomes"}
"""Modules with the functions of commands, where they are not named after the command."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHIPS = (".html", ".png", ".jpg", ".jpeg", ".webp", ".svg")
"""Suffixes of pages and pictures, which may have a genome in them."""


class Command:
    """Options of a command."""

    def load(self) -> Callable[[Any], None]:
        """Import the command's function, and torch.

        OpenMP reads how idle threads wait when torch is loaded. Spinning threads make the steps of a small p-net five
        to ten times as slow on a machine with other work.
        """
        waits = not isinstance(self, Bench) and not any(name in os.environ for name in _WAITING)
        if "torch" not in sys.modules and waits:
            os.environ["OMP_WAIT_POLICY"] = "passive"
        name = type(self).__name__.lower()
        return getattr(importlib.import_module(f"gbfunc.cli.{_MODULES.get(name, name)}"), f"run_{name}")

    def run(self) -> None:
        self.load()(self)


@dataclass(frozen=True, kw_only=True)
class GenomeCommand(Command, ConfigOption, DataOptions):
    """Options of a command that takes a genome, whose file says what of task and p-net is not said here."""

    # What it learned: digits, mnist, fashion-mnist, cifar10, text, trec, texts, control, or module:function.
    task: Annotated[str, shows("NAME", "the genome's")] = ""
    # The genome, as `gbfunc train --out` writes it; or `gbfunc export`: a page, or a picture of a QR code.
    genome: Annotated[Path, arg(metavar="FILE")]

    def run(self) -> None:
        if self.genome.suffix.lower() not in _SHIPS:
            return super().run()
        from gbfunc.exporting.qr import shipped_genome

        with TemporaryDirectory(prefix="gbfunc-") as folder:
            path = Path(folder, f"{self.genome.stem}.safetensors")
            path.write_bytes(shipped_genome(self.genome))
            return Command.run(replace(self, genome=path))


@dataclass(frozen=True, kw_only=True)
class Train(Command, RunOptions):
    """Train a genome on a task and measure it; under torchrun, on many ranks."""

    # Train the p-net's weights themselves, without a genome: the dense baseline. The file then holds them all.
    dense: bool = False
    output: CheckpointOptions = CheckpointOptions()
    teacher: TeacherOptions = TeacherOptions()
    birth: BirthOptions = BirthOptions()
    execution: ExecutionOptions = ExecutionOptions()


@dataclass(frozen=True, kw_only=True)
class Demo(Command, RunOptions):
    """Train a genome on real digits beside two dense nets, and compare them."""


@dataclass(frozen=True, kw_only=True)
class Eval(GenomeCommand):
    """Show where a genome file's bytes go; rebuild its p-net and measure it."""


@dataclass(frozen=True, kw_only=True)
class Predict(GenomeCommand):
    """Classify images (.npy and .npz, too) and texts (.txt, an input each line)."""

    # The files. Pixels count from 0 to 255 (of 16 bits scaled so), or as the task's data has them, bright where its
    # images are; transparent ones are white.
    inputs: Positional[tuple[Path, ...]]
    # Classes to tell of each input, the likeliest first.
    top: Annotated[int, arg(metavar="INT"), COUNT] = 1


@dataclass(frozen=True, kw_only=True)
class Sample(GenomeCommand):
    """Write text with the language model of a genome file."""

    # What it learned: text, or package.module:function.
    task: Annotated[str, arg(metavar="NAME")] = "text"
    # What it goes on from.
    prompt: Annotated[str, shows("TEXT", "a new line")] = "\n"
    # How much to write: characters, or tokens of the task's vocabulary.
    tokens: int = 300
    # Below 1 it writes more carefully, above 1 more freely; 0 takes the likeliest token each time.
    temperature: float = 0.8
    # Seed of what is drawn.
    seed: Annotated[int, SEED] = 0


@dataclass(frozen=True, kw_only=True)
class Export(GenomeCommand):
    """Write a genome's network for programs, as a web page, or as a QR code."""

    # Where to; a file that is there is replaced. A page of a text task takes its characters from --data-dir.
    out: Annotated[Path, arg(metavar="FILE")]
    # Address of a page of --out net.html: draw the QR code that opens it with this genome, up to some 2,200 bytes.
    qr: Annotated[str | None, shows("PAGE")] = None
    # The format: suffixes .onnx, .pt2 (torch.export), .vmfb (IREE) and .safetensors tell it; aoti is AOTInductor.
    to: Annotated[FormatName | None, shows(FormatName, "by the suffix of --out")] = None
    # genome: the file holds the genome, and generates the weights where it runs; dense: it holds the weights.
    weights: Annotated[
        Literal["genome", "dense"] | None, shows("genome|dense", "genome; dense for safetensors, and adapters")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Plan(Command, ConfigOption):
    """Show what a genome would hold, tensor by tensor; and layouts of ranks."""

    data: PNetOptions = PNetOptions()
    genome: GenomeOptions = GenomeOptions()
    output: StoredOptions = StoredOptions()

    # Plan its training on so many ranks too: memory, bytes and seconds of every layout, the fastest first.
    ranks: MaybeCount = None
    # Memory of a rank, with --ranks: 16GB, 80GiB.
    memory: Annotated[str | None, shows("SIZE", "the device's")] = None
    # What a rank can send per second, with --ranks: 100Gbit, 12.5GB.
    link: Annotated[str | None, shows("RATE", "the device's")] = None
    # What a rank is like, with --ranks: the JSON that `gbfunc bench --calibrate` prints.
    device: Annotated[Path | None, shows("FILE", "50 Gflop/s, 10 GB/s, 10Gbit, 16GB")] = None
    # Examples per step of all ranks together, with --ranks.
    batch_size: RecipeCount = None
    # Microbatches per step, with --ranks.
    microbatches: Annotated[int | None, shows("INT", "the fastest"), COUNT] = None
    # How the layers of a p-net of yours are split along a tensor axis, with --ranks, as for gbfunc train.
    parallel: Annotated[str | None, shows("MODULE:FUNCTION", "those of the p-net")] = None


@dataclass(frozen=True)
class Compare(Command, DataOptions):
    """Compare genomes and other small networks within the same bytes."""

    # Budgets: the bytes of a periodic genome's file of so many parameters, its header included.
    sizes: Annotated[tuple[int, ...] | None, shows("INT ...", " ".join(map(str, SIZES)))] = None
    # Budgets in bytes instead of --sizes; 1500 to 186000 by default for a pretrained p-net.
    bytes: Annotated[tuple[int, ...] | None, shows("INT ...")] = None
    # Only these: periodic, periodic_int7, periodic_auto (codes with steps that training finds), smaller_dense,
    # random_subspace, pruned, int8 and int4 (smaller nets; all three trained for their rounding and entropy-coded), the
    # other types of g-net: gnet, stochastic, low_rank_genome, xox. With --pretrained: genome, genome_int7, genome_auto,
    # linear_probe, bitfit, lora, vera, fourierft, tinylora, unilora, ia3, each in float numbers also as NAME_float16,
    # and full_fine_tuning, whatever its size.
    methods: Annotated[tuple[str, ...] | None, shows("NAME ...", "all")] = None
    # Trainings of each method at each size, seeded 0, 1, ...
    seeds: Annotated[int, COUNT] = 3
    # Passes over the training examples, for all alike; candidates take a ninth, a third and all of them.
    epochs: RecipeCount = None
    # dtype that every method stores which has no other format; training is in float32.
    dtype: Literal["float32", "float16"] = "float32"
    # Run every network in this dtype (autocast) in training: faster where the machine has it.
    amp: Annotated[Literal["bfloat16"] | None, shows("bfloat16")] = None
    # One epoch, one seed, two candidates: shows that all of it runs, and nothing else.
    quick: Flag = False
    # Threads of the CPU.
    threads: Threads = None
    # Folder for compare.json, the figure and the data of every network; rows that it holds are not run again.
    out: Path = Path("compare")


@dataclass(frozen=True)
class Bench(Command):
    """Measure training steps and generation side by side: time and memory."""

    # Fewer and smaller cases: under a minute.
    quick: Flag = False
    # Only these: demo, small_mlp, population, mlp_2048, mlp_4096, jax, generation, gpt, resnet18, remat, adapter.
    cases: Annotated[tuple[str, ...] | None, shows("NAME ...", "all")] = None
    # Runs of all these cases, one after the other: ratios are then the median over the runs, with their range.
    repeat: Annotated[int, arg(metavar="N"), COUNT] = 1
    # Where to run: cpu, or cuda for larger sizes in bfloat16.
    device: str = "cpu"
    # Threads of the CPU.
    threads: Threads = None
    # Folder for bench.json, which is replaced.
    out: Path = Path("bench")
    # Measure instead what `gbfunc plan --device FILE` takes, and print it as JSON: a matrix product, a copy, and an
    # all-reduce, between the ranks of torchrun or two processes on the loopback.
    calibrate: Flag = False


@dataclass(frozen=True, kw_only=True)
class Federated(Command, ConfigOption):
    """Simulate federated learning of a genome on Flower, clients and server."""

    data: PNetOptions = PNetOptions()
    genome: GenomeOptions = GenomeOptions()

    # How many there are.
    clients: Annotated[int, COUNT] = 100
    # Clients that train in a round, chosen by chance.
    sample: Annotated[int, COUNT] = 10
    # How alike their examples are: concentration of the Dirichlet distribution by which each class is spread over
    # them, 0.1 to 1; inf for parts alike.
    alpha: float = float("inf")
    # Rounds in all.
    rounds: Annotated[int, COUNT] = 200
    # Training steps of a client in a round.
    local_steps: Annotated[int, COUNT] = 20
    # Examples of a step.
    batch_size: Annotated[int, COUNT] = 32
    # Highest learning rate of clients.
    lr: Annotated[float | None, shows("FLOAT", "0.02; with convolutions 0.01; with --dense 0.1"), POSITIVE] = None
    # Course of that rate over the rounds: averages of genomes stand still where it does not fall.
    schedule: Annotated[ScheduleName, arg(metavar="|".join(get_args(ScheduleName)))] = "cosine"
    # Class of torch.optim of the clients, which begins afresh in each round.
    optimizer: Annotated[str | None, shows("NAME", "Adam; with --dense SGD")] = None
    # Strategy of the server, a class of flwr.serverapp.strategy: FedAvg, FedAvgM, FedAdam, FedProx, FedMedian, ...
    strategy: Annotated[str | None, shows("NAME", "FedAvgM of momentum 0.5; with --dense FedAvg")] = None
    # Options of the class, for FedAdam '{"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99}'.
    strategy_config: Annotated[str, shows("JSON")] = "{}"
    # dtype in which clients send changes: intN codes, or the K largest numbers. Later changes make up for losses.
    up: Annotated[str, arg(metavar="float32|float16|int8|...|int2|topK")] = "int4"
    # dtype in which the server sends the genome; its own stays in float32.
    down: Annotated[str, arg(metavar="float32|float16|int8|...|int2")] = "int8"
    # Send the p-net's weights themselves, without a genome: the dense baseline.
    dense: Flag = False
    # Rounds from one validation to the next.
    measure_every: Annotated[int, arg(metavar="ROUNDS"), COUNT] = 10
    # Folder for metrics.json, history.csv, genome.safetensors, and server.safetensors, the server after each round.
    out: Annotated[Path | None, shows("DIR", "nothing is kept")] = None
    # Go on from OUT/server.safetensors, with the strategy's state; clients begin with no error to add.
    resume: Flag = False


_ALL = (Demo, Plan, Train, Eval, Predict, Sample, Export, Compare, Bench, Federated)
COMMANDS: dict[str, Any] = {command.__name__.lower(): command for command in _ALL}
