"""The genome as an `nn.Module`, for training loops, `Trainer`, `Accelerate`, DDP, `torch.compile` and similar tools.

    parameters (the genome's leaves) --generate--> weights --the p-net's forward--> outputs

The module is a copy of the p-net, whose class is made at run time and has the name of the p-net's class. Generated
weights are properties of their layers. The module's parameters are the genome's leaves and direct parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generation import Generator, make_generator
from gbfunc.genome import Noise, check_genome, check_plan, init_genome, sample_noise, unflat_genome
from gbfunc.layers.forms import Weight, generated_attribute, unseen_by_checkpoints
from gbfunc.layers.install import blank_layer, install
from gbfunc.plan import Plan
from gbfunc.pnet.describe import copy_with, keep_statistics, named_tensors, without_sparse
from gbfunc.storage.hub import load_pretrained, push_pretrained, save_pretrained
from gbfunc.trees import DIRECT, GNET
from gbfunc.types import Genome, GenomeLike, Lazy, Params

Self = TypeVar("Self", bound="GenomeModule")
_WATCHED = 100  # after this number of forwards in training mode, the genome should have changed
_UNCHANGED = (
    f"after {_WATCHED} forwards with gradients the genome has not changed: make the optimizer after GenomeModule, from "
    "its parameters (torch.optim.Adam(module.parameters())); if you accumulate as many gradients, ignore this warning"
)


class _Frame(NamedTuple):
    """The constants of a `GenomeModule`. `sources` maps all names of generated tensors to names in the plan."""

    plan: Plan
    base: BaseTensors | None
    lazy: Lazy
    sources: dict[str, str]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frame:
        # Copies share the base, because the base never changes.
        return self


class GenomeModule(nn.Module):
    """The p-net as a module whose parameters are the genome: `GenomeModule(plan, pnet, genome=None, *, seed, lazy)`.

    `net = GenomeModule(plan, pnet)` is a copy of the p-net, with the p-net's class name, modules, attributes, methods,
    hooks and buffers. `net` is an instance of both the p-net's class and `GenomeModule`. Make the optimizer from
    `net.parameters()`, because the p-net's own parameters are not trained. Only the genome is a parameter, so optimizer
    states, DDP's all-reduce and state dicts have the genome's size. A forward generates all weights once, from the
    current genome. Outside of a forward, reading `net.fc.weight` generates the weight: in-place changes are lost.

    The g-nets' parameters are named `gnets:<ensemble>:<leaf>`. Direct parameters and buffers have the p-net's names
    and, without a `genome`, the p-net's values. Parameters require grad as in the p-net. `load_state_dict` raises
    RuntimeError for the state dict of another plan, except from safetensors files, which lack the plan's hash. In
    training mode, stochastic g-nets draw from torch's default generator. In evaluation mode, weights are mean weights.

    The tensors of a base are neither parameters nor buffers of the module, nor in state dicts. They are moved to the
    genome's device. The base's batch norms stay in evaluation mode. Copies of the module share the base's memory.

    `save_pretrained`, `from_pretrained` and `push_to_hub` work on the genome and override the p-net's methods.

    Args:
        plan: a plan of `make_plan`.
        pnet: the plan's p-net or base, which is not changed.
        genome: a `Genome` or `TrainState`, which is copied; by default, a new random genome.
        seed: seed of a new genome.
        lazy: whether layers multiply by factors of weights (`StepOptions`). `torch.compile` of torch 2.5 needs False.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if plan, p-net and genome do not fit together, if the p-net is not the plan's base, if the p-net is
            wrapped (DDP, FSDP, compiled), or if the p-net has an attribute `plan` or `to_genome`.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> net = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(features=2)), pnet)
    >>> type(net).__name__, [name for name, _ in net.named_parameters()][0], tuple(net(torch.ones(3, 30)).shape)
    ('Linear', 'bias', (3, 20))
    """

    _frame: _Frame
    _generator: Generator
    _drawn: Noise | None
    _stated: type[GenomeModule]
    _pnet_class: type[nn.Module]

    def __new__(cls: type[Self], plan: Any = None, pnet: Any = None, genome: Any = None, **options: Any) -> Self:
        """Copy the p-net, and give the copy a class that inherits from this class and the p-net's class."""
        if pnet is None:
            return super().__new__(cls)  # pyright: ignore[reportArgumentType]
        check_plan(plan, pnet)
        if used := sorted(name for name in ("plan", "to_genome") if hasattr(pnet, name)):
            words = "names that GenomeModule uses: rename them, or train with gb.make_train_step"
            raise ValueError(f"the p-net has attributes {used}, {words}")
        kept = {t.name for t in plan.direct} | {b.name for b in plan.buffers}
        net = copy_with(pnet, lambda name, x: x.clone() if name in kept else torch.empty_like(x, device="meta"))
        net.__class__ = _module_class(cls, type(net))
        return net  # pyright: ignore[reportReturnType]

    def __init__(
        self, plan: Plan, pnet: nn.Module, genome: GenomeLike | None = None, *, seed: int = 0, lazy: Lazy = "auto"
    ) -> None:
        if lazy not in (True, False, "auto"):
            raise ValueError(f"lazy must be one of {(True, False, 'auto')}, got {lazy!r}")
        initial: Any = init_genome(plan, pnet, seed) if genome is None else genome
        check_genome(plan, initial)
        leaves = {_leaf(e, k): x.detach().clone() for e, leaves in initial.gnets.items() for k, x in leaves.items()}
        for t in plan.direct:
            direct = nn.Parameter(initial.direct[t.name].detach().clone(), self.get_parameter(t.name).requires_grad)
            for name in (t.name, *t.aliases):
                path, _, key = name.rpartition(".")
                self.get_submodule(path).register_parameter(key, direct)
        for name, x in initial.buffers.items():
            path, _, key = name.rpartition(".")
            setattr(self.get_submodule(path), key, x.detach().clone())
        base, kept, first = plan.base_tensors(pnet), {*initial.direct, *initial.buffers}, dict[int, str]()
        sources = {name: first.setdefault(id(x), name) for name, x in named_tensors(self, ties=True)}
        sources = {name: source for name, source in sources.items() if source not in kept}
        sources |= {t.name: t.name for t in plan.tensors if t.kind == "beside"}
        self._frame = _Frame(plan, base, lazy, sources)
        without_sparse(self, {name for t in plan.generated for name in (t.name, *t.aliases)})
        # `install` replaces the class of a module by a subclass with generated weights. So that `install` makes a
        # subclass of the p-net's class, give this module that class first. `_module_class` adds GenomeModule's class.
        this: Any = self
        read, cls = self._read, type(self)
        this.__class__ = cls._pnet_class
        forms = make_generator(plan, pnet=self, lazy=lazy, base=base).forms
        install(self, {name: forms.get(name) for name in sources}, read)
        this.__class__ = _module_class(cls._stated, type(self))
        for name, x in leaves.items():
            self.register_parameter(name, nn.Parameter(x))
        self._build()
        self._freeze_statistics()

    def to_genome(self) -> Genome:
        """Copy the current genome, without an autograd graph, for `gb.save`, `gb.generate` and `gb.materialize`.

        For a module under `fully_shard` (FSDP2), all ranks must call this method, because shards are gathered.

        Raises:
            ValueError: if a generated layer was replaced or parameters were added, which the plan does not contain.
        """
        plan = self.plan
        known = {_leaf(e.name, k) for e in plan.ensembles for k in e.leaves}
        known |= {name for t in plan.direct for name in (t.name, *t.aliases)}
        if others := [name for name, _ in self.named_parameters() if name not in known]:
            raise ValueError(f"the module has parameters that the plan does not know: {others[:8]}; make a new plan")
        buffers = {b.name: _copied(self.get_buffer(b.name)) for b in plan.buffers}
        named = self._leaves() | {f"{DIRECT}{t.name}": self.get_parameter(t.name) for t in plan.direct}
        return unflat_genome(plan, {k: _copied(x) for k, x in named.items()}, buffers)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._frame.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the p-net's output with the weights that the current genome generates."""
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._watch()
        self._drawn = self._noise()
        placed = self._place(self._weights(self._generator))
        try:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        finally:
            for layer, key, before in placed:
                object.__setattr__(layer, key, before)
            for b in self.plan.buffers:
                layer, key = self._layer(b.name)
                buffer = getattr(layer, key, None)
                if isinstance(buffer, Tensor) and buffer.requires_grad:
                    # Detach a tensor that the forward assigned. Otherwise the next call would extend its graph.
                    setattr(layer, key, buffer.detach())

    def _watch(self) -> None:
        """Warn if gradients never change the genome: probably, the optimizer has the parameters of another module."""
        forwards = next(self._forwards)
        if forwards not in (2, _WATCHED):
            return
        leaves = [x for x in self.parameters() if x.is_leaf and x.grad is not None]
        if forwards == 2:
            self._first = [x.detach().clone() for x in leaves]
        elif leaves and self._first and all(map(torch.equal, leaves, self._first)):
            warnings.warn(_UNCHANGED, UserWarning, stacklevel=2)

    def train(self: Self, mode: bool = True) -> Self:
        """Set the training mode. Layers with running statistics of the base stay in evaluation mode."""
        super().train(mode)
        self._freeze_statistics()
        return self

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> str | None:
        """Write a folder in the Hugging Face layout: `genome.safetensors`, `config.json` and a model card.

        Options: `dtype` as in `gb.save`. `state_dict` (a state dict of the module, or None for the present one) also
        writes `model.safetensors`, from which `Trainer` resumes. `push_to_hub=True` uploads the folder to `repo_id` (by
        default, the folder's name), with the options of `push_to_hub`. The options of `PreTrainedModel.save_pretrained`
        for large files have no effect. Returns the commit's URL with `push_to_hub=True`, otherwise None. Raises
        TypeError for an unknown option, ImportError for an upload without huggingface_hub, and the errors of `gb.save`.
        """
        if "state_dict" in options:
            # Trainer passes None.
            options["state_dict"] = options["state_dict"] or self.state_dict()
        return save_pretrained(self.plan, self.to_genome(), save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the files of `save_pretrained` to a repository of the Hugging Face hub. Return the commit's URL.

        The options are `dtype`, as in `gb.save`, and the options of `huggingface_hub.ModelHubMixin.push_to_hub`:
        `private` (for a new repository), `token`, `branch`, `commit_message`, `create_pr`, `allow_patterns`,
        `ignore_patterns` and `delete_patterns`. Raises the errors of `save_pretrained`.
        """
        return push_pretrained(self.plan, self.to_genome(), repo_id, **options)

    @classmethod
    def from_pretrained(
        cls: type[Self],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        pnet: nn.Module | None = None,
        lazy: Lazy = "auto",
        factories: Sequence[Callable[..., Any]] = (),
        **options: Any,
    ) -> Self:
        """Load a module from a folder or a hub repository that `save_pretrained` or `push_to_hub` wrote.

        Args:
            pretrained_model_name_or_path: the folder, or the name of the repository.
            pnet: the p-net or base that the genome was made for.
            lazy: as in the constructor.
            factories: the functions passed to `gb.from_module`, as in `gb.load`.
            options: options of `huggingface_hub.hf_hub_download` (`revision`, `token`, `cache_dir`, ...).

        Raises:
            FileNotFoundError: if the folder or repository does not exist, or has no genome.
            ImportError: for a hub repository, if the package huggingface_hub is not installed.
            TypeError: if `pnet` is None.
            ValueError: if the genome is not valid, or does not fit the p-net.
        """
        if pnet is None:
            words = "the module that the genome was made for: a genome holds no architecture"
            raise TypeError(f"from_pretrained needs pnet=, {words}")
        plan, genome = load_pretrained(pretrained_model_name_or_path, factories, **options)
        module = cls.__dict__.get("_stated", cls)(plan, pnet, genome, lazy=lazy)
        return module.to(next((x.device for x in pnet.parameters() if not x.is_meta), None))

    def _freeze_statistics(self) -> None:
        if (base := self._frame.base) is not None:
            keep_statistics(self, base.buffers)

    def _leaves(self) -> Params:
        plan = self.plan
        gnets = {f"{GNET}{e.name}/{k}": getattr(self, _leaf(e.name, k)) for e in plan.ensembles for k in e.leaves}
        return gnets or dict(list(self.named_parameters())[:1])

    def _weights(self, generator: Generator) -> dict[str, Any]:
        leaves = self._leaves()
        with unseen_by_checkpoints():
            weights: dict[str, Any] = generator(leaves, self._drawn)
        for form in dict.fromkeys(generator.forms.values()):
            weights[form.name] = Weight(form, form.taken(weights))
        if (base := self._frame.base) is not None:
            weights.update(base.on(next(iter(leaves.values())).device)[1])
        return weights

    def _layer(self, name: str) -> tuple[Any, str]:
        """Return the layer that holds a tensor (None if the layer was removed) and the attribute that is the tensor."""
        *path, attribute = name.split(".")
        layer: Any = self
        for key in path:
            layer = layer._modules.get(key) if layer is not None else None
        return layer, attribute

    def _place(self, weights: dict[str, Any]) -> list[tuple[nn.Module, str, Any]]:
        placed = []
        for name, source in self._frame.sources.items():
            layer, attribute = self._layer(name)
            if layer is not None:
                key = generated_attribute(attribute)
                placed.append((layer, key, getattr(layer, key, None)))
                object.__setattr__(layer, key, weights[source])
        return placed

    def _read(self, layer: nn.Module, attribute: str) -> Any:
        """Generate a weight that code reads outside of a forward, for example when a checkpoint repeats a layer."""
        source = self._frame.sources[vars(layer)["_names"][attribute]]
        return self._weights(self._generator_of(source))[source]

    def _noise(self) -> Noise | None:
        drawn = self.training and self.plan.stochastic
        return _drawn(self.plan, next(iter(self._leaves().values()))) if drawn else None  # pyright: ignore[reportCallIssue]

    def _build(self) -> None:
        plan, base, lazy, _ = self._frame

        def of(*names: str) -> Generator:
            return make_generator(plan, pnet=self, lazy=lazy, base=base, names=names)

        self._generator_of, self._drawn = functools.cache(of), None
        self._forwards, self._first = itertools.count(1), list[Tensor]()
        self._generator = of(*self._frame.sources.values())
        self._generator.prepare(self._leaves())

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._frame.base is not None and (base := self._frame.base.cast(fn)) is not None:
            self._frame = self._frame._replace(base=base)
        # Build the g-nets' constants, such as codes, on the new device now: a compiled forward cannot build constants.
        self._build()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["plan"] = self.plan.digest()

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if dense := [name for name in self._frame.sources if f"{prefix}{name}" in state]:
            words = "load it into the p-net, then gb.fit_genome(plan, pnet) finds the nearest genome"
            raise ValueError(f"expected a genome's state dict, got one with the dense weight {dense[0]!r}: {words}")
        super()._load_from_state_dict(state, prefix, metadata, *args)
        if metadata.get("plan") not in (None, self.plan.digest()):
            words = "keep the plan, which depends on the p-net's first weights (gb.save, save_pretrained, Plan.to_json)"
            args[-1].append(f"the state dict belongs to another plan: {words}; dict(state_dict) skips this check")

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls: Any = type(self)
        layer = getattr(cls._pnet_class, "_made_of", (cls._pnet_class,))
        return _blank_module, (cls._stated, layer), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        built = ("_generator", "_generator_of", "_drawn", "_forwards", "_first")
        return {k: x for k, x in self.__dict__.items() if k not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()


def _leaf(ensemble: str, leaf: str) -> str:
    # Parameter names must not contain dots.
    return f"gnets:{ensemble}:{leaf.replace('.', ':')}"


def _copied(x: Any) -> Tensor:
    shard = type(x).__name__ == "DTensor"  # compare names, because the import of DTensor is slow
    return (x.detach().full_tensor() if shard else x.detach()).clone()


@torch.compiler.disable
def _drawn(plan: Plan, like: Tensor) -> Noise:
    """Draw noise from torch's default generator, outside of compiled graphs, which cannot contain a generator."""
    return sample_noise(plan, torch.default_generator, like)


@functools.lru_cache(maxsize=256)
def _module_class(cls: type[GenomeModule], stock: type[nn.Module]) -> type[GenomeModule]:
    def forward(self: GenomeModule, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    # Keep the signature of the p-net's forward, by which trainers select the columns of a data set.
    with contextlib.suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(stock.forward)  # pyright: ignore[reportFunctionMemberAccess]
    own = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    kind: Any = type(stock)
    return kind(stock.__name__, (cls, stock), {**own, "forward": forward, "_stated": cls, "_pnet_class": stock})


def _blank_module(cls: type[GenomeModule], layer: tuple[Any, ...]) -> GenomeModule:
    final = _module_class(cls, layer[0] if len(layer) == 1 else type(blank_layer(*layer)))
    return final.__new__(final)
